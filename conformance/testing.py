"""assert_matches_cpu: one line in a test of one's own."""

import os
from collections.abc import Mapping
from typing import Any

import onnx

from ort_webgpu.conformance.candidates import Candidate
from ort_webgpu.conformance.case import Array
from ort_webgpu.conformance.checks import MismatchError
from ort_webgpu.conformance.compare import Options, compare_model
from ort_webgpu.conformance.generate import InputOptions
from ort_webgpu.conformance.golden import Step
from ort_webgpu.conformance.tolerances import Tolerance
from ort_webgpu.errors import InvalidInputError

__all__ = ["assert_matches_cpu", "model_of_node"]

_IR_VERSION = 10


def assert_matches_cpu(
    model: "str | os.PathLike | bytes | onnx.ModelProto | onnx.NodeProto",
    feeds: Mapping[str, Array] | None = None,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    seed: int = 0,
    **candidate: Any,
) -> None:
    """Fail unless WebGPUSession gives what ORT's CPU EP gives.

    Args:
        model: a model (path, bytes or proto), or one node, whose wired inputs must all be in
            `feeds` and whose domain is com.microsoft unless it says otherwise.
        feeds: inputs by name; those that are missing are generated (not for a node).
        atol, rtol: instead of the tolerances of the project's table.
        seed: of generated inputs.
        candidate: adapter, backend, routes, offload: as WebGPUSession's.

    Raises MismatchError, an AssertionError that names every output and node that differs.
    """
    if isinstance(model, onnx.NodeProto):
        model = model_of_node(model, feeds or {})
    if isinstance(model, onnx.ModelProto):
        model = model.SerializeToString()
    tolerances = {}
    if atol is not None or rtol is not None:
        tolerances[""] = Tolerance(atol or 0.0, rtol or 0.0)
    given = [Step(dict(feeds))] if feeds else []
    options = Options(inputs=InputOptions(seed=seed), tolerances=tolerances)
    comparison = compare_model(model, Candidate(**candidate), options=options, given=given)
    lines = [f"{d.name}: {d.problem}" for s in comparison.steps for d in s.outputs if d.problem]
    lines += [f"node {n.node}: {n.problem}" for n in comparison.nodes if n.problem]
    if lines:
        head = f"{comparison.model}: {comparison.candidate} differs from ORT's CPU EP"
        raise MismatchError("\n  ".join([head, *lines]))


def model_of_node(node: onnx.NodeProto, feeds: Mapping[str, Array]) -> onnx.ModelProto:
    """A model of `node` alone, its wired inputs and outputs those of the graph.

    Raises InvalidInputError where `feeds` lacks an input.
    """
    domain = node.domain or "com.microsoft"
    wired = [name for name in node.input if name]
    missing = sorted(set(wired) - feeds.keys())
    if missing:
        raise InvalidInputError(
            f"{node.op_type} node {node.name!r} reads {missing}, which feeds lack; a node's inputs"
            " cannot be generated, give them all"
        )
    copied = onnx.NodeProto()
    copied.CopyFrom(node)
    copied.domain = domain
    helper = onnx.helper
    graph = helper.make_graph(
        [copied],
        "node",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(feeds[name].dtype), feeds[name].shape
            )
            for name in dict.fromkeys(wired)
        ],
        [onnx.ValueInfoProto(name=name) for name in node.output if name],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(domain, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)
