"""Element types of the values of a graph, without running it and without its weights.

onnx's own shape inference stops at the first contrib node, and real files often carry no
value_info at all; an element type is all that is asked for here, and it follows from operator
schemas by matching type variables.
"""

from collections.abc import Iterable, Mapping

import onnx
from onnx import TensorProto

__all__ = ["element_types"]

_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}
_BY_SCHEMA_NAME = {
    f"tensor({name})": number
    for name, number in {
        "float": TensorProto.FLOAT,
        "float16": TensorProto.FLOAT16,
        "bfloat16": TensorProto.BFLOAT16,
        "double": TensorProto.DOUBLE,
        "int32": TensorProto.INT32,
        "int64": TensorProto.INT64,
        "bool": TensorProto.BOOL,
        "string": TensorProto.STRING,
        "uint8": TensorProto.UINT8,
        "int8": TensorProto.INT8,
    }.items()
}

_INTEGER_OUTPUTS = {"EmbedLayerNormalization": (1,), "RemovePadding": (1, 2, 3)}
"""Outputs of contrib operators that are int32 while the operator's first output is float."""


def element_types(
    graph: onnx.GraphProto, opsets: Mapping[str, int], outer: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Element type of each value of `graph` that is known, by name.

    `outer` holds the types of the scope that a control-flow body captures from. What the file
    declares wins over what is inferred. A value that is no tensor, or that no rule reaches, is
    absent from the result.
    """
    known = dict(outer or {})
    for info in (*graph.value_info, *graph.input, *graph.output):
        if info.type.tensor_type.elem_type:
            known[info.name] = info.type.tensor_type.elem_type
    known.update((tensor.name, tensor.data_type) for tensor in graph.initializer)
    known.update(
        (sparse.values.name, sparse.values.data_type) for sparse in graph.sparse_initializer
    )
    for node in graph.node:
        for name, elem_type in _node_outputs(node, opsets, known):
            known.setdefault(name, elem_type)
    return known


def _node_outputs(
    node: onnx.NodeProto, opsets: Mapping[str, int], known: Mapping[str, int]
) -> Iterable[tuple[str, int]]:
    bodies = [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    if bodies:
        declared = [o.type.tensor_type.elem_type for o in bodies[0].output]
        declared = declared[1:] if node.op_type == "Loop" else declared
        pairs = zip(node.output, declared, strict=False)
        return [(name, elem_type) for name, elem_type in pairs if name and elem_type]
    attributes = {a.name: a for a in node.attribute}
    if node.op_type == "Cast":
        return [(node.output[0], attributes["to"].i)] if "to" in attributes else []
    if node.op_type in ("Constant", "ConstantOfShape"):
        return [(node.output[0], _constant_type(attributes))]
    domain = "" if node.domain == "ai.onnx" else node.domain
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets.get(domain, 1), domain)
    except onnx.defs.SchemaError:
        return _contrib_outputs(node, known)
    return _schema_outputs(node, schema, known)


def _constant_type(attributes: Mapping[str, onnx.AttributeProto]) -> int:
    if "value" in attributes:
        return attributes["value"].t.data_type
    if "value_int" in attributes or "value_ints" in attributes:
        return TensorProto.INT64
    if "value_string" in attributes or "value_strings" in attributes:
        return TensorProto.STRING
    return TensorProto.FLOAT


def _contrib_outputs(node: onnx.NodeProto, known: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    """Contrib operators compute in the type of their first float input, with few exceptions."""
    found = next((known[i] for i in node.input if known.get(i) in _FLOATS), None)
    integers = _INTEGER_OUTPUTS.get(node.op_type, ())
    for index, name in enumerate(node.output):
        if name and index in integers:
            yield name, TensorProto.INT32
        elif name and found is not None:
            yield name, found


def _schema_outputs(
    node: onnx.NodeProto, schema: onnx.defs.OpSchema, known: Mapping[str, int]
) -> Iterable[tuple[str, int]]:
    bound: dict[str, int] = {}
    for index, name in enumerate(node.input):
        if name in known and schema.inputs:
            formal = schema.inputs[min(index, len(schema.inputs) - 1)]
            bound.setdefault(formal.type_str, known[name])
    only = {
        c.type_param_str: next(iter(c.allowed_type_strs))
        for c in schema.type_constraints
        if len(c.allowed_type_strs) == 1
    }
    for index, name in enumerate(node.output):
        if not name or not schema.outputs:
            continue
        variable = schema.outputs[min(index, len(schema.outputs) - 1)].type_str
        elem_type = bound.get(variable) or _BY_SCHEMA_NAME.get(only.get(variable, variable))
        if elem_type:
            yield name, elem_type
