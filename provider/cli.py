"""The command `ort-webgpu`: devices, explain, run, compare, conformance, bench, tune, external.

Needs the extra `cli`.

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
from ort_webgpu.cli_options import (
    Adapter,
    AsJson,
    Backend,
    Batch,
    CandidateName,
    Dims,
    FailFast,
    Golden,
    HtmlFile,
    InputFile,
    Isolate,
    Iterations,
    JsonFile,
    JunitFile,
    Length,
    Library,
    ModelPath,
    Nodes,
    Offload,
    OwnCaches,
    Past,
    Python,
    Ranges,
    Reference,
    Repeat,
    Repro,
    Routes,
    Save,
    Saved,
    Seed,
    Steps,
    Tolerances,
    TunedModel,
    Verbose,
    bounds,
    bounds_by_output,
    pairs,
    sizes,
)

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
    reference: Reference = "reference",
    adapter: Adapter = "auto",
    backend: Backend = "auto",
    route: Routes = None,
    offload: Offload = "all",
    library: Library = None,
    python: Python = None,
    isolate: Isolate = False,
    inputs: InputFile = None,
    golden: Golden = None,
    saved: Saved = None,
    save: Save = None,
    steps: Steps = 1,
    iterations: Iterations = 1,
    repeat: Repeat = 1,
    own_caches: OwnCaches = False,
    nodes: Nodes = True,
    fail_fast: FailFast = False,
    atol: Tolerances = None,
    rtol: Tolerances = None,
    batch: Batch = 2,
    length: Length = 12,
    past: Past = 0,
    dim: Dims = None,
    value_range: Ranges = None,
    seed: Seed = 0,
    repro: Repro = None,
    json_file: JsonFile = None,
    junit: JunitFile = None,
    html: HtmlFile = None,
    verbose: Verbose = False,
) -> None:
    """Find the first wrong number of a model, next to ORT's CPU EP; status 1 where there is one."""
    from ort_webgpu.conformance.compare import Options, compare_model, recheck
    from ort_webgpu.conformance.golden import load_steps, save_steps

    tried = _candidate(candidate, adapter, backend, route, offload, library, python, isolate)
    tolerances = _tolerances(atol, rtol)
    names = _value_names(model)
    loaded = _given_steps(golden, inputs, names)
    if saved is not None and golden is None:
        raise typer.BadParameter("needs --golden to check against", param_hint="--saved")
    if saved is not None:
        comparison = recheck(model, load_steps(saved, *names), loaded, tolerances)
    else:
        made = _input_options(dim, value_range, batch=batch, length=length, past=past, seed=seed)
        options = Options(steps, iterations, repeat, fail_fast, own_caches, nodes, made, tolerances)
        comparison = compare_model(model, tried, _named(reference), options, loaded)
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
    verbose: Verbose = False,
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


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def bench(context: typer.Context) -> None:
    """Time the operators on an adapter, next to its ceilings and to others; see bench --help."""
    from ort_webgpu.conformance.bench import main as run_bench

    raise typer.Exit(run_bench(context.args))


@app.command()
def tune(
    model: TunedModel = None,
    adapter: Adapter = "auto",
    backend: Backend = "auto",
    quick: Annotated[bool, typer.Option(help="Fewer shapes, no tiles of kernels.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Only print what is stored.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Only delete what is stored.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure routes and their settings on an adapter, and keep what is best for later sessions.

    Results are kept in the user's cache directory (or ORT_WEBGPU_CACHE_DIR), for this adapter,
    driver and version; sessions use them unless they are made with tuned=False. Without MODEL
    common shapes are measured.
    """
    from ort_webgpu import tuning
    from ort_webgpu.cli_tuned import print_findings, print_stored
    from ort_webgpu.device import open_gpu

    if clear and show:
        raise typer.BadParameter("--show and --clear exclude each other", param_hint="--clear")
    gpu = open_gpu(int(adapter) if adapter.isdigit() else adapter, backend)
    if gpu is None:
        raise typer.BadParameter("there is no adapter; see `ort-webgpu devices`")
    if clear:
        path, there = tuning.file_of(gpu.info), tuning.clear(gpu.info)
        console.print(f"deleted {path}" if there else "nothing is tuned", soft_wrap=True)
        return
    if not show:
        findings, wrong = _tuned(gpu, model, quick)
        if not findings:
            raise typer.Exit(1)
        path = tuning.store(gpu.info, findings)
    stored = tuning.read(gpu.info)
    if as_json:
        _print_json(dataclasses.asdict(stored))
    elif show:
        print_stored(stored, console)
    else:
        print_findings(findings, console)
        console.print(f"kept in {path}", highlight=False, soft_wrap=True)
    if not show and wrong:
        raise typer.Exit(1)


def _tuned(gpu: Any, model: Path | None, quick: bool) -> tuple[list[Any], list[str]]:
    """What is found for each class of calls, and lines about what was wrong, which are printed."""
    from ort_webgpu.conformance import tune

    works = tune.model_works(gpu, model, quick) if model else tune.default_works(gpu, quick)
    findings, wrong = [], []
    told = Console(stderr=True)
    for work in track(works, "measuring", console=told, transient=True):
        try:
            finding, lines = tune.tune_work(gpu, work, quick)
        except OrtWebGpuError as error:  # a call too large for this adapter; the others count
            lines = [str(error)]
        else:
            findings.append(finding)
        wrong += lines
        for line in lines:
            told.print(line, highlight=False, soft_wrap=True, markup=False)
    return findings, wrong


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


def _tolerances(atol: list[str] | None, rtol: list[str] | None) -> dict[str, Any]:
    from ort_webgpu.conformance.tolerances import Tolerance

    return {name: Tolerance(*found) for name, found in bounds_by_output(atol, rtol).items()}


def _given_steps(golden: Path | None, inputs: Path | None, names: Any) -> list[Any]:
    """The steps to run; outputs stay in them only where they are what is right."""
    from ort_webgpu.conformance.golden import load_steps

    if golden is not None:
        return load_steps(golden, *names)
    steps = load_steps(inputs, *names) if inputs is not None else []
    return [dataclasses.replace(step, outputs={}) for step in steps]


def _value_names(model: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the inputs that may be given, and of the outputs."""
    from ort_webgpu.graph_tools import ModelFile

    file = ModelFile.open(model)
    return (*file.inputs, *file.overridable), file.outputs


def _named(name: str) -> Any:
    from ort_webgpu.conformance.candidates import Candidate

    return Candidate(name)


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
        routes=pairs(routes, "--route"),
        offload=_offload(offload),
        library=str(library) if library else None,
        python=str(python) if python else None,
        isolated=isolate,
    )


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
        routes=pairs(routes, "--route"),
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

    return InputOptions(dims=sizes(dims, "--dim"), ranges=bounds(ranges, "--range"), **options)


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
