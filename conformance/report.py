"""JSON and JUnit XML files, for programs and for CI."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ort_webgpu.conformance.compare import Comparison

__all__ = ["Verdict", "verdicts", "write_json", "write_junit"]


@dataclass(frozen=True)
class Verdict:
    """One test: `problem` None where it passed; `skipped` is a reason not to have run it."""

    group: str
    name: str
    problem: str | None = None
    skipped: str | None = None
    seconds: float = 0.0


def verdicts(comparison: Comparison) -> list[Verdict]:
    """One for each output of each step, and one for each node call."""
    found = []
    for step in comparison.steps:
        for output in step.outputs:
            problem = output.problem
            if output.name in step.changing:
                problem = "; ".join(filter(None, (problem, "changed between runs")))
            name = f"iteration {step.iteration} step {step.step} {output.name}"
            found.append(Verdict("outputs", name, problem, seconds=sum(step.seconds)))
    found += [
        Verdict("nodes", f"step {node.step} {node.node}", node.problem) for node in comparison.nodes
    ]
    return found


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write `data`; infinities and NaN are written as text, which JSON has no numbers for."""
    path.write_text(json.dumps(_plain(data), indent=2, allow_nan=False), encoding="utf-8")


def write_junit(path: Path, name: str, found: Iterable[Verdict]) -> None:
    """Write JUnit XML: a suite `name`, a test for each verdict."""
    found = list(found)
    suite = ElementTree.Element(
        "testsuite",
        name=name,
        tests=str(len(found)),
        failures=str(sum(one.problem is not None for one in found)),
        skipped=str(sum(one.skipped is not None for one in found)),
        errors="0",
        time=f"{sum(one.seconds for one in found):.3f}",
    )
    for one in found:
        test = ElementTree.SubElement(
            suite,
            "testcase",
            classname=f"{name}.{one.group}",
            name=one.name,
            time=f"{one.seconds:.3f}",
        )
        if one.problem is not None:
            ElementTree.SubElement(test, "failure", message=one.problem).text = one.problem
        elif one.skipped is not None:
            ElementTree.SubElement(test, "skipped", message=one.skipped)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
