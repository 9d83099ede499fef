"""Tiled attention on the matrix layer (tensor cores): attention_flash_matrix.wgsl.j2."""

from collections.abc import Iterator
from dataclasses import dataclass

from ort_webgpu.ops.attention_core import (
    MOST_SPLITS,
    PARTIAL,
    AttentionProblem,
    Parts,
    TiledRoute,
    constants,
    input_bindings,
    make_launch,
    merged,
    missing_matrices,
    other_subgroups,
    output_bindings,
    shuffle_width,
    too_many_buffers,
    uniforms,
)
from ort_webgpu.ops.spec import Accepted, Caps, Rejected
from ort_webgpu.wgsl.kernel import STORAGE, Binding

__all__ = ["FlashMatrix"]

LOG2E = 1.4426950408889634
_KEYS = 32  # of a tile
_FEW_TILES = 132  # of 128 rows, that would leave half of a large GPU's room for workgroups empty


@dataclass(frozen=True)
class MatrixTile:
    """Geometry of attention_flash_matrix: query rows of a workgroup, blocks of 16 of them that a
    subgroup has, and how many subgroups share a block's columns."""

    rows: int
    blocks: int
    sides: int

    @property
    def lanes(self) -> int:
        """Of a workgroup."""
        return self.rows // (16 * self.blocks) * self.sides * 32

    @property
    def lanes_per_row(self) -> int:
        """Lanes that turn a row's scores into weights."""
        return self.lanes // self.rows

    def stride(self, head_size: int, caps: Caps) -> int:
        """Floats between score rows: as many as keep lanes off each other's banks, if they fit."""
        wide = _KEYS + max(8, 4 * self.lanes_per_row)
        return wide if self._memory(head_size, wide) <= caps.workgroup_memory else _KEYS + 8

    def fits(self, head_size: int, caps: Caps) -> bool:
        """Whether the device has the memory, the lanes and the subgroups."""
        return (
            self._memory(head_size, self.stride(head_size, caps)) <= caps.workgroup_memory
            and self.lanes <= caps.workgroup_invocations
            and self.lanes_per_row <= shuffle_width(caps)
        )

    def _memory(self, head_size: int, stride: int) -> int:
        """Bytes: keys, values and weights of float16, scores of float32."""
        operands = 2 * _KEYS * (head_size + 8) + self.rows * (_KEYS + 8)
        return 2 * operands + 4 * self.rows * stride


_WIDE = MatrixTile(128, 2, 2)
_LIGHT = MatrixTile(64, 2, 2)  # for heads that leave room for more workgroups
_FEW = MatrixTile(64, 1, 1)  # for fewer workgroups of 128 rows than a large GPU takes
_DEEP = MatrixTile(64, 1, 2)  # for heads that fill memory or registers otherwise
_TILES = (_WIDE, _DEEP, _LIGHT, _FEW, MatrixTile(128, 1, 1))


class FlashMatrix(TiledRoute[MatrixTile]):
    """float16 operands in 16x16x16 tiles, float32 sums.

    `native` takes subgroup matrices; otherwise they are emulated, for tests.
    """

    half_queries = True

    def __init__(self, native: bool):
        self.native = native
        self.forced_only = not native
        self.name = "flash_matrix" if native else "flash_matrix_emulated"

    def check(self, problem: AttentionProblem, caps: Caps) -> Accepted | Rejected:
        p = problem
        if self.native and (
            missing := missing_matrices(caps, 16, 16, "f16") or other_subgroups(caps, 32)
        ):
            return missing
        if not p.half_queries or p.kv_dtype != "float16" or p.out_dtype != "float16":
            return Rejected(
                f"takes float16 queries, keys and values, not {p.out_dtype} and {p.kv_dtype}"
            )
        if p.head_size % 32 or p.v_head_size != p.head_size:
            return Rejected(
                f"head sizes {p.head_size} and {p.v_head_size}; it takes equal multiples of 32"
            )
        if p.beam_width or p.mask_width or p.qk:
            return Rejected("takes no beams and no mask, and writes no output_qk")
        if self.native and p.q_len < 16:
            return Rejected(f"{p.q_len} query positions; it is for at least 16")
        if self.tile(p, caps) is None:
            return Rejected(
                f"head size {p.head_size} needs more than {caps.workgroup_memory} bytes of"
                f" workgroup memory, or subgroups wider than {caps.subgroup_min} lanes"
            )
        bindings = input_bindings(p) + output_bindings(p)
        return too_many_buffers(bindings, caps) or Accepted()

    def fitting(self, problem: AttentionProblem, caps: Caps) -> Iterator[MatrixTile]:
        """By rule: few large tiles leave processors idle, many small ones load keys more often."""
        p = problem
        tiles = p.batch * p.num_heads * -(-p.q_len // 128)
        if p.rows <= 64 or (p.max_keys <= 1024 and tiles <= _FEW_TILES):
            best = _FEW if p.head_size <= 128 else _DEEP
        else:
            best = _LIGHT if p.head_size <= 64 else _WIDE
        for tile in dict.fromkeys((best, *_TILES)):
            if tile.fits(p.head_size, caps):
                yield tile

    def parts(self, problem: AttentionProblem, caps: Caps) -> Parts:
        p, tile = problem, self.tile(problem, caps)
        assert tile is not None
        heads = min(p.group & -p.group, tile.rows // 16)  # a power of two that divides the group
        tiles = -(-p.q_len // (tile.rows // heads))
        row_groups = p.group // heads
        workgroups = p.batch * p.kv_heads * row_groups * tiles
        splits = self.splits(p, workgroups)
        direct = splits == 1
        bias_wide = p.bias_dtype != "" and p.bias_width % 4 == 0
        wide = {"q": "f16" if self.native else "u32", "k": "vec4<u32>", "v": "vec4<u32>"}
        if bias_wide:
            wide["bias"] = STORAGE[p.bias_dtype]
        bindings = [Binding(b.name, wide.get(b.name, b.element)) for b in input_bindings(p)]
        features = {"subgroups", "f16", "subgroup_matrix"} if self.native else {"subgroups"}
        given = constants(
            p,
            D=p.head_size,
            BM=tile.rows,
            BN=_KEYS,
            HP=heads,
            MR=tile.blocks,
            SIDES=tile.sides,
            SS=tile.stride(p.head_size, caps),
            bias_wide=bias_wide,
            TILE=16,
            SG=32,
            native=self.native,
            operand="f16",
            direct=direct,
        )
        launch = make_launch(
            "attention_flash_matrix",
            given,
            [*bindings, *(output_bindings(p) if direct else PARTIAL)],
            tile.lanes,
            workgroups * splits,
            uniforms(
                p,
                tiles=tiles,
                row_groups=row_groups,
                splits=splits,
                q_scale=p.scale if p.softcap > 0 else p.scale * LOG2E,
            ),
            frozenset(features),
        )
        if direct:
            return Parts((launch,))
        merge = merged(p, caps, splits)
        return Parts((launch, *merge.launches), merge.scratch)

    def splits(self, p: AttentionProblem, workgroups: int) -> int:
        """Shares of the keys that fill a device of 132 processors twice and leave no workgroup
        over, none under 512 keys.

        The emulation splits sooner, so that tests get there.
        """
        if p.packed_rows or workgroups >= 132:
            return 1
        least = 512 if self.native else 64
        return max(1, min(264 // workgroups, p.visible // least, MOST_SPLITS))
