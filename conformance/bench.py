"""`ort-webgpu bench`: times operators on a device, next to what the device and others can do.

    python -m ort_webgpu.conformance.bench --quick --results conformance/RESULTS.md

does the same where typer is not installed. Every kernel is checked on fresh random data against
float64 before it is timed (bench_time); a wrong one is reported and makes the status 1.
"""

import argparse
import datetime
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ort_webgpu import OrtWebGpuError, __version__
from ort_webgpu.conformance.bench_ceilings import ceilings
from ort_webgpu.conformance.bench_peers import comparable, peers_here, run_peer
from ort_webgpu.conformance.bench_report import (
    Ticker,
    load_record,
    print_record,
    save_record,
    update_results,
)
from ort_webgpu.conformance.bench_session import StepFigure, time_step
from ort_webgpu.conformance.bench_time import Timing, time_work
from ort_webgpu.conformance.bench_works import GqaWork, Work, hardware_works, software_works
from ort_webgpu.device import Gpu, open_gpu

__all__ = ["GqaWork", "Timing", "main", "measure", "time_work"]

_MAIN_WORKS = (
    "prefill-512-f16",
    "prefill-2048-f16",
    "prefill-2048-f32",
    "prefill-8192-f16",
    "decode-4096-f16",
    "decode-32768-f16",
    "prefill-256-small-f32",
    "prefill-512-f32",
    "decode-1024-small-f32",
    "decode-2048-f32",
)
"""Works whose whole step is timed, and that slow peers are given, in a quick run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0, or 1 where a kernel was wrong or nothing could be measured."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        record = load_record(options.load) if options.load else measure(options, arguments)
    except (OrtWebGpuError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_record(record)
    if options.json:
        save_record(options.json, record)
    if options.results:
        update_results(options.results, record)
    if options.plots:
        from ort_webgpu.conformance.bench_plots import write_plots

        for path in write_plots(options.plots, record):
            print(path)
    return 1 if any("WRONG" in line for line in record["refused"]) or not record["works"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ort-webgpu bench",
        description="Time the attention operators on an adapter, next to its ceilings and peers.",
    )
    add = parser.add_argument
    add("--adapter", default="auto", help="as for WebGPUSession: auto, hardware, a name, an index")
    add("--backend", default="auto", choices=("auto", "wgpu", "dawn"))
    add("--quick", action="store_true", help="fewer works; steps, slow peers on the main ones")
    add("--works", action="append", metavar="PATTERN", help="only works whose name fits, * allowed")
    add("--routes", default="chosen", help="chosen (default), all, or names with commas between")
    add("--seed", type=int, default=0, help="of the random data")
    add("--no-peers", action="store_true", help="do not ask ORT and torch")
    add("--no-steps", action="store_true", help="no whole steps through a session")
    add("--webgpu-python", metavar="PATH", help="an interpreter that has onnxruntime-webgpu")
    add("--json", type=Path, metavar="FILE", help="save everything measured")
    add("--load", type=Path, metavar="FILE", help="measure nothing: report what --json saved")
    add("--results", type=Path, metavar="FILE", help="replace this adapter's section of RESULTS.md")
    add("--plots", type=Path, metavar="DIR", help="write plots; needs matplotlib")
    return parser


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Everything that one run of the command measures, as plain data for JSON."""
    adapter = int(options.adapter) if options.adapter.isdigit() else options.adapter
    gpu = open_gpu(adapter, options.backend)
    if gpu is None:
        raise ValueError("there is no adapter to measure; `ort-webgpu devices` lists them")
    works = _works(gpu, options)
    compared = [w for w in works if isinstance(w, GqaWork) and comparable(w)]
    few = options.quick and not options.works
    main_works = [w for w in compared if w.name in _MAIN_WORKS] if few else compared
    peers, missing = (
        ([], ["peers: not asked"])
        if options.no_peers
        else peers_here(gpu.info.software, options.webgpu_python)
    )
    steps = [] if options.no_steps else main_works
    record = _header(gpu, options, arguments)
    began = time.monotonic()
    record["notes"] += missing
    asked = [(peer, compared if peer.widely else main_works) for peer in peers]
    total = 1 + len(works) + len(steps) + sum(len(wanted) for _, wanted in asked)
    with Ticker(total) as ticker:
        ticker.start("ceilings")
        record["ceilings"] = ceilings(gpu)
        _time_works(gpu, works, options, record, ticker)
        for work in steps:
            ticker.start(f"{work.name}, whole step")
            figure = time_step(work, gpu.info)
            if isinstance(figure, StepFigure):
                record["steps"].append(asdict(figure))
            else:
                record["refused"].append(figure)
        for peer, wanted in asked:
            ticker.start(f"{peer.key}")
            figures = run_peer(peer, wanted, gpu.info.software, ticker.start)
            record["peers"] += [asdict(figure) for figure in figures]
    if hasattr(os, "getloadavg"):
        record["host"]["load"] = round(os.getloadavg()[0], 1)
    record["seconds"] = round(time.monotonic() - began)
    return record


def _works(gpu: Gpu, options: argparse.Namespace) -> list[Work]:
    known = software_works if gpu.info.software else hardware_works
    works = known(options.quick)
    if not options.works:
        return works
    # A name that is asked for is found in either list, also where quick leaves it out
    everything = {w.name: w for w in (*software_works(False), *hardware_works(False))}
    fitting = [
        w for w in everything.values() if any(_fits(w.name, pattern) for pattern in options.works)
    ]
    if not fitting:
        raise ValueError(f"no work fits {options.works}; there are: {', '.join(everything)}")
    return fitting


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) if "*" in pattern else name == pattern


def _time_works(
    gpu: Gpu,
    works: Sequence[Work],
    options: argparse.Namespace,
    record: dict[str, Any],
    ticker: "Ticker",
) -> None:
    routes = None if options.routes == "all" else frozenset(options.routes.split(","))
    for work in works:
        ticker.start(work.name)
        try:
            for found in time_work(gpu, work, options.seed, routes):
                if isinstance(found, str):
                    record["refused"].append(found)
                else:
                    record["works"].append(_row(found))
        except OrtWebGpuError as error:  # a work too large for this adapter; the others still count
            record["refused"].append(f"{work.name}: {error}")


def _row(timing: Timing) -> dict[str, Any]:
    shape = asdict(timing.work) if isinstance(timing.work, GqaWork) else {}
    return {
        "work": timing.work.name,
        "operator": timing.work.op_type,
        "shape": shape,
        "route": timing.route,
        "chosen": timing.chosen,
        "node": asdict(timing.whole),
        "parts": [asdict(part) for part in timing.parts],
        "error": timing.error,
        "launches": timing.launches,
    }


def _header(gpu: Gpu, options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    packages = (
        "onnxruntime",
        "onnx",
        "numpy",
        "wgpu",
        "wgpudawn",
        "onnxruntime-ep-webgpu",
        "torch",
    )
    return {
        "format": 1,
        "command": shlex.join(["ort-webgpu", "bench", *arguments]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "quick": options.quick,
        "seed": options.seed,
        "adapter": asdict(gpu.info),
        "versions": {"ort-webgpu": __version__, **_versions(packages)},
        "host": {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count(),
        },
        "ceilings": {},
        "works": [],
        "refused": [],
        "steps": [],
        "peers": [],
        "notes": [],
    }


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    raise SystemExit(main())
