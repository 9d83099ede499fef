"""What a bench run measured, shown: on the terminal, as JSON, and as a section of RESULTS.md.

A record is the plain data that `bench.measure` returns, so that a run on one machine can be shown
on another. Sections of RESULTS.md stand between two comments that name adapter and backend; what
is outside of them is kept as it is.
"""

import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = [
    "Ticker",
    "load_record",
    "markdown",
    "peak_of",
    "print_record",
    "save_record",
    "update_results",
]

Record = dict[str, Any]
Table = tuple[str, list[str], list[list[str]]]

_INTRODUCTION = """# Results

Written by `ort-webgpu bench --results conformance/RESULTS.md`, which replaces the section of the
adapter that it ran on; the command of each run is in its section. Kernel times are medians of
device timestamps, taken after the output was found right against float64 on fresh random data.
Compare figures of one section only: peers were measured in the same run, on the same machine.
"""


class Ticker:
    """Progress on standard error: a bar where rich is installed, else a line for each step."""

    def __init__(self, total: int):
        self._total, self._done = total, 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "Ticker":
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        except ImportError:
            return self
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._bar.start()
        self._task = self._bar.add_task("starting", total=self._total)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, name: str) -> None:
        """The next step is `name`."""
        self._done += 1
        if self._bar is None:
            print(f"[{self._done}/{self._total}] {name}", file=sys.stderr, flush=True)
        else:
            self._bar.update(self._task, description=name, completed=self._done)


# -- files ---------------------------------------------------------------------------------------


def save_record(path: Path, record: Record) -> None:
    """Write `record` as JSON."""
    path.write_text(json.dumps(record, indent=1), encoding="utf-8")


def load_record(path: Path) -> Record:
    """What `save_record` wrote; ValueError for another file."""
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or record.get("format") != 1:
        raise ValueError(f"{path} was not written by this version's bench --json")
    return record


def update_results(path: Path, record: Record) -> None:
    """Put the record's section in place of the adapter's former one, or at the end."""
    text = path.read_text(encoding="utf-8") if path.exists() else _INTRODUCTION
    begin, end = _marks(record)
    section = f"{begin}\n{markdown(record)}{end}\n"
    former = re.compile(re.escape(begin) + ".*?" + re.escape(end) + "\n?", re.DOTALL)
    if former.search(text):
        text = former.sub(lambda _: section, text, count=1)
    else:
        text = text.rstrip("\n") + "\n\n" + section
    path.write_text(text, encoding="utf-8")


def _marks(record: Record) -> tuple[str, str]:
    about = record["adapter"]
    name = f"{about['name']} {about['backend']}".replace("--", "-")
    return f"<!-- bench {name} -->", f"<!-- end of {name} -->"


# -- figures -------------------------------------------------------------------------------------


def peak_of(record: Record, row: dict[str, Any]) -> float:
    """Floating-point operations per second that the row's route could reach at most."""
    found = record["ceilings"]
    if "matrix" in row["route"] and "matrix_f16" in found:
        return found["matrix_f16"]
    return found["fma_f32"]


def _bound(record: Record, row: dict[str, Any], part: dict[str, Any]) -> float:
    """Seconds that the part needs at the ceilings."""
    about = part["part"]
    peak, copy = peak_of(record, row), record["ceilings"]["copy"]
    return max(about["flops"] / peak, about["bytes"] / copy)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _spread(times: dict[str, Any]) -> str:
    return f"{_milliseconds(times['low'])}-{_milliseconds(times['high'])}"


def _tables(record: Record) -> list[Table]:
    tables = [_ceiling_table(record), _work_table(record)]
    if any(len(row["parts"]) > 1 for row in record["works"]):
        tables.append(_part_table(record))
    if record["peers"]:
        tables.append(_peer_table(record))
    if record["steps"]:
        tables.append(_step_table(record))
    growth = _growth_table(record)
    return [*tables, growth] if growth[2] else tables


def _ceiling_table(record: Record) -> Table:
    words = {
        "copy": ("copy, read + written", 1e9, "GB/s"),
        "fma_f32": ("multiply-add f32", 1e9, "GFLOP/s"),
        "fma_f16": ("multiply-add f16", 1e9, "GFLOP/s"),
        "matrix_f16": ("subgroup matrices f16, sums f32", 1e9, "GFLOP/s"),
    }
    rows = []
    for key, value in record["ceilings"].items():
        text, unit, name = words[key]
        rows.append([text, f"{value / unit:,.4g} {name}"])
    return "Ceilings of the adapter, measured", ["kernel", "rate"], rows


def _work_table(record: Record) -> Table:
    rows = []
    for row in record["works"]:
        main = row["parts"][0]
        seconds, about = main["times"]["median"], main["part"]
        rows.append(
            [
                row["work"],
                row["route"] + ("" if row["chosen"] else " (forced)"),
                str(row["launches"]),
                _milliseconds(row["node"]["median"]),
                _spread(row["node"]),
                _milliseconds(seconds),
                f"{about['flops'] / seconds / 1e9:,.4g}",
                f"{about['bytes'] / seconds / 1e9:,.4g}",
                f"{100 * _bound(record, row, main) / seconds:.0f} %",
                f"{row['error']:.1e}",
            ]
        )
    names = ["work", "route", "launches", "node ms", "low-high", "core ms", "GFLOP/s", "GB/s"]
    names += ["of ceiling", "error"]
    return (
        "Kernel time. node: all launches; core: attention alone (PackedAttention: the projection)",
        names,
        rows,
    )


def _part_table(record: Record) -> Table:
    rows = []
    for row in record["works"]:
        for part in row["parts"] if len(row["parts"]) > 1 else ():
            seconds = part["times"]["median"]
            rate = part["part"]["flops"] / seconds / 1e9
            rows.append([row["work"], part["part"]["name"], _milliseconds(seconds), f"{rate:,.4g}"])
    return "Parts alone", ["work", "part", "ms", "GFLOP/s"], rows


def _chosen_seconds(record: Record) -> dict[str, float]:
    return {row["work"]: row["node"]["median"] for row in record["works"] if row["chosen"]}


def _peer_table(record: Record) -> Table:
    kernel = _chosen_seconds(record)
    steps = {step["work"]: step["seconds"] for step in record["steps"]}
    rows = []
    for figure in record["peers"]:
        ours, step = kernel.get(figure["work"]), steps.get(figure["work"])
        theirs = figure["seconds"]
        if theirs is None:
            rows.append([figure["work"], figure["peer"], figure["error"], "", "", "", ""])
            continue
        device = figure["peer"].startswith("torch")
        rows.append(
            [
                figure["work"],
                figure["peer"],
                _milliseconds(theirs),
                _milliseconds(ours) if ours else "-",
                f"{theirs / ours:.3g}x" if ours else "-",
                _milliseconds(step) if step and not device else "-",
                f"{theirs / step:.3g}x" if step and not device else "-",
            ]
        )
    title = (
        "Peers in the same run (ORT: wall time of a layer; torch: device time of a call)."
        " Ratios above 1: ours is faster"
    )
    names = ["work", "peer", "its ms", "our node ms", "ratio", "our step ms", "ratio of steps"]
    return title, names, rows


def _step_table(record: Record) -> Table:
    kernel = _chosen_seconds(record)
    rows = []
    for step in record["steps"]:
        ours = kernel.get(step["work"])
        runs = ", ".join(f"{n}: {_milliseconds(s)}" for n, s in step["runs"])
        beyond = _milliseconds(step["seconds"] - ours) if ours else "-"
        host = _milliseconds(step["host"]) if "host" in step else "-"  # not in older records
        rows.append([step["work"], _milliseconds(step["seconds"]), beyond, host, runs])
    title = (
        "Whole steps by the wall clock, cache on the device: a layer, from chains of two lengths."
        " host: processor time of the calling thread"
    )
    names = ["work", "ms a layer", "beyond kernels", "host", "ms by number of layers"]
    return title, names, rows


def _growth_table(record: Record) -> Table:
    """Times over a range of lengths or batches, all else equal."""
    series: dict[tuple[str, str], dict[int, float]] = {}
    for row in record["works"]:
        shape = row["shape"]
        if not shape or not row["chosen"]:
            continue
        for axis in ("q_len", "past", "batch"):
            fixed = {k: v for k, v in shape.items() if k not in ("name", axis)}
            key = (axis, json.dumps(fixed, sort_keys=True))
            series.setdefault(key, {})[shape[axis]] = row["node"]["median"]
    words = {"q_len": "prefill", "past": "past", "batch": "batch"}
    rows = []
    for (axis, others), times in series.items():
        facts = json.loads(others)
        if len(times) < 3 or (axis == "q_len" and facts["past"]):
            continue
        points = sorted(times.items())
        (first, t0), (last, t1) = points[0], points[-1]
        about = f"{words[axis]}, H{facts['heads']} D{facts['head_size']} {facts['dtype']}"
        about += f" {facts['cache']}".rstrip()
        figures = ", ".join(f"{n}: {_milliseconds(t)}" for n, t in points)
        rows.append([about, figures, f"{t1 / t0:.3g}x for {last / first:.3g}x"])
    return "Growth, node ms", ["what grows", "ms by size", "first to last"], rows


def _geometric_mean(record: Record) -> str:
    kernel = _chosen_seconds(record)
    ratios: dict[str, list[float]] = {}
    for figure in record["peers"]:
        if figure["seconds"] and kernel.get(figure["work"]):
            ratios.setdefault(figure["peer"], []).append(figure["seconds"] / kernel[figure["work"]])
    return "; ".join(
        f"{peer}: {math.exp(sum(map(math.log, found)) / len(found)):.3g}x over {len(found)} works"
        for peer, found in ratios.items()
    )


# -- showing -------------------------------------------------------------------------------------


def _facts(record: Record) -> list[str]:
    about, host = record["adapter"], record["host"]
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    lines = [
        f"{record['date']}, {record['seconds']} s: `{record['command']}`",
        f"Adapter {about['name']}, {about['api']}, driver {about['driver']}; host"
        f" {host['platform']}, {host['cores']} cores (load {host.get('load', 'unknown')}), Python"
        f" {host['python']}",
        versions,
    ]
    mean = _geometric_mean(record)
    return [*lines, f"Geometric mean of peer's time to our node time: {mean}"] if mean else lines


def markdown(record: Record) -> str:
    """The section's text: heading, facts, tables, what was refused or not measured."""
    about = record["adapter"]
    lines = [f"## {about['name']}, backend {about['backend']}", ""]
    lines += [f"- {fact}" for fact in _facts(record)]
    for title, names, rows in _tables(record):
        lines += ["", f"### {title}", "", _line(names), _line(["---"] * len(names))]
        lines += [_line(row) for row in rows]
    remarks = [*record["refused"], *record["notes"]]
    if remarks:
        lines += ["", *(f"- {remark}" for remark in remarks)]
    return "\n".join(lines) + "\n\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def print_record(record: Record) -> None:
    """Show the record on standard output."""
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        print(markdown(record))
        return
    console = Console()
    if not console.is_terminal:
        console.width = 180  # a pipe or file has no edge to fit into
    for fact in _facts(record):
        console.print(fact, highlight=False, markup=False)
    for title, names, rows in _tables(record):
        table = RichTable(*names, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for remark in (*record["refused"], *record["notes"]):
        console.print(remark, highlight=False, markup=False)
