"""Plots of a bench record: time against length, and the roofline. Needs the extra `report`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["write_plots"]

Record = dict[str, Any]


def write_plots(folder: Path, record: Record) -> list[Path]:
    """Write every plot as SVG and PNG into `folder`; ValueError where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ValueError("plots need matplotlib: pip install 'ort-webgpu[report]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    about = record["adapter"]
    plots: dict[str, Callable[[Any, Record], bool]] = {
        "time": _time_against_length,
        "roofline": _roofline,
    }
    for name, draw in plots.items():
        figure, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
        if draw(axes, record):
            axes.set_title(f"{about['name']} ({about['backend']}), {record['date']}", fontsize=9)
            for kind in ("svg", "png"):
                path = folder / f"{name}.{kind}"
                figure.savefig(path)
                written.append(path)
        pyplot.close(figure)
    return written


def _series(record: Record) -> Iterator[tuple[str, list[int], list[float]]]:
    """Plain prefills by length and decode steps by past, of batch 1: label, lengths, seconds."""
    found: dict[str, dict[int, float]] = {}
    for row in record["works"]:
        s = row["shape"]
        if not s or not row["chosen"] or s["batch"] != 1 or s["window"] >= 0:
            continue
        if s["softcap"] or s["bias"] or s["sink"] or (s["past"] and s["q_len"] > 1):
            continue
        kind = s["cache"] or s["dtype"]
        label = f"{'decode' if s['past'] else 'prefill'} H{s['heads']} D{s['head_size']} {kind}"
        found.setdefault(label, {})[s["past"] or s["q_len"]] = row["node"]["median"]
    for label, times in found.items():
        lengths = sorted(times)
        yield label, lengths, [times[n] for n in lengths]


def _time_against_length(axes: Any, record: Record) -> bool:
    drawn = False
    for label, lengths, seconds in _series(record):
        axes.loglog(lengths, np.array(seconds) * 1e3, marker="o", label=label)
        drawn = True
    shapes = {row["work"]: row["shape"] for row in record["works"]}
    marks = dict(zip(sorted({f["peer"] for f in record["peers"]}), "xs^v", strict=False))
    for peer, mark in marks.items():
        points = [
            (shapes[f["work"]]["past"] or shapes[f["work"]]["q_len"], f["seconds"] * 1e3)
            for f in record["peers"]
            if f["peer"] == peer and f["seconds"] and shapes.get(f["work"])
        ]
        if points:
            axes.loglog(*zip(*points, strict=True), mark, linestyle="", label=peer)
    axes.set_xlabel("tokens (prefill: new ones; decode: in the cache)")
    axes.set_ylabel("ms a layer")
    axes.grid(True, which="both", alpha=0.3)
    if drawn:
        axes.legend(fontsize=7)
    return drawn


def _roofline(axes: Any, record: Record) -> bool:
    ceilings = record["ceilings"]
    points = [
        (row["work"], part["part"], part["times"]["median"])
        for row in record["works"]
        if row["chosen"]
        for part in row["parts"][:1]
    ]
    if not points or "copy" not in ceilings:
        return False
    intensity = np.logspace(-1, 4, 200)
    for name, peak in ceilings.items():
        if name != "copy":
            roof = np.minimum(peak, intensity * ceilings["copy"]) / 1e12
            axes.loglog(intensity, roof, linewidth=1, label=f"{name}: {peak / 1e12:.3g} TFLOP/s")
    for name, part, seconds in points:
        x, y = part["flops"] / part["bytes"], part["flops"] / seconds / 1e12
        axes.loglog([x], [y], "k.", markersize=5)
        axes.annotate(name, (x, y), fontsize=5, xytext=(3, 2), textcoords="offset points")
    axes.set_xlabel(f"FLOP per byte (copy: {ceilings['copy'] / 1e12:.3g} TB/s)")
    axes.set_ylabel("TFLOP/s")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize=7)
    return True
