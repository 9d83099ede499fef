"""The core routes, in order of preference: how softmax(q k^T) v of an AttentionProblem is computed.

Operands and semantics are those of attention_core.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ort_webgpu.ops.attention_core import (
    SEQ_FIELDS,
    AttentionProblem,
    ComposedRoute,
    CoreRoute,
    Parts,
    TiledRoute,
    constants,
    input_bindings,
    make_launch,
    output_bindings,
    sequences,
    shuffle_width,
    too_many_buffers,
    uniforms,
)
from ort_webgpu.ops.attention_flash_matrix import FlashMatrix
from ort_webgpu.ops.attention_matrix import Materialized
from ort_webgpu.ops.attention_splitk import SplitK, SplitKMatrix, SplitKSubgroups
from ort_webgpu.ops.spec import Accepted, Caps, Rejected
from ort_webgpu.wgsl.kernel import Binding, Constant

__all__ = [
    "CORE_ROUTES",
    "SEQ_FIELDS",
    "AttentionProblem",
    "ComposedRoute",
    "CoreRoute",
    "Parts",
    "composed_routes",
    "sequences",
]


class Serial(CoreRoute):
    """One workgroup per query row and head; takes every problem."""

    name = "serial"

    def check(self, problem: AttentionProblem, caps: Caps) -> Accepted | Rejected:
        return too_many_buffers(self._bindings(problem), caps) or Accepted()

    def parts(self, problem: AttentionProblem, caps: Caps) -> Parts:
        p = problem
        launch = make_launch(
            "attention_serial",
            constants(p, qk=p.qk),
            self._bindings(p),
            64,
            p.batch * p.q_len * p.num_heads,
            uniforms(p),
        )
        return Parts((launch,))

    @staticmethod
    def _bindings(p: AttentionProblem) -> list[Binding]:
        bindings = input_bindings(p) + output_bindings(p)
        if p.qk:
            bindings.append(Binding("qk_out", "f32", "read_write"))
        return bindings


@dataclass(frozen=True)
class FlashTile:
    """Geometry of attention_flash: RL x CL lanes, RPT rows and KPT keys a lane."""

    rl: int
    cl: int
    rpt: int
    kpt: int

    def workgroup_memory(self, p: AttentionProblem, subgroups: bool) -> int:
        """Bytes: the key and value tile, weights, and without subgroups the maxima."""
        tile = (self.cl * self.kpt * (max(p.h4, p.v4) + 1) + self.cl) * 16
        cells = self.rl * self.rpt * (self.cl + 1)
        return tile + cells * 4 * self.kpt + (0 if subgroups else cells * 4)

    def registers(self, p: AttentionProblem) -> int:
        """Float registers a lane needs for its output columns and scores."""
        return self.rpt * (4 * -(-p.v4 // self.cl) + self.kpt)


_FLASH_TILES = (
    FlashTile(32, 8, 4, 4),
    FlashTile(16, 8, 4, 4),
    FlashTile(16, 8, 2, 4),
    FlashTile(16, 8, 2, 2),
    FlashTile(16, 8, 1, 2),
    FlashTile(8, 8, 1, 1),
    FlashTile(32, 4, 4, 4),
    FlashTile(32, 4, 2, 4),
    FlashTile(16, 4, 2, 4),
    FlashTile(16, 4, 2, 2),
    FlashTile(16, 4, 1, 2),
    FlashTile(16, 4, 1, 1),
)


# Where registers are memory anyway, more rows to each loaded key win. Small problems keep the tiles
# of GPUs, so that tests on software adapters run those.
_SOFTWARE_TILE = FlashTile(8, 4, 16, 4)
_SOFTWARE_ROWS = 512


class Flash(TiledRoute[FlashTile]):
    """Tiles of query rows over tiles of keys, with an online softmax."""

    def __init__(self, subgroups: bool):
        self.subgroups = subgroups
        self.name = "flash" if subgroups else "flash_nosg"

    def check(self, problem: AttentionProblem, caps: Caps) -> Accepted | Rejected:
        if self.subgroups and shuffle_width(caps) < 4:
            return Rejected(
                f"needs subgroups of 4 lanes or more, the adapter has {caps.subgroup_min or 'none'}"
            )
        if problem.qk:
            return Rejected("writes no output_qk; the split-K and serial routes do")
        bindings = input_bindings(problem) + output_bindings(problem)
        return too_many_buffers(bindings, caps) or self._no_tile(problem, caps) or Accepted()

    def _no_tile(self, p: AttentionProblem, caps: Caps) -> Rejected | None:
        if self.tile(p, caps) is None:
            return Rejected(
                f"no tile for head sizes {p.head_size} and {p.v_head_size} fits"
                f" {caps.workgroup_memory} bytes of workgroup memory"
            )
        return None

    def fitting(self, problem: AttentionProblem, caps: Caps) -> Iterator[FlashTile]:
        p = problem
        large = caps.software and p.rows >= _SOFTWARE_ROWS
        for tile in (_SOFTWARE_TILE, *_FLASH_TILES) if large else _FLASH_TILES:
            if (
                tile.rl * tile.cl <= caps.workgroup_invocations
                and (not self.subgroups or tile.cl <= shuffle_width(caps))
                and tile.workgroup_memory(p, self.subgroups) <= caps.workgroup_memory
                and (tile.registers(p) <= 96 or tile is _SOFTWARE_TILE)
                and (tile.rl * tile.rpt <= max(32, 2 * p.rows))
            ):
                yield tile

    def parts(self, problem: AttentionProblem, caps: Caps) -> Parts:
        p, tile = problem, self.tile(problem, caps)
        assert tile is not None
        tiles = -(-p.rows // (tile.rl * tile.rpt))
        # software adapters fetch an address that all lanes share once for each of them
        quads = self.subgroups and tile == _SOFTWARE_TILE
        launch = make_launch(
            "attention_flash",
            constants(
                p,
                RL=tile.rl,
                CL=tile.cl,
                RPT=tile.rpt,
                KPT=tile.kpt,
                quads=quads,
                **_unrolled(p, tile, caps),
            ),
            input_bindings(p) + output_bindings(p),
            tile.rl * tile.cl,
            p.batch * p.kv_heads * tiles,
            uniforms(p, tiles=tiles),
            frozenset({"subgroups"}) if self.subgroups else frozenset(),
        )
        return Parts((launch,))


def _unrolled(p: AttentionProblem, tile: FlashTile, caps: Caps) -> dict[str, Constant]:
    """How often attention_flash unrolls its loops. naga counts iterations against endless loops, so
    more is to be won there; on a CPU more text is more time."""
    if caps.software:
        return {"DU": 1, "CU": 1}
    steps = next(n for n in (32, 16, 8, 4, 2, 1) if p.h4 % n == 0)
    return {"DU": steps, "CU": tile.cl if caps.dialect == "naga" else 1}


#: In order of preference; the last takes everything. The materialized form comes behind flash: on
#: an H200 it took twice flash's time or more (prefill of 2048, head sizes 128 and 256).
CORE_ROUTES: tuple[CoreRoute, ...] = (
    FlashMatrix(True),
    FlashMatrix(False),
    SplitKMatrix(True),
    SplitKMatrix(False),
    SplitKSubgroups(),
    SplitK(),
    Flash(True),
    Flash(False),
    Materialized(True),
    Materialized(False),
    Serial(),
)


def composed_routes() -> tuple[ComposedRoute, ...]:
    """The routes of an operator that is prologue, core attention and epilogue."""
    return tuple(ComposedRoute(core) for core in CORE_ROUTES)
