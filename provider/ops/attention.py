"""The attention that all operators share: AttentionProblem, its routes, and their composition.

An operator turns its inputs into float32 query rows and key and value rows (its prologue), then any
core route of this file computes softmax(q k^T) v. Operands that core routes read and write, by name:

    q        float32, [query row][num_heads][head_size padded to 4], times the score scale
    k, v     kv_dtype, rows of head_size and v_head_size padded to 4; row of key j of batch entry b and
             KV head h: seq[b].k_row + h * kv_head_rows + j
    seq      int32 [batch][SEQ_FIELDS], made by `sequences`
    out      out_dtype, [query row][num_heads][v_head_size padded to 4]
    bias     bias_dtype, [batch or 1][num_heads or 1][bias_rows, 0: q_len][bias_width], dense
    mask     int32 [batch][mask_width];  beams int32 [batch][beam_rows]
    sink     sink_dtype [num_heads];  v_scale float32 [kv_heads][v_head_size]
    qk_out   float32 [batch][num_heads][q_len][qk_width]

Semantics: contract ort-semantics.md 2.3, 2.4, 3.1. Scores, weights and sums are float32.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ort_webgpu.ops.spec import Accepted, Caps, Rejected, Route
from ort_webgpu.wgsl.kernel import Binding, Constant, Kernel, Launch, Program
from ort_webgpu.wgsl.render import STORAGE, WIDE, scalar_element

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

SEQ_FIELDS = (
    "q_row",  # first query row
    "q_valid",  # query rows that exist; rows beyond see nothing
    "k_row",  # first key row of KV head 0
    "past",  # key index that precedes the first query's own
    "total",  # keys that exist
    "bias_batch",  # row of the bias' first axis
    "key0",  # absolute position of key 0: the bias' first column, and rotary positions
    "write",  # row of the cache, counted like keys, that takes the first new key
    "keep",  # cache_copy: rows taken from the past
    "shift",  # cache_copy: rows of the past that were dropped in front
    "new",  # cache_copy: first row that `prepare` writes
    "new_count",  # cache_copy: how many it writes
)


def sequences(batch: int, **fields: Any) -> np.ndarray:
    """The `seq` operand: int32 [batch, len(SEQ_FIELDS)]; a field is a number or one per entry."""
    table = np.zeros((batch, len(SEQ_FIELDS)), np.int32)
    for name, value in fields.items():
        table[:, SEQ_FIELDS.index(name)] = value
    return table


@dataclass(frozen=True)
class AttentionProblem:
    """The facts of one attention; no arrays.

    `max_keys` is the largest number of keys that any query row sees, `qk` 0 (none), 1 (raw scores)
    or 2 (probabilities). `packed_rows`: entries have different numbers of query rows and rows beyond
    `q_valid` do not exist; otherwise such rows exist and are written as zero.
    """

    batch: int
    q_len: int
    num_heads: int
    kv_heads: int
    head_size: int
    v_head_size: int
    kv_dtype: str
    out_dtype: str
    kv_head_rows: int
    max_keys: int
    causal: bool = True
    window: int = -1
    softcap: float = 0.0
    bias_dtype: str = ""
    bias_heads: int = 1
    bias_rows: int = 0
    bias_width: int = 0
    mask_width: int = 0
    mask_filter: float = 0.0
    beam_width: int = 0
    beam_rows: int = 0
    sink: str = ""  # "" none, "zero" (smooth softmax), or the dtype of the sink operand
    v_scaled: bool = False
    exclude_lowest: bool = True
    qk: int = 0
    qk_width: int = 0
    packed_rows: bool = False

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Rows (query positions times heads of a group) of one KV head."""
        return self.q_len * self.group

    @property
    def h4(self) -> int:
        """Groups of four in a key row."""
        return -(-self.head_size // 4)

    @property
    def v4(self) -> int:
        """Groups of four in a value row."""
        return -(-self.v_head_size // 4)


@dataclass(frozen=True)
class Parts:
    """Launches and the scratch they use, to be chained."""

    launches: tuple[Launch, ...] = ()
    scratch: tuple[tuple[str, int], ...] = ()


class Composed(Protocol):
    """An operator's problem: a core attention between a prologue and an epilogue."""

    @property
    def core(self) -> AttentionProblem: ...
    def check(self, caps: Caps) -> Accepted | Rejected: ...
    def prologue(self, caps: Caps) -> Parts: ...
    def epilogue(self, caps: Caps) -> Parts: ...
    def names(self) -> dict[str, str]: ...
    def card_variant(self, core_route: str, caps: Caps) -> str | None: ...


class CoreRoute:
    """A way to compute the core attention."""

    name: str

    def check(self, problem: AttentionProblem, caps: Caps) -> Accepted | Rejected:
        """Whether the route takes the problem on such a device."""
        raise NotImplementedError

    def parts(self, problem: AttentionProblem, caps: Caps) -> Parts:
        """Its launches, over the operand names of this module."""
        raise NotImplementedError


class ComposedRoute(Route):
    """A core route inside an operator: prologue, core, epilogue."""

    def __init__(self, core: CoreRoute):
        self.core_route = core
        self.name = core.name

    def check(self, problem: Composed, caps: Caps) -> Accepted | Rejected:
        verdict = problem.check(caps)
        if isinstance(verdict, Rejected):
            return verdict
        return self.core_route.check(problem.core, caps)

    def program(self, problem: Composed, caps: Caps) -> Program:
        before = problem.prologue(caps)
        core = self.core_route.parts(problem.core, caps)
        after = problem.epilogue(caps)
        names = problem.names()
        renamed = tuple(
            Launch(
                launch.kernel,
                tuple((binding, names.get(operand, operand)) for binding, operand in launch.operands),
                launch.workgroups,
                launch.uniforms,
            )
            for launch in core.launches
        )
        return Program(
            before.launches + renamed + after.launches,
            before.scratch + core.scratch + after.scratch,
        )

    def card_variant(self, problem: Composed, caps: Caps) -> str | None:
        return problem.card_variant(self.name, caps)


# -- kernels of the core ---------------------------------------------------------------------------


def _constants(p: AttentionProblem, **extra: Constant) -> tuple[tuple[str, Constant], ...]:
    constants: dict[str, Constant] = {
        "H4": p.h4,
        "V4": p.v4,
        "GROUP": p.group,
        "kv": p.kv_dtype,
        "out": p.out_dtype,
        "causal": p.causal,
        "window": p.window >= 0,
        "softcap": p.softcap > 0,
        "bias": p.bias_dtype,
        "mask": p.mask_width > 0,
        "beams": p.beam_width > 0,
        "exclude_lowest": p.exclude_lowest,
        "sink": "" if p.sink == "zero" else p.sink,
        "sink_is_zero": p.sink == "zero",
        "v_scaled": p.v_scaled,
        "packed_rows": p.packed_rows,
        **extra,
    }
    return tuple(sorted(constants.items()))


_UNIFORMS = (
    ("q_len", "u32"),
    ("num_heads", "u32"),
    ("kv_heads", "u32"),
    ("kv_head_rows", "u32"),
    ("window", "i32"),
    ("softcap", "f32"),
    ("bias_heads", "u32"),
    ("bias_rows", "u32"),
    ("bias_width", "u32"),
    ("mask_width", "u32"),
    ("mask_filter", "f32"),
    ("beam_width", "u32"),
    ("beam_rows", "u32"),
    ("qk_width", "u32"),
    ("tiles", "u32"),
    ("splits", "u32"),
    ("row_groups", "u32"),
)


def _uniforms(p: AttentionProblem, **extra: int) -> tuple[tuple[str, int | float], ...]:
    own = {name: getattr(p, name) for name, _ in _UNIFORMS if hasattr(p, name)}
    own["bias_rows"] = p.bias_rows or p.q_len
    return tuple({**own, **extra}.items())


def _input_bindings(p: AttentionProblem, wide: bool = False) -> list[Binding]:
    element = (WIDE if wide else STORAGE)[p.kv_dtype]
    bindings = [
        Binding("q", "vec4<f32>"),
        Binding("k", element),
        Binding("v", element),
        Binding("seq", "i32"),
    ]
    if p.bias_dtype:
        bindings.append(Binding("bias", scalar_element(p.bias_dtype)))
    if p.mask_width:
        bindings.append(Binding("mask", "i32"))
    if p.beam_width:
        bindings.append(Binding("beams", "i32"))
    return bindings


def _output_bindings(p: AttentionProblem) -> list[Binding]:
    bindings = [Binding("out", STORAGE[p.out_dtype], "read_write")]
    if p.sink and p.sink != "zero":
        bindings.append(Binding("sink", scalar_element(p.sink)))
    if p.v_scaled:
        bindings.append(Binding("v_scale", "vec4<f32>"))
    return bindings


def _launch(
    template: str,
    constants: tuple[tuple[str, Constant], ...],
    bindings: list[Binding],
    workgroup_size: int,
    workgroups: int,
    uniforms: tuple[tuple[str, int | float], ...],
    features: frozenset[str] = frozenset(),
) -> Launch:
    kernel = Kernel(template, constants, tuple(bindings), _UNIFORMS, workgroup_size, features)
    return Launch(kernel, tuple((b.name, b.name) for b in bindings), workgroups, uniforms)


def _too_many_buffers(bindings: list[Binding], caps: Caps) -> Rejected | None:
    if len(bindings) > caps.storage_buffers:
        return Rejected(
            f"needs {len(bindings)} storage buffers, the adapter allows {caps.storage_buffers}"
        )
    return None


def shuffle_width(caps: Caps) -> int:
    """Lanes that are surely in one subgroup: the largest power of two up to the smallest size."""
    return 1 << (caps.subgroup_min.bit_length() - 1) if caps.subgroup_min else 0


class Serial(CoreRoute):
    """One workgroup per query row and head; takes every problem."""

    name = "serial"

    def check(self, problem: AttentionProblem, caps: Caps) -> Accepted | Rejected:
        return _too_many_buffers(self._bindings(problem), caps) or Accepted()

    def parts(self, problem: AttentionProblem, caps: Caps) -> Parts:
        p = problem
        launch = _launch(
            "attention_serial",
            _constants(p, qk=p.qk),
            self._bindings(p),
            64,
            p.batch * p.q_len * p.num_heads,
            _uniforms(p),
        )
        return Parts((launch,))

    @staticmethod
    def _bindings(p: AttentionProblem) -> list[Binding]:
        bindings = _input_bindings(p) + _output_bindings(p)
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
        """Bytes of workgroup memory: the key and value tile, weights, and maxima without subgroups."""
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


class Flash(CoreRoute):
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
        bindings = _input_bindings(problem) + _output_bindings(problem)
        return (
            _too_many_buffers(bindings, caps)
            or self._few_rows(problem)
            or self._no_tile(problem, caps)
            or Accepted()
        )

    @staticmethod
    def _few_rows(p: AttentionProblem) -> Rejected | None:
        return None

    def _no_tile(self, p: AttentionProblem, caps: Caps) -> Rejected | None:
        if self.tile(p, caps) is None:
            return Rejected(
                f"no tile for head sizes {p.head_size} and {p.v_head_size} fits"
                f" {caps.workgroup_memory} bytes of workgroup memory"
            )
        return None

    def tile(self, p: AttentionProblem, caps: Caps) -> FlashTile | None:
        """The first geometry that fits the device and the problem."""
        for tile in _FLASH_TILES:
            if (
                tile.rl * tile.cl <= caps.workgroup_invocations
                and (not self.subgroups or tile.cl <= shuffle_width(caps))
                and tile.workgroup_memory(p, self.subgroups) <= caps.workgroup_memory
                and tile.registers(p) <= 96
                and (tile.rl * tile.rpt <= max(32, 2 * p.rows))
            ):
                return tile
        return None

    def parts(self, problem: AttentionProblem, caps: Caps) -> Parts:
        p, tile = problem, self.tile(problem, caps)
        assert tile is not None
        tiles = -(-p.rows // (tile.rl * tile.rpt))
        launch = _launch(
            "attention_flash",
            _constants(p, RL=tile.rl, CL=tile.cl, RPT=tile.rpt, KPT=tile.kpt),
            _input_bindings(p) + _output_bindings(p),
            tile.rl * tile.cl,
            p.batch * p.kv_heads * tiles,
            _uniforms(p, tiles=tiles),
            frozenset({"subgroups"}) if self.subgroups else frozenset(),
        )
        return Parts((launch,))


class SplitK(CoreRoute):
    """Few query rows: the keys are dealt out to workgroups and the shares merged."""

    name = "splitk_nosg"
    template = "attention_splitk"
    wide = False
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
            or _too_many_buffers(self._bindings(problem, self._direct(problem, caps)), caps)
            or Accepted()
        )

    def _direct(self, p: AttentionProblem, caps: Caps) -> bool:
        return self.splits(p, caps) == 1

    def _bindings(self, p: AttentionProblem, direct: bool) -> list[Binding]:
        partial = [
            Binding("part_o", "vec4<f32>", "read_write"),
            Binding("part_ml", "vec2<f32>", "read_write"),
        ]
        bindings = _input_bindings(p, self.wide) + (_output_bindings(p) if direct else partial)
        if p.qk:
            bindings.append(Binding("qk_out", "f32", "read_write"))
        return bindings

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
        """Shares of the keys: enough workgroups to fill the device, no share under 64 keys."""
        keys = p.max_keys if p.window < 0 else min(p.max_keys, p.window + p.q_len)
        groups = p.batch * p.kv_heads * -(-p.rows // self.rows(p, caps))
        target = 8 if caps.software else 256
        return max(1, min(-(-target // groups), keys // 64, 64))

    def parts(self, problem: AttentionProblem, caps: Caps) -> Parts:
        p = problem
        rows, splits = self.rows(p, caps), self.splits(p, caps)
        row_groups = -(-p.rows // rows)
        direct = self._direct(p, caps)
        size, own = self.geometry(p, caps)
        split = _launch(
            self.template,
            _constants(p, ROWS=rows, direct=direct, qk=p.qk, **own),
            self._bindings(p, direct),
            size,
            p.batch * p.kv_heads * row_groups * splits,
            _uniforms(p, splits=splits, row_groups=row_groups),
            self.features,
        )
        if direct:
            return Parts((split,))
        slots = p.batch * p.num_heads * p.q_len
        merge = _launch(
            "attention_merge",
            _constants(p),
            [
                Binding("part_o", "vec4<f32>"),
                Binding("part_ml", "vec2<f32>"),
                Binding("seq", "i32"),
                *_output_bindings(p),
            ],
            64,
            slots,
            _uniforms(p, splits=splits),
        )
        scratch = (("part_o", slots * splits * p.v4 * 16), ("part_ml", slots * splits * 8))
        return Parts((split, merge), scratch)


class SplitKSubgroups(SplitK):
    """Split-K with several lanes to a key, whose partial sums meet by shuffles."""

    name = "splitk"
    template = "attention_splitk_sg"
    wide = True
    features = frozenset({"subgroups"})

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

    def _size(self, p: AttentionProblem, caps: Caps) -> int | None:
        """Lanes of a workgroup: as many as the memory for the final merge allows."""
        lanes = self.lanes(p, caps)
        for size in (64,) if caps.software else (256, 128, 64, 32):
            teams = size // lanes
            memory = teams * (p.v4 * 16 + self.rows(p, caps) * 8)
            if teams and size <= caps.workgroup_invocations and memory <= caps.workgroup_memory:
                return size
        return None

    def geometry(self, p: AttentionProblem, caps: Caps) -> tuple[int, dict[str, Constant]]:
        lanes, size = self.lanes(p, caps), self._size(p, caps)
        assert size is not None
        units = -(-(p.head_size // 8) // lanes)
        ahead = 2 if units > 1 else 4
        if p.kv_dtype in ("int8", "int4"):
            ahead *= 2
        return size, {"LPK": lanes, "UPL": units, "KB": ahead}


#: In order of preference; the last takes everything.
CORE_ROUTES: tuple[CoreRoute, ...] = (
    SplitKSubgroups(),
    SplitK(),
    Flash(True),
    Flash(False),
    Serial(),
)


def composed_routes() -> tuple[ComposedRoute, ...]:
    """The routes of an operator that is prologue, core attention and epilogue."""
    return tuple(ComposedRoute(core) for core in CORE_ROUTES)
