"""Tiled attention on subgroup matrices (tensor cores): attention_flash_matrix.wgsl.j2."""

from dataclasses import dataclass

from ort_webgpu.ops.attention_core import (
    MOST_SPLITS,
    PARTIAL,
    AttentionProblem,
    CoreRoute,
    Parts,
    constants,
    input_bindings,
    make_launch,
    merged,
    output_bindings,
    too_many_buffers,
    uniforms,
)
from ort_webgpu.ops.spec import Accepted, Caps, Rejected
from ort_webgpu.wgsl.kernel import Binding

__all__ = ["FlashMatrix"]

LOG2E = 1.4426950408889634
_LANES = 256


@dataclass(frozen=True)
class MatrixTile:
    """Query rows, keys, and heads of a KV group that share a workgroup's tile."""

    rows: int
    keys: int
    heads: int

    def workgroup_memory(self, head_size: int) -> int:
        """Bytes: keys, values, scores, weights and the two flags of the template."""
        lanes_per_row = _LANES // self.rows
        return (
            2 * 2 * self.keys * (head_size + 8)
            + 4 * self.rows * (max(self.keys, 32) + 4 * lanes_per_row)
            + 2 * self.rows * (self.keys + 8)
            + 32
        )


class FlashMatrix(CoreRoute):
    """float16 operands in 16x16x16 tiles, float32 sums."""

    name = "flash_matrix"
    half_queries = True

    def check(self, problem: AttentionProblem, caps: Caps) -> Accepted | Rejected:
        p = problem
        if (16, 16, 16, "f16", "f32") not in caps.matrix_tiles or not caps.f16:
            return Rejected(
                "needs subgroup matrices of 16x16x16 f16 with f32 results; the adapter has"
                f" {list(caps.matrix_tiles) or 'none'}"
            )
        if caps.subgroup_min != 32 or caps.subgroup_max != 32:
            return Rejected(
                f"needs subgroups of 32, the adapter has {caps.subgroup_min} to {caps.subgroup_max}"
            )
        if not p.half_queries or p.kv_dtype != "float16" or p.out_dtype != "float16":
            return Rejected(
                f"takes float16 queries, keys and values, not {p.out_dtype} and {p.kv_dtype}"
            )
        if p.head_size % 32 or p.v_head_size != p.head_size:
            return Rejected(
                f"head sizes {p.head_size} and {p.v_head_size}; it takes equal multiples of 32"
            )
        if p.beam_width or p.qk:
            return Rejected("takes no beams and writes no output_qk")
        if p.q_len < 16:
            return Rejected(f"{p.q_len} query positions; it is for at least 16")
        if self.tile(p, caps) is None:
            return Rejected(
                f"head size {p.head_size} needs more than {caps.workgroup_memory} bytes of"
                " workgroup memory"
            )
        bindings = input_bindings(p) + output_bindings(p)
        return too_many_buffers(bindings, caps) or Accepted()

    @staticmethod
    def tile(p: AttentionProblem, caps: Caps) -> MatrixTile | None:
        """The largest tile that fits the workgroup memory."""
        shared = p.group & -p.group  # the largest power of two that divides the group
        for rows in (128, 64):
            tile = MatrixTile(rows, 32, min(shared, rows // 16))
            if tile.workgroup_memory(p.head_size) <= caps.workgroup_memory:
                return tile
        return None

    def parts(self, problem: AttentionProblem, caps: Caps) -> Parts:
        p, tile = problem, self.tile(problem, caps)
        assert tile is not None
        tiles = -(-p.q_len // (tile.rows // tile.heads))
        row_groups = p.group // tile.heads
        workgroups = p.batch * p.kv_heads * row_groups * tiles
        splits = self.splits(p, workgroups)
        direct = splits == 1
        plain = not (p.softcap > 0 or p.bias_dtype or p.mask_width)
        wide = {"q": "f16", "k": "vec4<u32>", "v": "vec4<u32>"}
        bindings = [Binding(b.name, wide.get(b.name, b.element)) for b in input_bindings(p)]
        launch = make_launch(
            "attention_flash_matrix",
            constants(p, D=p.head_size, BM=tile.rows, BN=tile.keys, HP=tile.heads, direct=direct),
            [*bindings, *(output_bindings(p) if direct else PARTIAL)],
            _LANES,
            workgroups * splits,
            uniforms(
                p,
                tiles=tiles,
                row_groups=row_groups,
                splits=splits,
                q_scale=p.scale * LOG2E if plain else p.scale,
            ),
            frozenset({"subgroups", "f16", "subgroup_matrix"}),
        )
        if direct:
            return Parts((launch,))
        merge = merged(p, caps, splits)
        return Parts((launch, *merge.launches), merge.scratch)

    @staticmethod
    def splits(p: AttentionProblem, workgroups: int) -> int:
        """Shares of the keys that fill a device of 132 processors, none under 512 keys."""
        keys = p.max_keys if p.window < 0 else min(p.max_keys, p.window + p.q_len)
        if p.packed_rows or workgroups >= 132:
            return 1
        return max(1, min(-(-264 // workgroups), keys // 512, MOST_SPLITS))
