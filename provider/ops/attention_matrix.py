"""The materialized attention: scores in memory, made and applied with matrix tiles.

Three launches: attention_scores_matrix, attention_rowstats, attention_apply_matrix. Tiles are
subgroup matrices, or their emulation in workgroup memory, which runs the same code everywhere.
"""

import math
from dataclasses import dataclass

from ort_webgpu.ops.attention_core import (
    AttentionProblem,
    CoreRoute,
    Parts,
    constants,
    input_bindings,
    make_launch,
    missing_matrices,
    output_bindings,
    too_many_buffers,
    uniforms,
)
from ort_webgpu.ops.spec import Accepted, Caps, Rejected
from ort_webgpu.wgsl.kernel import Binding, Constant

__all__ = ["TILES", "Materialized", "MatrixTile", "operand_of"]

_SUBGROUPS = 4  # two rows of two
_EMULATED_LANES = 32


def operand_of(p: AttentionProblem) -> str:
    """Type of the operand tiles: "f16" where output and cache are float16, else "f32".

    Quantized keys span a wider range than float16 queries times their scale can serve.
    """
    return "f16" if p.out_dtype == p.kv_dtype == "float16" else "f32"


@dataclass(frozen=True)
class MatrixTile:
    """BM rows by BN keys (or output columns) for a workgroup, BK of the reduction a step."""

    bm: int
    bn: int
    bk: int

    def workgroup_memory(self, operand: str) -> int:
        """Bytes that the larger of the two kernels needs."""
        pad, size = _pad(operand), 2 if operand == "f16" else 4
        rows = self.bm * (self.bk + pad)
        operands = rows + max(self.bn * (self.bk + pad), self.bk * (self.bn + pad))
        return operands * size + self.bm * (4 * (self.bn + 4) + 32)

    def positions(self, p: AttentionProblem) -> int:
        """Query positions that a tile of rows may touch."""
        return (self.bm - 1) // p.group + 2

    def key_tiles(self, p: AttentionProblem) -> int:
        """Tiles of the keys that the rows of one tile see."""
        keys = p.max_keys if p.window < 0 else min(p.max_keys, p.window + self.positions(p))
        return max(1, -(-keys // self.bn))

    def row_tiles(self, p: AttentionProblem) -> int:
        """Tiles of the rows of one KV head."""
        return -(-p.rows // self.bm)


TILES = (
    MatrixTile(64, 64, 32),
    MatrixTile(64, 64, 16),
    MatrixTile(32, 32, 32),
    MatrixTile(32, 32, 16),
)


def _pad(operand: str) -> int:
    """Elements between rows of operands: 16 bytes, against bank conflicts."""
    return 8 if operand == "f16" else 4


class Materialized(CoreRoute):
    """Scores to memory, statistics of rows, weights times values.

    `native` takes subgroup matrices; otherwise they are emulated, for tests.
    """

    _FEW = 32

    def __init__(self, native: bool):
        self.native = native
        self.forced_only = not native
        self.name = "matrix" if native else "matrix_emulated"

    def check(self, problem: AttentionProblem, caps: Caps) -> Accepted | Rejected:
        if problem.qk:
            return Rejected("writes no output_qk; the split-K and serial routes do")
        tile = self.tile(problem, caps)
        if tile is None:
            return Rejected(f"no tile fits {caps.workgroup_memory} bytes of workgroup memory")
        return (
            (self._device_rejection(problem, caps) if self.native else None)
            or self._scratch_rejection(problem, caps, tile)
            or too_many_buffers(self._score_bindings(problem), caps)
            or too_many_buffers(self._apply_bindings(problem), caps)
            or Accepted()
        )

    def _device_rejection(self, p: AttentionProblem, caps: Caps) -> Rejected | None:
        operand, size = operand_of(p), self._size(p)
        if missing := missing_matrices(caps, size, size, operand):
            return missing
        if caps.subgroup_min != caps.subgroup_max:
            return Rejected(
                f"needs subgroups of one size; the adapter's have {caps.subgroup_min} to"
                f" {caps.subgroup_max} lanes"
            )
        if _SUBGROUPS * caps.subgroup_min > caps.workgroup_invocations:
            return Rejected(f"{_SUBGROUPS} subgroups exceed {caps.workgroup_invocations} lanes")
        if p.rows < self._FEW:
            return Rejected(f"{p.rows} query rows for each KV head; it is for {self._FEW} or more")
        return None

    def _scratch_rejection(
        self, p: AttentionProblem, caps: Caps, tile: MatrixTile
    ) -> Rejected | None:
        largest = max(size for _, size in self._scratch(p, caps, tile))
        if largest > min(caps.storage_binding, caps.buffer_size):
            return Rejected(
                f"the scores need {largest:,} bytes, the adapter binds {caps.storage_binding:,}"
            )
        return None

    @staticmethod
    def _size(p: AttentionProblem) -> int:
        return 16 if operand_of(p) == "f16" else 8

    def _lanes(self, caps: Caps) -> int:
        return caps.subgroup_min if self.native else _EMULATED_LANES

    def tile(self, p: AttentionProblem, caps: Caps) -> MatrixTile | None:
        """The largest geometry that fits the device and is not mostly empty."""
        for tile in TILES:
            memory = tile.workgroup_memory(operand_of(p))
            if memory <= caps.workgroup_memory and (p.rows > tile.bm // 2 or tile.bm == 32):
                return tile
        return None

    def _scratch(
        self, p: AttentionProblem, caps: Caps, tile: MatrixTile
    ) -> tuple[tuple[str, int], ...]:
        rows = p.batch * p.kv_heads * tile.row_tiles(p) * tile.bm
        entries = tile.key_tiles(p) * (_SUBGROUPS * self._lanes(caps) // tile.bm)
        return (
            ("scores", rows * tile.key_tiles(p) * tile.bn * 4),
            ("stats", rows * entries * 8),
            ("row_stats", rows * 8),
        )

    @staticmethod
    def _score_bindings(p: AttentionProblem) -> list[Binding]:
        return [
            *(b for b in input_bindings(p) if b.name != "v"),
            Binding("scores", "f32", "read_write"),
            Binding("stats", "vec2<f32>", "read_write"),
        ]

    @staticmethod
    def _apply_bindings(p: AttentionProblem) -> list[Binding]:
        return [
            *(b for b in input_bindings(p) if b.name in ("v", "seq", "beams")),
            Binding("scores", "f32"),
            Binding("row_stats", "vec2<f32>"),
            *output_bindings(p),
        ]

    def parts(self, problem: AttentionProblem, caps: Caps) -> Parts:
        p, tile = problem, self.tile(problem, caps)
        assert tile is not None
        lanes = self._lanes(caps)
        size = _SUBGROUPS * lanes
        geometry: dict[str, Constant] = {"BM": tile.bm, "BN": tile.bn}
        operands: dict[str, Constant] = {
            "BK": tile.bk,
            "PAD": _pad(operand_of(p)),
            "TILE": self._size(p),
            "SG": lanes,
            "SGR": 2,
            "SGC": 2,
            "native": self.native,
            "operand": operand_of(p),
        }
        tiles = p.batch * p.kv_heads * tile.row_tiles(p)
        columns = -(-4 * p.v4 // tile.bn)
        values = uniforms(
            p,
            tiles=tile.row_tiles(p),
            key_tiles=tile.key_tiles(p),
            column_tiles=columns,
            # queries are float16 numbers again but for a power of two, and are not rounded twice
            q_scale=math.frexp(p.scale)[0] or 1.0,
        )
        score_launch = make_launch(
            "attention_scores_matrix",
            constants(p, **geometry, **operands),
            self._score_bindings(p),
            size,
            tiles * tile.key_tiles(p),
            values,
            self._features(p),
        )
        combine = make_launch(
            "attention_rowstats",
            constants(p, **_PLAIN, beams=False, LPR=size // tile.bm, **geometry),
            [
                Binding("stats", "vec2<f32>"),
                Binding("seq", "i32"),
                Binding("row_stats", "vec2<f32>", "read_write"),
            ],
            tile.bm,
            tiles,
            values,
        )
        apply = make_launch(
            "attention_apply_matrix",
            constants(p, **_PLAIN, **geometry, **operands),
            self._apply_bindings(p),
            size,
            tiles * columns,
            values,
            self._features(p),
        )
        return Parts((score_launch, combine, apply), self._scratch(p, caps, tile))

    def _features(self, p: AttentionProblem) -> frozenset[str]:
        if not self.native:
            return frozenset()
        f16 = {"f16"} if operand_of(p) == "f16" else set()
        return frozenset({"subgroups", "subgroup_matrix", *f16})


#: What is in the scores already when they are read back.
_PLAIN: dict[str, Constant] = {"softcap": False, "bias": "", "mask": False}
