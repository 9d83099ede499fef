"""What GroupQueryAttention must refuse, each as one change to a valid node.

Source: shared/contract/ort-semantics.md section 6 (its checklist, in its order), 2.8 to 2.10, and
public cases S2, S8, S9, S10, T1.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ort_webgpu.conformance.case import OPERATORS, Array, Case, RejectCase
from ort_webgpu.conformance.cases_gqa import GqaConfig, rotary_tables
from ort_webgpu.conformance.cases_public import gqa

__all__ = ["Change", "gqa_rejections", "rejected"]

SECTION = "ort-semantics 6"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change to a valid node: inputs by name (None removes), attributes, wanted outputs."""

    name: str
    mentions: tuple[str, ...]
    inputs: Mapping[str, Array | None] | None = None
    attributes: dict[str, Any] | None = None
    wanted: tuple[bool, ...] | None = None
    kind: str = "input"
    ort: str = "rejects"
    source: str = SECTION


def rejected(base: Case, change: Change) -> RejectCase:
    """The changed node. Attributes that are None in `change` are removed."""
    names = OPERATORS[base.op_type][0]
    data = dict(zip(names, base.inputs, strict=False)) | dict(change.inputs or {})
    attributes = {**base.attributes, **(change.attributes or {})}
    return RejectCase(
        name=change.name,
        op_type=base.op_type,
        attributes={k: v for k, v in attributes.items() if v is not None},
        inputs=tuple(data.get(n) for n in names),
        wanted=change.wanted or base.wanted,
        source=change.source,
        symbolic=True,
        kind=change.kind,
        mentions=change.mentions,
        ort=change.ort,
    )


def gqa_rejections() -> list[RejectCase]:
    """All of them, in the order of the checklist."""
    makers = (
        _lengths, _totals, _queries_and_keys, _pasts, _rotary, _extras, _attributes, _quantized,
        _query_seqlens, _window_cache, _types, _unsafe,
    )  # fmt: skip
    return [case for make in makers for case in make()]


def _decode(**changes: Any) -> Case:
    """B=2, N=4, K=2, H=16, static past of 12 rows, T=(9, 6)."""
    plain: dict[str, Any] = {"head_size": 16, "past": 12, "lengths": (9, 6)}
    return gqa("valid", SECTION, **{**plain, **changes})


def _prompt(**changes: Any) -> Case:
    plain: dict[str, Any] = {"head_size": 16, "new": 5, "lengths": (5, 3)}
    return gqa("valid", SECTION, **{**plain, **changes})


def _ints(*values: Any) -> Array:
    return np.array(values, np.int32)


def _zeros(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


def _lengths() -> Iterator[RejectCase]:
    one: dict[str, Any] = {"heads": 1, "kv_heads": 1, "head_size": 8}
    source = "public case S2"
    plans = [
        ("negative", gqa("", source, **one), _ints(-5)),
        ("beyond-prompt", gqa("", source, **one), _ints(100)),
        ("second-negative", gqa("", source, **one, lengths=(1, 1)), _ints(0, -3)),
        ("off-by-one", gqa("", source, **one, past=4, lengths=(4,)), _ints(4)),
        ("int32-max", gqa("", source, **one, past=4, lengths=(4,)), _ints(2**31 - 1)),
        ("shorter-than-chunk", gqa("", source, **one, new=3, past=5, lengths=(5,)), _ints(1)),
    ]
    for label, base, values in plans:
        change = Change(
            name=f"gqa-seqlens-{label}",
            mentions=("seqlens_k",),
            inputs={"seqlens_k": values},
            source=source,
        )
        yield rejected(base, change)
    shapes = {
        "count": _ints(8, 5, 3),
        "square": _ints([8, 5], [1, 1]),
        "scalar": np.array(8, np.int32),
    }
    for label, values in shapes.items():
        change = Change(
            name=f"gqa-seqlens-{label}",
            mentions=("seqlens_k",),
            inputs={"seqlens_k": values},
        )
        yield rejected(_decode(), change)


def _totals() -> Iterator[RejectCase]:
    values = {
        "zero": np.array(0, np.int32),
        "negative": np.array(-5, np.int32),
        "two": _ints(9, 9),
        "matrix": _ints([9]),
        "empty": np.zeros(0, np.int32),
    }
    for label, total in values.items():
        change = Change(
            name=f"gqa-total-{label}",
            mentions=("total_sequence_length",),
            inputs={"total_sequence_length": total},
        )
        yield rejected(_decode(), change)
    plans = {
        "beyond-past": (_decode(past=8, lengths=(9,)), 10),
        "prompt-unequal": (_prompt(), 7),
        "below-new-keys": (_prompt(), 4),
    }
    for label, (base, number) in plans.items():
        change = Change(
            name=f"gqa-total-{label}",
            mentions=("total_sequence_length", "sequence_length"),
            inputs={"total_sequence_length": np.array(number, np.int32)},
        )
        yield rejected(base, change)


def _queries_and_keys() -> Iterator[RejectCase]:
    empty = {"query": _zeros(2, 0, 64), "key": _zeros(2, 0, 32), "value": _zeros(2, 0, 32)}
    changes = [
        Change(name="gqa-no-tokens", mentions=("sequence", "query"), inputs=empty),
        Change(name="gqa-query-rank", mentions=("query",), inputs={"query": _zeros(5, 64)}),
        Change(name="gqa-query-width", mentions=("query",), inputs={"query": _zeros(2, 5, 66)}),
        Change(name="gqa-key-rank", mentions=("key",), inputs={"key": _zeros(5, 32)}),
        Change(name="gqa-key-only", mentions=("value",), inputs={"value": None}),
        Change(name="gqa-value-only", mentions=("key",), inputs={"key": None}),
        Change(name="gqa-key-batch", mentions=("key",), inputs={"key": _zeros(3, 5, 32)}),
        Change(name="gqa-key-length", mentions=("key",), inputs={"key": _zeros(2, 4, 32)}),
        Change(name="gqa-key-width", mentions=("key",), inputs={"key": _zeros(2, 5, 48)}),
        Change(name="gqa-value-batch", mentions=("value",), inputs={"value": _zeros(1, 5, 32)}),
        Change(name="gqa-value-length", mentions=("value",), inputs={"value": _zeros(2, 6, 32)}),
        Change(name="gqa-value-width", mentions=("value",), inputs={"value": _zeros(2, 5, 16)}),
    ]
    for change in changes:
        either = Change(**{**vars(change), "kind": "either"})
        yield rejected(_prompt(), either)
    small = gqa("", SECTION, head_size=4, new=3)
    yield rejected(
        small, Change(name="gqa-head-size-4", mentions=("head",), source="public case S9")
    )


def _pasts() -> Iterator[RejectCase]:
    cache = _decode().require("past_key")
    changes = [
        Change(name="gqa-past-rank", mentions=("past",), inputs={"past_key": _zeros(2, 12, 32)}),
        Change(name="gqa-past-heads", mentions=("past",), inputs=_both(2, 3, 12, 16)),
        Change(name="gqa-past-batch", mentions=("past",), inputs=_both(1, 2, 12, 16)),
        Change(name="gqa-past-width", mentions=("past",), inputs=_both(2, 2, 12, 8)),
        Change(name="gqa-past-rows", mentions=("past",), inputs={"past_key": cache[:, :, :10]}),
        Change(name="gqa-past-key-only", mentions=("past",), inputs={"past_value": None}),
        Change(name="gqa-past-value-only", mentions=("past",), inputs={"past_key": None}),
    ]
    for change in changes:
        yield rejected(_decode(), Change(**{**vars(change), "kind": "either"}))


def _both(*shape: int) -> dict[str, Array | None]:
    return {"past_key": _zeros(*shape), "past_value": _zeros(*shape)}


def _rotary() -> Iterator[RejectCase]:
    cos, sin = rotary_tables(20, 8, np.float32)
    base = _decode(attributes={"do_rotary": 1}, cos_cache=cos, sin_cache=sin)
    wide = np.ones((20, 16), np.float32)
    tables: dict[str, dict[str, Array | None]] = {
        "no-sin": {"sin_cache": None},
        "unequal": {"sin_cache": sin[:15]},
        "too-few-rows": {"cos_cache": cos[:8], "sin_cache": sin[:8]},
        "too-wide": {"cos_cache": wide, "sin_cache": wide},
        "width-4": {"cos_cache": cos[:, :4].copy(), "sin_cache": sin[:, :4].copy()},
    }
    for label, inputs in tables.items():
        change = Change(
            name=f"gqa-rotary-{label}",
            mentions=("cos_cache", "sin_cache"),
            inputs=inputs,
            kind="either",
            source="public case S9",
        )
        yield rejected(base, change)
    yield rejected(
        base,
        Change(
            name="gqa-rotary-no-tables",
            mentions=("cos_cache", "do_rotary", "rotary"),
            inputs={"cos_cache": None, "sin_cache": None},
            kind="either",
        ),
    )
    odd = _decode(head_size=24, attributes={"do_rotary": 1}, cos_cache=cos, sin_cache=sin)
    yield rejected(odd, Change(name="gqa-rotary-head-size-24", mentions=("head_size", "16")))
    ids = {
        "batch": np.zeros((3, 1), np.int64),
        "beyond": np.array([[3], [20]], np.int64),
        "negative": np.array([[-1], [2]], np.int64),
    }
    for label, values in ids.items():
        change = Change(
            name=f"gqa-position-ids-{label}",
            mentions=("position",),
            inputs={"position_ids": values},
        )
        yield rejected(base, change)
    narrow = Change(
        name="gqa-position-ids-narrow",
        mentions=("position_ids",),
        inputs={"position_ids": np.zeros((2, 3), np.int64)},
    )
    yield rejected(_prompt(), narrow)


def _extras() -> Iterator[RejectCase]:
    shapes = {
        "rank": (4, 1, 9),
        "batch": (3, 1, 1, 9),
        "heads": (1, 2, 1, 9),
        "queries": (1, 1, 2, 9),
        "cache-width": (1, 1, 1, 12),
    }
    for label, shape in shapes.items():
        change = Change(
            name=f"gqa-bias-{label}",
            mentions=("attention_bias",),
            inputs={"attention_bias": np.ones(shape, np.float32)},
            kind="either",
            source="public case S8" if label == "cache-width" else SECTION,
        )
        yield rejected(_decode(), change)
    for label, shape in (("rank", (4, 1)), ("size", (2,))):
        change = Change(
            name=f"gqa-sink-{label}",
            mentions=("head_sink",),
            inputs={"head_sink": np.ones(shape, np.float32)},
            kind="either",
        )
        yield rejected(_decode(), change)
    weight = np.ones(16, np.float32)
    norms: dict[str, dict[str, Array | None]] = {
        "q-only": {"q_norm_weight": weight},
        "k-only": {"k_norm_weight": weight},
        "size": {"q_norm_weight": weight[:8], "k_norm_weight": weight[:8]},
    }
    for label, inputs in norms.items():
        change = Change(
            name=f"gqa-norm-{label}", mentions=("norm_weight",), inputs=inputs, kind="either"
        )
        yield rejected(_decode(), change)


def _attributes() -> Iterator[RejectCase]:
    four = (True, True, True, True)
    changes = [
        Change(
            name="gqa-head-ratio",
            mentions=("num_heads",),
            attributes={"num_heads": 3, "kv_num_heads": 2},
            kind="either",
        ),
        Change(
            name="gqa-no-kv-heads",
            mentions=("kv_num_heads",),
            attributes={"kv_num_heads": None},
            kind="model",
        ),
        Change(
            name="gqa-zero-heads",
            mentions=("num_heads",),
            attributes={"num_heads": 0},
            kind="model",
        ),
        Change(
            name="gqa-qk-output-3",
            mentions=("qk_output",),
            attributes={"qk_output": 3},
            wanted=four,
            kind="either",
        ),
        Change(
            name="gqa-qk-output-unwired",
            mentions=("qk_output",),
            attributes={"qk_output": 1},
            kind="either",
        ),
        Change(name="gqa-qk-output-not-asked", mentions=("qk_output",), wanted=four, kind="either"),
        Change(
            name="gqa-present-key-only",
            mentions=("present",),
            wanted=(True, True, False),
            kind="either",
        ),
        Change(name="gqa-causal-2", mentions=("causal",), attributes={"causal": 2}, kind="model"),
        Change(
            name="gqa-bidirectional-window",
            mentions=("causal", "local_window_size"),
            attributes={"causal": 0, "local_window_size": 4},
            kind="model",
        ),
        Change(
            name="gqa-window-cache-without-window",
            mentions=("sliding_window_cache", "local_window_size"),
            attributes={"sliding_window_cache": 1},
            kind="model",
        ),
    ]
    for change in changes:
        yield rejected(_decode(), change)


def _quantized() -> Iterator[RejectCase]:
    base = GqaConfig(cache="int8", phase="decode_static", batch=2, head_size=32).case(3)
    scale = np.full(1, 0.05, np.float32)
    bytes_ = {n: base.require(n).view(np.uint8) for n in ("past_key", "past_value")}
    changes = [
        Change(
            name="gqa-quant-types-differ",
            mentions=("quant_type",),
            attributes={"v_quant_type": "PER_CHANNEL"},
            inputs={"v_scale": np.full(64, 0.05, np.float32)},
        ),
        Change(
            name="gqa-quant-type-unknown",
            mentions=("quant_type",),
            attributes={"k_quant_type": "PER_ROW", "v_quant_type": "PER_ROW"},
        ),
        Change(
            name="gqa-quant-bits-5",
            mentions=("kv_cache_bit_width",),
            attributes={"kv_cache_bit_width": 5},
        ),
        Change(name="gqa-quant-no-scale", mentions=("k_scale",), inputs={"k_scale": None}),
        Change(
            name="gqa-quant-scale-count",
            mentions=("scale",),
            inputs={"k_scale": np.full(3, 0.05, np.float32)},
        ),
        Change(
            name="gqa-quant-channel-scale-count",
            mentions=("scale",),
            attributes={"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL"},
            inputs={"k_scale": scale, "v_scale": scale},
        ),
        Change(
            name="gqa-quant-8-bits-uint8",
            mentions=("uint8", "kv_cache_bit_width", "past"),
            inputs={n: a.copy() for n, a in bytes_.items()},
        ),
    ]
    for change in changes:
        yield rejected(base, Change(**{**vars(change), "kind": "either"}))
    plain = Change(
        name="gqa-quant-none-with-bits",
        mentions=("kv_cache_bit_width",),
        attributes={"kv_cache_bit_width": 8},
        kind="either",
    )
    yield rejected(_decode(), plain)


def _query_seqlens() -> Iterator[RejectCase]:
    base = GqaConfig(phase="chunk_queries", batch=2, ragged=True, length=17).case(4)
    values = {
        "beyond-chunk": _ints(19, 1),
        "negative": _ints(2, -1),
        "count": _ints(2, 1, 1),
        "matrix": _ints([2], [1]),
    }
    for label, queries in values.items():
        change = Change(
            name=f"gqa-query-seqlens-{label}",
            mentions=("query_seqlens",),
            inputs={"query_seqlens": queries},
            source="ort-semantics 2.8",
        )
        yield rejected(base, change)
    changes = [
        Change(
            name="gqa-query-seqlens-bidirectional",
            mentions=("query_seqlens", "causal"),
            attributes={"causal": 0},
            kind="either",
        ),
        Change(
            name="gqa-query-seqlens-no-past",
            mentions=("query_seqlens", "past"),
            inputs={"past_key": None, "past_value": None},
            kind="either",
        ),
        Change(
            name="gqa-query-seqlens-capacity",
            mentions=("query_seqlens", "capacity", "past"),
            inputs={n: base.require(n)[:, :, :22].copy() for n in ("past_key", "past_value")}
            | {"query_seqlens": _ints(1, 1)},
        ),
    ]
    for change in changes:
        yield rejected(base, change)


def _window_cache() -> Iterator[RejectCase]:
    config = GqaConfig(phase="prompt_static", window=4, window_extra=5, batch=2, length=17)
    base = config.case(5)
    small = {n: base.require(n)[:, :, :3].copy() for n in ("past_key", "past_value")}
    source = "ort-semantics 2.10"
    changes = [
        Change(name="gqa-ring-below-window", mentions=("past", "window"), inputs=small),
        Change(name="gqa-ring-ragged", mentions=("seqlens_k",), inputs={"seqlens_k": _ints(16, 3)}),
        Change(
            name="gqa-ring-output-qk",
            mentions=("qk_output", "sliding_window_cache"),
            attributes={"qk_output": 1},
            wanted=(True, True, True, True),
            kind="either",
        ),
        Change(
            name="gqa-ring-no-past",
            mentions=("past", "sliding_window_cache"),
            inputs={"past_key": None, "past_value": None},
            kind="either",
        ),
    ]
    for change in changes:
        yield rejected(base, Change(**{**vars(change), "source": source}))


def _types() -> Iterator[RejectCase]:
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            "bfloat16 and float8 cases need ml-dtypes: pip install 'ort-webgpu[test]'"
        ) from error
    base, narrow = _decode(), ml_dtypes.bfloat16
    floats = {
        n: base.require(n).astype(narrow)
        for n in ("query", "key", "value", "past_key", "past_value")
    }
    yield rejected(
        base,
        Change(
            name="gqa-bfloat16",
            mentions=("bfloat16", "NOT_IMPLEMENTED"),
            inputs=floats,
            kind="model",
            source="public case T1",
        ),
    )
    eighth = {
        n: base.require(n).astype(ml_dtypes.float8_e4m3fn) for n in ("past_key", "past_value")
    }
    scale = np.full(1, 0.05, np.float32)
    yield rejected(
        base,
        Change(
            name="gqa-float8-cache",
            mentions=("float8", "NOT_IMPLEMENTED"),
            inputs={**eighth, "k_scale": scale, "v_scale": scale},
            attributes={"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"},
            kind="model",
        ),
    )


def _unsafe() -> Iterator[RejectCase]:
    """What ORT takes and should not: wrong rows, reads out of bounds, a crash."""
    cos, sin = rotary_tables(20, 8, np.float32)
    rotary = _decode(attributes={"do_rotary": 1}, cos_cache=cos, sin_cache=sin)
    bias = np.ones((1, 1, 1, 4), np.float32)
    no_batch = {n: a[:0] for n, a in _decode().feeds().items() if n != "total_sequence_length"}
    source = "ort-semantics 6, 10"
    plans = [
        (
            rotary,
            Change(
                name="gqa-position-ids-wide",
                mentions=("position_ids",),
                inputs={"position_ids": np.zeros((2, 3), np.int64)},
                ort="accepts",
            ),
        ),
        (
            _decode(),
            Change(
                name="gqa-bias-below-length",
                mentions=("attention_bias", "total_sequence_length", "seqlens_k"),
                inputs={
                    "attention_bias": bias,
                    "total_sequence_length": np.array(4, np.int32),
                },
                ort="accepts",
            ),
        ),
        (
            _decode(),
            Change(
                name="gqa-past-without-present",
                mentions=("present",),
                wanted=(True,),
                kind="either",
                ort="accepts",
            ),
        ),
        (
            _decode(),
            Change(name="gqa-empty-batch", mentions=("batch",), inputs=no_batch, ort="crashes"),
        ),
    ]
    for base, change in plans:
        yield rejected(base, Change(**{**vars(change), "source": source}))
