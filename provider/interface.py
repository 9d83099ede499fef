"""The stand-in: a tiny ORT session with a model's inputs, outputs and metadata, and nothing else.

`InferenceSession._sess` must be a real session of ORT's: libraries read its metadata, bind to it
and rely on its errors. Loading the whole model for that would load its weights twice, and fails
where ORT's CPU EP lacks a kernel. Outputs of the stand-in are made with a shape that only a run
tells, so that ORT reports the declared one, as it does for the model itself.
"""

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as _ort

from ort_webgpu.graph_tools import extract, type_from_node_arg
from ort_webgpu.options import copy_options
from ort_webgpu.segments import SegmentFactory

__all__ = ["Undeclarable", "stand_in"]

_PREFIX = "ort_webgpu_stand_in/"
_ERROR = 3


class Undeclarable(Exception):
    """An output has a type that no operator of a weightless model makes."""


def stand_in(factory: SegmentFactory, original: Any) -> Any:
    """An initialized session with the interface of `original`, a loaded session of the model.

    Raises Undeclarable.
    """
    session = _session(factory, original, {})
    # Free-dimension overrides take effect as a session is initialized, in its inputs; ORT carries
    # them to the outputs by inference, which finds nothing to follow here.
    given = zip(original.inputs_meta, session.inputs_meta, strict=True)
    dims = {
        before: after
        for one, other in given
        for before, after in zip(one.shape, other.shape, strict=True)
        if isinstance(before, str) and isinstance(after, int)
    }
    return _session(factory, original, dims) if dims else session


def _session(factory: SegmentFactory, original: Any, dims: dict[str, int]) -> Any:
    """The stand-in, with symbolic output dims replaced where `dims` has them."""
    model = factory.model
    proto = onnx.ModelProto()
    proto.ir_version = 10
    proto.opset_import.append(helper.make_opsetid("", 21))
    _describe(model.proto, proto)
    graph = proto.graph
    options = _quiet_options(factory)
    reported = {arg.name for arg in (*original.inputs_meta, *original.overridable_initializers)}
    graph.input.extend(v for v in model.proto.graph.input if v.name in reported)
    overridable = [name for name in model.overridable if name in reported]
    if overridable:
        sub = extract(model, [], overridable, {})
        graph.initializer.extend(sub.proto.graph.initializer)
        factory.hand_over(options, sub.weights)
    _constants(graph)
    made = set(reported)  # a graph may list an output twice
    for position, arg in enumerate(original.outputs_meta):
        kind = type_from_node_arg(arg.type, [dims.get(dim, dim) for dim in arg.shape])
        graph.output.add(name=arg.name).type.CopyFrom(kind)
        if arg.name not in made:
            made.add(arg.name)
            graph.node.extend(_producer(kind, arg.name, position))
    session = _ort.InferenceSession(options, proto.SerializeToString(), False, False)
    session.initialize_session(list(factory.providers), list(factory.provider_options), set())
    return session


def _quiet_options(factory: SegmentFactory) -> Any:
    """The caller's options for a session that only tells of its inputs and outputs."""
    options = copy_options(factory.options)
    options.enable_profiling = False
    options.graph_optimization_level = _ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    # Each of its outputs is an empty value of another shape than declared, which ORT would tell
    options.log_severity_level = max(_ERROR, options.log_severity_level)
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return options


def _describe(source: onnx.ModelProto, target: onnx.ModelProto) -> None:
    target.producer_name = source.producer_name
    target.producer_version = source.producer_version
    target.domain = source.domain
    if source.HasField("model_version"):
        target.model_version = source.model_version
    target.doc_string = source.doc_string
    target.metadata_props.extend(source.metadata_props)
    target.graph.name = source.graph.name
    target.graph.doc_string = source.graph.doc_string


def _constants(graph: onnx.GraphProto) -> None:
    """A scalar, and a shape tensor of unknown length: the indexes of a vector's nonzero entries."""
    for name, value in (
        ("zero", np.float32(0)),
        ("flat", np.array([-1], np.int64)),
        ("nothing", np.zeros(1, np.float32)),
    ):
        graph.initializer.append(numpy_helper.from_array(np.asarray(value), _PREFIX + name))
    graph.node.extend(
        [
            helper.make_node("NonZero", [_PREFIX + "nothing"], [_PREFIX + "indexes"]),
            helper.make_node(
                "Reshape", [_PREFIX + "indexes", _PREFIX + "flat"], [_PREFIX + "shape"]
            ),
            helper.make_node("Expand", [_PREFIX + "zero", _PREFIX + "shape"], [_PREFIX + "tensor"]),
        ]
    )


def _producer(kind: onnx.TypeProto, name: str, position: int) -> list[onnx.NodeProto]:
    """Nodes that make an output called `name` of type `kind`."""
    outer = kind.WhichOneof("value")
    if outer == "tensor_type":
        elem_type = kind.tensor_type.elem_type
        return [helper.make_node("Cast", [_PREFIX + "tensor"], [name], to=elem_type)]
    if outer == "sequence_type" and kind.sequence_type.elem_type.HasField("tensor_type"):
        elem_type = kind.sequence_type.elem_type.tensor_type.elem_type
        empty = f"{_PREFIX}sequence{position}"
        return [
            helper.make_node("SequenceEmpty", [], [empty], dtype=elem_type),
            helper.make_node("Identity", [empty], [name]),
        ]
    if outer == "optional_type":
        return [helper.make_node("Optional", [], [name], type=kind.optional_type.elem_type)]
    raise Undeclarable(f"output {name!r} has a type that the session cannot declare: {outer}")
