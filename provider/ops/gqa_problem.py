"""GqaProblem: one call of GroupQueryAttention, as launches around the core attention."""

from dataclasses import dataclass, replace

from ort_webgpu.ops.attention_core import AttentionProblem, Parts
from ort_webgpu.ops.gqa_cards import CardFacts, card_name
from ort_webgpu.ops.prepare import CacheCopy, Prepare
from ort_webgpu.ops.repack import repack
from ort_webgpu.ops.spec import Accepted, Caps, Rejected

__all__ = ["PAST", "PRESENT", "WORK", "GqaProblem"]

PRESENT = ("present_key", "present_value")
PAST = ("past_key", "past_value")
WORK = ("work_key", "work_value")


@dataclass(frozen=True)
class GqaProblem:
    """One call: how the cache is built, then the core attention over `keys`.

    `before` fills the attended cache from the past, `after` the present from a work cache (window
    caches whose step evicts rows that its own queries still see), of `work_bytes`.
    """

    core: AttentionProblem
    prepare: Prepare
    keys: tuple[str, str]
    card: CardFacts
    before: CacheCopy | None = None
    after: CacheCopy | None = None
    work_bytes: int = 0
    present_bytes: int = 0  # of a present that no output wants
    in_place: bool = False
    windowed: bool = False

    def check(self, caps: Caps) -> Accepted | Rejected:
        """Whether the prologue can run; the core route checks the rest."""
        return self.prepare.check(caps)

    def prologue(self, caps: Caps, half_queries: bool = False) -> Parts:
        """Past to cache, then queries, keys and values to their places."""
        prepare = replace(self.prepare, half_queries=half_queries).parts(caps)
        launches = (self.before.parts().launches if self.before else ()) + prepare.launches
        scratch = prepare.scratch
        if self.work_bytes:
            scratch += ((WORK[0], self.work_bytes), (WORK[1], self.work_bytes))
        if self.present_bytes:
            scratch += ((PRESENT[0], self.present_bytes), (PRESENT[1], self.present_bytes))
        if self._repacks_qk:
            scratch += (("qk_scratch", self._qk_elements * 4),)
        return Parts(launches, scratch)

    def epilogue(self, caps: Caps) -> Parts:
        """The present of a window cache, and output_qk as float16."""
        launches = self.after.parts().launches if self.after else ()
        if self._repacks_qk:
            width = self.core.qk_width
            rows = self._qk_elements // width
            launches += repack("qk_scratch", "output_qk", "float16", rows, width, width).launches
        return Parts(launches)

    def names(self) -> dict[str, str]:
        """What the core's operands are called here."""
        qk = "qk_scratch" if self._repacks_qk else "output_qk"
        return {"k": self.keys[0], "v": self.keys[1], "out": "output", "qk_out": qk}

    def card_variant(self, core_route: str, caps: Caps) -> str | None:
        """The name in variants.json that this call on `core_route` is."""
        return card_name(core_route, self.card)

    @property
    def _qk_elements(self) -> int:
        return self.core.batch * self.core.num_heads * self.core.q_len * self.core.qk_width

    @property
    def _repacks_qk(self) -> bool:
        return self.core.qk > 0 and self.core.out_dtype == "float16"
