"""What attention of every operator shares: AttentionProblem, CoreRoute, and their composition.

An operator turns its inputs into float32 query rows and key and value rows (its prologue), then any
core route computes softmax(q k^T) v. Operands that core routes read and write, by name:

    q        float32, [query row][num_heads][head_size padded to 4], times the score scale
    k, v     kv_dtype, rows of head_size and v_head_size padded to 4; row of key j of batch entry b
             and KV head h: seq[b].k_row + h * kv_head_rows + j
    seq      int32 [batch][SEQ_FIELDS], made by `sequences`
    out      out_dtype, [query row][num_heads][v_head_size padded to 4]
    bias     bias_dtype, [batch or 1][num_heads or 1][bias_rows, 0: q_len][bias_width], dense
    mask     int32 [batch][mask_width];  beams int32 [batch][beam_rows]
    sink     sink_dtype [num_heads];  v_scale float32 [kv_heads][v_head_size]
    qk_out   float32 [batch][num_heads][q_len][qk_width]

Semantics: contract ort-semantics.md 2.3, 2.4, 3.1. Scores, weights and sums are float32.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from ort_webgpu.ops.spec import Accepted, Caps, Rejected, Route
from ort_webgpu.ops.tuned import CallClass, Finding
from ort_webgpu.wgsl.kernel import (
    STORAGE,
    Access,
    Binding,
    Constant,
    Kernel,
    Launch,
    Program,
    scalar_element,
)

__all__ = [
    "MOST_SPLITS",
    "PARTIAL",
    "SEQ_FIELDS",
    "AttentionProblem",
    "ComposedRoute",
    "CoreRoute",
    "Parts",
    "TiledRoute",
    "constants",
    "input_bindings",
    "make_launch",
    "merged",
    "missing_matrices",
    "other_subgroups",
    "output_bindings",
    "sequences",
    "shuffle_width",
    "too_many_buffers",
    "uniforms",
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
    or 2 (probabilities). `packed_rows`: entries have different numbers of query rows and rows
    beyond `q_valid` do not exist; otherwise such rows exist and are written as zero.
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
    scale: float = 1.0  # of scores; for routes that take queries without it
    half_queries: bool = False  # the prologue can hand out such queries, as float16
    appended: bool = False  # k and v are buffers apart from each other that the prologue writes to

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

    @property
    def visible(self) -> int:
        """Keys that the rows of a call can see at most."""
        return self.max_keys if self.window < 0 else min(self.max_keys, self.window + self.q_len)

    @cached_property
    def call_class(self) -> CallClass:
        """What a measurement of this problem stands for."""
        facts = {
            "beams": self.beam_width > 0,
            "bias": bool(self.bias_dtype),
            "half queries": self.half_queries,
            "mask": self.mask_width > 0,
            "not causal": self.q_len > 1 and not self.causal,
            "packed": self.packed_rows,
            "qk": self.qk > 0,
            "softcap": self.softcap > 0,
        }
        return CallClass(
            self.rows,
            self.visible,
            self.batch * self.kv_heads,
            self.head_size,
            self.v_head_size,
            self.kv_dtype,
            tuple(name for name, holds in facts.items() if holds),
        )


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
    def prologue(self, caps: Caps, half_queries: bool = False) -> Parts: ...
    def epilogue(self, caps: Caps) -> Parts: ...
    def names(self) -> dict[str, str]: ...
    def card_variant(self, core_route: str, caps: Caps) -> str | None: ...


class CoreRoute:
    """A way to compute the core attention.

    `half_queries`: it reads `q` as float16 without the score scale (problem.scale), in a buffer
    with room for a tile of 128 query rows more; only for problems that say half_queries too.
    `setting_compiles`: each of its settings is a kernel of its own.
    """

    name: str
    forced_only: bool = False
    half_queries: bool = False
    setting_compiles: bool = False

    def check(self, problem: AttentionProblem, caps: Caps) -> Accepted | Rejected:
        """Whether the route takes the problem on such a device."""
        raise NotImplementedError

    def parts(self, problem: AttentionProblem, caps: Caps) -> Parts:
        """Its launches, over the operand names of this module."""
        raise NotImplementedError

    def settings(self, problem: AttentionProblem, caps: Caps) -> tuple[tuple[int, ...], ...]:
        """What `ort-webgpu tune` tries on an accepted problem, first what the route takes now.

        One of these in `caps.tuned` is taken in place of the rule's, where it fits a problem.
        """
        return ((),)

    def tuned(self, problem: AttentionProblem, caps: Caps) -> tuple[int, ...] | None:
        """The setting that was measured to be best, None where the rule holds."""
        return caps.tuned.setting(problem.call_class, self.name) if caps.tuned else None


Tile = TypeVar("Tile", bound=Any)


class TiledRoute(CoreRoute, Generic[Tile]):
    """A core route whose settings are geometries: dataclasses of numbers, each a kernel."""

    setting_compiles = True

    def fitting(self, problem: AttentionProblem, caps: Caps) -> Iterator[Tile]:
        """The geometries that fit the device and the problem, best first by rule."""
        raise NotImplementedError

    def tile(self, problem: AttentionProblem, caps: Caps) -> Tile | None:
        """The geometry that was measured to be best, else the first that fits, if any does."""
        first = next(self.fitting(problem, caps), None)
        tuned = self.tuned(problem, caps)
        if tuned is None:
            return first
        return next((t for t in self.fitting(problem, caps) if astuple(t) == tuned), first)

    def settings(self, problem: AttentionProblem, caps: Caps) -> tuple[tuple[int, ...], ...]:
        now = self.tile(problem, caps)
        assert now is not None
        others = [tile for tile in self.fitting(problem, caps) if tile != now]
        return tuple(astuple(tile) for tile in (now, *others))


class ComposedRoute(Route):
    """A core route inside an operator: prologue, core, epilogue."""

    def __init__(self, core: CoreRoute):
        self.core_route = core
        self.name = core.name
        self.forced_only = core.forced_only
        self.measured_as = core.name

    def check(self, problem: Composed, caps: Caps) -> Accepted | Rejected:
        verdict = problem.check(caps)
        if isinstance(verdict, Rejected):
            return verdict
        return self.core_route.check(problem.core, caps)

    def program(self, problem: Composed, caps: Caps) -> Program:
        half_queries = self.core_route.half_queries
        before = problem.prologue(caps, True) if half_queries else problem.prologue(caps)
        core = self.core_route.parts(problem.core, caps)
        after = problem.epilogue(caps)
        names = problem.names()
        renamed = tuple(
            Launch(
                launch.kernel,
                tuple(
                    (binding, names.get(operand, operand)) for binding, operand in launch.operands
                ),
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

    def finding(self, problem: Composed, caps: Caps) -> Finding | None:
        return caps.tuned.find(problem.core.call_class) if caps.tuned else None


# -- what the core's kernels have in common --------------------------------------------------------


def constants(p: AttentionProblem, **extra: Constant) -> tuple[tuple[str, Constant], ...]:
    """The constants that every attention template needs, and `extra`."""
    found: dict[str, Constant] = {
        "H4": p.h4,
        "V4": p.v4,
        "GROUP": p.group,
        "kv": p.kv_dtype,
        "out": p.out_dtype,
        "causal": p.causal,
        "window": p.window >= 0,
        "softcap": p.softcap > 0,
        "bias": p.bias_dtype,
        "bias_wide": False,
        "mask": p.mask_width > 0,
        "beams": p.beam_width > 0,
        "exclude_lowest": p.exclude_lowest,
        "sink": "" if p.sink == "zero" else p.sink,
        "sink_is_zero": p.sink == "zero",
        "v_scaled": p.v_scaled,
        "packed_rows": p.packed_rows,
        **extra,
    }
    return tuple(sorted(found.items()))


_UNIFORMS = (
    ("batch", "u32"),
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
    ("key_tiles", "u32"),
    ("column_tiles", "u32"),
    ("q_scale", "f32"),
)


def uniforms(p: AttentionProblem, **extra: int | float) -> tuple[tuple[str, int | float], ...]:
    """Values of the uniform block: the problem's own, and `extra`."""
    own = {name: getattr(p, name) for name, _ in _UNIFORMS if hasattr(p, name)}
    own["bias_rows"] = p.bias_rows or p.q_len
    return tuple({**own, **extra}.items())


def input_bindings(p: AttentionProblem, kv_element: str = "", ahead: bool = False) -> list[Binding]:
    """What a kernel reads before the softmax; `kv_element`: of k and v, if not that of STORAGE.

    `ahead`: k and v are loaded a step before their use. They are bound as writable where that is
    allowed (no other binding may share their memory), though nothing writes: from a read-only
    buffer NVIDIA's compiler loads at the use all the same (see conformance/RESULTS.md).
    """
    element = kv_element or STORAGE[p.kv_dtype]
    access: Access = "read_write" if ahead and p.appended else "read"
    bindings = [
        Binding("q", "vec4<f32>"),
        Binding("k", element, access),
        Binding("v", element, access),
        Binding("seq", "i32"),
    ]
    if p.bias_dtype:
        bindings.append(Binding("bias", scalar_element(p.bias_dtype)))
    if p.mask_width:
        bindings.append(Binding("mask", "i32"))
    if p.beam_width:
        bindings.append(Binding("beams", "i32"))
    return bindings


def output_bindings(p: AttentionProblem) -> list[Binding]:
    """What attention_epilogue needs to write the result."""
    bindings = [Binding("out", STORAGE[p.out_dtype], "read_write")]
    if p.sink and p.sink != "zero":
        bindings.append(Binding("sink", scalar_element(p.sink)))
    if p.v_scaled:
        bindings.append(Binding("v_scale", "vec4<f32>"))
    return bindings


def make_launch(
    template: str,
    given: tuple[tuple[str, Constant], ...],
    bindings: list[Binding],
    workgroup_size: int,
    workgroups: int,
    values: tuple[tuple[str, int | float], ...],
    features: frozenset[str] = frozenset(),
) -> Launch:
    """A launch whose operands are called like its bindings."""
    kernel = Kernel(template, given, tuple(bindings), _UNIFORMS, workgroup_size, features)
    return Launch(kernel, tuple((b.name, b.name) for b in bindings), workgroups, values)


MOST_SPLITS = 64
PARTIAL = (
    Binding("part_o", "vec4<f32>", "read_write"),
    Binding("part_ml", "vec2<f32>", "read_write"),
)


def merged(p: AttentionProblem, caps: Caps, splits: int) -> Parts:
    """The launch that combines `splits` shares of the keys, and the scratch that holds them."""
    slots = p.batch * p.num_heads * p.q_len
    lanes = 64 if caps.software else min(256, caps.workgroup_invocations)
    merge = make_launch(
        "attention_merge",
        constants(p, SPLITS=MOST_SPLITS, VP=min(lanes, 1 << (p.v4 - 1).bit_length())),
        [
            *(Binding(b.name, b.element) for b in PARTIAL),
            Binding("seq", "i32"),
            *output_bindings(p),
        ],
        lanes,
        slots,
        uniforms(p, splits=splits),
    )
    scratch = (("part_o", slots * splits * p.v4 * 16), ("part_ml", slots * splits * 8))
    return Parts((merge,), scratch)


def too_many_buffers(bindings: list[Binding], caps: Caps) -> Rejected | None:
    """The rejection, where the adapter allows fewer bindings than these."""
    if len(bindings) > caps.storage_buffers:
        return Rejected(
            f"needs {len(bindings)} storage buffers, the adapter allows {caps.storage_buffers}"
        )
    return None


def missing_matrices(caps: Caps, size: int, depth: int, operand: str) -> Rejected | None:
    """The rejection, where the device has no subgroup matrices of size x size x depth: operands
    f16 or f32 with float32 sums, i8 with int32 sums."""
    result = "i32" if operand == "i8" else "f32"
    if (size, size, depth, operand, result) not in caps.matrix_tiles:
        return Rejected(
            f"needs {size}x{size}x{depth} subgroup matrices of {operand} with {result} sums; the"
            f" adapter has {list(caps.matrix_tiles) or 'none'}"
        )
    if operand == "f16" and not caps.f16:
        return Rejected("needs the shader-f16 feature")
    return None


def other_subgroups(caps: Caps, lanes: int) -> Rejected | None:
    """The rejection, where subgroups may have more or fewer than `lanes`."""
    if caps.subgroup_min == caps.subgroup_max == lanes:
        return None
    return Rejected(
        f"needs subgroups of {lanes}, the adapter has {caps.subgroup_min} to {caps.subgroup_max}"
    )


def shuffle_width(caps: Caps) -> int:
    """Lanes that are surely in one subgroup: the largest power of two up to the smallest size."""
    return 1 << (caps.subgroup_min.bit_length() - 1) if caps.subgroup_min else 0
