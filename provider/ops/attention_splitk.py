"""Split-K: few query rows, whose keys are dealt out to workgroups; the shares are merged.

Operands and semantics are those of attention_core.
"""

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
    missing_matrices,
    other_subgroups,
    output_bindings,
    shuffle_width,
    too_many_buffers,
    uniforms,
)
from ort_webgpu.ops.spec import Accepted, Caps, Rejected
from ort_webgpu.wgsl.kernel import WIDE, Binding, Constant

__all__ = ["SplitK", "SplitKMatrix", "SplitKSubgroups"]

_LEAST_SHARE = 32  # keys, below which no share is worth trying


class SplitK(CoreRoute):
    """Few query rows: the keys are dealt out to workgroups and the shares merged."""

    name = "splitk_nosg"
    template = "attention_splitk"
    ahead = False
    features: frozenset[str] = frozenset()

    def check(self, problem: AttentionProblem, caps: Caps) -> Accepted | Rejected:
        if problem.qk == 2:
            return Rejected("writes raw scores as output_qk; only the serial route probabilities")
        if problem.packed_rows:
            return Rejected("takes no packed rows: their number differs between batch entries")
        if problem.rows > 64:
            return Rejected(
                f"{problem.rows} query rows for each KV head; it is for at most 64"
                " (few queries, many keys)"
            )
        return (
            self._geometry_rejection(problem, caps)
            or too_many_buffers(self._bindings(problem, self._direct(problem, caps)), caps)
            or Accepted()
        )

    def _direct(self, p: AttentionProblem, caps: Caps) -> bool:
        return self.splits(p, caps) == 1

    def _bindings(self, p: AttentionProblem, direct: bool) -> list[Binding]:
        bindings = input_bindings(p, self._kv_element(p), self.ahead)
        bindings += output_bindings(p) if direct else PARTIAL
        if p.qk:
            bindings.append(Binding("qk_out", "f32", "read_write"))
        return bindings

    def _kv_element(self, p: AttentionProblem) -> str:
        return ""

    def _geometry_rejection(self, p: AttentionProblem, caps: Caps) -> Rejected | None:
        memory = 16 * self.rows(p, caps) * p.h4 + 4 * 64 * (self.rows(p, caps) + 5)
        if memory > caps.workgroup_memory:
            return Rejected(
                f"needs {memory} bytes of workgroup memory, the adapter has {caps.workgroup_memory}"
            )
        return None

    def rows(self, p: AttentionProblem, caps: Caps) -> int:
        """Rows that one workgroup takes: a power of two up to 8."""
        most = 8 if p.v4 <= 32 else 4 if p.v4 <= 64 else 2
        return min(most, 1 << (p.rows - 1).bit_length())

    def geometry(self, p: AttentionProblem, caps: Caps) -> tuple[int, dict[str, Constant]]:
        """Workgroup size and the template's own constants."""
        return 64, {"VP": min(64, 1 << (p.v4 - 1).bit_length())}

    def splits(self, p: AttentionProblem, caps: Caps) -> int:
        """Shares of the keys: as measured, else enough workgroups to fill the device, with no
        share too small to pay."""
        keys, tuned = p.visible, self.tuned(p, caps)
        if tuned:
            return max(1, min(tuned[0], keys, MOST_SPLITS))
        groups = p.batch * p.kv_heads * -(-p.rows // self.rows(p, caps))
        least = 64 if caps.software else 128
        return max(1, min(self._filling(groups, caps), keys // least, MOST_SPLITS))

    def _filling(self, groups: int, caps: Caps) -> int:
        """Shares that fill the device, when each is the work of `groups` workgroups."""
        return -(-(8 if caps.software else 256) // groups)

    def settings(self, problem: AttentionProblem, caps: Caps) -> tuple[tuple[int, ...], ...]:
        now = self.splits(problem, caps)
        most = min(MOST_SPLITS, problem.visible // _LEAST_SHARE)
        powers = [1 << i for i in range(most.bit_length())]
        return tuple((n,) for n in (now, *(n for n in powers if n != now)))

    def parts(self, problem: AttentionProblem, caps: Caps) -> Parts:
        p = problem
        rows, splits = self.rows(p, caps), self.splits(p, caps)
        row_groups = -(-p.rows // rows)
        direct = self._direct(p, caps)
        size, own = self.geometry(p, caps)
        split = make_launch(
            self.template,
            constants(p, ROWS=rows, direct=direct, qk=p.qk, **own),
            self._bindings(p, direct),
            size,
            p.batch * p.kv_heads * row_groups * splits,
            uniforms(p, splits=splits, row_groups=row_groups),
            self.features,
        )
        if direct:
            return Parts((split,))
        merge = merged(p, caps, splits)
        return Parts((split, *merge.launches), merge.scratch)


class SplitKSubgroups(SplitK):
    """Split-K with several lanes to a key, whose partial sums meet by shuffles."""

    name = "splitk"
    template = "attention_splitk_sg"
    ahead = True
    features = frozenset({"subgroups", "subgroup_branches"})

    def _kv_element(self, p: AttentionProblem) -> str:
        return WIDE[p.kv_dtype]

    def _geometry_rejection(self, p: AttentionProblem, caps: Caps) -> Rejected | None:
        if shuffle_width(caps) < 2:
            return Rejected(
                f"needs subgroups of 2 lanes or more, the adapter has {caps.subgroup_min or 'none'}"
            )
        if p.head_size % 8 or p.v_head_size != p.head_size:
            return Rejected(
                f"head sizes {p.head_size} and {p.v_head_size}; it takes equal multiples of 8"
            )
        if self._size(p, caps) is None:
            return Rejected(
                f"head size {p.head_size} needs more than {caps.workgroup_memory} bytes of"
                " workgroup memory"
            )
        return None

    def lanes(self, p: AttentionProblem, caps: Caps) -> int:
        """Lanes that share a key: the most that leave few of them idle."""
        units = p.head_size // 8
        fitting = [n for n in (2, 4, 8, 16) if n <= shuffle_width(caps)]
        idle = {n: -(-units // n) * n / units for n in fitting}
        return max([n for n in fitting if idle[n] <= 1.34] or [min(fitting, key=idle.__getitem__)])

    def rows(self, p: AttentionProblem, caps: Caps) -> int:
        units = -(-(p.head_size // 8) // self.lanes(p, caps))
        most = 8 if units == 1 else 4 if units <= 2 else 2
        return min(most, self.lanes(p, caps), 1 << (p.rows - 1).bit_length())

    def _memory(self, p: AttentionProblem, caps: Caps, size: int, merged: int) -> int:
        """Bytes of workgroup memory that `size` lanes need, merging `merged` rows at a time."""
        return size // self.lanes(p, caps) * (merged * p.v4 * 16 + self.rows(p, caps) * 12)

    def _size(self, p: AttentionProblem, caps: Caps) -> int | None:
        """Lanes of a workgroup: as many as the memory for the final merge allows."""
        for size in (64,) if caps.software else (128, 64, 32):
            fits = self._memory(p, caps, size, 1) <= caps.workgroup_memory
            if self.lanes(p, caps) <= size <= caps.workgroup_invocations and fits:
                return size
        return None

    def geometry(self, p: AttentionProblem, caps: Caps) -> tuple[int, dict[str, Constant]]:
        lanes, size = self.lanes(p, caps), self._size(p, caps)
        assert size is not None
        units = -(-(p.head_size // 8) // lanes)
        merged = self.rows(p, caps)
        while self._memory(p, caps, size, merged) > caps.workgroup_memory:
            merged //= 2
        own = {"LPK": lanes, "UPL": units, "KB": self._ahead(p, caps, units), "MERGED": merged}
        return size, {**own, "peel": not caps.software}

    @staticmethod
    def _ahead(p: AttentionProblem, caps: Caps, units: int) -> int:
        """Keys of a step, all loaded during the step before: what registers hold."""
        if caps.software or units > 1:
            return 2
        long = p.kv_dtype == "float16" and p.visible >= 8192
        return 8 if long or p.kv_dtype in ("int8", "int4") else 4


class SplitKMatrix(SplitK):
    """Split-K over a quantized cache, its products on matrices of int8.

    `native` takes subgroup matrices; otherwise they are emulated, for tests.
    """

    template = "attention_splitk_matrix"
    ahead = True
    lanes = 256

    def __init__(self, native: bool):
        self.native = native
        self.forced_only = not native
        self.name = "splitk_matrix" if native else "splitk_matrix_emulated"
        self.features = frozenset({"subgroups", "subgroup_matrix"} if native else ())

    def _geometry_rejection(self, p: AttentionProblem, caps: Caps) -> Rejected | None:
        if self.native and (
            missing := missing_matrices(caps, 16, 32, "i8") or other_subgroups(caps, 32)
        ):
            return missing
        if p.kv_dtype not in ("int8", "int4"):
            return Rejected(f"takes a cache of int8 or int4, not {p.kv_dtype}")
        if p.head_size % 32 or p.head_size > 128 or p.v_head_size != p.head_size:
            return Rejected(
                f"head sizes {p.head_size} and {p.v_head_size}; it takes 32, 64, 96 and 128, for"
                " values as for keys"
            )
        if p.beam_width:
            return Rejected("takes no beams")
        if self.native and p.rows == 1 and p.kv_dtype == "int4":
            return Rejected("one query row for each KV head: over int4 the split-K route is faster")
        if self._keys(p, caps) is None or self.lanes > caps.workgroup_invocations:
            return Rejected(
                f"head size {p.head_size} needs more than {caps.workgroup_memory} bytes of"
                f" workgroup memory, or {self.lanes} lanes more than {caps.workgroup_invocations}"
            )
        return None

    def _keys(self, p: AttentionProblem, caps: Caps) -> int | None:
        """Keys of a step: as many as workgroup memory has room for. A GPU has it for 128, and an
        H200 takes as long for a step of fewer."""
        size = p.head_size
        for keys in (128,) if self.native else (128, 64, 32):
            operands = keys * (size + 16) + size * (keys + 16) + 16 * (max(keys, size) + 16)
            results = 64 * (max(keys, size) + 4)
            emulation = 0 if self.native else 16 * (size + 16) + 4 * self.lanes
            fits = operands + results + emulation <= caps.workgroup_memory
            if fits and keys * size <= 64 * self.lanes:
                return keys
        return None

    def _kv_element(self, p: AttentionProblem) -> str:
        return "vec4<u32>" if p.kv_dtype == "int8" else "vec2<u32>"

    def rows(self, p: AttentionProblem, caps: Caps) -> int:
        return 4

    def _filling(self, groups: int, caps: Caps) -> int:
        """One workgroup to a processor, which has no memory for two: one more would double the time
        (132 processors of an H200)."""
        return (8 if caps.software else 132) // groups

    def geometry(self, p: AttentionProblem, caps: Caps) -> tuple[int, dict[str, Constant]]:
        keys = self._keys(p, caps)
        assert keys is not None
        own: dict[str, Constant] = {"D": p.head_size, "T": keys, "native": self.native}
        return self.lanes, {**own, "TILE": 16, "SG": 32, "operand": "i8"}
