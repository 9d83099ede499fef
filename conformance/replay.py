"""Node by node: what each offloaded node gave, next to what an oracle makes of the same inputs.

Every node is judged on the very inputs that it got, so that errors of the nodes before it do not
count against it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ort_webgpu import NodeCall
from ort_webgpu.conformance.case import OPERATORS, Array, Case
from ort_webgpu.conformance.difference import Difference, difference
from ort_webgpu.conformance.oracles import answer
from ort_webgpu.conformance.tolerances import scaled, tolerance_for

__all__ = ["NodeResult", "case_of_call", "replay"]


@dataclass(frozen=True)
class NodeResult:
    """One call of one node against an oracle.

    `problem` is None where all outputs agree. `nonfinite_inputs` name inputs that hold NaN or Inf,
    with counts, so that what came in is told from what the node made. `case` and `shaders` are
    what a repro needs.
    """

    step: int
    node: str
    op_type: str
    route: str | None
    oracle: str
    outputs: tuple[Difference, ...]
    problem: str | None = None
    nonfinite_inputs: Mapping[str, str] = field(default_factory=dict)
    case: Case | None = field(default=None, repr=False)
    shaders: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def passed(self) -> bool:
        """Whether the node agrees with the oracle."""
        return self.problem is None

    @property
    def worst(self) -> float:
        """The largest absolute error over all outputs."""
        return max((d.absolute.max for d in self.outputs if d.absolute), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "step": self.step,
            "node": self.node,
            "op_type": self.op_type,
            "route": self.route,
            "oracle": self.oracle,
            "passed": self.passed,
            "problem": self.problem,
            "nonfinite_inputs": dict(self.nonfinite_inputs),
            "outputs": [output.to_dict() for output in self.outputs],
        }


def case_of_call(call: NodeCall) -> Case:
    """The call as a case of its own, named after the node."""
    names = OPERATORS[call.node.op_type][0]
    case = Case(
        name=call.node.name,
        op_type=call.node.op_type,
        attributes=dict(call.node.attributes),
        inputs=call.inputs,
        wanted=tuple(output is not None for output in call.outputs),
        source="captured from a model",
    )
    words = set()
    past = case.input("past_key") if "past_key" in names else None
    if past is not None and past.dtype.kind == "f" and past.dtype != case.first.dtype:
        words.add("mixed_cache")
    if case.op_type == "PackedAttention":
        words.add("projection")
    if "mask_index" in names and _masks_all(case.input("mask_index")):
        words.add("mask_addition")
    return replace(case, features=frozenset(words))


def replay(call: NodeCall, step: int = 0) -> NodeResult:
    """Judge one call. An oracle that refuses the inputs is reported as the problem."""
    case = case_of_call(call)
    common: dict[str, Any] = {
        "step": step,
        "node": call.node.name,
        "op_type": call.node.op_type,
        "route": call.route,
        "nonfinite_inputs": _nonfinite(case),
        "case": case,
        "shaders": call.shaders(),
    }
    try:
        expected = answer(case)
    except Exception as error:
        problem = f"no oracle takes these inputs: {type(error).__name__}: {error}"
        return NodeResult(oracle="none", outputs=(), problem=problem, **common)
    given = [output for output in call.outputs if output is not None]
    found = tuple(
        difference(
            name, got, values, scaled(tolerance_for(values.dtype, case), _seen(values, care)), care
        )
        for name, got, (values, care) in zip(
            case.output_names(), given, expected.wanted(), strict=True
        )
    )
    verdict = _problem(found, common["nonfinite_inputs"])
    return NodeResult(oracle=expected.oracle, outputs=found, problem=verdict, **common)


def _problem(found: Sequence[Difference], nonfinite: Mapping[str, str]) -> str | None:
    lines = [f"{output.name}: {output.problem}" for output in found if output.problem]
    if lines and nonfinite:
        came = ", ".join(f"{counts} came in through {name}" for name, counts in nonfinite.items())
        lines.append(came)
    return "; ".join(lines) or None


def _nonfinite(case: Case) -> dict[str, str]:
    found = {}
    for name, array in zip(OPERATORS[case.op_type][0], case.inputs, strict=False):
        if array is None or array.dtype.kind != "f":
            continue
        counts = {"NaN": int(np.isnan(array).sum()), "Inf": int(np.isinf(array).sum())}
        words = [f"{count} {kind}" for kind, count in counts.items() if count]
        if words:
            found[name] = " and ".join(words)
    return found


def _seen(values: Array, care: Array | None) -> Array:
    return values if care is None else values[np.broadcast_to(care, values.shape)]


def _masks_all(mask: Array | None) -> bool:
    return mask is not None and mask.ndim == 2 and bool((mask == 0).all(-1).any())
