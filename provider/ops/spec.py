"""What an operator is to the session: contract (OpSpec), strategy (Route), validated call (Call).

None of it touches a device: a Route is tested with a made-up `Caps`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ort_webgpu.graph_tools.nodes import Node
from ort_webgpu.ops.tuned import Finding, Tuned
from ort_webgpu.wgsl.kernel import Program

__all__ = [
    "Accepted",
    "Call",
    "Caps",
    "Known",
    "OpSpec",
    "Output",
    "Picked",
    "Rejected",
    "Room",
    "Route",
    "TensorSpec",
    "Value",
    "item_size",
    "pick",
]


@dataclass(frozen=True)
class Caps:
    """What an adapter can do, as far as routes care. Sizes in bytes.

    `subgroup_min`/`subgroup_max` are 0 where subgroups are missing. `matrix_tiles` are the subgroup
    matrix shapes (M, N, K, operand type, result type), e.g. (16, 16, 16, "f16", "f32").
    `dialect` is the WGSL reader: "naga" (wgpu-native) or "tint" (Dawn). `tuned` is what was
    measured on it, by which routes and settings are chosen before any rule.
    """

    name: str = "made-up adapter"
    backend: str = "wgpu"
    dialect: str = "naga"
    software: bool = False
    workgroup_memory: int = 16384
    workgroup_invocations: int = 256
    workgroups_per_dimension: int = 65535
    storage_buffers: int = 8
    storage_binding: int = 128 << 20
    buffer_size: int = 256 << 20
    offset_alignment: int = 256
    subgroup_min: int = 0
    subgroup_max: int = 0
    f16: bool = False
    timestamps: bool = False
    matrix_tiles: tuple[tuple[int, int, int, str, str], ...] = ()
    tuned: Tuned = field(default_factory=Tuned)


@dataclass(frozen=True)
class TensorSpec:
    """dtype (a numpy dtype name: "float32", "float16", "int8", "uint8", ...) and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return self.size * item_size(self.dtype)


@cache
def item_size(dtype: str) -> int:
    """Bytes of an element."""
    return np.dtype(dtype).itemsize


class Room(NamedTuple):
    """The memory a cache (batch, heads, rows, width) lies in, and what its owner allows.

    `capacity` rows lie between two heads. `append`: nothing but the value's own rows is in use, so
    rows behind them may be written. `clean`: those rows are zero. `fixed`: a present must lie in
    `capacity` rows. `limit`: the most rows that a new present should be given, 0 for no spare rows.
    """

    capacity: int
    append: bool = False
    clean: bool = False
    fixed: bool = False
    limit: int = 0

    def spacious(self, rows: int) -> int:
        """Rows for a new present of `rows`: what is fixed, or room to double, up to the limit."""
        if self.fixed:
            return self.capacity
        return max(rows, min(self.limit, max(64, 1 << rows.bit_length()))) if self.limit else rows


@dataclass(frozen=True)
class Known:
    """What is known of an input before a run: dtype, and sizes (None or a name where symbolic)."""

    dtype: str
    shape: tuple[int | str | None, ...]


@dataclass(frozen=True)
class Value:
    """One input of a call: its spec, its data where the operator reads it on the host, and the
    room around it where it is a cache that the session manages."""

    spec: TensorSpec
    host: np.ndarray | None = None
    room: Room | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> str:
        return self.spec.dtype


@dataclass(frozen=True)
class Output:
    """One output that a call writes: the operand name its launches use, and its spec.

    `alias` is the index of the input whose storage the output continues when caller or session
    binds both to one value (a KV cache updated in place), else None. `in_place`: the launches write
    to that storage. `capacity`: rows between two heads, where they are more than the spec's.
    """

    operand: str
    spec: TensorSpec
    alias: int | None = None
    in_place: bool = False
    capacity: int | None = None


@dataclass(frozen=True)
class Call:
    """One validated call of a node, ready for a route.

    `inputs` maps operand names to node input indexes, `arrays` operand names to small host-made
    arrays (uploaded at each call). `outputs` maps node output indexes to what is written there;
    an Output under a negative index is written by the kernels but wanted by nobody. `host_outputs`
    are outputs that the contract made on the host, where they stay: later host inputs and the
    caller get them without a transfer. Operands in `strided` are read with the capacity of their
    `room`; all others must be dense.
    """

    problem: Any
    inputs: dict[str, int]
    outputs: dict[int, Output]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    host_outputs: dict[int, np.ndarray] = field(default_factory=dict)
    strided: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Accepted:
    """The route takes the problem."""


@dataclass(frozen=True)
class Rejected:
    """The route or contract does not take it; `reason` says what was found and what is allowed."""

    reason: str


class Route(ABC):
    """A named strategy for an operator. Both methods are pure.

    A `forced_only` route is there to test another one's logic: only `routes=` can choose it.
    `measured_as` is its name in findings, "" where it is in none. Findings change the order of
    routes of one `stage` only: what comes before the measured part is not theirs to judge.
    """

    name: str
    forced_only: bool = False
    measured_as: str = ""
    stage: str = ""

    @abstractmethod
    def check(self, problem: Any, caps: Caps) -> Accepted | Rejected:
        """Whether this route can run the problem on such a device, with the reason if not."""

    @abstractmethod
    def program(self, problem: Any, caps: Caps) -> Program:
        """The launches; only called for an accepted problem."""

    def card_variant(self, problem: Any, caps: Caps) -> str | None:
        """The name in variants.json that this route is for the problem, or None."""
        return None

    def finding(self, problem: Any, caps: Caps) -> Finding | None:
        """What was measured of such problems on the device, if anything."""
        return None


@dataclass(frozen=True)
class Picked:
    """The route for a problem, None where none accepts, and why those before it do not.

    `finding` is what put it first, None where it is first by rule.
    """

    route: Route | None
    rejected: dict[str, str]
    finding: Finding | None = None


def pick(routes: Sequence[Route], problem: Any, caps: Caps, forced: str | None = None) -> Picked:
    """The first of `routes` that accepts; before it one that was measured to be faster.

    A measurement counts only where the route that it prefers accepts as well. `forced` is the name
    of the only route that may be taken.
    """
    rejected: dict[str, str] = {}
    for route in routes:
        if route.name != forced if forced else route.forced_only:
            continue
        verdict = route.check(problem, caps)
        if isinstance(verdict, Rejected):
            rejected[route.name] = verdict.reason
            continue
        finding = None if forced else route.finding(problem, caps)
        if finding is None:
            return Picked(route, rejected)
        preferred = next(
            (
                r
                for r in routes
                if (r.measured_as, r.stage) == (finding.route, route.stage)
                and not r.forced_only
                and not isinstance(r.check(problem, caps), Rejected)
            ),
            None,
        )
        return Picked(preferred or route, rejected, finding if preferred else None)
    return Picked(None, rejected)


class OpSpec(ABC):
    """An operator's contract.

    `host_inputs` are the indexes whose data `call` reads on the host (lengths, positions, scales);
    `weight_inputs` those that are uploaded once when they are initializers. `caches` maps the index
    of each present to that of its past.
    """

    domain: str = "com.microsoft"
    op_type: str
    host_inputs: frozenset[int] = frozenset()
    weight_inputs: frozenset[int] = frozenset()
    caches: Mapping[int, int] = MappingProxyType({})
    routes: tuple[Route, ...] = ()

    @abstractmethod
    def check_node(self, node: Node, input_dtypes: Sequence[str | None]) -> Accepted | Rejected:
        """Whether a node can be offloaded at all, from attributes, wiring and element types.

        `input_dtypes` has a numpy dtype name for each input, None where absent or unknown.
        Raises InvalidModelError only for what ORT itself refuses at session creation.
        """

    def cache_kind(self, node: Node) -> str:
        """How the node's caches go on: "growing" by new rows, "window" (rows drop out, so it can't
        go back), or "static" (of fixed size, with the number of valid rows fed beside them)."""
        return "static"

    def typed(self, output_dtypes: Sequence[str | None]) -> "OpSpec":
        """The contract of a node with such output types, where its inputs do not tell them.

        `output_dtypes` has a numpy dtype name for each output, None where absent or unknown.
        """
        return self

    def typical_calls(self, node: Node, known: Sequence[Known | None]) -> Iterator[Call]:
        """Calls that a session with this node will likely see; their kernels are compiled early."""
        return iter(())

    @abstractmethod
    def call(self, node: Node, values: Sequence[Value | None], in_place: frozenset[int]) -> Call:
        """Validate one call. `values` has an entry for each node input, None where absent.

        `in_place` are the node output indexes that the caller bound to the same value as the
        input they alias, or whose past it gives away. Raises InvalidInputError with the node's
        name.
        """
