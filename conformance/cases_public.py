"""Cases from public reports and from measured corners of ORT, each with its source.

`source` "public case X" is an entry of shared/cases/public-cases.md, "ort-semantics X" a section of
shared/contract/ort-semantics.md. The triggers are retold; data is fresh where the report's is not
the point.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ort_webgpu.conformance.case import OPERATORS, Array, Case
from ort_webgpu.conformance.cases_dmmha import DmmhaConfig
from ort_webgpu.conformance.cases_gqa import GqaConfig, rotary_tables
from ort_webgpu.conformance.cases_packed import PackedConfig

__all__ = ["gqa", "public_cases", "with_changes"]

_GQA_INPUTS = OPERATORS["GroupQueryAttention"][0]


def gqa(
    name: str,
    source: str,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 8,
    new: int = 1,
    past: int | None = None,
    lengths: tuple[int, ...] | None = None,
    total: int | None = None,
    dtype: Any = np.float32,
    features: tuple[str, ...] = (),
    attributes: dict[str, Any] | None = None,
    presents: bool = True,
    seed: int = 0,
    **inputs: Array | None,
) -> Case:
    """A GroupQueryAttention case with random q, k, v and past; `inputs` override by name.

    `lengths` are T_b (default: past + new for one sequence), `total` their maximum by default.
    """
    rng = np.random.default_rng([seed, 19])
    lengths = lengths or ((past or 0) + new,)
    total = max(lengths) if total is None else total
    batch = len(lengths)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(dtype)

    data: dict[str, Array | None] = {
        "query": normal(batch, new, heads * head_size),
        "key": normal(batch, new, kv_heads * head_size),
        "value": normal(batch, new, kv_heads * head_size),
        "seqlens_k": np.array(lengths, np.int32) - 1,
        "total_sequence_length": np.array(total, np.int32),
    }
    if past is not None:
        shape = (batch, kv_heads, past, head_size)
        data["past_key"], data["past_value"] = normal(*shape), normal(*shape)
    data.update(inputs)
    return Case(
        name=name,
        op_type="GroupQueryAttention",
        attributes={"num_heads": heads, "kv_num_heads": kv_heads, **(attributes or {})},
        inputs=tuple(data.get(n) for n in _GQA_INPUTS),
        wanted=(True, presents, presents, bool((attributes or {}).get("qk_output"))),
        features=frozenset({"f16" if dtype == np.float16 else "f32", "literal", *features}),
        source=source,
        seed=seed,
        symbolic=seed % 2 == 0,
    )


def with_changes(case: Case, name: str, source: str, **inputs: Array | None) -> Case:
    """`case` under a new name with some inputs (by name) replaced."""
    names = OPERATORS[case.op_type][0]
    data = dict(zip(names, case.inputs, strict=False)) | inputs
    return replace(
        case,
        name=name,
        source=source,
        inputs=tuple(data.get(n) for n in names),
        baked=frozenset(),
    )


def public_cases(level: str) -> list[Case]:
    """All of them; "full" has the whole table of N8."""
    makers = (_overflow, _masks, _windows, _heads, _shapes, _shared_kv, _caches, _corners)
    cases = [case for make in makers for case in make()]
    cases += _rotary(level)
    return [*cases, *_dmmha(), *_packed()]


def _normal(seed: int, *shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng([seed, 23]).standard_normal(shape).astype(dtype)


def _overflow() -> Iterator[Case]:
    """N1: the raw dot product exceeds float16. N11: an infinity stays in its own kv group."""
    plans = [(512, 16.0, None), (512, 12.0, 1.0), (64, 40.0, None), (128, 60.0, 0.0883883)]
    for head_size, value, scale in plans:
        filled = np.full((1, 6, 8 * head_size), value, np.float16)
        yield gqa(
            f"gqa-f16-overflow-h{head_size}-v{value:g}",
            "public case N1",
            heads=8,
            kv_heads=8,
            head_size=head_size,
            new=6,
            dtype=np.float16,
            features=("prompt", "overflow", f"h{head_size}"),
            attributes={} if scale is None else {"scale": scale},
            query=filled,
            key=filled.copy(),
        )
    infinite = GqaConfig(phase="decode", head_size=32, cache="int8").case(81)
    key = infinite.require("key").copy()
    key[0, 0, 3], key[0, 0, 5] = -np.inf, np.inf
    yield replace(
        infinite,
        name="gqa-f32-int8-infinite-key",
        source="seeded bug: an infinity quantized as NaN is",
        inputs=(infinite.inputs[0], key, *infinite.inputs[2:]),
    )
    for new, past in ((5, None), (1, 9)):
        for dtype in (np.float32, np.float16):
            label = "f16" if dtype == np.float16 else "f32"
            yield gqa(
                f"gqa-{label}-h512-s{new}p{past or 0}",
                "generated",
                head_size=512,
                new=new,
                past=past,
                dtype=dtype,
                features=("h512", "decode" if past else "prompt"),
            )
    case = gqa("gqa-f32-inf-in-key", "public case N11", past=5, features=("decode", "nonfinite"))
    past_key = case.require("past_key").copy()
    past_key[0, 0, 2, 3] = np.inf
    yield with_changes(case, case.name, case.source, past_key=past_key)
    yield gqa(
        "gqa-f16-largest-values",
        "ort-semantics 5",
        new=3,
        past=6,
        dtype=np.float16,
        features=("chunk", "overflow"),
        value=np.full((1, 3, 16), 65504, np.float16),
        past_value=np.full((1, 2, 6, 8), 65504, np.float16),
    )


def _masks() -> Iterator[Case]:
    """N3: softcap before bias. N4: wholly and partly masked rows. N5: sinks."""
    rng = np.random.default_rng([3, 29])
    case = gqa(
        "gqa-f32-softcap-then-bias",
        "public case N3",
        new=2,
        past=8,
        features=("chunk", "softcap", "bias"),
        attributes={"softcap": 2.0},
        attention_bias=(3 * rng.standard_normal((1, 1, 2, 10))).astype(np.float32),
    )
    stronger: dict[str, Array | None] = {
        name: 5 * case.require(name) for name in ("query", "key", "past_key")
    }
    yield with_changes(case, case.name, case.source, **stronger)
    lowest = float(np.finfo(np.float32).min)
    for label, value in (("inf", -np.inf), ("lowest", lowest), ("1e4", -1e4)):
        for sink in (False, True):
            yield gqa(
                f"gqa-f32-bias-all-{label}{'-sink' if sink else ''}",
                "public case N4",
                past=16,
                features=("decode", "bias", "masked_row", "mask_addition")[: 3 + (label == "1e4")],
                attention_bias=np.full((1, 1, 1, 17), value, np.float32),
                head_sink=_normal(4, 4) if sink else None,
            )
    prefix = _normal(5, 1, 4, 2, 150)
    prefix[:, :, 0, :75] = -np.inf
    prefix[:, 1::2, 1, 70:] = -np.inf
    for dtype in (np.float32, np.float16):
        label = "f16" if dtype == np.float16 else "f32"
        yield gqa(
            f"gqa-{label}-bias-partly-inf",
            "ort-semantics 5",
            new=2,
            past=148,
            dtype=dtype,
            features=("chunk", "bias", "masked_row"),
            attention_bias=prefix.astype(dtype),
        )
    yield gqa(
        "gqa-f32-sink-chunk",
        "public case N5",
        new=2,
        past=8,
        features=("chunk", "sink"),
        head_sink=np.array([2, -1, 0.5, 8], np.float32),
    )
    yield gqa(
        "gqa-f32-sink-far",
        "seeded bug: exponentials taken from the lesser of maximum and sink overflow",
        new=2,
        past=8,
        features=("chunk", "sink"),
        head_sink=np.array([120, -120, 95, -95], np.float32),
    )
    yield gqa(
        "gqa-f32-smooth-chunk",
        "public case N5",
        new=2,
        past=8,
        features=("chunk", "smooth"),
        attributes={"smooth_softmax": 1},
    )


def _windows() -> Iterator[Case]:
    """N6: key tiles wholly outside the window. N7: the window moves with the query row."""
    yield gqa(
        "gqa-f32-window4-p255",
        "public case N6",
        past=255,
        features=("decode", "window"),
        attributes={"local_window_size": 4},
    )
    yield gqa(
        "gqa-f32-window2-s4p255",
        "public case N6",
        new=4,
        past=255,
        features=("chunk", "window"),
        attributes={"local_window_size": 2},
    )
    for window in (-2, -1, 0, 1, 2, 4):
        yield gqa(
            f"gqa-f32-window{window}-s2p8",
            "public case N7",
            new=2,
            past=8,
            features=("chunk", "window"),
            attributes={"local_window_size": window},
        )


def _rotary(level: str) -> Iterator[Case]:
    """N8: interleaved and half, full and partial; present keys are the rotated ones."""
    for interleaved in (0, 1):
        for width in (16, 8):
            yield _rotary_case(4, 32, 3, 4, interleaved, width)
    table = [(new, past) for new in (1, 3, 4, 16) for past in (0, 16, 20, 32, 64)]
    for new, past in table if level == "full" else table[::4]:
        yield _rotary_case(2, 16, new, past, 1, 8)


def _rotary_case(
    heads: int, head_size: int, new: int, past: int, interleaved: int, width: int
) -> Case:
    cos, sin = rotary_tables(new + past + 3, width, np.float32)
    style = "interleaved" if interleaved else "half"
    return gqa(
        f"gqa-f32-{style}-h{head_size}w{width}-s{new}p{past}",
        "public case N8",
        heads=heads,
        head_size=head_size,
        new=new,
        past=past,
        features=("rotary", style),
        attributes={"do_rotary": 1, "rotary_interleaved": interleaved},
        cos_cache=cos,
        sin_cache=sin,
    )


def _heads() -> Iterator[Case]:
    """N9: default scale of packed QKV. N10: which kv head serves a head. L2: many rows."""
    yield gqa(
        "gqa-f32-packed-scale-n40k10h128",
        "public case N9",
        heads=40,
        kv_heads=10,
        head_size=128,
        new=4,
        features=("prompt", "packed_qkv"),
        query=_normal(9, 1, 4, 7680),
        key=None,
        value=None,
    )
    for heads, kv_heads in ((12, 12), (32, 8), (28, 4)):
        constant = np.repeat(np.arange(1, kv_heads + 1), 8).astype(np.float32)
        yield gqa(
            f"gqa-f32-head-map-n{heads}k{kv_heads}",
            "public case N10",
            heads=heads,
            kv_heads=kv_heads,
            new=3,
            features=("prompt", "grouped"),
            value=np.tile(constant, (1, 3, 1)),
        )
    yield gqa(
        "gqa-f32-70000-rows",
        "public case L2",
        heads=7000,
        kv_heads=1,
        new=10,
        features=("prompt", "grouped", "many_rows"),
    )


def _shapes() -> Iterator[Case]:
    """S2, S3, S5, S7, S8, S10, S11: lengths and broadcasts that were read wrong."""
    one: dict[str, Any] = {"heads": 1, "kv_heads": 1}
    yield gqa("gqa-f32-static-last-row", "public case S2", past=4, lengths=(4,), **one)
    yield gqa("gqa-f32-static-second-row", "public case S2", past=4, lengths=(2,), **one)
    cos, sin = rotary_tables(16, 16, np.float32)
    yield gqa("gqa-f32-ragged-prompt", "public case S3", new=6, lengths=(6, 3, 1), head_size=32)
    yield gqa(
        "gqa-f32-ragged-prompt-rotary",
        "public case S3",
        new=6,
        lengths=(6, 3, 1),
        head_size=32,
        features=("prompt", "ragged", "rotary"),
        attributes={"do_rotary": 1},
        cos_cache=cos,
        sin_cache=sin,
    )
    yield gqa("gqa-f32-empty-past", "public case S5", new=4, past=0, features=("prompt",))
    for first, second in ((1, 1), (2, 1), (1, 4), (2, 4)):
        yield gqa(
            f"gqa-f32-bias-{first}x{second}",
            "public case S7",
            past=16,
            lengths=(17, 17),
            features=("decode", "bias"),
            attention_bias=_normal(first + second, first, second, 1, 17),
        )
    yield gqa(
        "gqa-f32-bias-narrower-than-cache",
        "public case S8",
        past=32,
        lengths=(17,),
        features=("decode", "bias"),
        attention_bias=_normal(8, 1, 1, 1, 17),
    )
    yield gqa("gqa-f32-chunk-s3p4", "public case S10", new=3, past=4, features=("chunk",))
    yield gqa(
        "gqa-f32-chunk-s3p4-b2",
        "public case S10",
        new=3,
        past=4,
        lengths=(7, 7),
        features=("chunk", "chunk_batched"),
    )
    yield gqa("gqa-f32-output-only", "public case S11", new=4, presents=False)


def _shared_kv() -> Iterator[Case]:
    """S6: layers that bring no new keys."""
    for new, past, heads, kv_heads, head_size in (
        (1, 8, 2, 1, 8),
        (8, 8, 2, 1, 8),
        (1, 4, 8, 1, 16),
    ):
        empty = np.zeros((1, 0, kv_heads * head_size), np.float32)
        for presents in (True, False):
            yield gqa(
                f"gqa-f32-shared-s{new}p{past}n{heads}{'' if presents else '-nopresent'}",
                "public case S6",
                heads=heads,
                kv_heads=kv_heads,
                head_size=head_size,
                new=new,
                past=past,
                lengths=(past,),
                features=("shared",),
                presents=presents,
                key=empty,
                value=empty.copy(),
            )


def _caches() -> Iterator[Case]:
    """A1: present grows by one. A3: capacity is not length. A4: stale rows do not leak."""
    for past in (16, 1, 2):
        yield gqa(
            f"gqa-f32-grow-{past}", "public case A1", past=past, head_size=32, features=("decode",)
        )
    yield gqa(
        "gqa-f32-capacity-kept",
        "public case A3",
        new=4,
        past=32,
        lengths=(4,),
        features=("prompt",),
    )
    case = gqa("gqa-f32-stale-nan", "public case A4", past=32, lengths=(17,), features=("decode",))
    stale = {}
    for name in ("past_key", "past_value"):
        stale[name] = case.require(name).copy()
        stale[name][:, :, 16:] = np.nan
    yield with_changes(case, case.name, case.source, **stale)


def _corners() -> Iterator[Case]:
    """What ORT accepts in silence, with the meaning that it gives."""
    yield gqa("gqa-f32-total-too-small", "ort-semantics 2.1", past=8, lengths=(6,), total=4)
    yield gqa("gqa-f32-single-length-ignored", "ort-semantics 2.1", past=8, lengths=(4,), total=1)
    yield gqa(
        "gqa-f32-seqlens-1xB",
        "ort-semantics 1.1",
        past=6,
        lengths=(7, 4),
        seqlens_k=np.array([[6, 3]], np.int32),
    )
    ignored: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": -2.0},
        "smooth": {"smooth_softmax": 2},
        "window": {"local_window_size": -7},
        "scale": {"scale": -0.0},
    }
    for label, attributes in ignored.items():
        yield gqa(
            f"gqa-f32-ignored-{label}", "ort-semantics 1.1", new=3, past=5, attributes=attributes
        )
    cos, sin = rotary_tables(20, 8, np.float32)
    yield gqa(
        "gqa-f32-unused-tables",
        "ort-semantics 2.6",
        head_size=16,
        past=5,
        cos_cache=cos,
        sin_cache=sin,
    )
    yield gqa(
        "gqa-f32-prompt-ids-first-only",
        "ort-semantics 2.6",
        head_size=16,
        new=3,
        lengths=(3, 2),
        features=("prompt", "rotary", "position_ids"),
        attributes={"do_rotary": 1},
        cos_cache=cos,
        sin_cache=sin,
        position_ids=np.array([[4, 9, 0], [7, 1, 1]], np.int64),
    )
    scaled = GqaConfig(cache="int8", quant="channel", phase="decode_static", head_size=16).case(1)
    zero = scaled.require("k_scale").copy()
    zero.reshape(-1)[3] = 0
    yield with_changes(scaled, "gqa-f32-int8-scale-zero", "ort-semantics 2.9", k_scale=zero)


def _dmmha() -> Iterator[Case]:
    """DM2: beams. DM3: cross attention. DM4: bias dimensions. Masks below zero."""
    source = "public case DM2"
    beams = DmmhaConfig(beams=2, length=5, head_size=8).case(1)
    rows = np.array([[[0, 1, 0, 1, 0, 0, 0, 0], [1, 1, 0, 0, 1, 0, 0, 0]]], np.int32)
    yield with_changes(beams, "dmmha-beams-literal", source, cache_indirection=rows)
    cross = DmmhaConfig(kind="cross", groups=2, head_size=8, length=7).case(2)
    yield replace(cross, name="dmmha-cross-literal", source="public case DM3")
    for bias in ("11", "1N", "BN", "B1"):
        case = DmmhaConfig(groups=2, head_size=8, attention_bias=bias).case(3)
        yield replace(case, name=f"dmmha-bias-{bias}", source="public case DM4")
    negative = np.array([[1, -1, 2, 0, 1, 1], [1, 1, -3, 1, 0, 1]], np.int32)
    for label, case in (
        ("plain", DmmhaConfig(groups=2, head_size=8).case(4)),
        ("beams", DmmhaConfig(beams=2, head_size=8).case(5)),
    ):
        name = f"dmmha-negative-mask-{label}"
        yield with_changes(case, name, "ort-semantics 3.1", mask_index=negative)


def _packed() -> Iterator[Case]:
    """P1: batch comes from token_offset; sequences do not see one another."""
    case = PackedConfig(lengths=(2, 2), slack=2, head_size=2, input_size=4).case(1)
    offsets = np.array([[0, 1, 4, 5], [2, 3, 6, 7]], np.int32)
    yield with_changes(case, "packed-two-windows", "public case P1", token_offset=offsets)
