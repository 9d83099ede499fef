"""Beam-search decoder bodies without DecoderMaskedMultiHeadAttention.

ORT's beam-search operators look for such nodes in their `decoder` body. With them, the body is
called with caches of full capacity, past_sequence_length, beam_width and cache_indirection.
Without them those three inputs are refused, the caches grow by one row a step, and the operator
itself reorders them by beam. A body whose nodes are expanded must therefore change its side of
the contract too.
"""

import onnx
from onnx import TensorProto

from ort_webgpu.graph_tools.nodes import Node
from ort_webgpu.graph_tools.reference_builder import GraphBuilder
from ort_webgpu.graph_tools.reference_decoder import is_self_attention

__all__ = ["BEAM_SEARCH_OPS", "grow_caches"]

BEAM_SEARCH_OPS = frozenset({"BeamSearch", "WhisperBeamSearch"})

_PAST_KEY, _PAST_LENGTH, _BEAM_WIDTH, _CACHE_INDIRECTION = 5, 7, 8, 9


def grow_caches(body: onnx.GraphProto, prefix: str, opset: int) -> None:
    """Give `body`, in place, the interface that ORT calls when no DMMHA node is in it.

    The nodes stay: with a past of exactly past_sequence_length rows, which is now read off the
    first past cache, their standard form appends a row instead of overwriting one.
    """
    protos = [n for n in body.node if n.op_type == "DecoderMaskedMultiHeadAttention"]
    nodes = [Node.from_proto(proto, 0) for proto in protos]
    cached = [node for node in nodes if is_self_attention(node)]
    inputs = {value.name for value in body.input}
    if not cached or not inputs.issuperset(cached[0].inputs[_PAST_KEY : _PAST_LENGTH + 1]):
        return
    for proto in protos:
        for index in (_BEAM_WIDTH, _CACHE_INDIRECTION):
            if index < len(proto.input):
                proto.input[index] = ""
    # One symbol names the size of past and present; they now differ, and ORT plans memory by it.
    presents = {name for node in cached for name in node.outputs[1:3] if name}
    for value in body.output:
        if value.name in presents and len(value.type.tensor_type.shape.dim) == 4:
            value.type.tensor_type.shape.dim[2].Clear()
    length = cached[0].inputs[_PAST_LENGTH]
    _drop_inputs(body, {length}, {*cached[0].inputs[_BEAM_WIDTH : _CACHE_INDIRECTION + 1]})
    b = GraphBuilder(prefix, opset)
    b.cast(b.dim(cached[0].inputs[_PAST_KEY], 2), TensorProto.INT32, out=length)
    rest = onnx.GraphProto()
    rest.node.extend((*b.nodes, *body.node))
    body.ClearField("node")
    body.node.extend(rest.node)


def _drop_inputs(body: onnx.GraphProto, always: set[str], unread: set[str]) -> None:
    """Remove the inputs `always`, and those of `unread` that no node reads."""
    read = {name for node in body.node for name in node.input}
    kept = [v for v in body.input if v.name not in always and v.name not in unread - read]
    rest = onnx.GraphProto()
    rest.input.extend(kept)
    body.ClearField("input")
    body.input.extend(rest.input)
