"""Which name of the GroupQueryAttention kernel card a call on a core route is (variants.json).

The card names a variant by how the cache is built, by the family of the attention kernel, by what
the call asks for, and by `_nosg` where no subgroups are used. Read from its text:

- Caches. "direct": no past is given (`qkv_present`). "copy": a past with room for all keys is
  copied to the present, or attended as it is (`past_kv`). "merge": the present is the past and the
  new rows behind it (`new_kv_past`). "shift": a window cache drops rows (`window_shift`). "append":
  past and present are one buffer (`share_append`). A quantized cache is named by its storage.
- Families. Materialized scores on matrix tiles, native or emulated (`materialized_sgmat`); tiles
  with an online softmax (`flash_cluster`, `flash_prefill`); split keys (`flash_splitk`,
  `decode_splitk`); the portable kernel, row by row (`tiled_nosg`, `new_kv_share_append_split`).
- The first row of _CARD that fits is the name. A row fits if the call has the features it names;
  what it does not name it allows, except that `qkv_present` names take no other feature at all.

Calls outside the card have no name: `OFF_CARD` lists what makes them so.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["OFF_CARD", "CardFacts", "card_name"]

Cache = Literal["direct", "copy", "merge", "shift", "append"]

OFF_CARD = (
    "packed QKV",
    "position_ids",
    "interleaved rotary",
    "output_qk",
    "query_seqlens",
    "a cache of the other float type",
    "a quantized cache with float16",
    "int4 beyond the first prompt",
    "bidirectional attention over a past",
)


@dataclass(frozen=True)
class CardFacts:
    """What names a call: its cache, whether it has one query ("decode"), the cache's storage,
    which of "rotary", "softcap", "sink", "bias", "norm", "bidirectional" it has, and which of
    OFF_CARD."""

    cache: Cache
    decode: bool
    storage: str
    features: frozenset[str] = frozenset()
    off_card: frozenset[str] = frozenset()


#: Family and suffix of each core route; the others are not on the card.
_FAMILIES = {
    "matrix": ("materialized", ""),
    "matrix_emulated": ("materialized", ""),
    "flash": ("flash", ""),
    "flash_nosg": ("flash", "_nosg"),
    "splitk": ("splitk", ""),
    "splitk_nosg": ("splitk", "_nosg"),
    "serial": ("serial", ""),
}


@dataclass(frozen=True)
class _Row:
    name: str
    family: str
    cache: Cache | None
    storage: tuple[str, ...] = ("float32", "float16")
    features: frozenset[str] = frozenset()
    decode: bool | None = None

    def fits(self, family: str, facts: CardFacts) -> bool:
        """Whether the row is for such a call."""
        return (
            family == self.family
            and self.cache in (None, facts.cache)
            and facts.storage in self.storage
            and self.decode in (None, facts.decode)
            and self.features <= facts.features
            and (facts.cache != "direct" or facts.features <= self.features | {"bidirectional"})
        )


def _materialized(name: str, cache: Cache, storage: str, *features: str) -> _Row:
    return _Row(name, "materialized", cache, (storage,), frozenset(features), decode=False)


def _prefill(name: str, cache: Cache, *features: str) -> _Row:
    return _Row(name, "flash", cache, features=frozenset(features), decode=False)


def _decode(name: str, cache: Cache) -> _Row:
    return _Row(name, "splitk", cache, decode=True)


#: In order of preference: what asks for more comes first.
_CARD = (
    _materialized("qkv_present_materialized_sgmat_f32", "direct", "float32", "bidirectional"),
    _materialized("past_kv_bias_materialized_sgmat_f32", "copy", "float32", "bias"),
    _materialized("past_kv_rotary_materialized_sgmat_f32", "copy", "float32", "rotary"),
    _materialized("past_kv_materialized_sgmat_f32", "copy", "float32"),
    _materialized("past_kv_rotary_materialized_sgmat_f16", "copy", "float16", "rotary"),
    _materialized("past_kv_materialized_sgmat_f16", "copy", "float16"),
    _materialized("new_kv_past_materialized_sgmat_f32", "merge", "float32"),
    _materialized("window_shift_materialized_sgmat_f32", "shift", "float32"),
    _materialized("share_append_materialized_sgmat_f32", "append", "float32"),
    _Row("qkv_present_tiled_nosg", "serial", "direct"),
    _Row("new_kv_share_append_split", "serial", "append"),
    _Row("qkv_present_flash_splitk", "splitk", "direct"),
    _decode("past_kv_decode_splitk", "copy"),
    _decode("new_kv_past_decode_splitk", "merge"),
    _decode("window_shift_decode_splitk", "shift"),
    _decode("share_append_split_decode_splitk", "append"),
    _Row("quant_int8_decode_splitk", "splitk", None, ("int8",), decode=True),
    _Row("qkv_present_flash_cluster", "flash", "direct"),
    _prefill("past_kv_bias_headsink_flash_prefill", "copy", "bias", "sink"),
    _prefill("past_kv_headsink_flash_prefill", "copy", "sink"),
    _prefill("past_kv_softcap_flash_prefill", "copy", "softcap"),
    _prefill("past_kv_rotary_flash_prefill", "copy", "rotary"),
    _prefill("past_kv_flash_prefill", "copy"),
    _prefill("new_kv_past_flash_prefill", "merge"),
    _prefill("window_shift_flash_prefill", "shift"),
    _prefill("share_append_split_flash_prefill", "append"),
    _Row("quant_int8_flash_prefill", "flash", None, ("int8",), decode=False),
    _Row("quant_int4_flash_prefill", "flash", None, ("int4",), decode=False),
)


def card_name(route: str, facts: CardFacts) -> str | None:
    """The card's name for the call on core route `route`; None where it has none."""
    family, suffix = _FAMILIES.get(route, (None, ""))
    if family is None or facts.off_card:
        return None
    for row in _CARD:
        if row.fits(family, facts):
            return row.name + suffix
    return None
