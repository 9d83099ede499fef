"""Standard-operator forms of the decoder operators that ORT's CPU EP lacks, whole or in part.

Letters: B batch, N query heads, K key/value heads, H head size, D = N*H, M cache capacity,
p past length, T = p+1 keys (self attention) or L keys (cross attention), W beams.
"""

from onnx import TensorProto

from ort_webgpu.graph_tools.nodes import Node
from ort_webgpu.graph_tools.reference_builder import GraphBuilder

__all__ = [
    "decoder_masked_attention",
    "group_query_attention_with_norm",
    "is_self_attention",
    "relative_position_bias",
]

_MASK_FILTER_VALUE = -10000.0
_NORM_EPSILON = 1e-6
_PAST_KEY, _BIAS, _CACHE_INDIRECTION = 5, 10, 9


def is_self_attention(node: Node) -> bool:
    """Whether a DecoderMaskedMultiHeadAttention node has a cache (else it is cross attention)."""
    return node.has_input(_PAST_KEY) or node.has_output(1)


def decoder_masked_attention(b: GraphBuilder, node: Node, elem_type: int, qk_type: int) -> None:
    """DecoderMaskedMultiHeadAttention: one query token per row, output (B, 1, D).

    The new key and value are rounded to the cache's type before they are attended, so that a step
    sees what later steps see.
    """
    heads = node.attributes["num_heads"]
    if is_self_attention(node):
        query, keys, values = _self_operands(b, node, elem_type)
    else:
        query = b.f32(node.inputs[0])
        if node.has_input(_BIAS):
            bias = b.slice(b.f32(node.inputs[_BIAS]), 0, b.dim(query, 2), 0)
            query = b.op("Add", query, bias)
        keys, values = node.inputs[1], node.inputs[2]
    query = b.scale(b.split_heads(query, heads), 3, node.attributes.get("scale", 0.0))
    logits = b.op("MatMul", b.transpose(query, 0, 2, 1, 3), b.transpose(b.f32(keys), 0, 1, 3, 2))
    logits = _add_bias_and_mask(b, node, logits)
    if node.has_output(3):
        b.cast(logits, qk_type, out=node.outputs[3])
    context = b.op("MatMul", b.softmax(logits), b.f32(values))
    b.cast(b.merge_heads(context), elem_type, out=node.outputs[0])


def _self_operands(b: GraphBuilder, node: Node, elem_type: int) -> tuple[str, str, str]:
    """Write the present caches; return float32 query (B, 1, D), keys and values (B, N, T, H)."""
    parts = _new_rows(b, node)
    past_length = b.vector(node.inputs[7])
    total = b.op("Add", past_length, b.ints(1))
    index = _beam_index(b, node, past_length, total) if node.has_input(_CACHE_INDIRECTION) else None
    visible = []
    for i in (1, 2):
        past, rows = node.inputs[_PAST_KEY - 1 + i], parts[i]
        present = node.outputs[i] if node.has_output(i) else None
        heads = b.split_heads(rows, node.attributes["num_heads"])
        row = b.cast(b.transpose(heads, 0, 2, 1, 3), elem_type)
        before, after = b.slice(past, 0, past_length, 2), b.slice(past, total, 2**62, 2)
        cache = b.op("Concat", before, row, after, axis=2, out=present)
        cache = b.slice(cache, 0, total, 2)
        visible.append(cache if index is None else _pick_beams(b, cache, index))
    return parts[0], visible[0], visible[1]


def _new_rows(b: GraphBuilder, node: Node) -> list[str]:
    """This token's float32 q, k, v, each (B, 1, D), with their bias."""
    if node.has_input(1):
        parts = [b.f32(name) for name in node.inputs[:3]]
    else:
        qkv = b.f32(node.inputs[0])
        parts = b.split(qkv, 2, *[b.op("Div", b.dim(qkv, 2), b.ints(3))] * 3)
    if node.has_input(_BIAS):
        biases = b.split(b.f32(node.inputs[_BIAS]), 0, *(b.dim(part, 2) for part in parts))
        parts = [b.op("Add", part, bias) for part, bias in zip(parts, biases, strict=True)]
    return parts


def _beam_group(b: GraphBuilder, node: Node) -> str:
    """The beam group of each row, int64 (B,)."""
    rows = b.arange(b.dim(node.inputs[0], 0))
    return b.op("Div", rows, b.dim(node.inputs[_CACHE_INDIRECTION], 1))


def _beam_index(b: GraphBuilder, node: Node, past_length: str, total: str) -> str:
    """The batch row that each row reads each position from, int64 (B, T).

    The newest position is always the row's own: what cache_indirection says there is not read.
    """
    indirection = node.inputs[_CACHE_INDIRECTION]
    batch, beams = b.dim(node.inputs[0], 0), b.dim(indirection, 1)
    chosen = b.cast(b.slice(indirection, 0, total, 2), TensorProto.INT64)
    first = b.unsqueeze(b.op("Mul", _beam_group(b, node), beams), 1)
    past = b.op("Add", b.reshape(chosen, batch, total), first)
    newest = b.op("Equal", b.unsqueeze(b.arange(total), 0), b.unsqueeze(past_length, 1))
    return b.op("Where", newest, b.unsqueeze(b.arange(batch), 1), past)


def _pick_beams(b: GraphBuilder, cache: str, index: str) -> str:
    """cache[index[b, t], :, t] for a cache (B, N, T, H) and index (B, T): (B, N, T, H)."""
    positions = b.unsqueeze(b.arange(b.dim(index, 1)), 0)
    positions = b.op("Expand", positions, b.op("Shape", index))
    pairs = b.op("Concat", b.unsqueeze(index, 2), b.unsqueeze(positions, 2), axis=2)
    picked = b.op("GatherND", b.transpose(cache, 0, 2, 1, 3), pairs)
    return b.transpose(picked, 0, 2, 1, 3)


def _add_bias_and_mask(b: GraphBuilder, node: Node, logits: str) -> str:
    """Add attention_bias, then mask_filter_value where masked: float32 (B, N, 1, T)."""
    in_beams = is_self_attention(node) and node.has_input(_CACHE_INDIRECTION)
    if node.has_input(4):
        bias = node.inputs[4]
        if in_beams:
            # ORT indexes the bias by beam group, not by row, although its size must be B or 1.
            last = b.op("Sub", b.dim(bias, 0), b.ints(1))
            bias = b.op("Gather", bias, b.op("Min", _beam_group(b, node), last), axis=0)
        logits = b.op("Add", logits, b.f32(bias))
    if node.has_input(3):
        mask = b.cast(node.inputs[3], TensorProto.INT64)
        # ORT's two kernels differ on negative entries: with beams they do not mask.
        masked = b.op("Equal", mask, b.ints(0)) if in_beams else b.op("Less", mask, b.ints(1))
        filter_value = b.float(node.attributes.get("mask_filter_value", _MASK_FILTER_VALUE))
        added = b.op("Where", b.unsqueeze(masked, 1, 2), filter_value, b.float(0.0))
        logits = b.op("Add", logits, added)
    return logits


def relative_position_bias(b: GraphBuilder, node: Node) -> None:
    """RelativePositionBias: T5's bucketed bias, (1, N, query length, key length).

    The table is declared (buckets, N), yet its memory holds N rows of buckets: this is how the
    exporter stores it and how ORT's CUDA kernel reads it.
    """
    table, query_length, key_length = node.inputs[:3]
    buckets, heads = b.dim(table, 0), b.dim(table, 1)
    queries = b.unsqueeze(b.arange(b.vector(query_length)), 1)
    keys = b.unsqueeze(b.arange(b.vector(key_length)), 0)
    ahead = b.op("Sub", keys, queries)
    if node.attributes.get("is_bidirectional", 0):
        buckets = b.op("Div", buckets, b.ints(2))
        base = b.op("Where", b.op("Greater", ahead, b.ints(0)), buckets, b.ints(0))
        distance = b.op("Abs", ahead)
    else:
        base = b.ints(0)
        distance = b.op("Max", b.op("Neg", ahead), b.ints(0))
    bucket = _distance_bucket(b, distance, buckets, node.attributes.get("max_distance", 128))
    by_head = b.reshape(table, heads, b.dim(table, 0))
    bias = b.op("Gather", by_head, b.op("Add", base, bucket), axis=1)
    b.op("Identity", b.unsqueeze(bias, 0), out=node.outputs[0])


def _distance_bucket(b: GraphBuilder, distance: str, buckets: str, max_distance: int) -> str:
    """Half of the `buckets` are one distance each, the rest grow by a factor."""
    exact = b.op("Div", buckets, b.ints(2))
    ratio = b.op("Div", b.f32(b.op("Max", distance, exact)), b.f32(exact))
    span = b.op("Log", b.op("Div", b.float(float(max_distance)), b.f32(exact)))
    steps = b.op("Mul", b.op("Div", b.op("Log", ratio), span), b.f32(b.op("Sub", buckets, exact)))
    far = b.op("Add", b.cast(steps, TensorProto.INT64), exact)
    far = b.op("Min", far, b.op("Sub", buckets, b.ints(1)))
    return b.op("Where", b.op("Less", distance, exact), distance, far)


def group_query_attention_with_norm(
    b: GraphBuilder, node: Node, elem_type: int, cache_type: int
) -> None:
    """GroupQueryAttention with q/k_norm_weight (H): RMS norm per head, then the node without.

    Everything runs in float32 around an inner node that ORT's CPU EP has; caches of integer type
    pass through untouched.
    """
    attributes = dict(node.attributes)
    shared = attributes.pop("qk_norm_epsilon", _NORM_EPSILON)
    epsilons = [attributes.pop(f"{x}_norm_epsilon", shared) for x in ("q", "k")]
    counts = (attributes["num_heads"], attributes["kv_num_heads"])
    inputs = [*node.inputs, *[""] * (17 - len(node.inputs))]
    float_cache = cache_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16)
    inputs[:3] = _split_query(b, node, counts)
    for i in (7, 8, 10, 11, *((3, 4) if float_cache else ())):
        inputs[i] = b.f32(inputs[i]) if inputs[i] else ""
    for i in (0, 1):
        if inputs[14 + i]:
            inputs[i] = _rms_norm(b, inputs[i], counts[i], inputs[14 + i], epsilons[i])
        inputs[14 + i] = ""
    while not inputs[-1]:
        inputs.pop()
    types = [elem_type, cache_type, cache_type, elem_type]
    rounded = {
        name: (b.fresh(f"float32_output{i}"), kind)
        for i, (name, kind) in enumerate(zip(node.outputs, types, strict=False))
        if name and kind in (TensorProto.FLOAT16, TensorProto.BFLOAT16)
    }
    outputs = [rounded.get(name, (name, 0))[0] for name in node.outputs]
    b.node("GroupQueryAttention", inputs, outputs, domain="com.microsoft", **attributes)
    for name, (made, kind) in rounded.items():
        b.cast(made, kind, out=name)


def _split_query(b: GraphBuilder, node: Node, counts: tuple[int, int]) -> list[str]:
    """Float32 query (B, S, N*H), key and value (B, S, K*H), also of a packed query."""
    if node.has_input(1):
        return [b.f32(name) for name in node.inputs[:3]]
    packed = b.f32(node.inputs[0])
    head_size = b.op("Div", b.dim(packed, 2), b.ints(counts[0] + 2 * counts[1]))
    width, kv_width = (b.op("Mul", head_size, b.ints(count)) for count in counts)
    return b.split(packed, 2, width, kv_width, kv_width)


def _rms_norm(b: GraphBuilder, value: str, heads: int, weight: str, epsilon: float) -> str:
    """Normalize each head of float32 (B, S, heads*H) and scale it by `weight` (H)."""
    split = b.split_heads(value, heads)
    mean = b.reduce("ReduceMean", b.op("Mul", split, split), -1)
    root = b.op("Sqrt", b.op("Add", mean, b.float(epsilon)))
    normed = b.op("Mul", b.op("Div", split, root), b.f32(weight))
    return b.reshape(normed, 0, 0, b.dim(value, 2))
