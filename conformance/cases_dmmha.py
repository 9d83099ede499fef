"""DecoderMaskedMultiHeadAttention cases: `DmmhaConfig(...).case(seed)` and the generated corpus."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ort_webgpu.conformance.case import Array, Case
from ort_webgpu.conformance.covering import pairwise

__all__ = ["DmmhaConfig", "generated_dmmha_cases"]


@dataclass(frozen=True, kw_only=True)
class DmmhaConfig:
    """What a generated case looks like. Defaults are the plainest values.

    kind "self"/"cross"; length is the past length p (self) or the encoder's (cross); beams 1 is
    none (`groups` sequences of `beams` rows each otherwise); mask "off"/"some"/"newest"/"full"
    (one row wholly masked); attention_bias as in GqaConfig.bias; qk "off"/"f32"/"f16"; share is
    past_present_share_buffer on a cross node, as Whisper's exporter writes it;
    `scale` multiplies the default scale, 0 leaves the attribute out.
    """

    kind: str = "self"
    dtype: str = "f32"
    heads: int = 2
    head_size: int = 16
    groups: int = 1
    beams: int = 1
    length: int = 5
    room: int = 3
    mask: str = "off"
    mask_value: float = 0.0
    attention_bias: str = "off"
    bias: bool = False
    packed: bool = False
    scale: float = 0.0
    qk: str = "off"
    in_place: bool = False
    share: bool = False

    @property
    def batch(self) -> int:
        return self.groups * self.beams

    def features(self) -> frozenset[str]:
        """Words for what the case exercises."""
        flags = {
            "mask": self.mask != "off",
            "mask_addition": self.mask == "full",
            "bias": self.attention_bias != "off",
            "qkv_bias": self.bias,
            "packed_qkv": self.packed,
            "scale": self.scale != 0.0,
            "output_qk": self.qk != "off",
            "beams": self.beams > 1,
            "in_place": self.in_place,
            "share_attribute": self.share,
            "batch": self.batch > 1,
            "first_step": self.kind == "self" and self.length == 0,
        }
        words = {self.kind, "decode", self.dtype, f"h{self.head_size}"}
        return frozenset(words | {word for word, on in flags.items() if on})

    def name(self) -> str:
        """The configuration as text; defaults are left out."""
        parts = [
            f"dmmha-{self.kind}-{self.dtype}-t{self.length}-b{self.groups}x{self.beams}"
            f"n{self.heads}h{self.head_size}"
        ]
        named = {
            f"mask_{self.mask}": self.mask != "off",
            f"filter{self.mask_value:g}": self.mask_value != 0.0,
            f"bias_{self.attention_bias}": self.attention_bias != "off",
            "qkvbias": self.bias,
            "packed": self.packed,
            f"scale{self.scale:g}": self.scale != 0.0,
            f"qk_{self.qk}": self.qk != "off",
            "inplace": self.in_place,
            "share": self.share,
        }
        return "-".join(parts + [word for word, on in named.items() if on])

    def case(self, seed: int, source: str = "generated") -> Case:
        """The case with random inputs of this seed."""
        rng = np.random.default_rng([seed, 11])
        dtype = np.dtype(np.float16 if self.dtype == "f16" else np.float32)
        inputs = self._inputs(rng, dtype)
        is_self = self.kind == "self"
        given = {i for i, array in enumerate(inputs) if array is not None}
        return Case(
            name=self.name(),
            op_type="DecoderMaskedMultiHeadAttention",
            attributes=self._attributes(),
            inputs=tuple(inputs),
            wanted=(True, is_self, is_self, self.qk != "off"),
            features=self.features(),
            source=source,
            seed=seed,
            baked=frozenset({10}) & given if seed % 2 else frozenset(),
            symbolic=seed % 3 == 0,
            in_place=self.in_place,
            qk_dtype={"off": None, "f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}[
                self.qk
            ],
        )

    def _attributes(self) -> dict[str, Any]:
        attributes: dict[str, Any] = {"num_heads": self.heads}
        if self.kind == "self" or self.share:
            attributes["past_present_share_buffer"] = 1
        if self.qk != "off":
            attributes["output_qk"] = 1
        if self.scale:
            attributes["scale"] = self.scale * self.head_size**-0.5
        if self.mask_value:
            attributes["mask_filter_value"] = self.mask_value
        return attributes

    def _inputs(self, rng: np.random.Generator, dtype: np.dtype[Any]) -> list[Array | None]:
        def normal(*shape: int) -> Array:
            return rng.standard_normal(shape).astype(dtype)

        hidden, batch = self.heads * self.head_size, self.batch
        inputs: list[Array | None] = [None] * 11
        inputs[0] = normal(batch, 1, 3 * hidden if self.packed else hidden)
        if self.kind == "cross":
            shape = (batch, self.heads, self.length, self.head_size)
            inputs[1], inputs[2] = normal(*shape), normal(*shape)
        elif not self.packed:
            inputs[1], inputs[2] = normal(batch, 1, hidden), normal(batch, 1, hidden)
        total = self.length + (self.kind == "self")
        if self.mask != "off":
            inputs[3] = self._mask(rng, total)
        if self.attention_bias != "off":
            first = batch if self.attention_bias[0] == "B" else 1
            second = self.heads if self.attention_bias[1] == "N" else 1
            inputs[4] = normal(first, second, 1, total)
        if self.kind == "self":
            rows = self.length + self.room
            shape = (batch, self.heads, rows, self.head_size)
            inputs[5], inputs[6] = normal(*shape), normal(*shape)
            inputs[7] = np.array([self.length], np.int32)
        if self.beams > 1:
            rows = self.length + self.room
            inputs[8] = np.array([self.beams], np.int32)
            inputs[9] = rng.integers(0, self.beams, (self.groups, self.beams, rows)).astype(
                np.int32
            )
        if self.bias:
            inputs[10] = normal(3 * hidden)
        return inputs

    def _mask(self, rng: np.random.Generator, total: int) -> Array:
        """int32 (B,T): unequal right padding with a hole here and there, never a lone pattern."""
        mask = (rng.uniform(size=(self.batch, total)) > 0.3).astype(np.int32)
        mask[:, 0] = 1
        if self.mask == "newest":
            mask[:, -1] = 0
            mask[:, 0] = 1 if total > 1 else 0
        if self.mask == "full":
            mask[-1] = 0
        return mask


MAX_WORK = 1e6

_SELF: dict[str, Sequence[Any]] = {
    "length": (33, 5, 0, 130, 17, 70),
    "head_size": (64, 16, 40, 128, 32, 6, 80),
    "mask": ("some", "off", "newest", "full"),
    "attention_bias": ("off", "BN", "11", "B1", "1N"),
    "heads": (2, 1, 12, 3),
    "beams": (1, 3, 2),
    "groups": (2, 1, 3),
    "scale": (0.0, -0.8, 1.3),
    "room": (1, 5),
    "qk": ("off", "f32"),
    "bias": (False, True),
    "mask_value": (0.0, -3.4e38),
    "in_place": (True, False),
}

_SELF_BEYOND_ORT: dict[str, Sequence[Any]] = {
    "length": (33, 5, 0, 130),
    "head_size": (64, 16, 40, 128),
    "mask": ("some", "off", "newest", "full"),
    "attention_bias": ("off", "BN", "11"),
    "heads": (2, 3),
    "beams": (1, 3, 2),
    "groups": (2, 1),
    "dtype": ("f16", "f32"),
    "packed": (True, False),
    "qk": ("off", "f16", "f32"),
    "scale": (0.0, 1.3),
    "bias": (False, True),
    "in_place": (True, False),
}
"""float16, packed QKV and a float16 qk, which ORT's CPU EP refuses."""

_CROSS: dict[str, Sequence[Any]] = {
    "kind": ("cross",),
    "length": (33, 5, 1, 130, 17, 70),
    "head_size": (64, 16, 40, 128, 32, 6, 80),
    "mask": ("some", "off", "newest", "full"),
    "heads": (2, 1, 12, 3),
    "groups": (2, 1, 3),
    "scale": (0.0, -0.8, 1.3),
    "qk": ("off", "f32"),
    "bias": (False, True),
    "mask_value": (0.0, -3.4e38),
}

_CROSS_BEYOND_ORT: dict[str, Sequence[Any]] = {
    "kind": ("cross",),
    "length": (33, 5, 1, 130),
    "head_size": (64, 16, 40, 128),
    "mask": ("some", "off", "newest", "full"),
    "heads": (2, 3),
    "groups": (2, 1),
    "qk": ("off", "f16", "f32"),
    "dtype": ("f16", "f32"),
    "bias": (False, True),
    "share": (True, False),
}


def generated_dmmha_cases(level: str) -> list[Case]:
    """Covering arrays over self and cross attention; "full" has several of each."""
    parts = (_SELF, _SELF_BEYOND_ORT, _CROSS, _CROSS_BEYOND_ORT)
    cases: dict[str, Case] = {}
    for part, parameters in enumerate(parts):
        for rotation in range(3 if level == "full" else 1):
            for i, row in enumerate(pairwise(parameters, _valid, rotation)):
                config = DmmhaConfig(**row)
                seed = 50_000 + 2000 * part + 300 * rotation + i
                cases.setdefault(config.name(), config.case(seed))
    return list(cases.values())


def _valid(row: Mapping[str, Any]) -> bool:
    if row.get("mask", "some") == "off" and row.get("mask_value", 0.0):
        return False
    if row.get("attention_bias") == "B1" and min(row.get("beams", 1), row.get("groups", 1)) > 1:
        # ORT strides a (B,1) bias by num_heads here and reads out of bounds.
        return False
    rows = row.get("beams", 1) * row.get("groups", 1) * row.get("heads", 1)
    return rows * row.get("head_size", 6) * row.get("length", 0) <= MAX_WORK
