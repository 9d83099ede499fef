"""PackedAttention, PackedMultiHeadAttention, RemovePadding and RestorePadding in numpy.

Letters: Tok packed tokens, B sequences, S padded length, N heads, Din input width, Dq = Dk and Dv
projected widths. Source: shared/contract/ort-semantics.md sections 1.3 to 1.5 and 4.
"""

from itertools import pairwise

import numpy as np

from ort_webgpu.conformance.case import Array, Case, Expected

__all__ = ["packed_attention", "packed_multi_head_attention", "remove_padding", "restore_padding"]


def packed_attention(case: Case) -> Expected:
    """Projection (rounded to T, as the GEMM's output is), then attention within each sequence."""
    tokens, weights, bias = (case.require(x) for x in ("input", "weights", "bias"))
    y = tokens.astype(np.float64) @ weights.astype(np.float64) + bias.astype(np.float64)
    y = y.astype(tokens.dtype).astype(np.float64)
    sizes = case.attributes.get("qkv_hidden_sizes") or [bias.shape[0] // 3] * 3
    q, k, v = np.split(y, np.cumsum(sizes)[:-1], axis=1)
    return _one(case, _attend(case, q, k, v))


def packed_multi_head_attention(case: Case) -> Expected:
    """The same attention on given q, k, v: separate (Tok,D), or packed (Tok,N,3,H)."""
    query = case.require("query").astype(np.float64)
    if query.ndim == 4:
        q, k, v = (query[:, :, i].reshape(query.shape[0], -1) for i in range(3))
    else:
        q, k, v = query, *(case.require(x).astype(np.float64) for x in ("key", "value"))
    bias = case.input("bias")
    if bias is not None:
        widths = [q.shape[1], k.shape[1], v.shape[1]]
        parts = np.split(bias.astype(np.float64), np.cumsum(widths)[:-1])
        q, k, v = (x + part for x, part in zip((q, k, v), parts, strict=True))
    return _one(case, _attend(case, q, k, v))


def _attend(case: Case, q: Array, k: Array, v: Array) -> Array:
    """Softmax attention of q, k (Tok,D), v (Tok,Dv) within each sequence, float64 (Tok,Dv)."""
    heads = case.attributes["num_heads"]
    q, k, v = (x.reshape(x.shape[0], heads, -1) for x in (q, k, v))
    scale = case.attributes.get("scale", 0.0) or q.shape[-1] ** -0.5
    bounds = case.require("cumulative_sequence_length")
    bias = case.input("attention_bias")
    output = np.zeros(v.shape)
    for b, (first, last) in enumerate(pairwise(bounds)):
        length = int(last) - int(first)
        if length == 0:
            continue
        rows = slice(int(first), int(last))
        x = scale * np.einsum("snh,tnh->nst", q[rows], k[rows])
        if bias is not None:
            x = x + bias[b if bias.shape[0] > 1 else 0, :, :length, :length].astype(np.float64)
        x = np.exp(x - x.max(-1, keepdims=True))
        x /= x.sum(-1, keepdims=True)
        output[rows] = np.einsum("nst,tnh->snh", x, v[rows])
    return output.reshape(output.shape[0], -1)


def _one(case: Case, output: Array) -> Expected:
    return Expected((output.astype(case.first.dtype),), (None,), "numpy float64")


def remove_padding(case: Case) -> Expected:
    """Packed tokens, their padded indexes followed by those of the padding, lengths, maximum."""
    tokens, counts = case.require("input"), case.require("sequence_token_count")
    batch, length = tokens.shape[:2]
    counts = np.clip(counts, 0, length)
    kept = np.arange(length) < counts[:, None]
    index = np.arange(batch * length).reshape(batch, length)
    offsets = np.concatenate([index[kept], index[~kept]]).reshape(batch, length)
    outputs = (
        tokens[kept],
        offsets.astype(np.int32),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        np.array([counts.max()], np.int32),
    )
    wanted = (*case.wanted, False, False, False)[:4]
    return Expected(
        tuple(o if w else None for o, w in zip(outputs, wanted, strict=True)),
        (None,) * 4,
        "numpy",
    )


def restore_padding(case: Case) -> Expected:
    """(Tok,D) scattered to (B,S,D) by token_offset; every other row is zero."""
    tokens, offsets = case.require("input"), case.require("token_offset")
    batch, length = offsets.shape
    output = np.zeros((batch * length, tokens.shape[1]), tokens.dtype)
    output[offsets.reshape(-1)[: tokens.shape[0]]] = tokens
    return Expected((output.reshape(batch, length, -1),), (None,), "numpy")
