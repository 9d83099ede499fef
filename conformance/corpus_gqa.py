"""The generated GroupQueryAttention corpus: float, quantized and window caches, card variants.

Each part is a covering array over `GqaConfig`, in which every pair of parameter values that may
stand together meets. Level "ci" has one array of each part, "full" has several different ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ort_webgpu.conformance.case import Case
from ort_webgpu.conformance.cases_gqa import GqaConfig
from ort_webgpu.conformance.covering import pairwise

__all__ = ["generated_gqa_cases"]

MAX_WORK = 6e6
"""Multiply-accumulates of one case, QK and PV: keeps the corpus quick on software adapters."""

_FULL_ROTATIONS = 4

_FLOAT: dict[str, Sequence[Any]] = {
    "phase": (
        "prompt", "decode", "decode_static", "chunk", "prompt_static", "shared", "chunk_queries",
        "chunk_static", "prompt_empty", "shared_prompt", "single",
    ),
    "head_size": (64, 32, 128, 80, 16, 96, 8, 40, 72, 256),
    "length": (33, 5, 70, 17, 130, 47),
    "group": (2, 1, 4, 3, 8),
    "rotary": ("half", "off", "interleaved", "half_partial", "interleaved_partial"),
    "bias": ("off", "BN", "11", "1N", "B1"),
    "window": (-1, 20, 4, 1, 0),
    "sink": ("off", "sink", "smooth", "both"),
    "batch": (2, 1, 3),
    "scale": ("default", "given", "negative"),
    "output_qk": (0, 1, 2),
    "kv_heads": (2, 1, 3),
    "cache": ("same", "other"),
    "dtype": ("f32", "f16"),
    "ragged": (True, False),
    "packed": (False, True),
    "position_ids": (False, True),
    "softcap": (0.0, 2.0),
    "causal": (1, 0),
    "presents": (True, False),
    "in_place": (False, True),
}  # fmt: skip

_BEYOND_ORT: dict[str, Sequence[Any]] = {
    "phase": ("chunk_batched", "decode", "prompt", "chunk", "decode_static", "prompt_static"),
    "norm": ("each", "off", "one"),
    "head_size": (64, 32, 128, 16, 96, 256),
    "length": (33, 5, 70, 17),
    "group": (2, 1, 4),
    "rotary": ("half", "off", "interleaved", "half_partial"),
    "bias": ("off", "BN", "11"),
    "window": (-1, 20, 4),
    "sink": ("off", "sink", "smooth"),
    "batch": (2, 1, 3),
    "kv_heads": (2, 1),
    "cache": ("same", "other", "int8", "int4"),
    "quant": ("tensor", "channel"),
    "dtype": ("f32", "f16"),
    "ragged": (True, False),
    "packed": (False, True),
    "position_ids": (False, True),
    "softcap": (0.0, 2.0),
    "causal": (1, 0),
    "output_qk": (0, 2),
    "in_place": (False, True),
}  # fmt: skip
"""What ORT's CPU EP refuses: Q/K norm, and a chunk with batch > 1."""

_QUANTIZED: dict[str, Sequence[Any]] = {
    "phase": (
        "decode_static", "prompt_empty", "chunk", "decode", "prompt_static", "chunk_static",
        "chunk_queries", "shared", "shared_prompt", "single",
    ),
    "head_size": (64, 32, 128, 16, 80, 96, 256),
    "length": (33, 5, 70, 17, 130),
    "rotary": ("off", "half", "interleaved", "half_partial"),
    "bias": ("off", "BN", "11"),
    "window": (-1, 20, 4),
    "group": (2, 1, 4),
    "batch": (2, 1, 3),
    "cache": ("int8", "int4"),
    "quant": ("tensor", "channel"),
    "sink": ("off", "sink", "smooth"),
    "dtype": ("f32", "f16"),
    "kv_heads": (2, 1),
    "output_qk": (0, 2),
    "ragged": (True, False),
    "packed": (False, True),
    "position_ids": (False, True),
    "softcap": (0.0, 2.0),
    "scale": ("default", "given"),
    "causal": (1, 0),
    "in_place": (False, True),
}  # fmt: skip

_WINDOW_CACHE: dict[str, Sequence[Any]] = {
    "phase": ("decode_static", "chunk_static", "prompt_static"),
    "length": (33, 5, 17, 70),
    "window": (4, 16, 9),
    "window_extra": (0, 3, 12),
    "head_size": (32, 64, 128),
    "rotary": ("half", "off", "interleaved_partial"),
    "bias": ("off", "BN", "11"),
    "cache": ("same", "int8", "int4"),
    "quant": ("tensor", "channel"),
    "group": (2, 1, 4),
    "batch": (2, 1, 3),
    "dtype": ("f32", "f16"),
    "sink": ("off", "sink"),
    "softcap": (0.0, 2.0),
    "ragged": (True, False),
    "packed": (False, True),
    "in_place": (False, True),
}  # fmt: skip


_ON_CARD = (
    GqaConfig(phase="prompt", head_size=64, length=70, causal=0),
    GqaConfig(phase="prompt", head_size=32, length=130, window=20, batch=2),
    GqaConfig(phase="prompt", head_size=40, length=5, dtype="f16"),
    GqaConfig(phase="prompt_static", head_size=80, length=130, batch=2, ragged=True),
    GqaConfig(phase="prompt_static", head_size=64, length=70, bias="BN", batch=2),
    GqaConfig(phase="prompt_static", head_size=64, length=70, rotary="half", group=4),
    GqaConfig(phase="prompt_static", head_size=32, length=47, softcap=2.0),
    GqaConfig(phase="prompt_static", head_size=64, length=70, sink="sink", window=20),
    GqaConfig(phase="prompt_static", head_size=32, length=70, bias="1N", sink="sink"),
    GqaConfig(phase="prompt_static", head_size=64, length=130, dtype="f16", group=1),
    GqaConfig(phase="prompt_static", head_size=128, length=70, dtype="f16", rotary="half"),
    GqaConfig(phase="chunk_static", head_size=96, length=70, dtype="f16", rotary="half"),
    GqaConfig(phase="chunk", head_size=64, length=130, rotary="half", group=4),
    GqaConfig(phase="decode_static", head_size=64, length=130, in_place=True, batch=2, ragged=True),
    GqaConfig(phase="decode_static", head_size=128, length=70, in_place=True, rotary="half",
              dtype="f16"),
    GqaConfig(phase="chunk_static", head_size=64, length=70, in_place=True, rotary="half"),
    GqaConfig(phase="prompt_static", head_size=32, length=47, in_place=True, batch=2, ragged=True),
    GqaConfig(phase="decode_static", head_size=64, length=70, window=16, window_extra=12,
              rotary="half"),
    GqaConfig(phase="chunk_static", head_size=32, length=70, window=16, window_extra=3),
    GqaConfig(phase="decode_static", head_size=64, length=130, cache="int8", quant="channel",
              batch=2, ragged=True),
    GqaConfig(phase="chunk_static", head_size=64, length=70, cache="int8", rotary="half"),
    GqaConfig(phase="prompt_empty", head_size=64, length=70, cache="int4", quant="channel",
              rotary="half"),
)  # fmt: skip
"""Calls that a kernel card describes: each of its variants has one, on some route."""


_SEEDED_BUGS = (
    # more shares of the keys than attention_merge has lanes for a column
    GqaConfig(phase="decode_static", head_size=256, kv_heads=1, group=1, length=700),
    # more columns than attention_merge has lanes
    GqaConfig(phase="decode_static", head_size=320, kv_heads=1, group=1, length=150),
    # a weight of 0 does not hide what a key that nobody sees has for a value
    GqaConfig(phase="decode_static", head_size=64, length=33, batch=2, ragged=True, in_place=True,
              stale="nan"),
    GqaConfig(phase="chunk_static", head_size=40, length=17, dtype="f16", in_place=True,
              stale="nan"),
    GqaConfig(phase="chunk_static", head_size=64, length=70, kv_heads=1, bias="BN", in_place=True,
              stale="nan"),
    GqaConfig(phase="prompt_static", head_size=32, length=47, group=3, in_place=True, stale="nan"),
    # weights underflow, or overflow, where the reference of a row is not the maximum that it sees
    GqaConfig(phase="chunk_static", head_size=64, length=14, loud=300.0),
    GqaConfig(phase="prompt_static", head_size=32, length=70, loud=300.0, dtype="f16"),
    GqaConfig(phase="prompt_static", head_size=64, length=70, bias="BN", shift=-150.0),
    GqaConfig(phase="decode_static", head_size=32, length=130, bias="BN", shift=-150.0),
    # a window of more keys than a tile has: tiles that some rows see whole, and others in part
    GqaConfig(phase="prompt", head_size=32, length=130, kv_heads=1, window=70),
    GqaConfig(phase="chunk_static", head_size=64, length=161, kv_heads=1, window=130),
    # in attention_flash_matrix references of all rows move with key 33, the second of a tile
    GqaConfig(phase="prompt", head_size=64, length=34, dtype="f16", causal=0, loud=20.0),
    # a bias of whole groups of four, from each of the four columns on that key 0 may be at
    GqaConfig(phase="decode_static", head_size=32, length=43, dtype="f16", window=13,
              window_extra=0, bias="BN", batch=4, ragged=True),
)  # fmt: skip
"""Calls without which a seeded bug lives (tests/mutations.py)."""


def generated_gqa_cases(level: str) -> list[Case]:
    """All generated GroupQueryAttention cases of a level."""
    rotations = range(_FULL_ROTATIONS if level == "full" else 1)
    cases: dict[str, Case] = {}
    for part, parameters in enumerate((_FLOAT, _BEYOND_ORT, _QUANTIZED, _WINDOW_CACHE)):
        for rotation in rotations:
            rows = pairwise(parameters, _valid, rotation)
            for i, row in enumerate(rows):
                config = GqaConfig(**row)
                cases.setdefault(config.name(), config.case(10_000 * part + 1000 * rotation + i))
    for i, config in enumerate(_ON_CARD):
        cases.setdefault(config.name(), config.case(90_000 + i))
    for i, config in enumerate(_SEEDED_BUGS):
        cases.setdefault(config.name(), config.case(95_000 + i))
    return list(cases.values())


def _valid(row: Mapping[str, Any]) -> bool:
    """Whether a partial configuration can still become one that the contract allows."""
    return all(rule(row) for rule in _RULES)


def _batch_fits(row: Mapping[str, Any]) -> bool:
    phase, batch = row.get("phase", ""), row.get("batch")
    if batch is None:
        return True
    if phase in ("chunk", "chunk_static"):
        return batch == 1
    return batch > 1 or not (phase == "chunk_batched" or row.get("ragged", False))


def _rotary_fits(row: Mapping[str, Any]) -> bool:
    rotary, size = row.get("rotary", "off"), row.get("head_size", 32)
    if rotary == "off":
        return not (row.get("position_ids", False) and "rotary" in row)
    return size % 16 == 0 and (size >= 32 or not rotary.endswith("partial"))


def _phase_fits(row: Mapping[str, Any]) -> bool:
    phase = row.get("phase", "")
    ragged = row.get("ragged", False)
    if phase.startswith("shared"):
        if row.get("packed", False) or row.get("norm", "off") != "off":
            return False
    elif not row.get("presents", True) and phase not in ("", "prompt"):
        return False
    if phase == "chunk_queries" and not row.get("causal", 1):
        return False
    if phase in ("single", "chunk", "chunk_static") and ragged:
        return False
    if phase == "prompt" and row.get("cache", "same") != "same":
        return False
    return not (row.get("in_place", False) and phase in _GROWING)


_GROWING = ("prompt", "prompt_empty", "decode", "chunk", "chunk_batched")
"""Phases whose present has more rows than the past, so that they cannot share storage."""


def _window_fits(row: Mapping[str, Any]) -> bool:
    window, causal = row.get("window", -1), row.get("causal", 1)
    if window >= 0 and not causal:
        return False
    # A right-padded prompt needs the full cache: ORT refuses it for a window cache.
    ring = row.get("window_extra", -1) >= 0
    return not (ring and row.get("phase") == "prompt_static" and row.get("ragged", False))


def _presents_fit(row: Mapping[str, Any]) -> bool:
    return row.get("presents", True) or not (row.get("in_place", False) or row.get("output_qk", 0))


def _work_fits(row: Mapping[str, Any]) -> bool:
    length, phase = row.get("length", 5), row.get("phase", "decode")
    new = length if "prompt" in phase else 18 if phase.startswith("chunk") else 1
    heads = row.get("group", 1) * row.get("kv_heads", 1) * row.get("batch", 1)
    return 2 * new * (length + new) * heads * row.get("head_size", 8) <= MAX_WORK


_RULES = (
    _batch_fits,
    _rotary_fits,
    _phase_fits,
    _window_fits,
    _presents_fit,
    _work_fits,
)
