"""The two kinds of step of a plan. A step holds no state of a run, so threads may share it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from ort_webgpu.device import DeviceBuffer, Gpu
from ort_webgpu.errors import NotOffloadedError
from ort_webgpu.graph_tools import Node
from ort_webgpu.ops.spec import (
    Call,
    Caps,
    OpSpec,
    Output,
    Rejected,
    Room,
    Route,
    TensorSpec,
    item_size,
    pick,
)
from ort_webgpu.ops.tuned import Finding, milliseconds
from ort_webgpu.profiling import DeviceEvents
from ort_webgpu.segments import Segment
from ort_webgpu.values import DeviceValue, Held, Rows, to_host
from ort_webgpu.wgsl.kernel import Program

__all__ = ["Choice", "Chooser", "CpuStep", "Env", "GpuNode", "GpuStep", "Seen", "ShapeStep"]

Env = dict[str, Held]
Launchable = tuple[Program, Mapping[str, DeviceBuffer]]


@dataclass(frozen=True)
class Choice:
    """The route that runs `problem`, and why those before it do not. No route: none accepts.

    `finding` is the measurement that put it first, None where a rule did.
    """

    problem: Any
    route: Route | None
    program: Program | None
    rejected: dict[str, str]
    finding: Finding | None = None


class Chooser:
    """Picks routes, and remembers what it picked for equal problems.

    `forced` maps operator types or node names to the only route that may run them. `caps` are the
    device's own, with what was measured on it where the session wants that.
    """

    _LIMIT = 1024

    def __init__(self, gpu: Gpu, forced: Mapping[str, str], caps: Caps | None = None):
        self.caps = caps or gpu.caps
        self._forced = dict(forced)
        self._choices: dict[tuple, Choice] = {}

    @property
    def forces(self) -> bool:
        """Whether a node's name or type can decide its route."""
        return bool(self._forced)

    def choose(self, node: Node, spec: OpSpec, problem: Any) -> Choice:
        """The first route of `spec` that accepts, or the forced one.

        Raises NotOffloadedError where a forced route rejects the problem.
        """
        forced = self._forced.get(node.name) or self._forced.get(node.op_type)
        key = (spec.op_type, forced, problem)
        choice = self._choices.get(key)
        if choice is None:
            choice = self._decide(spec, problem, forced)
            if len(self._choices) >= self._LIMIT:
                self._choices.clear()
            self._choices[key] = choice
        if choice.route is None and forced:
            raise NotOffloadedError(
                f"{node}: route {forced!r} was forced with routes= and does not take this call:"
                f" {choice.rejected.get(forced)}. Leave it out of routes= to let another route run"
            )
        return choice

    def others(self, spec: OpSpec, choice: Choice) -> dict[str, str]:
        """Why each other route did not run the problem of `choice`."""
        reasons = {}
        for route in spec.routes:
            if choice.route is not None and route.name == choice.route.name:
                continue
            verdict = route.check(choice.problem, self.caps)
            if isinstance(verdict, Rejected):
                reasons[route.name] = verdict.reason
            elif route.forced_only:
                reasons[route.name] = "runs only where routes= names it"
            elif choice.route is not None and route.name not in choice.rejected:
                reasons[route.name] = f"would do; {_why_later(route, choice)}"
        return reasons

    def _decide(self, spec: OpSpec, problem: Any, forced: str | None) -> Choice:
        picked = pick(spec.routes, problem, self.caps, forced)
        program = picked.route.program(problem, self.caps) if picked.route else None
        return Choice(problem, picked.route, program, picked.rejected, picked.finding)


def _why_later(route: Route, choice: Choice) -> str:
    times = dict(choice.finding.times) if choice.finding else {}
    if route.measured_as in times:
        return f"measured {milliseconds(times[route.measured_as])}"
    return f"{choice.route.name} comes before it"  # type: ignore[union-attr]


@dataclass
class CpuStep:
    """One ORT session. `objects` are outputs that `run` of ORT gives as Python objects."""

    segment: Segment
    outputs: tuple[str, ...]
    objects: frozenset[str] = frozenset()

    @classmethod
    def of(cls, segment: Segment) -> "CpuStep":
        """The step that runs `segment`."""
        objects = {n for n, kind in segment.kinds.items() if not kind.startswith("tensor(")}
        strings = {n for n, kind in segment.kinds.items() if kind == "tensor(string)"}
        return cls(segment, segment.outputs, frozenset(objects | strings))

    def reads(self, needed: frozenset[str]) -> set[str]:
        """What the step reads, whichever of its outputs are needed; overridable ones if fed."""
        return {*self.segment.inputs, *self.segment.overridable}

    def run(self, env: Env, outputs: Sequence[str], as_objects: bool, run_options: Any) -> None:
        """Put `outputs` into `env`, `as_objects` where the caller gets one that is no tensor."""
        segment = self.segment
        feeds = {name: env[name] for name in segment.inputs}
        if segment.overridable:
            feeds |= {name: env[name] for name in segment.overridable if name in env}
        to_host(feeds.values())
        # Only `run` takes Python objects, and an optional without a value crashes the other one.
        if as_objects or any(held.is_python for held in feeds.values()):
            given = {name: held.feed() for name, held in feeds.items()}
            results = segment.session.run(outputs, given, run_options)
            env.update(zip(outputs, map(Held.of_python, results), strict=True))
            return
        given = {name: held.ort() for name, held in feeds.items()}
        values = segment.session.run_with_ort_values(given, outputs, run_options)
        for i, name in enumerate(outputs):
            value = values[i]  # an iterator over ORT's vector takes longer to make than small runs
            empty = name in self.objects and not value.has_value()
            env[name] = Held.of_nothing(value) if empty else Held.of_ort(value)


@dataclass
class ShapeStep:
    """Shape and Size nodes of values that may lie on the device: answered without moving them."""

    nodes: tuple[Node, ...]
    outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.outputs = tuple(node.outputs[0] for node in self.nodes)

    def reads(self, needed: frozenset[str]) -> set[str]:
        """What the nodes read that make `needed`."""
        return {node.inputs[0] for node in self.nodes if node.outputs[0] in needed}

    def run(self, env: Env, outputs: Sequence[str]) -> None:
        """Put `outputs` into `env`."""
        for node in self.nodes:
            if node.outputs[0] not in outputs:
                continue
            spec = env[node.inputs[0]].spec
            if node.op_type == "Size":
                found = np.array(spec.size, np.int64)
            else:
                bounds = slice(node.attributes.get("start", 0), node.attributes.get("end"))
                found = np.array(spec.shape[bounds], np.int64)
            env[node.outputs[0]] = Held.of_array(found)


@dataclass
class GpuNode:
    """An offloaded node. `choice` is the one of its last run, for explain() only.

    `on_host` and `on_device` are its inputs by where the contract reads them; `caches` the
    OpSpec's, for presents that the node has; `sole` the inputs that nothing else reads; nodes of
    one `signature` differ in their values alone.
    """

    node: Node
    spec: OpSpec
    on_host: tuple[int, ...] = ()
    host_names: tuple[str, ...] = ()
    on_device: tuple[int, ...] = ()
    outputs: frozenset[str] = frozenset()
    caches: tuple[tuple[int, int], ...] = ()
    grows: bool = False
    sole: frozenset[int] = frozenset()
    signature: tuple = ()
    choice: Choice | None = None
    moved: str | None = None

    @classmethod
    def of(cls, node: Node, spec: OpSpec, sole: frozenset[int] = frozenset()) -> "GpuNode":
        """The node with what a run needs to know, looked up once."""
        wired = [i for i, name in enumerate(node.inputs) if name]
        on_host = tuple(i for i in wired if i in spec.host_inputs)
        caches = ((o, i) for o, i in spec.caches.items() if node.has_output(o) and i in wired)
        attributes = repr(sorted(node.attributes.items(), key=lambda item: item[0]))
        return cls(
            node,
            spec,
            on_host=on_host,
            host_names=tuple(node.inputs[i] for i in on_host),
            on_device=tuple(i for i in wired if i not in spec.host_inputs),
            outputs=frozenset(filter(None, node.outputs)),
            caches=tuple(caches),
            grows=spec.cache_kind(node) == "growing",
            sole=sole,
            signature=(id(spec), attributes, tuple(wired), tuple(map(bool, node.outputs))),
        )


@dataclass
class GpuStep:
    """Offloaded nodes between two CPU steps, recorded together and submitted once.

    `on_cpu` makes the CPU twin of a node that no route takes at run time.
    """

    nodes: tuple[GpuNode, ...]
    gpu: Gpu
    chooser: Chooser
    on_cpu: Callable[[GpuNode, Choice], CpuStep]
    events: DeviceEvents | None = None
    outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.outputs = tuple(n for one in self.nodes for n in one.node.outputs if n)

    def needed(self, names: frozenset[str]) -> tuple[GpuNode, ...]:
        """The nodes that the values `names` depend on, in order."""
        wanted, nodes = set(names), []
        for one in reversed(self.nodes):
            if not wanted.isdisjoint(one.outputs):
                nodes.append(one)
                wanted.update(one.node.inputs)
        return tuple(reversed(nodes))

    def reads(self, needed: frozenset[str]) -> set[str]:
        """What the nodes read that `needed` depends on."""
        return {name for one in self.needed(needed) for name in one.node.inputs if name}

    def run(
        self,
        env: Env,
        nodes: Sequence[GpuNode],
        run_options: Any,
        resident: frozenset[str] = frozenset(),
        seen: "Seen | None" = None,
        more: bool = False,
    ) -> None:
        """Put the outputs of `nodes` into `env`; presents that are `resident` get room to grow.

        `seen` is what this run has found so far. `more`: some of the outputs are read on the host
        next.
        """
        pending: list[Launchable] = []
        seen = Seen() if seen is None else seen
        for one in nodes:
            held = [env[name] if name else None for name in one.node.inputs]
            host = seen.hosts.get(one.host_names)
            if host is None:
                host = seen.hosts[one.host_names] = self._host_data(one, held, pending)
            valid, places = self._call(one, held, host, resident, seen)
            choice = one.choice = self._choice(one, valid)
            if choice.program is None:
                self.gpu.run(pending)
                pending = []
                twin = self.on_cpu(one, choice)
                twin.run(env, twin.outputs, False, run_options)
                continue
            one.moved = None
            launchable = (choice.program, self._operands(one.node, valid, held, env, places))
            if self.events is None:
                pending.append(launchable)
            else:
                self._measured(one, choice, launchable, env)
        if pending:
            self.gpu.run(pending, more)

    def _host_data(
        self, one: GpuNode, held: Sequence[Held | None], pending: list[Launchable]
    ) -> tuple:
        """What tells whether the host inputs of two nodes are equal; they are on the host then."""
        inputs: list[Held] = [held[i] for i in one.on_host]  # type: ignore[misc]
        if any(h.on_device_only for h in inputs):
            if pending:
                self.gpu.run(pending, more=True)
                pending.clear()
            to_host(inputs)
        # A large one equals itself alone: it is not worth comparing
        return tuple(
            (h.spec.dtype, h.spec.shape, data.tobytes()) if data.nbytes <= _LARGE else h
            for h, data in ((h, h.host()) for h in inputs)
        )

    def _call(
        self,
        one: GpuNode,
        held: Sequence[Held | None],
        host: tuple,
        resident: frozenset[str],
        seen: "Seen",
    ) -> tuple["Validated", Mapping[int, DeviceValue]]:
        """The validated call, and the pasts by output index whose storage it continues."""
        if not one.caches:
            return _validated(one, held, host, {}, (), seen), _NOTHING
        rooms, given_away = self._rooms(one, held, resident)
        valid = _validated(one, held, host, rooms, given_away, seen)
        if not valid.continued:
            return valid, _NOTHING
        places: dict[int, DeviceValue] = {}
        for index, alias, rows in valid.continued:
            past = held[alias].on_device(self.gpu)  # type: ignore[union-attr]
            if past.rows is not None and not past.rows.claim(past.shape[2], rows):
                # Another thread has just continued the same value: compute beside it
                return _validated(one, held, host, {}, (), seen), _NOTHING
            places[index] = past
        return valid, places

    def _choice(self, one: GpuNode, valid: "Validated") -> Choice:
        choice = valid.choice
        if choice is None:
            choice = self.chooser.choose(one.node, one.spec, valid.call.problem)
            if not self.chooser.forces:
                valid.choice = choice
        return choice

    def _rooms(
        self, one: GpuNode, held: Sequence[Held | None], resident: frozenset[str]
    ) -> tuple[dict[int, Room], tuple[int, ...]]:
        """The room around its pasts, by input; the presents that may overwrite them."""
        rooms, given_away = {}, []
        for present, position in one.caches:
            past: Held = held[position]  # type: ignore[assignment]
            shape = past.spec.shape
            if len(shape) != 4:
                continue
            place = past.device
            rows = place.rows if place is not None else None
            alone = rows is None or (one.grows and not rows.shared)
            if alone and past.own and position in one.sole:
                given_away.append(present)
            stays = one.grows and one.node.outputs[present] in resident
            if not stays and (rows is None or not one.grows):
                continue
            limit = 0
            if stays:  # what one binding can hold
                row = shape[0] * shape[1] * shape[3] * item_size(past.spec.dtype)
                limit = self.gpu.caps.storage_binding // max(1, row)
            if place is not None:
                rooms[position] = place.room(limit)
            else:
                rooms[position] = Room(shape[2], append=past.own, clean=True, limit=limit)
        return rooms, tuple(given_away)

    def _operands(
        self,
        node: Node,
        valid: "Validated",
        held: Sequence[Held | None],
        env: Env,
        places: Mapping[int, DeviceValue],
    ) -> dict[str, DeviceBuffer]:
        gpu, call = self.gpu, valid.call
        if call.arrays and not valid.arrays:
            valid.arrays = {operand: gpu.upload(array) for operand, array in call.arrays.items()}
        operands = dict(valid.arrays)
        for operand, index in call.inputs.items():
            one = held[index]
            if one is not None:
                strided = operand in call.strided
                operands[operand] = one.on_device(gpu).buffer if strided else one.buffer(gpu)  # type: ignore[assignment]
        names = node.outputs
        for index, output in call.outputs.items():
            value = _made(gpu, output, places.get(index))
            operands[output.operand] = value.buffer  # type: ignore[assignment]
            if 0 <= index < len(names) and names[index]:
                env[names[index]] = Held.of_device(value)
        for index, array in call.host_outputs.items():
            if index < len(names) and names[index]:
                env[names[index]] = Held.of_array(array)
        return operands

    def _measured(self, one: GpuNode, choice: Choice, launchable: Launchable, env: Env) -> None:
        start = time.monotonic_ns()
        if self.gpu.caps.timestamps:
            duration = self.gpu.time([launchable])[0]
        else:
            self.gpu.run([launchable])
            # Reading a value back waits for the device; the shortest way is the first one there
            there = (env[n] for n in one.node.outputs if n in env and env[n].on_device_only)
            to_host([held for held, _ in zip(there, (0,), strict=False)])
            duration = float(time.monotonic_ns() - start)
        route = choice.route.name if choice.route else ""
        self.events.add(one.node, route, start, duration)  # type: ignore[union-attr]


@dataclass
class Validated:
    """A call that nodes of one run share: its route once chosen, its arrays once uploaded.

    `continued` are (output, input whose storage it continues, rows it then has).
    """

    call: Call
    choice: Choice | None = None
    arrays: dict[str, DeviceBuffer] = field(default_factory=dict)
    continued: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        self.continued = tuple(
            (index, output.alias, output.spec.shape[2])
            for index, output in self.call.outputs.items()
            if output.in_place and output.alias is not None
        )


@dataclass
class Seen:
    """What the nodes of one run share: layers differ in the data alone that stays on the device.

    A name stands for one value during a run. `hosts` has what GpuStep._host_data found, by the
    inputs' names, `calls` those of equal nodes on equal values.
    """

    hosts: dict[tuple[str, ...], tuple] = field(default_factory=dict)
    calls: dict[tuple, Validated] = field(default_factory=dict)


_NOTHING: Mapping[int, DeviceValue] = MappingProxyType({})
_LARGE = 4096  # bytes of a host input that is not worth comparing


def _validated(
    one: GpuNode,
    held: Sequence[Held | None],
    host: tuple,
    rooms: Mapping[int, Room],
    given_away: tuple[int, ...],
    seen: Seen,
) -> Validated:
    """The call of `one`: that of an equal node on equal values where there was one."""
    parts: list[object] = [one.signature, host, given_away, *rooms.items()]
    for i in one.on_device:
        spec = held[i].spec  # type: ignore[union-attr]
        parts += (spec.dtype, spec.shape)
    key = tuple(parts)
    valid = seen.calls.get(key)
    if valid is None:
        values = [
            None if h is None else h.value(i in one.on_host, rooms.get(i))
            for i, h in enumerate(held)
        ]
        call = one.spec.call(one.node, values, frozenset(given_away))
        valid = seen.calls[key] = Validated(call)
    return valid


def _made(gpu: Gpu, output: Output, past: DeviceValue | None) -> DeviceValue:
    """The value that a call writes: in the storage of `past`, or in its own."""
    spec = output.spec
    if past is not None:
        return DeviceValue(gpu, past.buffer, spec, past.rows)
    if output.capacity is None:
        return DeviceValue(gpu, gpu.allocate(spec.nbytes), spec)
    batch, heads, used, width = spec.shape
    whole = TensorSpec(spec.dtype, (batch, heads, output.capacity, width))
    return DeviceValue(gpu, gpu.allocate(whole.nbytes), spec, Rows(output.capacity, used, used))
