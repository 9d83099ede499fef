"""GroupQueryAttention cases from a readable configuration: `GqaConfig(...).case(seed)`.

Inputs are fresh random data from the seed. Lengths differ across the batch, rows of a past that
nobody may read hold large garbage, and nothing is zero where zero would hide an error.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ort_webgpu.conformance.case import Array, Case
from ort_webgpu.conformance.oracle_numpy_gqa import ambiguous_bytes

__all__ = ["PHASES", "GqaConfig", "Lengths", "rotary_tables"]

PHASES = (
    "prompt",  # no past
    "prompt_empty",  # past with a zero dimension
    "prompt_static",  # past with room to spare, to be ignored
    "single",  # S == TT == 1 with a static past: a first prompt of one token
    "decode",  # dynamic past, one new token
    "decode_static",
    "chunk",  # several new tokens after a dynamic past, batch 1
    "chunk_static",
    "chunk_batched",  # the same with batch > 1, which ORT's CPU EP refuses
    "chunk_queries",  # ragged chunk with query_seqlens
    "shared",  # no new keys, one query
    "shared_prompt",  # no new keys, S == TT
)
GARBAGE = 50.0
_BAKEABLE = frozenset({7, 8, 11, 12, 13, 14, 15})
_CHUNKS = (3, 5, 18)


@dataclass(frozen=True)
class Lengths:
    """S, TT, past rows (None: no past), T_b, Q_b (None: no query_seqlens), new key rows."""

    new: int
    total: int
    capacity: int | None
    lengths: tuple[int, ...]
    queries: tuple[int, ...] | None = None
    new_keys: int | None = None


@dataclass(frozen=True, kw_only=True)
class GqaConfig:
    """What a generated case looks like. Defaults are the plainest values.

    dtype "f32"/"f16"; cache "same"/"other"/"int8"/"int4"; quant "tensor"/"channel"; rotary
    "off"/"half"/"interleaved"/"half_partial"/"interleaved_partial"; bias "off" or the broadcast
    ("11", "B1", "1N", "BN"); sink "off"/"sink"/"smooth"/"both"; scale "default"/"given"/"negative";
    norm "off"/"one"/"each"; window -1 is off; window_extra >= 0 makes a sliding_window_cache of
    capacity window + window_extra; stale "large"/"nan" is in rows of the past that nobody may read;
    loud multiplies the last key, which only the last query sees; shift is added to every bias.
    """

    dtype: str = "f32"
    head_size: int = 16
    group: int = 2
    kv_heads: int = 2
    batch: int = 1
    phase: str = "prompt"
    length: int = 17
    ragged: bool = False
    packed: bool = False
    rotary: str = "off"
    position_ids: bool = False
    window: int = -1
    softcap: float = 0.0
    bias: str = "off"
    sink: str = "off"
    scale: str = "default"
    norm: str = "off"
    causal: int = 1
    output_qk: int = 0
    presents: bool = True
    cache: str = "same"
    quant: str = "tensor"
    in_place: bool = False
    window_extra: int = -1
    stale: str = "large"
    loud: float = 1.0
    shift: float = 0.0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def bits(self) -> int:
        return {"int8": 8, "int4": 4}.get(self.cache, 0)

    def features(self) -> frozenset[str]:
        """Words for what the case exercises."""
        kind = self.phase.split("_")[0].replace("single", "prompt")
        words = {self.dtype, kind, self.phase, f"h{self.head_size}"}
        flags = {
            "ragged": self.ragged,
            "packed_qkv": self.packed,
            "rotary": self.rotary != "off",
            "interleaved": self.rotary.startswith("interleaved"),
            "partial": self.rotary.endswith("partial"),
            "position_ids": self.position_ids,
            "window": self.window >= 0,
            "softcap": self.softcap > 0,
            "bias": self.bias != "off",
            "sink": self.sink in ("sink", "both"),
            "smooth": self.sink in ("smooth", "both"),
            "scale": self.scale != "default",
            "norm": self.norm != "off",
            "bidirectional": not self.causal,
            "output_qk": self.output_qk > 0,
            "no_present": not self.presents,
            "mixed_cache": self.cache == "other",
            self.cache: self.bits > 0,
            f"per_{self.quant}": self.bits > 0,
            "in_place": self.in_place,
            "window_cache": self.window_extra >= 0,
            "stale_nan": self.stale == "nan",
            "large_scores": self.loud != 1.0 or self.shift != 0.0,
            "batch": self.batch > 1,
            "grouped": self.group > 1,
        }
        return frozenset(words | {word for word, on in flags.items() if on})

    def name(self) -> str:
        """The configuration as text; defaults are left out."""
        parts = [
            f"gqa-{self.dtype}-{self.phase}{self.length}-b{self.batch}n{self.heads}"
            f"k{self.kv_heads}h{self.head_size}"
        ]
        named = {
            "ragged": self.ragged,
            "packed": self.packed,
            "ids": self.position_ids,
            "causal0": not self.causal,
            "nopresent": not self.presents,
            "inplace": self.in_place,
            f"window{self.window}": self.window >= 0,
            f"ring{self.window + self.window_extra}": self.window_extra >= 0,
            f"softcap{self.softcap:g}": self.softcap > 0,
            f"qk{self.output_qk}": self.output_qk > 0,
            f"{self.cache}": self.cache != "same",
            f"{self.quant}": self.bits > 0,
            "stale_nan": self.stale == "nan",
            f"loud{self.loud:g}": self.loud != 1.0,
            f"shift{self.shift:g}": self.shift != 0.0,
        }
        parts += [word for word, on in named.items() if on]
        for word in ("rotary", "bias", "sink", "scale", "norm"):
            value = getattr(self, word)
            if value not in ("off", "default"):
                parts.append(value if word in ("rotary", "sink") else f"{word}_{value}")
        return "-".join(parts)

    def case(self, seed: int, source: str = "generated") -> Case:
        """The case with random inputs of this seed."""
        return _Builder(self, seed).case(source)

    def plan(self, rng: np.random.Generator) -> Lengths:
        """Lengths of every batch entry; the first one is the longest."""
        n = self.length
        if self.window_extra >= 0:
            return self._window_cache_plan(rng)
        chunk = _CHUNKS[n % 3]
        spread = self._spread
        plans = {
            "prompt": lambda: Lengths(n, n, None, spread(rng, 1, n)),
            "prompt_empty": lambda: Lengths(n, n, 0, spread(rng, 1, n)),
            "prompt_static": lambda: Lengths(n, n, n + 7, spread(rng, 1, n)),
            "single": lambda: Lengths(1, 1, n, (1,) * self.batch),
            "decode": lambda: Lengths(1, n + 1, n, spread(rng, 1, n + 1)),
            "decode_static": lambda: Lengths(1, n, n + 9, spread(rng, 1, n)),
            "chunk": lambda: Lengths(chunk, n + chunk, n, (n + chunk,)),
            "chunk_static": lambda: Lengths(chunk, n + chunk, n + chunk + 6, (n + chunk,)),
            "chunk_batched": lambda: Lengths(chunk, n + chunk, n, spread(rng, chunk, n + chunk)),
            "chunk_queries": lambda: self._queries_plan(rng, chunk),
            "shared": lambda: Lengths(1, n, n + 3, spread(rng, 1, n), new_keys=0),
            "shared_prompt": lambda: Lengths(n, n, n, spread(rng, 1, n), new_keys=0),
        }
        return plans[self.phase]()

    def _queries_plan(self, rng: np.random.Generator, chunk: int) -> Lengths:
        lengths = self._spread(rng, chunk, self.length + chunk)
        queries = tuple(int(rng.integers(0, chunk + 1)) for _ in range(self.batch - 1))
        total = self.length + chunk
        return Lengths(chunk, total, total + chunk, lengths, (chunk, *queries))

    def _window_cache_plan(self, rng: np.random.Generator) -> Lengths:
        n, capacity = self.length, self.window + self.window_extra
        new = {"prompt_static": n, "decode_static": 1, "chunk_static": _CHUNKS[n % 3]}[self.phase]
        total = n if new == n else n + new
        return Lengths(new, total, capacity, self._spread(rng, new if new < n else 1, total))

    def _spread(self, rng: np.random.Generator, low: int, high: int) -> tuple[int, ...]:
        """`high` first, then unequal smaller lengths (or `high` for all when not ragged)."""
        if not self.ragged:
            return (high,) * self.batch
        others = rng.permutation(np.arange(low, high))[: self.batch - 1]
        return (high, *(int(x) for x in others))


def rotary_tables(rows: int, width: int, dtype: Any) -> tuple[Array, Array]:
    """cos and sin (rows, width), frequencies 10000^(-i/width)."""
    angles = np.arange(rows)[:, None] * 10000.0 ** (-np.arange(width) / width)
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


class _Builder:
    """Makes the inputs of one configuration, in input order."""

    def __init__(self, config: GqaConfig, seed: int) -> None:
        self.config = config
        self.seed = seed
        self.rng = np.random.default_rng([seed, 7])
        self.dtype = np.dtype(np.float16 if config.dtype == "f16" else np.float32)
        self.plan = config.plan(self.rng)

    def case(self, source: str) -> Case:
        c = self.config
        inputs: list[Array | None] = [None] * 17
        inputs[0], inputs[1], inputs[2] = self._qkv()
        inputs[3], inputs[4] = self._past("key"), self._past("value")
        lengths = np.array(self.plan.lengths, np.int32) - 1
        inputs[5] = lengths.reshape(-1, 1) if self.seed % 7 == 0 else lengths
        inputs[6] = np.array([self.plan.total] if self.seed % 2 else self.plan.total, np.int32)
        if c.rotary != "off":
            inputs[7], inputs[8] = self._tables()
        if c.position_ids:
            inputs[9] = self._position_ids()
        if c.bias != "off":
            inputs[10] = self._bias()
        if c.sink in ("sink", "both"):
            inputs[11] = self._normal(c.heads)
        if c.bits:
            inputs[12], inputs[13] = self._scales(), self._scales()
        if c.norm != "off":
            inputs[14], inputs[15] = self._norm_weight(), self._norm_weight()
        if self.plan.queries is not None:
            inputs[16] = np.array(self.plan.queries, np.int32)
        case = self._record(inputs, source)
        return self._without_ties(case) if c.bits else case

    def _record(self, inputs: list[Array | None], source: str) -> Case:
        c = self.config
        given = {i for i, array in enumerate(inputs) if array is not None}
        baked = _BAKEABLE & given if self.seed % 3 == 0 else frozenset()
        if self.seed % 5 == 0:
            baked |= {6}
        return Case(
            name=c.name(),
            op_type="GroupQueryAttention",
            attributes=self._attributes(),
            inputs=tuple(inputs),
            wanted=(True, c.presents, c.presents, c.output_qk > 0),
            features=c.features(),
            source=source,
            seed=self.seed,
            baked=baked,
            symbolic=self.seed % 2 == 0,
            in_place=c.in_place,
        )

    def _attributes(self) -> dict[str, Any]:
        c = self.config
        attributes: dict[str, Any] = {"num_heads": c.heads, "kv_num_heads": c.kv_heads}
        root = c.head_size**-0.5
        optional = {
            "scale": {"default": None, "given": 1.3 * root, "negative": -0.8 * root}[c.scale],
            "softcap": c.softcap or None,
            "do_rotary": 1 if c.rotary != "off" else None,
            "rotary_interleaved": 1 if c.rotary.startswith("interleaved") else None,
            "local_window_size": c.window if c.window >= 0 else None,
            "smooth_softmax": 1 if c.sink in ("smooth", "both") else None,
            "causal": 0 if not c.causal else None,
            "qk_output": c.output_qk or None,
            "sliding_window_cache": 1 if c.window_extra >= 0 else None,
            "kv_cache_bit_width": c.bits or None,
            "k_quant_type": f"PER_{c.quant.upper()}" if c.bits else None,
            "v_quant_type": f"PER_{c.quant.upper()}" if c.bits else None,
            "qk_norm_epsilon": 0.02 if c.norm != "off" else None,
            "q_norm_epsilon": 0.1 if c.norm == "each" else None,
            "k_norm_epsilon": 0.3 if c.norm == "each" else None,
        }
        attributes.update({k: v for k, v in optional.items() if v is not None})
        return attributes

    def _normal(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape).astype(self.dtype)

    def _norm_weight(self) -> Array:
        spread = 0.3 * self.rng.standard_normal(self.config.head_size)
        return np.add(1, spread).astype(self.dtype)

    def _qkv(self) -> tuple[Array, Array | None, Array | None]:
        c, s = self.config, self.plan.new
        if c.packed:
            return self._normal(c.batch, s, (c.heads + 2 * c.kv_heads) * c.head_size), None, None
        rows = s if self.plan.new_keys is None else self.plan.new_keys
        shape = (c.batch, rows, c.kv_heads * c.head_size)
        query = self._normal(c.batch, s, c.heads * c.head_size)
        key, value = self._normal(*shape), self._normal(*shape)
        key[:, -1:] *= key.dtype.type(c.loud)
        return query, key, value

    def _past(self, which: str) -> Array | None:
        """The cache; rows that no query may see hold garbage."""
        c, rows = self.config, self.plan.capacity
        if rows is None:
            return None
        shape = (c.batch, c.kv_heads, rows, c.head_size)
        if c.bits == 8:
            return self.rng.integers(-128, 128, shape).astype(np.int8)
        if c.bits == 4:
            return self.rng.integers(0, 256, (*shape[:-1], c.head_size // 2)).astype(np.uint8)
        past = self._normal(*shape)
        if c.cache == "other":
            past = past.astype(np.float32 if self.dtype == np.float16 else np.float16)
        if c.window_extra < 0 and c.causal:
            for b in range(c.batch):
                past[b, :, self.plan.lengths[b] :] += past.dtype.type(
                    np.nan if c.stale == "nan" else GARBAGE
                )
        return past

    def _scales(self) -> Array:
        c = self.config
        base = 0.03 if c.bits == 8 else 0.45
        if c.quant == "tensor":
            return np.array([base * self.rng.uniform(0.7, 1.3)], np.float32)
        scales = base * self.rng.uniform(0.5, 1.5, c.kv_heads * c.head_size).astype(np.float32)
        shapes = [(-1,), (c.kv_heads, c.head_size), (1, c.kv_heads, 1, c.head_size)]
        return scales.reshape(shapes[self.seed % 3])

    def _tables(self) -> tuple[Array, Array]:
        c = self.config
        half = c.head_size // 2
        if c.rotary.endswith("partial"):
            half = max(8, half // 2 // 8 * 8)
        rows = self.plan.total + self.plan.new + 11
        return rotary_tables(rows, half, self.dtype)

    def _position_ids(self) -> Array:
        """Arbitrary positions, which differ from the default ones (int64, (B,S))."""
        rows = self.plan.total + self.plan.new + 11
        if self.plan.new == self.plan.total and self.plan.queries is None:
            offset = int(self.rng.integers(1, rows - self.plan.new))
            ids = offset + np.arange(self.plan.new)
            return np.tile(ids, (self.config.batch, 1)).astype(np.int64)
        return self.rng.integers(0, rows, (self.config.batch, self.plan.new)).astype(np.int64)

    def _bias(self) -> Array:
        c = self.config
        first = c.batch if c.bias[0] == "B" else 1
        second = c.heads if c.bias[1] == "N" else 1
        bias = self._normal(first, second, self.plan.new, self.plan.total)
        return bias + bias.dtype.type(c.shift)

    def _without_ties(self, case: Case) -> Case:
        """Redraw keys whose quantized byte would depend on the rounding of a float32 rotation."""
        rows = case.first if self.config.packed else case.require("key")
        for _ in range(40):
            unsure = ambiguous_bytes(case)
            if not unsure.any():
                return case
            fresh = self._normal(*rows.shape)
            rows[unsure] = fresh[unsure]
        raise RuntimeError(f"{case.name}: keys keep falling on rounding ties; use another seed")
