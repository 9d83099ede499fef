"""What the other operators must refuse, each as one change to a valid node.

Source: shared/contract/ort-semantics.md sections 3, 4 and 6. ORT's CPU EP has no kernel for the
packed operators: there the checks are CUDA's own, and those for malformed schedules are ours
(the kernel card leaves them unspecified).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ort_webgpu.conformance.case import Array, Case, RejectCase
from ort_webgpu.conformance.cases_dmmha import DmmhaConfig
from ort_webgpu.conformance.cases_packed import PackedConfig, padding_offsets
from ort_webgpu.conformance.rejects_gqa import Change, rejected

__all__ = ["dmmha_rejections", "packed_rejections", "padding_rejections"]


def _ints(*values: Any) -> Array:
    return np.array(values, np.int32)


def _ones(*shape: int) -> Array:
    return np.ones(shape, np.float32)


def dmmha_rejections() -> list[RejectCase]:
    """DecoderMaskedMultiHeadAttention: self attention, beams, cross attention."""
    return [*_self_shapes(), *_self_extras(), *_beams(), *_cross()]


def _self_case(**changes: Any) -> Case:
    """B=2, N=2, H=16, D=32, past 5 of 8 rows."""
    return DmmhaConfig(groups=2, **changes).case(1)


def _self_shapes() -> Iterator[RejectCase]:
    two = {"query": _ones(2, 2, 32), "key": _ones(2, 2, 32), "value": _ones(2, 2, 32)}
    changes = [
        Change(name="dmmha-two-queries", mentions=("query", "sequence"), inputs=two),
        Change(name="dmmha-key-length", mentions=("key",), inputs={"key": _ones(2, 2, 32)}),
        Change(name="dmmha-value-width", mentions=("value",), inputs={"value": _ones(2, 1, 48)}),
        Change(
            name="dmmha-not-shared",
            mentions=("past_present_share_buffer",),
            attributes={"past_present_share_buffer": 0},
            kind="either",
        ),
        Change(
            name="dmmha-no-past-length",
            mentions=("past_sequence_length",),
            inputs={"past_sequence_length": None},
            kind="either",
        ),
        Change(
            name="dmmha-past-length-two",
            mentions=("past_sequence_length",),
            inputs={"past_sequence_length": _ints(5, 5)},
        ),
        Change(
            name="dmmha-past-length-negative",
            mentions=("past_sequence_length",),
            inputs={"past_sequence_length": _ints(-1)},
        ),
        Change(
            name="dmmha-past-length-full",
            mentions=("past_sequence_length",),
            inputs={"past_sequence_length": _ints(8)},
        ),
        Change(
            name="dmmha-no-presents",
            mentions=("present",),
            wanted=(True,),
            kind="either",
            ort="crashes",
        ),
    ]
    for change in changes:
        yield rejected(_self_case(), change)


def _self_extras() -> Iterator[RejectCase]:
    masks: dict[str, Array] = {
        "width": np.ones((2, 7), np.int32),
        "batch": np.ones((3, 6), np.int32),
    }
    masks |= {"rank1": np.ones(2, np.int32), "rank3": np.ones((2, 1, 6), np.int32)}
    for label, mask in masks.items():
        change = Change(name=f"dmmha-mask-{label}", mentions=("mask",), inputs={"mask_index": mask})
        yield rejected(_self_case(), change)
    for label, shape in {
        "batch": (3, 1, 1, 6),
        "heads": (1, 3, 1, 6),
        "queries": (1, 1, 2, 6),
        "width": (1, 1, 1, 8),
    }.items():
        change = Change(
            name=f"dmmha-attention-bias-{label}",
            mentions=("attention_bias",),
            inputs={"attention_bias": _ones(*shape)},
        )
        yield rejected(_self_case(), change)
    short = Change(name="dmmha-bias-length", mentions=("bias",), inputs={"bias": _ones(64)})
    yield rejected(_self_case(), short)


def _beams() -> Iterator[RejectCase]:
    base = DmmhaConfig(groups=2, beams=2).case(2)
    rows = base.require("cache_indirection")
    values: dict[str, dict[str, Array | None]] = {
        "missing": {"cache_indirection": None},
        "rank": {"cache_indirection": rows.reshape(4, 8)},
        "width": {"cache_indirection": rows[:, :, :7].copy()},
        "groups": {"cache_indirection": rows[:1].copy()},
        "beyond": {"cache_indirection": np.full_like(rows, 2)},
        "negative": {"cache_indirection": np.full_like(rows, -1)},
        "beam-width": {"beam_width": _ints(3)},
    }
    for label, inputs in values.items():
        change = Change(
            name=f"dmmha-beams-{label}",
            mentions=("cache_indirection", "beam_width", "beam width"),
            inputs=inputs,
            source="ort-semantics 3.2",
        )
        yield rejected(base, change)


def _cross() -> Iterator[RejectCase]:
    base = DmmhaConfig(kind="cross", groups=2, length=7).case(3)
    source = "ort-semantics 3.3"
    changes = [
        Change(
            name="dmmha-cross-attention-bias",
            mentions=("attention_bias",),
            inputs={"attention_bias": _ones(2, 2, 1, 7)},
            kind="either",
        ),
        Change(
            name="dmmha-cross-presents",
            mentions=("present", "past"),
            wanted=(True, True, True),
            kind="either",
        ),
        Change(
            name="dmmha-cross-mask-width",
            mentions=("mask",),
            inputs={"mask_index": np.ones((2, 6), np.int32)},
        ),
        Change(
            name="dmmha-cross-3d-keys",
            mentions=("key",),
            inputs={"key": _ones(2, 7, 32), "value": _ones(2, 7, 32)},
            kind="either",
            ort="accepts",
        ),
    ]
    for change in changes:
        yield rejected(base, Change(**{**vars(change), "source": source}))


def packed_rejections() -> list[RejectCase]:
    """PackedAttention and PackedMultiHeadAttention; ORT's CPU EP has neither."""
    projection = PackedConfig(lengths=(5, 3), slack=1).case(1)
    separate = PackedConfig(op="mha", lengths=(5, 3), slack=1).case(2)
    found = [*_packed_inputs(projection), *_multi_head_inputs(separate)]
    for base, prefix in ((projection, "packed"), (separate, "packedmha")):
        found += _schedules(base, prefix)
    return found


def _packed(base: Case, name: str, mentions: tuple[str, ...], **changes: Any) -> RejectCase:
    change = Change(
        name=name,
        mentions=mentions,
        ort="no kernel",
        **{"kind": "either", "source": "ort-semantics 4", **changes},
    )
    return rejected(base, change)


def _packed_inputs(base: Case) -> Iterator[RejectCase]:
    """Tok=8, Din=20, N=2, H=16: weights (20,96)."""
    inputs: dict[str, tuple[str, Array | None]] = {
        "input-rank": ("input", _ones(1, 8, 20)),
        "weights-rank": ("weights", _ones(1920)),
        "weights-rows": ("weights", _ones(21, 96)),
        "bias-rank": ("bias", _ones(1, 96)),
        "bias-size": ("bias", _ones(90)),
        "bias-missing": ("bias", None),
    }
    for label, (which, array) in inputs.items():
        yield _packed(base, f"packed-{label}", (which,), inputs={which: array})
    for label, sizes in {
        "two": [32, 64],
        "heads": [33, 33, 30],
        "unequal": [16, 32, 48],
        "sum": [32, 32, 48],
    }.items():
        yield _packed(
            base,
            f"packed-sizes-{label}",
            ("qkv_hidden_sizes",),
            attributes={"qkv_hidden_sizes": sizes},
        )
    yield _packed(base, "packed-heads", ("num_heads",), attributes={"num_heads": 5})
    yield _packed(base, "packed-no-heads", ("num_heads",), attributes={"num_heads": None})


def _multi_head_inputs(base: Case) -> Iterator[RejectCase]:
    """Tok=8, N=2, H=16."""
    inputs: dict[str, tuple[str, Array | None]] = {
        "query-rank": ("query", _ones(1, 8, 32)),
        "key-missing": ("key", None),
        "value-missing": ("value", None),
        "key-tokens": ("key", _ones(7, 32)),
        "key-width": ("key", _ones(8, 16)),
        "value-tokens": ("value", _ones(9, 32)),
        "value-width": ("value", _ones(8, 33)),
        "bias-size": ("bias", _ones(64)),
    }
    for label, (which, array) in inputs.items():
        mentions = (which, "query") if label.endswith("missing") else (which,)
        yield _packed(base, f"packedmha-{label}", mentions, inputs={which: array})
    packed = PackedConfig(op="mha_packed", lengths=(5, 3)).case(3)
    for label, shape in (("three", (8, 2, 2, 16)), ("heads", (8, 4, 3, 16))):
        yield _packed(
            packed, f"packedmha-packed-{label}", ("query",), inputs={"query": _ones(*shape)}
        )


def _schedules(base: Case, prefix: str) -> Iterator[RejectCase]:
    """token_offset, cumulative_sequence_length and attention_bias of two sequences (5, 3), S=6."""
    right = padding_offsets((5, 3), 6)
    beyond, twice, swapped = right.copy(), right.copy(), right.copy()
    beyond[0, 2] = 12
    twice[0, 2] = twice[0, 1]
    swapped[0, :2] = right[0, 1::-1]
    offsets = {
        "rank": right.reshape(-1),
        "beyond": beyond,
        "twice": twice,
        "order": swapped,
        "too-short": padding_offsets((4, 4), 4),
    }
    for label, array in offsets.items():
        yield _packed(
            base,
            f"{prefix}-offset-{label}",
            ("token_offset", "cumulative_sequence_length"),
            inputs={"token_offset": array},
        )
    bounds = {
        "rank": _ints([0, 5, 8]),
        "size": _ints(0, 5),
        "start": _ints(1, 5, 8),
        "decreasing": _ints(0, 9, 8),
        "end": _ints(0, 5, 7),
        "negative": _ints(0, -1, 8),
        "longer-than-padded": _ints(0, 7, 8),
    }
    for label, array in bounds.items():
        source = "public case P1" if label == "size" else "ort-semantics 4"
        yield _packed(
            base,
            f"{prefix}-lengths-{label}",
            ("cumulative_sequence_length",),
            inputs={"cumulative_sequence_length": array},
            source=source,
        )
    for label, shape in {
        "rank": (2, 6, 6),
        "batch": (3, 1, 6, 6),
        "heads": (1, 3, 6, 6),
        "rows": (1, 1, 5, 6),
        "columns": (1, 1, 6, 5),
    }.items():
        yield _packed(
            base,
            f"{prefix}-attention-bias-{label}",
            ("attention_bias",),
            inputs={"attention_bias": _ones(*shape)},
        )


def padding_rejections() -> list[RejectCase]:
    """RemovePadding and RestorePadding."""
    remove = Case(
        name="valid",
        op_type="RemovePadding",
        attributes={},
        inputs=(_ones(2, 4, 3), _ints(2, 3)),
        wanted=(True, True, True, True),
    )
    restore = Case(
        name="valid",
        op_type="RestorePadding",
        attributes={},
        inputs=(_ones(5, 3), padding_offsets((2, 3), 4)),
    )
    beyond, negative = padding_offsets((2, 3), 4), padding_offsets((2, 3), 4)
    beyond[0, 1], negative[0, 1] = 8, -1
    plans: list[tuple[Case, str, str, Array]] = [
        (remove, "input-rank", "input", _ones(8, 3)),
        (remove, "count-size", "sequence_token_count", _ints(2, 3, 1)),
        (remove, "count-rank", "sequence_token_count", _ints([2, 3])),
        (restore, "input-rank", "input", _ones(1, 5, 3)),
        (restore, "offset-rank", "token_offset", padding_offsets((2, 3), 4).reshape(-1)),
        (restore, "offset-beyond", "token_offset", beyond),
        (restore, "offset-negative", "token_offset", negative),
        (restore, "too-many-tokens", "input", _ones(9, 3)),
    ]
    found = []
    for base, label, which, array in plans:
        name = f"{'remove' if base is remove else 'restore'}_padding-{label}"
        mentions = (which, "token_offset")
        found.append(_packed(base, name, mentions, inputs={which: array}))
    return found
