"""Standard-operator forms: each operator alone against float64 numpy and against ORT's CPU EP."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from ort_webgpu.graph_tools.reference import expand, replace_unsupported, single_node_reference

OPSETS = [12, 13, 17, 18, 22]
ELEM = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "int8": TensorProto.INT8,
}
TOLERANCE = {"float32": 1e-5, "float16": 5e-3}


def run(model, feeds):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, feeds)


def elem_types(feeds):
    return {name: ELEM[array.dtype.name] for name, array in feeds.items()}


def contrib_node(op_type, wiring, outputs, **attributes):
    return helper.make_node(
        op_type, wiring, outputs, name="node", domain="com.microsoft", **attributes
    )


def single(op_type, wiring, outputs, feeds, opset=17, types=None, **attributes):
    """Outputs of one node in its standard form, by name; an empty string is no input."""
    node = contrib_node(op_type, wiring, outputs, **attributes)
    model = single_node_reference(node, elem_types(feeds) | (types or {}), opset)
    results = run(model, feeds)
    return dict(zip((o.name for o in model.graph.output), results, strict=True))


def on_ort(op_type, wiring, outputs, feeds, **attributes):
    """Outputs of the same node on ORT's own CPU kernel."""
    node = contrib_node(op_type, wiring, outputs, **attributes)
    first = elem_types(feeds)[wiring[0]]
    inputs = [(n, t) for n, t in elem_types(feeds).items()]
    graph = helper.make_graph(
        [node],
        "alone",
        [helper.make_tensor_value_info(n, t, feeds[n].shape) for n, t in inputs],
        [
            helper.make_value_info(n, helper.make_tensor_type_proto(first, None))
            for n in outputs
            if n
        ],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    return dict(zip((n for n in outputs if n), run(model, feeds), strict=True))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def normal(rng, dtype, *shape):
    return rng.standard_normal(shape).astype(dtype)


# ---------------------------------------------------------------- padding helpers


@pytest.mark.parametrize("opset", OPSETS)
def test_remove_padding_gives_tokens_then_padding(opset):
    x = np.arange(3 * 4 * 2, dtype=np.float32).reshape(3, 4, 2)
    outputs = ["rows", "offset", "cumulated", "longest"]
    feeds = {"x": x, "count": np.array([1, 2, 4], np.int32)}
    got = single("RemovePadding", ["x", "count"], outputs, feeds, opset)
    offset = [0, 4, 5, 8, 9, 10, 11, 1, 2, 3, 6, 7]
    assert np.array_equal(got["offset"], np.array(offset, np.int32).reshape(3, 4))
    assert np.array_equal(got["rows"], x.reshape(12, 2)[offset[:7]])
    assert np.array_equal(got["cumulated"], np.array([0, 1, 3, 7], np.int32))
    assert np.array_equal(got["longest"], np.array([4], np.int32))
    assert {got[name].dtype.name for name in outputs[1:]} == {"int32"}


@pytest.mark.parametrize("counts", [[0, 0], [0, 3], [9, -2], [3, 3]])
def test_remove_padding_clamps_counts(counts):
    rng = np.random.default_rng(0)
    x = normal(rng, np.float16, 2, 3, 5)
    feeds = {"x": x, "count": np.array(counts, np.int32)}
    got = single("RemovePadding", ["x", "count"], ["rows", "", "cumulated", "longest"], feeds)
    kept = np.clip(counts, 0, 3)
    assert np.array_equal(got["rows"], np.concatenate([x[b, :n] for b, n in enumerate(kept)]))
    assert got["rows"].dtype == np.float16
    assert got["cumulated"].tolist() == [0, kept[0], kept.sum()]
    assert got["longest"].tolist() == [kept.max()]


@pytest.mark.parametrize("opset", OPSETS)
def test_padding_operators_take_an_empty_grid(opset):
    feeds = {"x": np.zeros((2, 0, 4), np.float32), "count": np.zeros(2, np.int32)}
    outputs = ["rows", "offset", "cumulated", "longest"]
    got = single("RemovePadding", ["x", "count"], outputs, feeds, opset)
    assert (got["rows"].shape, got["offset"].shape) == ((0, 4), (2, 0))
    assert (got["cumulated"].tolist(), got["longest"].tolist()) == ([0, 0, 0], [0])
    feeds = {"x": got["rows"], "offset": got["offset"]}
    assert single("RestorePadding", ["x", "offset"], ["y"], feeds, opset)["y"].shape == (2, 0, 4)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("lengths", [[1, 2, 4], [0, 4, 1], [0, 0, 0]])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_restore_padding_inverts_remove_padding(dtype, lengths, opset):
    rng = np.random.default_rng(1)
    x = normal(rng, dtype, 3, 4, 5)
    feeds = {"x": x, "count": np.array(lengths, np.int32)}
    got = single("RemovePadding", ["x", "count"], ["rows", "offset"], feeds, opset)
    feeds = {"rows": got["rows"], "offset": got["offset"]}
    back = single("RestorePadding", ["rows", "offset"], ["y"], feeds, opset)["y"]
    valid = np.arange(4) < np.array(lengths)[:, None]
    assert back.dtype == x.dtype
    assert np.array_equal(back, np.where(valid[..., None], x, 0))


# ---------------------------------------------------------------- packed attention


def schedule(lengths, seq):
    """token_offset (B, S) and cumulative lengths (B+1,) of right-padded sequences."""
    valid = (np.arange(seq) < np.array(lengths)[:, None]).ravel()
    order = np.concatenate([np.flatnonzero(valid), np.flatnonzero(~valid)])
    offset = order.reshape(len(lengths), seq).astype(np.int32)
    return offset, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def packed_oracle(q, k, v, lengths, heads, bias=None, scale=None):
    """float64 attention, one sequence and head at a time: q, k (Tok, D), v (Tok, Dv)."""
    size, v_size = q.shape[1] // heads, v.shape[1] // heads
    scale = scale or size**-0.5
    out, start = np.zeros(v.shape), 0
    for b, length in enumerate(lengths):
        rows = slice(start, start + length)
        start += length
        for n in range(heads if length else 0):
            cols, v_cols = (slice(n * w, (n + 1) * w) for w in (size, v_size))
            x = scale * (q[rows, cols] @ k[rows, cols].T)
            if bias is not None:
                x += bias[b % bias.shape[0], n % bias.shape[1], :length, :length]
            out[rows, v_cols] = softmax(x) @ v[rows, v_cols]
    return out


PACKED_CASES = {
    "plain": {},
    "wide_v": {"sizes": (12, 12, 20)},
    "scale": {"scale": 0.3},
    "bias_full": {"bias": (4, 2)},
    "bias_shared": {"bias": (1, 1)},
    "one_token": {"lengths": [1, 0, 0, 0]},
    "no_token": {"lengths": [0, 0, 0, 0]},
}


def packed_case(name, dtype, heads=2, seq=6):
    case, rng = PACKED_CASES[name], np.random.default_rng(2)
    lengths = case.get("lengths", [3, 0, 1, 6])
    sizes = case.get("sizes", (12, 12, 12))
    offset, cumulative = schedule(lengths, seq)
    feeds = {
        "x": normal(rng, dtype, sum(lengths), 8),
        "w": normal(rng, dtype, 8, sum(sizes)),
        "wb": normal(rng, dtype, sum(sizes)),
        "offset": offset,
        "cum": cumulative,
    }
    if "bias" in case:
        feeds["ab"] = normal(rng, dtype, *case["bias"], seq, seq)
    attributes = {"num_heads": heads}
    if "sizes" in case:
        attributes["qkv_hidden_sizes"] = list(sizes)
    if "scale" in case:
        attributes["scale"] = case["scale"]
    return feeds, attributes, lengths, sizes


@pytest.mark.parametrize("name", PACKED_CASES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_packed_attention_against_float64(name, dtype):
    feeds, attributes, lengths, sizes = packed_case(name, dtype)
    got = single("PackedAttention", list(feeds), ["y"], feeds, **attributes)["y"]
    wide = {k: v.astype(np.float64) for k, v in feeds.items() if v.dtype.name == dtype}
    qkv = wide["x"] @ wide["w"] + wide["wb"]
    parts = np.split(qkv, np.cumsum(sizes)[:2], axis=1)
    want = packed_oracle(*parts, lengths, 2, wide.get("ab"), attributes.get("scale"))
    assert got.dtype.name == dtype
    np.testing.assert_allclose(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["plain", "wide_v", "scale", "bias_full", "bias_shared"])
def test_packed_attention_against_ort_attention_on_padded_rows(name):
    feeds, attributes, lengths, _ = packed_case(name, "float32")
    got = single("PackedAttention", list(feeds), ["y"], feeds, **attributes)["y"]
    grid = np.zeros((4, 6, 8), np.float32)
    valid = np.arange(6) < np.array(lengths)[:, None]
    grid[valid] = feeds["x"]
    padded = {"x": grid, "w": feeds["w"], "wb": feeds["wb"], "len": np.array(lengths, np.int32)}
    wiring = ["x", "w", "wb", "len", "", "ab" if "ab" in feeds else ""]
    if "ab" in feeds:
        padded["ab"] = feeds["ab"]
    lowest = float(np.finfo(np.float32).min)
    want = on_ort("Attention", wiring, ["y"], padded, mask_filter_value=lowest, **attributes)["y"]
    np.testing.assert_allclose(got, want[valid], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("opset", OPSETS)
def test_packed_attention_at_each_opset(opset):
    feeds, attributes, _, _ = packed_case("bias_full", "float32")
    args = ("PackedAttention", list(feeds), ["y"], feeds)
    got, want = (single(*args, o, **attributes)["y"] for o in (opset, 17))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_packed_attention_keeps_nan_of_one_sequence_from_the_others():
    feeds, attributes, lengths, _ = packed_case("plain", "float32")
    want = single("PackedAttention", list(feeds), ["y"], feeds, **attributes)["y"]
    feeds["x"][-lengths[-1] :] = np.nan
    got = single("PackedAttention", list(feeds), ["y"], feeds, **attributes)["y"]
    assert np.array_equal(got[: -lengths[-1]], want[: -lengths[-1]])
    assert np.isnan(got[-lengths[-1] :]).all()


@pytest.mark.parametrize("form", ["separate", "packed"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_packed_multi_head_attention_against_float64(dtype, with_bias, form):
    rng, heads, size, lengths = np.random.default_rng(3), 2, 5, [2, 0, 4, 1]
    v_size = size if form == "packed" else 7
    widths = [heads * size, heads * size, heads * v_size]
    parts = [normal(rng, dtype, sum(lengths), width) for width in widths]
    offset, cumulative = schedule(lengths, 4)
    feeds = dict(zip("qkv", parts, strict=True))
    if form == "packed":
        by_head = [part.reshape(-1, heads, 1, size) for part in parts]
        feeds = {"q": np.concatenate(by_head, axis=2)}
    wiring = [name if name in feeds else "" for name in "qkv"]
    wiring += ["b" if with_bias else "", "offset", "cum", "ab"]
    feeds |= {"offset": offset, "cum": cumulative, "ab": normal(rng, dtype, 4, 1, 4, 4)}
    if with_bias:
        feeds["b"] = normal(rng, dtype, sum(widths))
        cuts = np.split(feeds["b"].astype(np.float64), np.cumsum(widths)[:2])
        parts = [part + cut for part, cut in zip(parts, cuts, strict=True)]
    got = single("PackedMultiHeadAttention", wiring, ["y"], feeds, num_heads=heads)["y"]
    wide = [part.astype(np.float64) for part in parts]
    want = packed_oracle(*wide, lengths, heads, feeds["ab"].astype(np.float64))
    assert got.dtype.name == dtype
    np.testing.assert_allclose(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


# ---------------------------------------------------------------- decoder attention

SELF = ["q", "k", "v", "mask", "ab", "pk", "pv", "p", "beams", "ci", "b"]


def self_case(rng, dtype, features, past=3, capacity=7, rows=4, heads=2, size=8):
    width = heads * size
    feeds = {
        "pk": normal(rng, dtype, rows, heads, capacity, size),
        "pv": normal(rng, dtype, rows, heads, capacity, size),
        "p": np.array([past], np.int32),
    }
    if "packed" in features:
        feeds["q"] = normal(rng, dtype, rows, 1, 3 * width)
    else:
        feeds |= {name: normal(rng, dtype, rows, 1, width) for name in "qkv"}
    if "mask" in features:
        feeds["mask"] = rng.integers(-1, 2, (rows, past + 1)).astype(np.int32)
    if "ab" in features:
        feeds["ab"] = normal(rng, dtype, rows, heads, 1, past + 1)
    if "ab1" in features:
        feeds["ab"] = normal(rng, dtype, 1, 1, 1, past + 1)
    if "beams" in features:
        feeds["ci"] = rng.integers(0, 2, (rows // 2, 2, capacity)).astype(np.int32)
        feeds["beams"] = np.array([2], np.int32)
    if "bias" in features:
        feeds["b"] = normal(rng, dtype, 3 * width)
    return feeds, [name if name in feeds else "" for name in SELF]


def self_oracle(feeds, heads, scale=None, filter_value=-10000.0):
    """float64 output (B, 1, D), present caches and logits (B, N, 1, T), row by row."""
    wide = {k: v.astype(np.float64) for k, v in feeds.items() if v.dtype.kind == "f"}
    q, k, v = np.split(wide["q"], 3, axis=2) if "k" not in wide else (wide[n] for n in "qkv")
    if "b" in wide:
        q, k, v = (x + bias for x, bias in zip((q, k, v), np.split(wide["b"], 3), strict=True))
    rows, past = q.shape[0], int(feeds["p"][0])
    q, k, v = (x.reshape(rows, heads, -1) for x in (q, k, v))
    keys, values = wide["pk"].copy(), wide["pv"].copy()
    keys[:, :, past], values[:, :, past] = k, v
    beams = feeds["ci"].shape[1] if "ci" in feeds else 1
    out, logits = np.zeros_like(q), np.zeros((rows, heads, 1, past + 1))
    for row in range(rows):
        group, beam = divmod(row, beams)
        source = [row] * (past + 1)
        if "ci" in feeds:
            source[:past] = group * beams + feeds["ci"][group, beam, :past]
        masked = np.zeros(past + 1, bool)
        if "mask" in feeds:
            mask = feeds["mask"][row]
            masked = mask == 0 if "ci" in feeds else mask <= 0
        for n in range(heads):
            x = np.array([q[row, n] @ keys[source[j], n, j] for j in range(past + 1)])
            x *= scale or q.shape[2] ** -0.5
            if "ab" in wide:
                bias = wide["ab"]
                x += bias[(group if "ci" in feeds else row) % bias.shape[0], n % bias.shape[1], 0]
            x += np.where(masked, filter_value, 0.0)
            logits[row, n, 0] = x
            out[row, n] = softmax(x) @ [values[source[j], n, j] for j in range(past + 1)]
    return {"y": out.reshape(rows, 1, -1), "ok": keys, "ov": values, "qk": logits}


SELF_CASES = ["", "mask", "ab", "ab1", "bias", "beams", "mask ab beams bias", "ab1 beams", "packed"]


@pytest.mark.parametrize("past", [0, 3, 6])
@pytest.mark.parametrize("features", [*SELF_CASES, "packed bias mask ab"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_decoder_self_attention_against_float64(dtype, features, past):
    rng = np.random.default_rng(past + 10)
    feeds, wiring = self_case(rng, dtype, features.split(), past)
    outputs = ["y", "ok", "ov", "qk"]
    attributes = {"num_heads": 2, "past_present_share_buffer": 1, "output_qk": 1, "scale": 0.4}
    op_type, types = "DecoderMaskedMultiHeadAttention", {"qk": TensorProto.FLOAT}
    got = single(op_type, wiring, outputs, feeds, types=types, **attributes)
    want = self_oracle(feeds, 2, 0.4)
    assert [got[n].dtype.name for n in outputs] == [dtype, dtype, dtype, "float32"]
    for name in outputs:
        atol = TOLERANCE[dtype] * (100 if name == "qk" else 1)  # masked logits stand near -1e4
        np.testing.assert_allclose(got[name], want[name], rtol=TOLERANCE[dtype], atol=atol)
    for new, old in (("ok", "pk"), ("ov", "pv")):
        assert np.array_equal(np.delete(got[new], past, 2), np.delete(feeds[old], past, 2))


@pytest.mark.parametrize("features", [f for f in SELF_CASES if f != "packed"])
def test_decoder_self_attention_against_ort(features):
    feeds, wiring = self_case(np.random.default_rng(20), np.float32, features.split())
    outputs = ["y", "ok", "ov", "qk"]
    attributes = {"num_heads": 2, "past_present_share_buffer": 1, "output_qk": 1}
    args = ("DecoderMaskedMultiHeadAttention", wiring, outputs, feeds)
    got, want = single(*args, **attributes), on_ort(*args, **attributes)
    for name in outputs:
        np.testing.assert_allclose(got[name], want[name], rtol=2e-6, atol=2e-6)


def test_decoder_mask_is_added_in_float32():
    """All keys masked: the additions of -1e4 cost precision, but no key is dropped."""
    feeds, wiring = self_case(np.random.default_rng(21), np.float32, ["mask"])
    feeds["mask"][:] = 0
    args = ("DecoderMaskedMultiHeadAttention", wiring, ["y", "ok", "ov"], feeds)
    attributes = {"num_heads": 2, "past_present_share_buffer": 1}
    got, want = single(*args, **attributes)["y"], on_ort(*args, **attributes)["y"]
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
    lowest = float(np.finfo(np.float32).min)
    got = single(*args, mask_filter_value=lowest, **attributes)["y"]
    cache = feeds["pv"].copy()
    cache[:, :, 3] = feeds["v"].reshape(4, 2, 8)
    np.testing.assert_allclose(got.reshape(4, 2, 8), cache[:, :, :4].mean(2), rtol=1e-5, atol=1e-6)


def cross_case(rng, dtype, features, length=5, rows=2, heads=2, size=8):
    feeds = {"q": normal(rng, dtype, rows, 1, heads * size)}
    feeds |= {name: normal(rng, dtype, rows, heads, length, size) for name in "kv"}
    if "mask" in features:
        feeds["mask"] = rng.integers(-1, 2, (rows, length)).astype(np.int32)
    if "bias" in features:
        feeds["b"] = normal(rng, dtype, 3 * heads * size)
    if "beams" in features:
        feeds |= {"ci": np.zeros((1, 2, 9), np.int32), "beams": np.array([2], np.int32)}
    return feeds, [name if name in feeds else "" for name in SELF]


@pytest.mark.parametrize("features", ["", "mask", "bias", "mask bias beams"])
@pytest.mark.parametrize("opset", OPSETS)
def test_decoder_cross_attention_against_ort(opset, features):
    feeds, wiring = cross_case(np.random.default_rng(22), np.float32, features.split())
    args = ("DecoderMaskedMultiHeadAttention", wiring, ["y", "", "", "qk"], feeds)
    got = single(*args, opset, num_heads=2, output_qk=1)
    want = on_ort(*args, num_heads=2, output_qk=1)
    for name in ("y", "qk"):
        np.testing.assert_allclose(got[name], want[name], rtol=2e-6, atol=2e-6)


def test_decoder_cross_attention_ignores_share_buffer():
    """The Whisper exporter sets it on cross nodes, where ORT 1.32 refuses it."""
    feeds, wiring = cross_case(np.random.default_rng(23), np.float16, ["bias"])
    args = ("DecoderMaskedMultiHeadAttention", wiring, ["y"], feeds)
    shared = single(*args, num_heads=2, past_present_share_buffer=1)["y"]
    assert shared.dtype == np.float16
    wide = {k: v.astype(np.float32) for k, v in feeds.items()}
    want = on_ort(args[0], wiring, ["y"], wide, num_heads=2)["y"]
    np.testing.assert_allclose(shared, want, rtol=5e-3, atol=5e-3)


# ---------------------------------------------------------------- relative position bias


def bucket_of(distance, buckets, max_distance):
    exact = buckets // 2
    if distance < exact:
        return distance
    ratio = np.log(distance / exact) / np.log(max_distance / exact)
    return min(exact + int(ratio * (buckets - exact) + 1e-6), buckets - 1)


@pytest.mark.parametrize("bidirectional", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("opset", OPSETS)
def test_relative_position_bias(opset, dtype, bidirectional):
    heads, buckets, length = 3, 32, 200
    table = normal(np.random.default_rng(24), dtype, buckets, heads)
    feeds = {"t": table, "ql": np.array([length]), "kl": np.array([length - 7])}
    attributes = {"max_distance": 128, "is_bidirectional": bidirectional}
    got = single("RelativePositionBias", ["t", "ql", "kl"], ["y"], feeds, opset, **attributes)["y"]
    memory = table.ravel().reshape(heads, buckets)
    half = buckets // 2 if bidirectional else buckets
    want = np.zeros((1, heads, length, length - 7), dtype)
    for i in range(length):
        for j in range(length - 7):
            ahead = bidirectional and j > i
            distance = abs(j - i) if bidirectional else max(i - j, 0)
            bucket = bucket_of(distance, half, 128) + (half if ahead else 0)
            want[0, :, i, j] = memory[:, bucket]
    assert np.array_equal(got, want)


# ---------------------------------------------------------------- GQA with Q/K norm

GQA = [
    "q",
    "k",
    "v",
    "pk",
    "pv",
    "len",
    "total",
    "cos",
    "sin",
    "",
    "ab",
    "sink",
    "",
    "",
    "qw",
    "kw",
]


def gqa_case(rng, dtype, form, seq=4, past=0, size=16):
    widths = {"q": 4 * size, "k": 2 * size, "v": 2 * size}
    rows = {name: normal(rng, dtype, 2, seq, width) for name, width in widths.items()}
    feeds = dict(rows)
    if form == "packed":
        feeds = {"q": np.concatenate(list(rows.values()), axis=2)}
    total = past + seq
    angles = rng.uniform(-3, 3, (total + 3, size // 2))
    feeds |= {
        "pk": normal(rng, dtype, 2, 2, past, size),
        "pv": normal(rng, dtype, 2, 2, past, size),
        "len": np.array([total - 1, total - 1 if past else 1], np.int32),
        "total": np.array([total], np.int32),
        "cos": np.cos(angles).astype(dtype),
        "sin": np.sin(angles).astype(dtype),
        "sink": normal(rng, dtype, 4),
        "qw": normal(rng, dtype, size),
        "kw": normal(rng, dtype, size),
    }
    return feeds, [name if name in feeds else "" for name in GQA]


def with_norms_applied(feeds, form, epsilons, size=16):
    """The same call for a node without norms: float64 RMS norm of each head, then float32."""
    wide = {k: v.astype(np.float32) if v.dtype.kind == "f" else v for k, v in feeds.items()}
    parts = [wide[n] for n in "qkv"] if form != "packed" else np.split(wide["q"], [64, 96], axis=2)
    for i, weight in enumerate(("qw", "kw")):
        x = parts[i].astype(np.float64).reshape(*parts[i].shape[:2], -1, size)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilons[i]) * wide.pop(weight)
        parts[i] = x.reshape(parts[i].shape).astype(np.float32)
    return wide | dict(zip("qkv", parts, strict=True))


@pytest.mark.parametrize("form", ["separate", "packed"])
@pytest.mark.parametrize(("seq", "past"), [(4, 0), (1, 5)])
@pytest.mark.parametrize(("dtype", "opset"), [("float32", 17), ("float16", 22), ("float32", 13)])
def test_gqa_norm_against_ort_without_norm(dtype, opset, seq, past, form):
    feeds, wiring = gqa_case(np.random.default_rng(25), dtype, form, seq=seq, past=past)
    attributes = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, "scale": 0.3}
    outputs = ["y", "ok", "ov"]
    norm = {"qk_norm_epsilon": 0.5, "k_norm_epsilon": 0.01}
    got = single("GroupQueryAttention", wiring, outputs, feeds, opset, **attributes, **norm)
    plain = with_norms_applied(feeds, form, (0.5, 0.01))
    wiring = ["q", "k", "v", *wiring[3:14]]
    want = on_ort("GroupQueryAttention", wiring, outputs, plain, **attributes)
    for name in outputs:
        assert got[name].dtype.name == dtype
        np.testing.assert_allclose(
            got[name], want[name], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize(("dtype", "cache"), [("float16", "float32"), ("float32", "float16")])
def test_gqa_norm_with_a_cache_of_the_other_float_type(dtype, cache):
    feeds, wiring = gqa_case(np.random.default_rng(28), dtype, "separate", seq=1, past=5)
    feeds |= {name: feeds[name].astype(cache) for name in ("pk", "pv")}
    attributes = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}
    got = single("GroupQueryAttention", wiring, ["y", "ok", "ov"], feeds, **attributes)
    assert [got[n].dtype.name for n in ("y", "ok", "ov")] == [dtype, cache, cache]
    plain = with_norms_applied(feeds, "separate", (1e-6, 1e-6))
    want = on_ort("GroupQueryAttention", wiring[:14], ["y", "ok", "ov"], plain, **attributes)
    for name in got:
        np.testing.assert_allclose(got[name], want[name], rtol=5e-3, atol=5e-3)


def test_gqa_norm_leaves_a_quantized_cache_alone():
    feeds, wiring = gqa_case(np.random.default_rng(26), "float16", "separate", seq=1, past=5)
    rng = np.random.default_rng(27)
    for name in ("pk", "pv"):
        feeds[name] = rng.integers(-90, 90, feeds[name].shape).astype(np.int8)
    feeds |= {"ks": np.array([0.02], np.float32), "vs": np.array([0.02], np.float32)}
    wiring[12:14] = ["ks", "vs"]
    quant = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
    attributes = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, **quant}
    got = single("GroupQueryAttention", wiring, ["y", "ok", "ov"], feeds, **attributes)
    assert [got[n].dtype.name for n in ("y", "ok", "ov")] == ["float16", "int8", "int8"]
    assert np.array_equal(got["ok"][:, :, :5], feeds["pk"])
    plain = with_norms_applied(feeds, "separate", (1e-6, 1e-6))
    node = contrib_node("GroupQueryAttention", wiring[:14], ["y", "ok", "ov"], **attributes)
    graph = helper.make_graph(
        [node],
        "alone",
        [helper.make_tensor_value_info(n, t, plain[n].shape) for n, t in elem_types(plain).items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    want = run(helper.make_model(graph, opset_imports=imports, ir_version=8), plain)[0]
    np.testing.assert_allclose(got["y"], want, rtol=5e-3, atol=5e-3)


def test_gqa_without_norm_has_no_expansion():
    node = contrib_node("GroupQueryAttention", ["q", "k", "v"], ["y"], num_heads=2, kv_num_heads=1)
    assert expand(node, {"q": TensorProto.FLOAT}, 17, "x/") is None
    with pytest.raises(ValueError, match=r"'node'.*has no standard-operator form.*q_norm_weight"):
        single_node_reference(node, {"q": TensorProto.FLOAT})


# ---------------------------------------------------------------- errors


def test_an_opset_that_lacks_the_operators_is_named():
    node = contrib_node("RestorePadding", ["x", "o"], ["y"])
    with pytest.raises(ValueError, match=r"RestorePadding node 'node'.*opset 12.*has 11"):
        expand(node, {"x": TensorProto.FLOAT}, 11, "x/")


def test_an_unknown_element_type_is_named():
    node = contrib_node("PackedAttention", ["x", "w", "b", "o", "c"], ["y"], num_heads=1)
    with pytest.raises(ValueError, match=r"PackedAttention node 'node'.*\['x', 'w', 'b', 'y'\]"):
        expand(node, {"o": TensorProto.INT32}, 17, "x/")


def test_other_operators_have_no_expansion():
    assert expand(helper.make_node("Add", ["a", "b"], ["c"]), {}, 17, "x/") is None
    elsewhere = helper.make_node("RestorePadding", ["x", "o"], ["y"], domain="my.domain")
    assert expand(elsewhere, {"x": TensorProto.FLOAT}, 17, "x/") is None
    assert not replace_unsupported(onnx.ModelProto()).graph.node
