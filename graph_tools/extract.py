"""Sub-models: some nodes of a model as a model of their own, which ORT can load.

External data stays where it is: the sub-model names the files, and ORT maps them when the session
option FOLDER_OPTION is set to `SubModel.folder`. Measured with ORT 1.32: a mapped weight takes no
memory of its own in any session, while one given to `SessionOptions.add_external_initializers` is
copied into each. So only large inline initializers are handed over that way, which keeps them out
of `proto`. Nothing is loaded here.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import TensorProto, TypeProto
from onnx.helper import make_tensor_type_proto

from ort_webgpu.graph_tools.model import (
    ModelError,
    ModelFile,
    Weight,
    bodies,
    copy_fields,
    external,
    tensors,
)
from ort_webgpu.graph_tools.partition import reads

__all__ = ["FOLDER_OPTION", "SubModel", "extract", "type_from_node_arg"]

# ORT session option: the folder that external data of a model given as bytes is relative to.
FOLDER_OPTION = "session.model_external_initializers_file_folder_path"

# Larger inline initializers are handed over in memory instead of being serialized once more.
_LARGE_BYTES = 64 * 1024


@dataclass(frozen=True)
class SubModel:
    """A model cut out of another.

    Attributes:
        proto: the model; below 2 GB, since weights are left out.
        inputs: values that must be fed, in the order of the proto's graph inputs.
        outputs: values it makes.
        weights: large inline initializers, each to be given as an OrtValue over `Weight.array()` to
            `SessionOptions.add_external_initializers`: all of them and no others, or ORT refuses.
        overridable: initializers that are graph inputs too and may be fed.
        folder: value for the session option FOLDER_OPTION, the same for all sub-models of a model;
            None where no data file is named.
    """

    proto: onnx.ModelProto
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[Weight, ...]
    overridable: tuple[str, ...]
    folder: Path | None


def extract(
    model: ModelFile,
    nodes: Sequence[int],
    outputs: Sequence[str],
    input_types: Mapping[str, TypeProto],
) -> SubModel:
    """Cut the nodes with indexes `nodes`, with all that they and their bodies need.

    Args:
        model: what to cut from.
        nodes: indexes in topological order; may be empty.
        outputs: values to hand out: made by `nodes`, or graph inputs or initializers (as such).
        input_types: types of values that come from outside; the model's own types fill gaps.

    Raises:
        ModelError: an input's type is not known, or an output comes from nowhere.
    """
    chosen = [model.proto.graph.node[i] for i in nodes]
    made = {name for node in chosen for name in node.output if name}
    outside = dict.fromkeys(name for node in chosen for name in sorted(reads(node)))
    outside.update(dict.fromkeys(outputs))
    stored = {n for n in outside if n in model.weights or n in model.sparse} - made
    inputs = tuple(n for n in outside if n not in made and n not in stored)
    overridable = tuple(name for name in model.overridable if name in stored)

    sub = onnx.ModelProto()
    copy_fields(model.proto, sub, skip=("graph", "functions", "training_info"))
    graph = sub.graph
    # `node` and the fields that name values are filled below.
    copy_fields(model.proto.graph, graph, only=("name", "doc_string", "metadata_props"))
    graph.node.extend(chosen)
    sub.functions.extend(_called_functions(model.proto, chosen))
    for name in inputs:
        graph.input.add(name=name).type.CopyFrom(_input_type(model, name, input_types))
    for name in overridable:
        graph.input.add(name=name).type.CopyFrom(model.value_types[name])
    for name in outputs:
        _declare_output(model, graph, name, input_types)
    declared = set(inputs) | set(outputs)
    for name in sorted(made - declared):
        if name in model.value_types:
            graph.value_info.add(name=name).type.CopyFrom(_open_type(model.value_types[name]))
    _annotate(model, graph, made | set(outside), stored)
    folder = model.data_folder if _add_data_files(model, sub, stored) else None
    weights = _add_initializers(model, graph, stored)
    return SubModel(sub, inputs, tuple(outputs), weights, overridable, folder)


def type_from_node_arg(kind: str, shape: Sequence[int | str | None] = ()) -> TypeProto:
    """The ONNX type that ORT writes as `kind`, such as "optional(seq(tensor(float)))".

    Args:
        kind: `NodeArg.type`: tensor, sparse_tensor, seq, optional and map, nested.
        shape: `NodeArg.shape`, the shape of the tensor inside. ORT gives [] for a scalar and for an
            unknown rank alike, so [] leaves the rank open.

    Raises:
        ModelError: `kind` is not such a type.
    """
    match = re.fullmatch(r"(\w+)\((.*)\)", kind.strip())
    if match is None:
        raise ModelError(f"{kind!r} is not a value type as ORT writes them, like 'tensor(float)'.")
    outer, inner = match.groups()
    proto = TypeProto()
    if outer in ("tensor", "sparse_tensor"):
        made = make_tensor_type_proto(_elem_type(inner), list(shape) or None).tensor_type
        target = proto.tensor_type if outer == "tensor" else proto.sparse_tensor_type
        target.elem_type = made.elem_type
        if made.HasField("shape"):
            target.shape.CopyFrom(made.shape)
    elif outer in ("seq", "optional"):
        target = proto.sequence_type if outer == "seq" else proto.optional_type
        target.elem_type.CopyFrom(type_from_node_arg(inner, shape))
    elif outer == "map":
        key, _, value = inner.partition(",")
        proto.map_type.key_type = _elem_type(key)
        proto.map_type.value_type.CopyFrom(type_from_node_arg(value, shape))
    else:
        raise ModelError(f"{kind!r} cannot cross a segment border: {outer!r} values are not known.")
    return proto


def _elem_type(name: str) -> int:
    try:
        return TensorProto.DataType.Value(name.strip().upper())
    except ValueError as error:
        raise ModelError(f"{name!r} is not an element type of ONNX.") from error


def _input_type(model: ModelFile, name: str, input_types: Mapping[str, TypeProto]) -> TypeProto:
    if name in input_types:
        return input_types[name]
    if name not in model.value_types:
        raise ModelError(
            f"Value {name!r} comes from outside the sub-model and its type is not known; "
            "give it in input_types."
        )
    kind = model.value_types[name]
    return kind if name in model.inputs else _open_type(kind)


def _declare_output(model: ModelFile, graph, name: str, input_types) -> None:
    """Declare output `name`; ORT infers the type of one that the model does not describe."""
    value = graph.output.add(name=name)
    known = name in model.weights or name in model.sparse or name in model.inputs
    if name in model.outputs or known:
        if name in model.value_types:
            value.type.CopyFrom(model.value_types[name])
    elif name in input_types:
        value.type.CopyFrom(input_types[name])
    elif name in model.value_types:
        value.type.CopyFrom(_open_type(model.value_types[name]))


def _open_type(kind: TypeProto) -> TypeProto:
    """`kind` with rank and symbolic dims, but without the fixed dims of a tensor.

    ORT checks fixed dims of what is fed to a model, never of values inside one, and files whose
    value_info is stale (an old batch size) are common. ORT infers the dims that are certain.
    """
    opened = TypeProto()
    opened.CopyFrom(kind)
    inner = opened
    while (which := inner.WhichOneof("value")) in ("sequence_type", "optional_type"):
        inner = getattr(inner, which).elem_type
    if which in ("tensor_type", "sparse_tensor_type"):
        for dim in getattr(inner, which).shape.dim:
            dim.ClearField("dim_value")
    return opened


def _annotate(model: ModelFile, graph, names: set[str], stored: set[str]) -> None:
    """Copy quantization annotations of `names`; the parameters they name join `stored`."""
    for annotation in model.proto.graph.quantization_annotation:
        if annotation.tensor_name in names:
            graph.quantization_annotation.append(annotation)
            parameters = {entry.value for entry in annotation.quant_parameter_tensor_names}
            stored |= parameters & model.weights.keys()


def _add_initializers(model: ModelFile, graph, stored: set[str]) -> tuple[Weight, ...]:
    """Add the inline initializers among `stored`; returns those to be handed over in memory."""
    weights = []
    for name, weight in model.weights.items():
        if name not in stored or weight.external:
            continue
        if weight.dtype is None or weight.length <= _LARGE_BYTES:
            graph.initializer.append(weight.tensor)
            continue
        weights.append(weight)
        marker = graph.initializer.add(
            name=name,
            dims=weight.shape,
            data_type=weight.elem_type,
            data_location=TensorProto.EXTERNAL,
        )
        marker.external_data.add(key="location", value="handed-over-in-memory")
    graph.sparse_initializer.extend(s for n, s in model.sparse.items() if n in stored)
    return tuple(weights)


def _add_data_files(model: ModelFile, sub: onnx.ModelProto, stored: set[str]) -> bool:
    """Add the external initializers among `stored`; returns whether `sub` names any data file.

    Locations, those in bodies and attributes too, become relative to the model's data folder.
    """
    if model.data_folder is None:
        return False
    sub.graph.initializer.extend(
        weight.tensor
        for name, weight in model.weights.items()
        if name in stored and weight.external
    )
    found = list(sub.graph.initializer)
    for nodes in (sub.graph.node, *(function.node for function in sub.functions)):
        found.extend(tensor for tensor in tensors(nodes) if external(tensor))
    for tensor in found:
        file = model.locate(tensor)[0]
        entry = next(entry for entry in tensor.external_data if entry.key == "location")
        entry.value = file.relative_to(model.data_folder).as_posix()
    return bool(found)


def _called_functions(model: onnx.ModelProto, nodes) -> list[onnx.FunctionProto]:
    """Local functions that `nodes` call, directly or not; ORT also checks those never called."""
    by_key = {(f.domain, f.name, f.overload): f for f in model.functions}
    called: dict[tuple[str, str, str], onnx.FunctionProto] = {}
    pending = list(nodes)
    while pending:
        node = pending.pop()
        key = (node.domain, node.op_type, node.overload)
        if key in by_key and key not in called:
            called[key] = by_key[key]
            pending.extend(by_key[key].node)
        for _, body in bodies(node):
            pending.extend(body.node)
    return [function for key, function in by_key.items() if key in called]
