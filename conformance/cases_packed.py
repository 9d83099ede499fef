"""PackedAttention, PackedMultiHeadAttention and padding cases: `PackedConfig(...).case(seed)`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ort_webgpu.conformance.case import Array, Case
from ort_webgpu.conformance.covering import pairwise

__all__ = ["PackedConfig", "generated_packed_cases", "padding_offsets"]


@dataclass(frozen=True, kw_only=True)
class PackedConfig:
    """What a generated case looks like.

    op "attention" (PackedAttention), "mha" (separate q, k, v) or "mha_packed" (Tok,N,3,H).
    `lengths` are the sequences' tokens (0 allowed), `slack` the padded length beyond the longest;
    `v_head_size` 0 means head_size; `bias` (mha only; PackedAttention always has one);
    `scale` multiplies the default scale, 0 leaves the attribute out.
    """

    op: str = "attention"
    dtype: str = "f32"
    heads: int = 2
    head_size: int = 16
    v_head_size: int = 0
    input_size: int = 20
    lengths: tuple[int, ...] = (5, 3)
    slack: int = 0
    attention_bias: str = "off"
    bias: bool = True
    scale: float = 0.0

    @property
    def values(self) -> int:
        """Width of V."""
        return self.heads * (self.v_head_size or self.head_size)

    def features(self) -> frozenset[str]:
        """Words for what the case exercises."""
        flags = {
            "ragged": len(set(self.lengths)) > 1,
            "empty_sequence": 0 in self.lengths,
            "one_token": 1 in self.lengths,
            "slack": self.slack > 0,
            "bias": self.attention_bias != "off",
            "qkv_bias": self.bias,
            "v_width": self.v_head_size not in (0, self.head_size),
            "scale": self.scale != 0.0,
            "packed_qkv": self.op == "mha_packed",
        }
        words = {"packed", self.dtype, f"h{self.head_size}"}
        words.add("projection" if self.op == "attention" else "mha")
        return frozenset(words | {word for word, on in flags.items() if on})

    def name(self) -> str:
        """The configuration as text; defaults are left out."""
        sizes = "_".join(str(n) for n in self.lengths)
        parts = [f"packed-{self.op}-{self.dtype}-t{sizes}-n{self.heads}h{self.head_size}"]
        named = {
            f"v{self.v_head_size}": "v_width" in self.features(),
            f"in{self.input_size}": self.op == "attention",
            f"slack{self.slack}": self.slack > 0,
            f"bias_{self.attention_bias}": self.attention_bias != "off",
            "nobias": not self.bias,
            f"scale{self.scale:g}": self.scale != 0.0,
        }
        return "-".join(parts + [word for word, on in named.items() if on])

    def case(self, seed: int, source: str = "generated") -> Case:
        """The case with random inputs of this seed."""
        rng = np.random.default_rng([seed, 13])
        dtype = np.dtype(np.float16 if self.dtype == "f16" else np.float32)
        is_projection = self.op == "attention"
        attributes: dict[str, Any] = {"num_heads": self.heads}
        if self.scale:
            attributes["scale"] = self.scale * self.head_size**-0.5
        if is_projection and self.v_head_size:
            qk = self.heads * self.head_size
            attributes["qkv_hidden_sizes"] = [qk, qk, self.values]
        inputs = self._tensors(rng, dtype) + self._schedule(rng, dtype)
        return Case(
            name=self.name(),
            op_type="PackedAttention" if is_projection else "PackedMultiHeadAttention",
            attributes=attributes,
            inputs=tuple(inputs),
            features=self.features(),
            source=source,
            seed=seed,
            baked=frozenset({1, 2}) if is_projection and seed % 2 else frozenset(),
            symbolic=seed % 3 == 0,
        )

    def _tensors(self, rng: np.random.Generator, dtype: np.dtype[Any]) -> list[Array | None]:
        def normal(*shape: int, by: float = 1.0) -> Array:
            return (by * rng.standard_normal(shape)).astype(dtype)

        tokens, qk = sum(self.lengths), self.heads * self.head_size
        width = 2 * qk + self.values
        bias = normal(width, by=0.5) if self.bias else None
        if self.op == "attention":
            weights = normal(self.input_size, width, by=self.input_size**-0.5)
            return [normal(tokens, self.input_size), weights, bias]
        if self.op == "mha_packed":
            return [normal(tokens, self.heads, 3, self.head_size), None, None, bias]
        return [normal(tokens, qk), normal(tokens, qk), normal(tokens, self.values), bias]

    def _schedule(self, rng: np.random.Generator, dtype: np.dtype[Any]) -> list[Array | None]:
        padded = max(self.lengths) + self.slack
        bounds = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)
        inputs: list[Array | None] = [padding_offsets(self.lengths, padded), bounds]
        if self.attention_bias != "off":
            first = len(self.lengths) if self.attention_bias[0] == "B" else 1
            second = self.heads if self.attention_bias[1] == "N" else 1
            inputs.append(rng.standard_normal((first, second, padded, padded)).astype(dtype))
        return inputs


def padding_offsets(lengths: Sequence[int], padded: int) -> Array:
    """token_offset (B,S): padded indexes of the tokens in order, then those of the padding."""
    index = np.arange(len(lengths) * padded).reshape(len(lengths), padded)
    kept = np.arange(padded) < np.array(lengths)[:, None]
    order = np.concatenate([index[kept], index[~kept]])
    return order.reshape(len(lengths), padded).astype(np.int32)


_ATTENTION: dict[str, Sequence[Any]] = {
    "lengths": (
        (33, 70, 5), (17, 1), (130,), (0, 9, 47), (1, 1, 1, 2), (5, 0, 0, 33), (64, 64), (8,),
    ),
    "head_size": (32, 64, 6, 128, 16, 80, 40),
    "attention_bias": ("off", "BN", "11", "B1", "1N"),
    "v_head_size": (0, 24, 64, 5),
    "input_size": (48, 20, 65, 128),
    "heads": (2, 1, 4, 3),
    "slack": (0, 1, 13),
    "dtype": ("f32", "f16"),
    "scale": (0.0, 1.3),
}  # fmt: skip

_MULTI_HEAD: dict[str, Sequence[Any]] = {
    **{k: v for k, v in _ATTENTION.items() if k != "input_size"},
    "op": ("mha", "mha_packed"),
    "bias": (False, True),
}


# Seeded bugs in how padded groups of four are numbered live until head sizes leave every remainder,
# and groups of V do not divide those of Q and K; one in how an output is made dense until that is
# but two elements; one in how rows of x end until they do inside a step and a group of four.
_ODD = (
    *(
        {"op": op, "lengths": (7, 0, 18), "head_size": size, "v_head_size": width, "heads": 2}
        for op, size, width in (
            ("attention", 5, 12),
            ("attention", 7, 20),
            ("attention", 8, 12),
            ("mha", 7, 12),
        )
    ),
    {"op": "mha", "lengths": (1,), "heads": 1, "head_size": 4, "v_head_size": 2},
    {"op": "attention", "lengths": (40, 24), "head_size": 8, "input_size": 22},
)


def generated_packed_cases(level: str) -> list[Case]:
    """Covering arrays of both attention operators, and the two padding operators."""
    cases: dict[str, Case] = {}
    for part, parameters in enumerate((_ATTENTION, _MULTI_HEAD)):
        for rotation in range(3 if level == "full" else 1):
            for i, row in enumerate(pairwise(parameters, _valid, rotation)):
                config = PackedConfig(**row)
                seed = 60_000 + 2000 * part + 300 * rotation + i
                cases.setdefault(config.name(), config.case(seed))
    for i, odd in enumerate(_ODD):
        config = PackedConfig(**odd)  # type: ignore[arg-type]
        cases.setdefault(config.name(), config.case(69_000 + i))
    return [*cases.values(), *_padding_cases()]


def _valid(row: Mapping[str, Any]) -> bool:
    if row.get("op") == "mha_packed" and row.get("v_head_size", 0):
        return False
    longest = max(row.get("lengths", (1,)))
    return longest**2 * row.get("heads", 1) * row.get("head_size", 6) <= 3e6


def _padding_cases() -> list[Case]:
    """Counts of 0, the full length and beyond it (RemovePadding clamps); widths odd and even."""
    cases = []
    plans = [((1, 2, 4), 4, 3), ((5,), 5, 8), ((0, 3), 7, 1), ((4, 0, 9, 2), 6, 5), ((2, 2), 2, 33)]
    for seed, (counts, length, width) in enumerate(plans):
        for dtype in (np.float32, np.float16):
            cases += _padding_pair(seed, counts, length, width, np.dtype(dtype))
    return cases


def _padding_pair(
    seed: int, counts: tuple[int, ...], length: int, width: int, dtype: np.dtype[Any]
) -> list[Case]:
    rng = np.random.default_rng([seed, 17])
    batch = len(counts)
    kept = tuple(min(n, length) for n in counts)
    label = f"{'f16' if dtype == np.float16 else 'f32'}-t{'_'.join(map(str, counts))}of{length}"
    padded = rng.standard_normal((batch, length, width)).astype(dtype)
    packed = rng.standard_normal((sum(kept), width)).astype(dtype)
    features = frozenset({"padding", label[:3], "ragged"})
    return [
        Case(
            name=f"remove_padding-{label}-d{width}",
            op_type="RemovePadding",
            attributes={},
            inputs=(padded, np.array(counts, np.int32)),
            wanted=(True, True, True, True),
            features=features,
            seed=seed,
            symbolic=seed % 2 == 0,
        ),
        Case(
            name=f"restore_padding-{label}-d{width}",
            op_type="RestorePadding",
            attributes={},
            inputs=(packed, padding_offsets(kept, length)),
            features=features,
            seed=seed,
            symbolic=seed % 2 == 0,
        ),
    ]
