"""Standard-operator forms of the packed attention operators and their padding helpers.

Letters: B batch, S padded sequence length, Tok packed tokens, N heads, H head size, D = N*H.
Semantics: ORT's CUDA kernels (no other provider has these operators). Packed tokens are placed by
the cumulative lengths alone, which is what ORT's fused kernels do; a right-padded, in-order
token_offset, the only well-defined kind, says the same.
"""

from onnx import TensorProto

from ort_webgpu.graph_tools.nodes import Node
from ort_webgpu.graph_tools.reference_builder import GraphBuilder

__all__ = [
    "packed_attention",
    "packed_multi_head_attention",
    "remove_padding",
    "restore_padding",
]


class _Packing:
    """Where the tokens of a packed stream stand in the padded grid."""

    def __init__(self, b: GraphBuilder, token_offset: str, cumulative: str) -> None:
        """Read token_offset (B, S), only for its shape, and cumulative lengths (B+1,)."""
        self._b = b
        ends = b.cast(cumulative, TensorProto.INT64)
        batch, seq = b.dim(token_offset, 0), b.dim(token_offset, 1)
        starts = b.unsqueeze(b.slice(ends, 0, batch, 0), 1)
        lengths = b.op("Sub", b.unsqueeze(b.slice(ends, 1, 2**62, 0), 1), starts)
        slots = b.unsqueeze(b.arange(seq), 0)
        self.valid = b.op("Less", slots, lengths)
        """bool (B, S): whether the slot holds a token."""
        self._row = b.op("Add", starts, slots)

    def pad(self, packed: str) -> str:
        """(Tok, ...) to (B, S, ...), zeros at padding."""
        b = self._b
        index = b.op("Where", self.valid, self._row, b.dim(packed, 0))
        return b.op("Gather", b.op("Pad", packed, b.ints(0, 0, 1, 0)), index, axis=0)

    def unpad(self, padded: str) -> str:
        """(B, S, ...) to (Tok, ...)."""
        return self._b.op("GatherND", padded, _positions(self._b, self.valid))


def _positions(b: GraphBuilder, mask: str) -> str:
    """Row-major coordinates of the true entries of a (B, S) mask: (count, 2)."""
    return b.transpose(b.op("NonZero", mask), 1, 0)


def _grid(b: GraphBuilder, batch: str, seq: str) -> str:
    """The flat position of every slot, int64 (B, S)."""
    rows = b.op("Mul", b.unsqueeze(b.arange(batch), 1), seq)
    return b.op("Add", rows, b.unsqueeze(b.arange(seq), 0))


def _attend(
    b: GraphBuilder, node: Node, packing: _Packing, projected: list[str], bias_index: int
) -> str:
    """Attention of float32 packed q, k (Tok, D) and v (Tok, Dv) within each sequence: (Tok, Dv)."""
    heads = node.attributes["num_heads"]
    padded = [b.split_heads(packing.pad(part), heads) for part in projected]
    query = b.transpose(b.scale(padded[0], 3, node.attributes.get("scale", 0.0)), 0, 2, 1, 3)
    logits = b.op("MatMul", query, b.transpose(padded[1], 0, 2, 3, 1))
    if node.has_input(bias_index):
        logits = b.op("Add", logits, b.f32(node.inputs[bias_index]))
    keys = b.unsqueeze(packing.valid, 1, 2)
    logits = b.op("Where", keys, logits, b.float(float("-inf")))
    context = b.op("MatMul", b.softmax(logits), b.transpose(padded[2], 0, 2, 1, 3))
    return packing.unpad(b.merge_heads(context))


def packed_attention(b: GraphBuilder, node: Node, elem_type: int) -> None:
    """PackedAttention: input (Tok, Din), weights (Din, Dq+Dk+Dv), bias; output (Tok, Dv)."""
    source, weights, bias, token_offset, cumulative = node.inputs[:5]
    qkv = b.op("Add", b.op("MatMul", b.f32(source), b.f32(weights)), b.f32(bias))
    third = b.op("Div", b.dim(bias, 0), b.ints(3))
    parts = b.split(qkv, 1, *(node.attributes.get("qkv_hidden_sizes") or [third] * 3))
    packing = _Packing(b, token_offset, cumulative)
    out = _attend(b, node, packing, parts, bias_index=5)
    b.cast(out, elem_type, out=node.outputs[0])


def packed_multi_head_attention(b: GraphBuilder, node: Node, elem_type: int) -> None:
    """PackedMultiHeadAttention: query, key (Tok, D), value (Tok, Dv), or query (Tok, N, 3, H).

    The optional bias (D+D+Dv) is q, then k, then v, each head-major, in both forms.
    """
    if node.has_input(1):
        parts = [b.f32(name) for name in node.inputs[:3]]
    else:
        qkv = b.f32(node.inputs[0])
        width = b.op("Mul", b.dim(qkv, 1), b.dim(qkv, 3))
        parts = [b.reshape(part, 0, width) for part in b.split(qkv, 2, 1, 1, 1)]
    if node.has_input(3):
        biases = b.split(b.f32(node.inputs[3]), 0, *(b.dim(part, 1) for part in parts))
        parts = [b.op("Add", part, bias) for part, bias in zip(parts, biases, strict=True)]
    packing = _Packing(b, node.inputs[4], node.inputs[5])
    out = _attend(b, node, packing, parts, bias_index=6)
    b.cast(out, elem_type, out=node.outputs[0])


def remove_padding(b: GraphBuilder, node: Node) -> None:
    """RemovePadding: input (B, S, D), counts (B,), clamped to [0, S] as ORT does.

    Outputs: rows (Tok, D); int32 token_offset (B, S), the flat positions of tokens in order, then
    of padding; int32 cumulated lengths (B+1,); int32 longest length (1,).
    """
    source, counts = node.inputs[:2]
    seq = b.dim(source, 1)
    lengths = b.cast(counts, TensorProto.INT64)
    lengths = b.op("Max", b.op("Min", lengths, seq), b.ints(0))
    valid = b.op("Less", b.unsqueeze(b.arange(seq), 0), b.unsqueeze(lengths, 1))
    tokens = _positions(b, valid)
    if node.has_output(0):
        b.op("GatherND", source, tokens, out=node.outputs[0])
    if node.has_output(1):
        order = b.op("Concat", tokens, _positions(b, b.op("Not", valid)), axis=0)
        strides = b.op("Concat", seq, b.ints(1), axis=0)
        flat = b.squeeze(b.reduce("ReduceSum", b.op("Mul", order, strides), 1), 1)
        offsets = b.op("Gather", flat, _grid(b, b.dim(source, 0), seq), axis=0)
        b.cast(offsets, TensorProto.INT32, out=node.outputs[1])
    if node.has_output(2):
        ends = b.op("CumSum", lengths, b.const(0, "int64"))
        ends = b.op("Concat", b.ints(0), ends, axis=0)
        b.cast(ends, TensorProto.INT32, out=node.outputs[2])
    if node.has_output(3):
        longest = b.reduce("ReduceMax", lengths, 0)
        b.cast(longest, TensorProto.INT32, out=node.outputs[3])


def restore_padding(b: GraphBuilder, node: Node) -> None:
    """RestorePadding: input (Tok, D), token_offset (B, S); output (B, S, D), zeros at padding."""
    packed, token_offset = node.inputs[:2]
    count = b.dim(packed, 0)
    batch, seq = b.dim(token_offset, 0), b.dim(token_offset, 1)
    total = b.op("Mul", batch, seq)
    flat = b.reshape(b.cast(token_offset, TensorProto.INT64), -1)
    # Which packed row a slot takes; a slot that no token names takes the zero row after the last.
    rows = b.op("Expand", count, total)
    slots = b.unsqueeze(b.slice(flat, 0, count, 0), 1)
    rows = b.op("ScatterND", rows, slots, b.arange(count))
    with_zero_row = b.op("Pad", packed, b.ints(0, 0, 1, 0))
    index = b.op("Gather", rows, _grid(b, batch, seq), axis=0)
    b.op("Gather", with_zero_row, index, axis=0, out=node.outputs[0])
