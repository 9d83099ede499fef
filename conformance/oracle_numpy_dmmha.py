"""DecoderMaskedMultiHeadAttention in float64 numpy.

Letters: B batch (with beams: groups * beam width W), N heads, H head size, D = N*H, M cache rows,
p past length, L encoder length. Source: shared/contract/ort-semantics.md sections 1.2 and 3.
"""

from typing import Any

import numpy as np

from ort_webgpu.conformance.case import Array, Case, Expected

__all__ = ["decoder_masked_attention"]


def decoder_masked_attention(case: Case) -> Expected:
    """Outputs of a DecoderMaskedMultiHeadAttention case; everything is specified."""
    q, key, value, present = _self_inputs(case) if _is_self(case) else _cross_inputs(case)
    logits = _logits(case, q, key)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    output = np.einsum("bnt,bnth->bnh", weights, value)
    dtype = case.first.dtype
    batch, heads, total = logits.shape
    with np.errstate(over="ignore"):
        qk = logits.reshape(batch, heads, 1, total).astype(case.qk_dtype or dtype)
    outputs = (output.reshape(batch, 1, -1).astype(dtype), *present, qk)
    wanted = (*case.wanted, False, False, False)[:4]
    kept = tuple(o if w else None for o, w in zip(outputs, wanted, strict=True))
    return Expected(kept, (None,) * 4, "numpy float64")


def _is_self(case: Case) -> bool:
    return case.input("past_key") is not None


def _heads(case: Case, rows: Array) -> Array:
    """(B,1,D) to (B,N,H)."""
    return rows.reshape(rows.shape[0], case.attributes["num_heads"], -1)


def _biases(case: Case, hidden: int) -> tuple[Array, Array, Array]:
    bias = case.input("bias")
    if bias is None:
        bias = np.zeros(3 * hidden)
    q, k, v = bias.astype(np.float64).reshape(3, hidden)
    return q, k, v


def _self_inputs(case: Case) -> tuple[Array, Array, Array, tuple[Array, Array]]:
    """q (B,N,H), the p+1 keys and values that each row sees (B,N,T,H), and the new caches."""
    query = case.first.astype(np.float64)
    if case.input("key") is None:
        query, key, value = np.split(query, 3, axis=-1)
    else:
        key, value = (case.require(x).astype(np.float64) for x in ("key", "value"))
    added = zip((query, key, value), _biases(case, query.shape[-1]), strict=True)
    q, new_key, new_value = (_heads(case, x + bias) for x, bias in added)
    past = int(case.require("past_sequence_length").reshape(-1)[0])
    present, seen = [], []
    for which, new in (("past_key", new_key), ("past_value", new_value)):
        cache = case.require(which).copy()
        cache[:, :, past] = new
        present.append(cache)
        seen.append(_follow_beams(case, cache, past))
    return q, seen[0], seen[1], (present[0], present[1])


def _follow_beams(case: Case, cache: Array, past: int) -> Array:
    """Rows [0, past] of the cache as each batch entry's beam history has them, float64."""
    seen = cache[:, :, : past + 1].astype(np.float64)
    indirection = case.input("cache_indirection")
    if indirection is None:
        return seen
    width = indirection.shape[1]
    history = seen.copy()
    for b in range(cache.shape[0]):
        group, beam = divmod(b, width)
        for j in range(past):
            history[b, :, j] = seen[group * width + indirection[group, beam, j], :, j]
    return history


def _cross_inputs(case: Case) -> tuple[Array, Array, Array, tuple[None, None]]:
    query = case.first.astype(np.float64)
    q = _heads(case, query + _biases(case, query.shape[-1])[0])
    key, value = (case.require(x).astype(np.float64) for x in ("key", "value"))
    return q, key, value, (None, None)


def _logits(case: Case, q: Array, key: Array) -> Array:
    """scale, attention_bias, mask (B,N,T); the mask is added in float32 as ORT does."""
    scale = case.attributes.get("scale", 0.0) or q.shape[-1] ** -0.5
    x = scale * np.einsum("bnh,bnth->bnt", q, key)
    bias, indirection = case.input("attention_bias"), case.input("cache_indirection")
    if bias is not None:
        rows = np.arange(q.shape[0])
        if indirection is not None:
            # ORT indexes the bias by beam group although it has a row for each beam.
            rows = rows // indirection.shape[1]
        rows = rows if bias.shape[0] > 1 else np.zeros_like(rows)
        x = x + bias[rows, :, 0].astype(np.float64)
    return _masked(case, x, indirection)


def _masked(case: Case, x: Array, indirection: Any) -> Array:
    mask = case.input("mask_index")
    if mask is None:
        return x
    hidden = mask == 0 if indirection is not None else mask <= 0
    filter_value = np.float32(case.attributes.get("mask_filter_value", -10000.0))
    addend = np.where(hidden, filter_value, np.float32(0))[:, None]
    with np.errstate(over="ignore"):
        return (x.astype(np.float32) + addend).astype(np.float64)
