"""The command `ort-webgpu`: devices, explain, run, compare, conformance. Needs the extra `cli`.

Exit status: 0 all well, 1 a difference or failure was found, 2 wrong use.
"""

import dataclasses
import json
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import track
    from rich.table import Table
except ImportError as missing:
    raise SystemExit(
        f"the command ort-webgpu needs {missing.name}: pip install 'ort-webgpu[cli]'"
    ) from None

from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

import ort_webgpu
from ort_webgpu import OrtWebGpuError, WebGPUSession

__all__ = ["app", "main"]

#: What ORT raises for models and inputs that it refuses.
ORT_ERRORS = (
    ort_state.Fail,
    ort_state.InvalidArgument,
    ort_state.InvalidGraph,
    ort_state.InvalidProtobuf,
    ort_state.NoSuchFile,
    ort_state.NotImplemented,
    ort_state.RuntimeException,
)

app = typer.Typer(
    help="Attention operators of ONNX models on WebGPU, next to ONNX Runtime.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

ModelPath = Annotated[Path, typer.Argument(help="The model file.", exists=True, dir_okay=False)]
Adapter = Annotated[
    str,
    typer.Option(help="auto, hardware, software, none, part of a name, or an index of `devices`."),
]
Backend = Annotated[str, typer.Option(help="auto, wgpu or dawn.")]
Routes = Annotated[
    list[str] | None,
    typer.Option("--route", help="OPERATOR=ROUTE or NODE=ROUTE: the only route that may run it."),
]
Offload = Annotated[
    str, typer.Option(help="all, none, or node names and operator types with commas between.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Batch = Annotated[int, typer.Option(help="Rows of generated inputs.", min=1)]
Length = Annotated[int, typer.Option(help="New tokens of generated inputs.", min=1)]
Past = Annotated[int, typer.Option(help="Tokens already in generated caches.", min=0)]
Dims = Annotated[list[str] | None, typer.Option("--dim", help="NAME=SIZE of a symbolic dimension.")]
Ranges = Annotated[
    list[str] | None, typer.Option("--range", help="INPUT=LOW:HIGH of generated values.")
]
Seed = Annotated[int, typer.Option(help="Seed of generated inputs.")]
InputFile = Annotated[
    Path | None, typer.Option("--inputs", help="Arrays by input name.", exists=True, dir_okay=False)
]
CandidateName = Annotated[
    str, typer.Option(help="ort-webgpu, ort-cpu, ort-webgpu-ep, or the name of an EP of ORT's.")
]
Library = Annotated[
    Path | None, typer.Option(help="The shared library of a plug-in EP.", exists=True)
]
Python = Annotated[
    Path | None, typer.Option(help="Run the candidate in this interpreter.", exists=True)
]
Isolate = Annotated[bool, typer.Option(help="Run the candidate in a process of its own.")]
Tolerances = Annotated[list[str] | None, typer.Option(help="VALUE or OUTPUT=VALUE.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write JSON here.")]
JunitFile = Annotated[Path | None, typer.Option(help="Write JUnit XML here.")]
HtmlFile = Annotated[Path | None, typer.Option(help="Write a page with plots here.")]


def main() -> None:
    """Run the command line; errors of this package and of ORT become one line and status 1."""
    warnings.simplefilter("default")
    warnings.showwarning = _show_warning
    try:
        app()
    except (OrtWebGpuError, *ORT_ERRORS) as error:
        Console(stderr=True).print(
            f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        raise SystemExit(1) from None


def _show_warning(message: Any, *_: Any, **__: Any) -> None:
    Console(stderr=True).print(
        f"[yellow]warning:[/yellow] {escape(str(message))}", highlight=False, soft_wrap=True
    )


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        console.print(ort_webgpu.__version__)
        raise typer.Exit


@app.command()
def devices(
    backend: Annotated[str, typer.Option(help="auto (all), wgpu or dawn.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """List the adapters that WebGPU finds here."""
    found = ort_webgpu.devices(backend)
    if as_json:
        _print_json([vars(info) for info in found])
        return
    if not found:
        console.print(
            "no adapter found: every model runs on the CPU. Install a Vulkan driver (on Debian"
            " mesa-vulkan-drivers has a software one, for tests)"
        )
        return
    table = Table("index", "name", "backend", "API", "kind", "driver")
    for info in found:
        table.add_row(str(info.index), info.name, info.backend, info.api, info.kind, info.driver)
    console.print(table)


@app.command()
def explain(
    model: ModelPath,
    adapter: Adapter = "auto",
    backend: Backend = "auto",
    offload: Offload = "all",
    route: Routes = None,
    inputs: InputFile = None,
    run: Annotated[bool, typer.Option(help="Run once, so that routes are known.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show where each attention node runs, by which route, and why not otherwise."""
    session = _session(model, adapter, backend, offload, route)
    if run or inputs is not None:
        session.run(None, _feeds(model, inputs))
    explanation = session.explain()
    if as_json:
        _print_json(explanation.to_dict())
        return
    table = Table("node", "operator", "placed", "route", "why", title=explanation.adapter)
    for row in explanation.rows:
        why = "\n".join([row.reason, *(f"not {r}: {x}" for r, x in row.rejected.items())])
        table.add_row(row.node, row.op_type, row.placed, row.route or "-", why)
    if explanation.rows:
        console.print(table)
    else:
        console.print("no attention nodes found: the whole model runs on the CPU")
    for note in explanation.notes:
        console.print(note)


@app.command(name="run")
def run_model(
    model: ModelPath,
    inputs: InputFile = None,
    against: Annotated[
        bool,
        typer.Option("--compare", help="Compare with ORT's CPU EP; status 1 where it differs."),
    ] = False,
    repeat: Annotated[int, typer.Option(help="Timed runs after the first.", min=0)] = 0,
    save_outputs: Annotated[Path | None, typer.Option(help="Write the outputs here.")] = None,
    adapter: Adapter = "auto",
    backend: Backend = "auto",
    offload: Offload = "all",
    route: Routes = None,
    batch: Batch = 2,
    length: Length = 12,
    past: Past = 0,
    dim: Dims = None,
    value_range: Ranges = None,
    seed: Seed = 0,
) -> None:
    """Run a model once, on given inputs or on random valid ones."""
    import numpy as np

    feeds = _feeds(
        model,
        inputs,
        batch=batch,
        length=length,
        past=past,
        seed=seed,
        dims=dim,
        ranges=value_range,
    )
    session = _session(model, adapter, backend, offload, route)
    results, times = [], []
    for _ in track(range(repeat + 1), "running", console=Console(stderr=True), transient=True):
        start = time.perf_counter()
        results = session.run(None, feeds)
        times.append(time.perf_counter() - start)
    names = [output.name for output in session.get_outputs()]
    outputs = dict(zip(names, results, strict=True))
    _print_values("inputs", feeds)
    _print_values("outputs", outputs)
    console.print(f"first run {times[0] * 1e3:.1f} ms", end="")
    console.print(f", then {np.median(times[1:]) * 1e3:.1f} ms" if repeat else "")
    if save_outputs is not None:
        np.savez(save_outputs, **outputs)
    if against:
        _compare_run(model, feeds, outputs)


@app.command()
def compare(
    model: ModelPath,
    candidate: CandidateName = "ort-webgpu",
    adapter: Adapter = "auto",
    backend: Backend = "auto",
    route: Routes = None,
    offload: Offload = "all",
    library: Library = None,
    python: Python = None,
    isolate: Isolate = False,
    inputs: InputFile = None,
    golden: Annotated[
        Path | None, typer.Option(help="Compare with the outputs in this saved run.")
    ] = None,
    saved: Annotated[
        Path | None, typer.Option(help="Do not run: check this saved run against --golden.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Save inputs and outputs of this run.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of a decode loop.", min=1)] = 1,
    iterations: Annotated[int, typer.Option(help="Runs with other seeds.", min=1)] = 1,
    repeat: Annotated[int, typer.Option(help="Runs of each call, for unsteady ones.", min=1)] = 1,
    own_caches: Annotated[bool, typer.Option(help="Each side keeps its own caches.")] = False,
    nodes: Annotated[bool, typer.Option(help="Judge each node on its own inputs.")] = True,
    fail_fast: Annotated[bool, typer.Option(help="Stop at the first difference.")] = False,
    atol: Tolerances = None,
    rtol: Tolerances = None,
    batch: Batch = 2,
    length: Length = 12,
    past: Past = 0,
    dim: Dims = None,
    value_range: Ranges = None,
    seed: Seed = 0,
    repro: Annotated[Path | None, typer.Option(help="Write the first bad node here.")] = None,
    json_file: JsonFile = None,
    junit: JunitFile = None,
    html: HtmlFile = None,
    verbose: Annotated[bool, typer.Option(help="List every node call.")] = False,
) -> None:
    """Find the first wrong number: a model on a candidate, next to ORT's CPU EP.

    Status 1 where an output or a node differs.
    """
    from ort_webgpu.conformance import compare as comparing
    from ort_webgpu.conformance.golden import load_steps, save_steps
    from ort_webgpu.graph_tools import ModelFile

    tried = _candidate(candidate, adapter, backend, route, offload, library, python, isolate)
    tolerances = _tolerances(atol, rtol)
    file = ModelFile.open(model)
    known = (*file.inputs, *file.overridable)
    given = golden or inputs
    loaded = load_steps(given, known, file.outputs) if given else []
    if golden is None:
        loaded = [dataclasses.replace(step, outputs={}) for step in loaded]
    if saved is not None:
        if golden is None:
            raise typer.BadParameter("needs --golden to check against", param_hint="--saved")
        actual = load_steps(saved, known, file.outputs)
        comparison = comparing.recheck(model, actual, loaded, tolerances)
    else:
        options = comparing.Options(
            steps=steps,
            iterations=iterations,
            repeat=repeat,
            fail_fast=fail_fast,
            own_caches=own_caches,
            nodes=nodes,
            inputs=_input_options(
                dim, value_range, batch=batch, length=length, past=past, seed=seed
            ),
            tolerances=tolerances,
        )
        comparison = comparing.compare_model(model, tried, options=options, given=loaded)
    if save is not None:
        save_steps(save, comparison.golden)
    _report(comparison, verbose, json_file, junit, html)
    if repro is not None and comparison.first_bad_node is not None:
        _write_repro(comparison.first_bad_node, tried, repro)
    if not comparison.passed:
        raise typer.Exit(1)


@app.command()
def conformance(
    candidate: CandidateName = "ort-webgpu",
    adapter: Adapter = "auto",
    backend: Backend = "auto",
    route: Routes = None,
    every_route: Annotated[
        bool, typer.Option(help="Each case on every route that takes it.")
    ] = False,
    library: Library = None,
    python: Python = None,
    isolate: Isolate = False,
    operator: Annotated[list[str] | None, typer.Option(help="Only this operator.")] = None,
    level: Annotated[str, typer.Option(help="ci, or full: several times as many cases.")] = "ci",
    only: Annotated[
        list[str] | None, typer.Option("-k", help="Only cases with this feature or in the name.")
    ] = None,
    refused: Annotated[bool, typer.Option(help="Also nodes that must be refused.")] = True,
    json_file: JsonFile = None,
    junit: JunitFile = None,
    verbose: Annotated[bool, typer.Option(help="List all failures and refusals.")] = False,
) -> None:
    """Run the corpus of single-node cases on a candidate; status 1 where one fails.

    The same table comes out for ORT's own EPs: --candidate ort-cpu, --candidate ort-webgpu-ep.
    """
    from ort_webgpu.conformance.report import write_json, write_junit
    from ort_webgpu.conformance.report_suite import print_suite, suite_verdicts
    from ort_webgpu.conformance.suite import run_suite, select

    tried = _candidate(candidate, adapter, backend, route, "all", library, python, isolate)
    try:
        cases = select(operator or (), level, only or ())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not cases:
        raise typer.BadParameter(f"no case has {only} in its name or features", param_hint="-k")

    def progress(items: Any) -> Any:
        return track(items, "running", console=Console(stderr=True), transient=True)

    suite = run_suite(tried, cases, level, every_route, refused and not only, progress)
    print_suite(suite, console, verbose)
    if json_file is not None:
        write_json(json_file, suite.to_dict())
    if junit is not None:
        write_junit(junit, "ort-webgpu conformance", suite_verdicts(suite))
    if not suite.passed:
        raise typer.Exit(1)


@app.command()
def external(
    checkout: Annotated[
        Path, typer.Argument(help="A checkout of microsoft/onnxruntime.", exists=True)
    ],
    suite: Annotated[
        list[str] | None, typer.Option(help="gqa_cpu, gqa_cpu_quantized or web; all if not given.")
    ] = None,
    adapter: Adapter = "auto",
    backend: Backend = "auto",
    route: Routes = None,
    argument: Annotated[
        list[str] | None, typer.Option(help="An argument for pytest, as in --argument=-x.")
    ] = None,
) -> None:
    """Run ONNX Runtime's own tests on our session; status 1 where one fails."""
    from ort_webgpu.conformance.external import PYTHON_TESTS, run_python_tests, run_web_cases
    from ort_webgpu.conformance.report_suite import print_suite

    wanted = suite or [*PYTHON_TESTS, "web"]
    unknown = set(wanted) - {*PYTHON_TESTS, "web"}
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(sorted(unknown))}", param_hint="--suite")
    tried = _candidate("ort-webgpu", adapter, backend, route, "all", None, None, False)
    failed = False
    python = [name for name in wanted if name in PYTHON_TESTS]
    if python:
        failed |= run_python_tests(checkout, python, tried, argument or ()) != 0
    if "web" in wanted:
        found = run_web_cases(checkout, tried)
        print_suite(found, console)
        failed |= not found.passed
    if failed:
        raise typer.Exit(1)


def _report(
    comparison: Any, verbose: bool, json_file: Path | None, junit: Path | None, html: Path | None
) -> None:
    from ort_webgpu.conformance.report import verdicts, write_json, write_junit
    from ort_webgpu.conformance.report_html import write_html
    from ort_webgpu.conformance.report_terminal import print_comparison

    print_comparison(comparison, console, verbose)
    if json_file is not None:
        write_json(json_file, comparison.to_dict())
    if junit is not None:
        write_junit(junit, "ort-webgpu compare", verdicts(comparison))
    if html is not None:
        write_html(html, comparison)


def _write_repro(bad: Any, candidate: Any, folder: Path) -> None:
    """The node as it was called, and under shrunk/ the smallest case that fails too."""
    from ort_webgpu.conformance.repro import repro_of_node

    scripts = repro_of_node(bad, candidate, folder)
    for script in scripts:
        console.print(f"repro: python {script}", highlight=False, soft_wrap=True)


def _candidate(
    name: str,
    adapter: str,
    backend: str,
    routes: list[str] | None,
    offload: str,
    library: Path | None,
    python: Path | None,
    isolate: bool,
) -> Any:
    from ort_webgpu.conformance.candidates import Candidate

    return Candidate(
        name,
        adapter=int(adapter) if adapter.isdigit() else adapter,
        backend=backend,
        routes=_pairs(routes, "--route"),
        offload=_offload(offload),
        library=str(library) if library else None,
        python=str(python) if python else None,
        isolated=isolate,
    )


def _tolerances(atol: list[str] | None, rtol: list[str] | None) -> dict[str, Any]:
    """By output, "" for all: what --atol and --rtol say, each as VALUE or OUTPUT=VALUE."""
    from ort_webgpu.conformance.tolerances import Tolerance

    parts: dict[str, dict[str, float]] = {}
    for option, texts in (("--atol", atol), ("--rtol", rtol)):
        for text in texts or ():
            name, _, value = text.rpartition("=")
            try:
                parts.setdefault(name, {})[option] = float(value)
            except ValueError:
                raise typer.BadParameter(
                    f"{text!r} is neither VALUE nor OUTPUT=VALUE", param_hint=option
                ) from None
    everywhere = parts.get("", {})
    return {
        name: Tolerance(*({**everywhere, **found}.get(key, 0.0) for key in ("--atol", "--rtol")))
        for name, found in parts.items()
    }


def _compare_run(model: Path, feeds: dict[str, Any], outputs: dict[str, Any]) -> None:
    from ort_webgpu.conformance.compare import compare_values
    from ort_webgpu.conformance.report_terminal import print_comparison

    comparison = compare_values(model, feeds, outputs)
    print_comparison(comparison, console)
    if not comparison.passed:
        raise typer.Exit(1)


def _session(
    model: Path, adapter: str, backend: str, offload: str, routes: list[str] | None
) -> WebGPUSession:
    return WebGPUSession(
        model,
        adapter=int(adapter) if adapter.isdigit() else adapter,
        backend=backend,
        offload=_offload(offload),
        routes=_pairs(routes, "--route"),
    )


def _offload(text: str) -> str | list[str]:
    return text if text in ("all", "none") else text.split(",")


def _feeds(
    model: Path,
    given: Path | None,
    dims: list[str] | None = None,
    ranges: list[str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    from ort_webgpu.conformance.generate import Inputs
    from ort_webgpu.conformance.golden import load_steps
    from ort_webgpu.graph_tools import ModelFile

    inputs = Inputs(ModelFile.open(model), _input_options(dims, ranges, **options))
    return inputs.first(load_steps(given, inputs.names)[0].inputs if given else None)


def _input_options(dims: list[str] | None, ranges: list[str] | None, **options: Any) -> Any:
    from ort_webgpu.conformance.generate import InputOptions

    return InputOptions(dims=_sizes(dims, "--dim"), ranges=_bounds(ranges, "--range"), **options)


def _pairs(texts: list[str] | None, option: str) -> dict[str, str]:
    """NAME=VALUE options; the last "=" divides, since node names may hold others."""
    found = {}
    for text in texts or ():
        name, equals, value = text.rpartition("=")
        if not (name and equals and value):
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint=option)
        found[name] = value
    return found


def _sizes(texts: list[str] | None, option: str) -> dict[str, int]:
    try:
        return {name: int(value) for name, value in _pairs(texts, option).items()}
    except ValueError:
        raise typer.BadParameter("sizes are whole numbers", param_hint=option) from None


def _bounds(texts: list[str] | None, option: str) -> dict[str, tuple[float, float]]:
    found = {}
    for name, value in _pairs(texts, option).items():
        low, _, high = value.partition(":")
        try:
            found[name] = (float(low), float(high))
        except ValueError:
            raise typer.BadParameter(f"{value!r} is not LOW:HIGH", param_hint=option) from None
    return found


def _print_values(title: str, values: dict[str, Any]) -> None:
    import numpy as np

    table = Table("name", "dtype", "shape", "min", "max", "mean", title=title, title_justify="left")
    for name, value in values.items():
        array = np.asarray(value)
        facts = ["-", "-", "-"]
        if array.dtype.kind in "biuf" and array.size:
            wide = array.astype(np.float64)
            facts = [f"{x:.4g}" for x in (wide.min(), wide.max(), wide.mean())]
        table.add_row(name, array.dtype.name, str(list(array.shape)), *facts)
    console.print(table)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, default=str))


if __name__ == "__main__":
    main()
