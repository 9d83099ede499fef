"""GroupQueryAttention in float64 numpy, shape by shape as the contract has it.

Letters: B batch, S new tokens, N query heads, K key/value heads, H head size, M rows of the past,
R rotary width, P_b rows of the past that count, T_b = seqlens_k[b] + 1, TT total_sequence_length.

Source: shared/contract/ort-semantics.md sections 1.1 and 2. Nothing here is shared with a kernel;
every case that ORT's CPU EP takes is compared with it by tests/test_oracles.py.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ort_webgpu.conformance.case import Array, Case, Expected

__all__ = ["ambiguous_bytes", "group_query_attention"]

ROTATION_ERROR = 4e-7
"""Relative error of one float32 rotation, generously: a*cos - b*sin with three roundings."""


@dataclass(frozen=True)
class _Setup:
    """Sizes and attributes of one case, read once."""

    batch: int
    new: int
    heads: int
    kv_heads: int
    head_size: int
    capacity: int
    total: int
    lengths: tuple[int, ...]
    pasts: tuple[int, ...]
    valid_queries: tuple[int, ...]
    first_prompt: bool
    shared_kv: bool
    scale: float
    softcap: float
    window: int
    causal: bool
    window_cache: bool
    bits: int

    @property
    def present_rows(self) -> int:
        return self.capacity if self.window_cache else max(self.total, self.capacity)


def group_query_attention(case: Case) -> Expected:
    """Outputs of a GroupQueryAttention case with the elements that the contract specifies."""
    q, k, v = _split(case)
    setup = _setup(case, q.shape, k.shape[1])
    q, k = _normalized(case, setup, q, k)
    q, k = _rotated(case, setup, q, k)
    keys, present_k, care_k = _cache(case, setup, k, "key")
    values, present_v, care_v = _cache(case, setup, v, "value")
    output, qk, care_out, care_qk = _attend(case, setup, q, keys, values)
    dtype = case.first.dtype
    outputs = (output.astype(dtype), present_k, present_v, qk)
    care = (care_out, care_k, care_v, care_qk)
    wanted = (*case.wanted, False, False, False)[:4]
    return Expected(
        tuple(o if w else None for o, w in zip(outputs, wanted, strict=True)),
        tuple(c if w else None for c, w in zip(care, wanted, strict=True)),
        "numpy float64",
    )


def _split(case: Case) -> tuple[Array, Array, Array]:
    """Query (B,S,N,H), key and value (B,Skv,K,H) in float64, from either layout."""
    n, kv = case.attributes["num_heads"], case.attributes["kv_num_heads"]
    query = case.first.astype(np.float64)
    batch, new, hidden = query.shape
    if case.input("key") is None:
        h = hidden // (n + 2 * kv)
        heads = query.reshape(batch, new, n + 2 * kv, h)
        return heads[:, :, :n], heads[:, :, n : n + kv], heads[:, :, n + kv :]
    h = hidden // n
    key, value = case.require("key"), case.require("value")
    shape = (batch, key.shape[1], kv, h)
    return (
        query.reshape(batch, new, n, h),
        key.astype(np.float64).reshape(shape),
        value.astype(np.float64).reshape(shape),
    )


def _setup(case: Case, q_shape: tuple[int, ...], kv_length: int) -> _Setup:
    batch, new, heads, head_size = q_shape
    attributes = case.attributes
    past = case.input("past_key")
    capacity = past.shape[2] if past is not None else 0
    total = int(case.require("total_sequence_length").reshape(-1)[0])
    lengths = tuple(int(x) + 1 for x in case.require("seqlens_k").reshape(-1))
    given = case.input("query_seqlens")
    queries = tuple(int(x) for x in given) if given is not None else (new,) * batch
    first_prompt = new == total and given is None
    no_past = first_prompt or past is None
    return _Setup(
        batch=batch,
        new=new,
        heads=heads,
        kv_heads=attributes["kv_num_heads"],
        head_size=head_size,
        capacity=capacity,
        total=total,
        lengths=lengths,
        pasts=tuple(0 if no_past else t - n for t, n in zip(lengths, queries, strict=True)),
        valid_queries=queries,
        first_prompt=first_prompt,
        shared_kv=kv_length == 0,
        scale=attributes.get("scale", 0.0) or head_size**-0.5,
        softcap=attributes.get("softcap", 0.0),
        window=attributes.get("local_window_size", -1),
        causal=attributes.get("causal", 1) == 1,
        window_cache=attributes.get("sliding_window_cache", 0) == 1,
        bits=_cache_bits(attributes),
    )


def _cache_bits(attributes: dict[str, Any]) -> int:
    quantized = attributes.get("k_quant_type", "NONE") != "NONE"
    return attributes.get("kv_cache_bit_width", 8) if quantized else 0


def _normalized(case: Case, setup: _Setup, q: Array, k: Array) -> tuple[Array, Array]:
    """RMS norm over H with one weight per channel, before the rotation."""
    if case.input("q_norm_weight") is None:
        return q, k
    q_weight, k_weight = case.require("q_norm_weight"), case.require("k_norm_weight")
    both = case.attributes.get("qk_norm_epsilon", 1e-6)
    q_eps = case.attributes.get("q_norm_epsilon", both)
    k_eps = case.attributes.get("k_norm_epsilon", both)
    q = q / np.sqrt((q * q).mean(-1, keepdims=True) + q_eps) * q_weight.astype(np.float64)
    if not setup.shared_kv:
        k = k / np.sqrt((k * k).mean(-1, keepdims=True) + k_eps) * k_weight.astype(np.float64)
    return q, k


def _rotated(case: Case, setup: _Setup, q: Array, k: Array) -> tuple[Array, Array]:
    if case.attributes.get("do_rotary", 0) != 1:
        return q, k
    positions = _positions(case, setup)
    q = _rotate(case, q, positions)
    if not setup.shared_kv:
        k = _rotate(case, k, positions)
    if _computes_in(case) == np.float16:
        # ORT stores rotated heads in T before the dot product.
        q, k = (x.astype(np.float16).astype(np.float64) for x in (q, k))
    return q, k


def _computes_in(case: Case) -> Any:
    """T, or float32 where a float cache of the other type makes ORT widen the whole node."""
    past = case.input("past_key")
    dtype = case.first.dtype
    mixed = past is not None and past.dtype.kind == "f" and past.dtype != dtype
    return np.dtype(np.float32) if mixed else dtype


def _positions(case: Case, setup: _Setup) -> Array:
    """Rotation position of every new token, (B,S)."""
    steps = np.arange(setup.new)
    ids = case.input("position_ids")
    if ids is None:
        return np.array(setup.pasts)[:, None] + steps
    if setup.first_prompt:
        return np.broadcast_to(ids[0, 0] + steps, (setup.batch, setup.new))
    return ids.reshape(-1)[: setup.batch * setup.new].reshape(setup.batch, setup.new)


def _rotate(case: Case, x: Array, positions: Array) -> Array:
    """Rotate the first R channels of x (B,S,heads,H); pairs (i, i+R/2) or (2i, 2i+1)."""
    cos_table = case.require("cos_cache").astype(np.float64)
    sin_table = case.require("sin_cache").astype(np.float64)
    # Padding rows of a query_seqlens chunk may lie past the table; nothing of theirs is compared.
    rows = np.minimum(positions, cos_table.shape[0] - 1)
    cos, sin = cos_table[rows][:, :, None], sin_table[rows][:, :, None]
    half = cos_table.shape[1]
    if case.attributes.get("rotary_interleaved", 0) == 1:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b = x[..., first], x[..., second]
    out = x.copy()
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out


# ------------------------------------------------------------------------------------------ cache


def _cache(
    case: Case, setup: _Setup, new: Array, which: str
) -> tuple[list[Array], Array, Array | None]:
    """Keys or values of every batch entry by absolute position [(K,T',H) float64], present, care.

    `new` is (B,Skv,K,H) float64, rotated already.
    """
    past = case.input(f"past_{which}")
    dtype = past.dtype if past is not None else case.first.dtype
    scale = _channel_scale(case, setup, which)
    stored = _store(new, setup, scale, dtype)
    width = setup.head_size // 2 if setup.bits == 4 else setup.head_size
    present = np.zeros((setup.batch, setup.kv_heads, setup.present_rows, width), dtype)
    care = np.ones(present.shape, bool)
    unsure = _unsure(case, setup, new, scale)
    attended = []
    for b in range(setup.batch):
        timeline = _timeline(case, setup, b, past, stored[b])
        floats = _load(timeline, setup, scale)
        start, count = setup.pasts[b], 0 if setup.shared_kv else setup.valid_queries[b]
        if past is not None and past.dtype.kind == "f" and past.dtype != case.first.dtype:
            # ORT widens the node to float32 and rounds only what it returns.
            floats[:, start : start + count] = new[b, :count].transpose(1, 0, 2)
        attended.append(floats)
        first, last = 0, setup.present_rows
        if setup.window_cache:
            first, last = setup.lengths[b] - _kept(setup, setup.lengths[b]), setup.lengths[b]
            care[b, :, last - first :] = False
        present[b, :, : last - first] = timeline[:, first:last]
        for step in range(count):
            if first <= start + step < last:
                care[b, :, start + step - first] &= ~unsure[b, step]
    return attended, present, None if care.all() else care


def _timeline(case: Case, setup: _Setup, b: int, past: Array | None, stored: Array) -> Array:
    """Stored rows of batch entry b by absolute position, (K, rows, H or H/2)."""
    start, length = setup.pasts[b], setup.lengths[b]
    rows = max(setup.present_rows, start + setup.new, length)
    timeline = np.zeros((setup.kv_heads, rows, stored.shape[-1]), stored.dtype)
    if past is not None and case.in_place and not setup.window_cache:
        timeline[:, : setup.capacity] = past[b]
    if past is None:
        # Without a past, start is 0: every row is new.
        timeline[:, : setup.new] = stored.transpose(1, 0, 2)
        return timeline
    if setup.shared_kv:
        timeline[:, :length] = past[b, :, :length]
        return timeline
    if setup.window_cache:
        kept = _kept(setup, start)
        timeline[:, start - kept : start] = past[b, :, :kept]
    elif start:
        timeline[:, :start] = past[b, :, :start]
    count = setup.valid_queries[b]
    timeline[:, start : start + count] = stored[:count].transpose(1, 0, 2)
    return timeline


def _kept(setup: _Setup, length: int) -> int:
    """Rows that a window cache of capacity C holds after `length` tokens."""
    if length <= setup.capacity:
        return length
    evicted_at_once = setup.capacity - setup.window + 1
    return length - evicted_at_once * -(-(length - setup.capacity) // evicted_at_once)


def _channel_scale(case: Case, setup: _Setup, which: str) -> Array | None:
    """Quantization scale as float32 (K,H) or (1,1), None for float caches."""
    if not setup.bits:
        return None
    scale = case.require(f"{which[0]}_scale").astype(np.float32).reshape(-1)
    per_channel = case.attributes[f"{which[0]}_quant_type"] == "PER_CHANNEL"
    return scale.reshape(setup.kv_heads, setup.head_size) if per_channel else scale.reshape(1, 1)


def _store(new: Array, setup: _Setup, scale: Array | None, dtype: Any) -> Array:
    """(B,S,K,H) float64 to the cache's type; two 4-bit values a byte, even channel low, +8."""
    if scale is None:
        with np.errstate(over="ignore"):
            return new.astype(dtype)
    low, high = (-8, 7) if setup.bits == 4 else (-128, 127)
    reciprocal = np.float32(1) / np.where(scale == 0, np.float32(1), scale)
    steps = np.rint(new.astype(np.float32) * reciprocal)
    steps = np.where(np.isnan(steps), high, np.clip(steps, low, high)).astype(np.int32)
    if setup.bits == 8:
        return steps.astype(dtype)
    nibbles = steps + 8
    return (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).astype(dtype)


def _load(stored: Array, setup: _Setup, scale: Array | None) -> Array:
    """(K,rows,H or H/2) of the cache to float64 (K,rows,H)."""
    if scale is None:
        return stored.astype(np.float64)
    if setup.bits == 8:
        steps = stored.astype(np.float64)
    else:
        shape = (*stored.shape[:-1], setup.head_size)
        steps = np.stack([stored & 15, stored >> 4], axis=-1).reshape(shape).astype(np.float64) - 8
    return steps * scale.astype(np.float64)[:, None, :]


def _unsure(case: Case, setup: _Setup, new: Array, scale: Array | None) -> Array:
    """Where a float32 rotation (or norm) may fall on the other side of a tie, (B,S,K,W)."""
    derived = case.attributes.get("do_rotary", 0) == 1 or case.input("q_norm_weight") is not None
    if scale is None or not derived or new.shape[1] == 0:
        return np.zeros((*new.shape[:-1], 1), bool)
    error = ROTATION_ERROR * np.abs(new).max(-1, keepdims=True)
    dtype = np.uint8 if setup.bits == 4 else np.int8
    low, high = (_store(new + sign * error, setup, scale, dtype) for sign in (-1, 1))
    return np.asarray(low != high)


def ambiguous_bytes(case: Case) -> Array:
    """Where new rows of a quantized key cache depend on float32 rounding, (B,S)."""
    q, k, _ = _split(case)
    setup = _setup(case, q.shape, k.shape[1])
    _, k = _rotated(case, setup, *_normalized(case, setup, q, k))
    return np.any(_unsure(case, setup, k, _channel_scale(case, setup, "key")), axis=(2, 3))


# -------------------------------------------------------------------------------------- attention


def _attend(
    case: Case, setup: _Setup, q: Array, keys: list[Array], values: list[Array]
) -> tuple[Array, Array, Array | None, Array | None]:
    """Output (B,S,N*H), output_qk (B,N,S,TT), and what of them is specified."""
    output = np.zeros((setup.batch, setup.new, setup.heads, setup.head_size))
    mode = case.attributes.get("qk_output", 0)
    qk = np.zeros((setup.batch, setup.heads, setup.new, setup.total))
    care, care_qk = np.ones(output.shape, bool), np.ones(qk.shape, bool)
    for b in range(setup.batch):
        visible = _visible(setup, b)
        unspecified = _unspecified_queries(setup, b)
        care[b, unspecified] = False
        care_qk[b, :, unspecified] = False
        for n in range(setup.heads):
            group = n // (setup.heads // setup.kv_heads)
            k, v = (x[b][group, : visible.shape[1]] for x in (keys, values))
            logits = _logits(case, setup, (b, n), q[b, :, n], k)
            weights, specified = _softmax(case, n, logits, visible)
            care[b, ~specified, n] = False
            care_qk[b, n, ~specified] = False
            # Rows that nobody sees may hold anything, NaN too: they must not touch the sum.
            seen = np.where(np.any(visible, axis=0)[:, np.newaxis], v, 0.0)
            with np.errstate(invalid="ignore"):
                output[b, :, n] = weights @ seen
            shown = np.where(visible, logits, 0.0) if mode == 1 else weights
            columns = min(setup.total, shown.shape[1])
            qk[b, n, :, :columns] = shown[:, :columns]
        care_qk[b, :, :, setup.lengths[b] :] = False
    if mode == 0:
        care_qk[:] = False
    hidden = setup.heads * setup.head_size
    shape = (setup.batch, setup.new, hidden)
    care = care.reshape(shape)
    with np.errstate(over="ignore"):
        qk = qk.astype(case.first.dtype)
    return (
        output.reshape(shape),
        qk,
        None if care.all() else care,
        None if care_qk.all() else care_qk,
    )


def _query_positions(setup: _Setup, b: int) -> Array:
    start = setup.pasts[b]
    if setup.shared_kv:
        start = 0 if setup.first_prompt else setup.lengths[b] - setup.new
    return start + np.arange(setup.new)


def _unspecified_queries(setup: _Setup, b: int) -> Array:
    """Query rows whose output nobody defines, (S,).

    Rows beyond query_seqlens; and padding rows under a window, where ORT's two float32
    algorithms disagree (window from the row's own position, or from the last valid key).
    """
    rows = np.arange(setup.new) >= setup.valid_queries[b]
    if setup.window >= 0:
        rows |= _query_positions(setup, b) >= setup.lengths[b]
    return rows


def _visible(setup: _Setup, b: int) -> Array:
    """Which of the T_b keys each new query sees, (S, T_b)."""
    length = setup.lengths[b]
    position = _query_positions(setup, b)
    end = np.minimum(position + 1, length) if setup.causal else np.full(setup.new, length)
    begin = np.maximum(end - setup.window, 0) if setup.window >= 0 else np.zeros_like(end)
    key = np.arange(length)
    return np.asarray((key >= begin[:, None]) & (key < end[:, None]))


def _logits(case: Case, setup: _Setup, index: tuple[int, int], q: Array, k: Array) -> Array:
    """scale, softcap, bias: in this order, (S,T_b)."""
    with np.errstate(invalid="ignore"):
        x = setup.scale * (q @ k.T)
    if setup.softcap > 0:
        x = setup.softcap * np.tanh(x / setup.softcap)
    bias = case.input("attention_bias")
    if bias is not None:
        b, n = (i if size > 1 else 0 for i, size in zip(index, bias.shape, strict=False))
        x = x + bias[b, n, :, : x.shape[1]].astype(np.float64)
    return x


def _softmax(case: Case, head: int, logits: Array, visible: Array) -> tuple[Array, Array]:
    """Weights (S,T_b), zero where invisible, and which rows the contract specifies (S,).

    A row without any mass (nothing visible, or all of it at or below -FLT_MAX) is zero; ORT does
    so for float32 and gives NaN for float16, which is left unspecified.
    """
    sinks = case.input("head_sink")
    sink = None
    if sinks is not None:
        sink = float(sinks[head])
    elif case.attributes.get("smooth_softmax", -1) == 1:
        sink = 0.0
    x = np.where(visible, logits, -np.inf)
    top = x.max(-1, keepdims=True, initial=-np.inf if sink is None else sink)
    lowest = float(np.finfo(np.float32).min)
    empty = top[:, 0] <= lowest
    with np.errstate(invalid="ignore"):
        weights = np.where(visible, np.exp(x - np.where(empty[:, None], 0.0, top)), 0.0)
        total = weights.sum(-1, keepdims=True)
        if sink is not None:
            total = total + np.exp(sink - top)
        weights = weights / np.where(empty[:, None], 1.0, total)
    weights[empty] = 0.0
    unspecified = empty & visible.any(-1) & (case.first.dtype == np.float16)
    return weights, ~unspecified
