"""The tables of `ort-webgpu conformance`: operators, features by operators, routes, variants."""

import json
from collections.abc import Mapping
from importlib import resources

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ort_webgpu.conformance.report import Verdict
from ort_webgpu.conformance.suite import STATUSES, CaseResult, Suite

__all__ = ["known_variants", "print_suite", "suite_verdicts"]

_SHOWN = 20


def print_suite(suite: Suite, console: Console, verbose: bool = False) -> None:
    """Everything that was covered, then what failed. `verbose` lists all failures and refusals."""
    console.print(_operators(suite))
    console.print(_features(suite))
    if suite.routes():
        console.print(_routes(suite))
        _print_variants(suite, console)
    shown = [r for r in suite.results if r.status == "failed"]
    for result in shown if verbose else shown[:_SHOWN]:
        console.print(_line(result), highlight=False, soft_wrap=True)
    if len(shown) > _SHOWN and not verbose:
        console.print(f"... and {len(shown) - _SHOWN} more; --verbose or --json has them all")
    reasons: dict[str, int] = {}
    for result in suite.results:
        if result.status in ("unsupported", "skipped"):
            key = f"{result.status}, {result.op_type}: {result.detail}"
            reasons[key] = reasons.get(key, 0) + 1
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1])[
        : None if verbose else 10
    ]:
        console.print(
            f"[dim]{count} x {escape(reason[:240])}[/dim]", highlight=False, soft_wrap=True
        )
    counts = suite.counts()
    verdict = "[green]PASSED[/green]" if suite.passed else "[red]FAILED[/red]"
    console.print(f"{verdict}  " + ", ".join(f"{counts[s]} {s}" for s in STATUSES))


def suite_verdicts(suite: Suite) -> list[Verdict]:
    """For JUnit: a test for each result."""
    return [
        Verdict(
            r.op_type,
            r.case + (f" [{r.route}]" if r.route else ""),
            r.detail if r.status == "failed" else None,
            r.detail or r.status if r.status in ("unsupported", "skipped") else None,
            r.seconds,
        )
        for r in suite.results
    ]


def known_variants() -> Mapping[str, list[str]]:
    """Operator to the names of the kernel cards' variants."""
    text = resources.files("ort_webgpu.conformance").joinpath("variants.json").read_text("utf-8")
    return json.loads(text)


def _operators(suite: Suite) -> Table:
    table = Table("operator", *STATUSES, title=f"{suite.candidate}, level {suite.level}")
    table.title_justify = "left"
    for op_type, counts in suite.by_operator().items():
        table.add_row(op_type, *(str(counts[status]) for status in STATUSES))
    return table


def _features(suite: Suite) -> Table:
    operators = list(suite.by_operator())
    table = Table("feature", title="passed of all, by feature", title_justify="left")
    for op_type in operators:
        table.add_column(op_type, justify="right", overflow="fold")
    for feature, found in suite.features().items():
        cells = []
        for op_type in operators:
            good, every = found.get(op_type, (0, 0))
            text = f"{good}/{every}" if every else ""
            cells.append(f"[red]{text}[/red]" if every and not good else text)
        table.add_row(feature, *cells)
    return table


def _routes(suite: Suite) -> Table:
    table = Table("operator", "routes, by cases that passed", title="routes", title_justify="left")
    for op_type, counts in suite.routes().items():
        table.add_row(op_type, ", ".join(f"{name} {n}" for name, n in counts.most_common()))
    return table


def _print_variants(suite: Suite, console: Console) -> None:
    exercised = suite.cards()
    for op_type, names in known_variants().items():
        if op_type not in suite.by_operator():
            continue
        found: Mapping[str, int] = exercised.get(op_type, {})
        missing = [name for name in names if name not in found]
        console.print(f"{op_type}: {len(names) - len(missing)} of {len(names)} variants exercised")
        if missing and found:
            console.print(f"[dim]  not: {', '.join(missing)}[/dim]", highlight=False)


def _line(result: CaseResult) -> str:
    route = f" on {result.route}" if result.route else ""
    return (
        f"[red]failed[/red] {result.case}{route} ({result.source}): {escape(result.detail or '')}"
    )
