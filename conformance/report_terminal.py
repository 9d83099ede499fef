"""Tables on the terminal."""

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ort_webgpu.conformance.compare import Comparison
from ort_webgpu.conformance.difference import Difference
from ort_webgpu.conformance.replay import NodeResult

__all__ = ["print_comparison"]


def print_comparison(comparison: Comparison, console: Console, verbose: bool = False) -> None:
    """Outputs of every step, then the nodes, then the verdict.

    Each output and node is shown in its worst step, with `verbose` in every one.
    """
    console.print(f"{comparison.candidate}  against  {comparison.reference}", highlight=False)
    console.print(_outputs(comparison, verbose, console.width))
    for step in comparison.steps:
        if step.changing:
            console.print(
                f"[red]step {step.step}: {', '.join(step.changing)} changed between runs[/red]"
            )
    if comparison.nodes:
        shown = comparison.nodes if verbose else _interesting(comparison.nodes)
        console.print(_nodes(shown))
        good = sum(node.passed for node in comparison.nodes)
        console.print(f"{good} of {len(comparison.nodes)} node calls agree with their oracles")
    bad = comparison.first_bad_node
    if bad is not None:
        console.print(
            f"[red]first bad node:[/red] {bad.node} (step {bad.step}): {escape(bad.problem or '')}"
        )
    good = sum(step.passed for step in comparison.steps)
    verdict = "[green]PASSED[/green]" if comparison.passed else "[red]FAILED[/red]"
    console.print(f"{verdict}  {good} of {len(comparison.steps)} steps")


_NUMBERS = ("max abs", "at", "mean", "p99", "max rel", "ulp", "cosine", "top-k")
_NARROW = ("max abs", "max rel", "top-k")  # what a terminal of 80 columns has room for


def _outputs(comparison: Comparison, verbose: bool, width: int) -> Table:
    headings = _NUMBERS if width >= 130 else _NARROW
    table = Table("step", title="outputs", title_justify="left")
    table.add_column("output", overflow="fold", min_width=12)
    table.add_column("shape", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=heading != "top-k")
    table.add_column("verdict", overflow="fold", min_width=7)
    rows = [(f"{s.iteration}.{s.step}", output) for s in comparison.steps for output in s.outputs]
    if not verbose:
        worst: dict[str, tuple[str, Difference]] = {}
        for row in rows:
            if row[1].name not in worst or _badness(row[1]) > _badness(worst[row[1].name][1]):
                worst[row[1].name] = row
        rows = list(worst.values())
    for number, output in rows:
        *numbers, verdict = _numbers(output)
        shown = [n for heading, n in zip(_NUMBERS, numbers, strict=True) if heading in headings]
        table.add_row(number, output.name, str(list(output.expected[1])), *shown, verdict)
    return table


def _badness(output: Difference) -> tuple[bool, float]:
    return not output.passed, output.absolute.max if output.absolute else 0.0


def _numbers(output: Difference) -> list[str]:
    verdict = "[green]ok[/green]" if output.passed else f"[red]{escape(output.problem or '')}[/red]"
    if output.absolute is None or output.relative is None:
        return [*["-"] * 8, verdict]
    return [
        f"{output.absolute.max:.2e}",
        ",".join(map(str, output.absolute.index)),
        f"{output.absolute.mean:.1e}",
        f"{output.absolute.p99:.1e}",
        f"{output.relative.max:.1e}",
        "-" if output.ulp is None else f"{output.ulp:.3g}",
        "-" if output.cosine is None else f"{output.cosine:.7f}",
        " ".join(f"{k}:{share:.0%}" for k, share in output.top.items()) or "-",
        verdict,
    ]


def _interesting(nodes: Iterable[NodeResult]) -> list[NodeResult]:
    """Of each node the call with the largest error, one that failed before all others."""
    worst: dict[str, NodeResult] = {}
    for node in nodes:
        best = worst.get(node.node)
        if best is None or (not node.passed, node.worst) > (not best.passed, best.worst):
            worst[node.node] = node
    return list(worst.values())


def _nodes(nodes: Iterable[NodeResult]) -> Table:
    table = Table("node", "step", "route", "oracle", "max abs", title="nodes", title_justify="left")
    table.add_column("verdict", overflow="fold")
    for node in nodes:
        verdict = "[green]ok[/green]" if node.passed else f"[red]{escape(node.problem or '')}[/red]"
        route = node.route or "cpu"
        table.add_row(node.node, str(node.step), route, node.oracle, f"{node.worst:.2e}", verdict)
    return table
