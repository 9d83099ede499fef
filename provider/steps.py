"""The two kinds of step of a plan. A step holds no state of a run, so threads may share it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    Value,
    pick,
)
from ort_webgpu.ops.tuned import Finding, milliseconds
from ort_webgpu.profiling import DeviceEvents
from ort_webgpu.segments import Segment
from ort_webgpu.values import DeviceValue, Held, Rows, to_host
from ort_webgpu.wgsl.kernel import Program

__all__ = ["Choice", "Chooser", "CpuStep", "Env", "GpuNode", "GpuStep", "ShapeStep"]

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

    `caches` are the OpSpec's, for presents that the node has; `sole` the inputs that nothing else
    reads; nodes of one `signature` differ in their values alone.
    """

    node: Node
    spec: OpSpec
    inputs: tuple[tuple[str, bool], ...] = ()
    on_host: tuple[int, ...] = ()
    outputs: frozenset[str] = frozenset()
    caches: Mapping[int, int] = field(default_factory=dict)
    grows: bool = False
    sole: frozenset[int] = frozenset()
    signature: tuple = ()
    choice: Choice | None = None
    moved: str | None = None

    @classmethod
    def of(cls, node: Node, spec: OpSpec, sole: frozenset[int] = frozenset()) -> "GpuNode":
        """The node with what a run needs to know, looked up once."""
        inputs = tuple((name, i in spec.host_inputs) for i, name in enumerate(node.inputs))
        on_host = tuple(sorted(i for i in spec.host_inputs if i < len(inputs)))
        outputs = frozenset(filter(None, node.outputs))
        caches = {o: i for o, i in spec.caches.items() if node.has_output(o) and node.has_input(i)}
        grows = spec.cache_kind(node) == "growing"
        attributes = repr(sorted(node.attributes.items(), key=lambda item: item[0]))
        wired = tuple(map(bool, node.inputs)), tuple(map(bool, node.outputs))
        signature = (id(spec), attributes, *wired)
        return cls(node, spec, inputs, on_host, outputs, caches, grows, sole, signature)


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
        alike: dict[Any, "Validated"] | None = None,
        more: bool = False,
    ) -> None:
        """Put the outputs of `nodes` into `env`; presents that are `resident` get room to grow.

        `alike` are calls of this run so far: layers that differ in their data alone share one.
        `more`: some of the outputs are read on the host next.
        """
        pending: list[Launchable] = []
        alike = {} if alike is None else alike
        for one in nodes:
            held = [env[name] if name else None for name, _ in one.inputs]
            late = [h for i in one.on_host if (h := held[i]) is not None and h.on_device_only]
            if late:
                if pending:
                    self.gpu.run(pending, more=True)
                    pending = []
                to_host(late)
            valid, places = self._call(one, held, resident, alike)
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

    def _call(
        self,
        one: GpuNode,
        held: Sequence[Held | None],
        resident: frozenset[str],
        alike: dict[Any, "Validated"],
    ) -> tuple["Validated", dict[int, DeviceValue]]:
        """The validated call, and the pasts by output index whose storage it continues."""
        values = [
            h.value(on_host) if h is not None else None
            for h, (_, on_host) in zip(held, one.inputs, strict=True)
        ]
        if not one.caches:
            return _validated(one, values, frozenset(), alike), {}
        given_away = self._add_rooms(one, held, values, resident)
        valid = _validated(one, values, given_away, alike)
        places: dict[int, DeviceValue] = {}
        for index, output in valid.call.outputs.items():
            if not output.in_place or output.alias is None:
                continue
            past = held[output.alias].on_device(self.gpu)  # type: ignore[union-attr]
            if past.rows is None or past.rows.claim(past.shape[2], output.spec.shape[2]):
                places[index] = past
                continue
            # Another thread has just continued the same value: compute beside it
            for position in one.caches.values():
                values[position] = Value(held[position].spec)  # type: ignore[union-attr]
            return _validated(one, values, frozenset(), alike), {}
        return valid, places

    def _choice(self, one: GpuNode, valid: "Validated") -> Choice:
        choice = valid.choice
        if choice is None:
            choice = self.chooser.choose(one.node, one.spec, valid.call.problem)
            if not self.chooser.forces:
                valid.choice = choice
        return choice

    def _add_rooms(
        self,
        one: GpuNode,
        held: Sequence[Held | None],
        values: list[Value | None],
        resident: frozenset[str],
    ) -> frozenset[int]:
        """Tell the call of the room around its pasts; the presents that may overwrite them."""
        given_away = set()
        for present, position in one.caches.items():
            past = held[position]
            if past is None or len(past.spec.shape) != 4:
                continue
            place = past.device
            rows = place.rows if place is not None else None
            alone = rows is None or (one.grows and not rows.shared)
            if alone and past.own and position in one.sole:
                given_away.add(present)
            stays = one.grows and one.node.outputs[present] in resident
            if not stays and (rows is None or not one.grows):
                continue
            limit = self._most_rows(past.spec) if stays else 0
            if place is not None:
                room = place.room(limit)
            else:
                room = Room(past.spec.shape[2], append=past.own, clean=True, limit=limit)
            values[position] = Value(past.spec, None, room)
        return frozenset(given_away)

    def _most_rows(self, spec: TensorSpec) -> int:
        """Rows of such a cache that one binding can hold."""
        batch, heads, _, width = spec.shape
        row = batch * heads * width * np.dtype(spec.dtype).itemsize
        return self.gpu.caps.storage_binding // max(1, row)

    def _operands(
        self,
        node: Node,
        valid: "Validated",
        held: Sequence[Held | None],
        env: Env,
        places: Mapping[int, DeviceValue],
    ) -> dict[str, DeviceBuffer]:
        gpu, call = self.gpu, valid.call
        operands: dict[str, DeviceBuffer] = {}
        for operand, index in call.inputs.items():
            one = held[index]
            if one is not None:
                strided = operand in call.strided
                operands[operand] = one.on_device(gpu).buffer if strided else one.buffer(gpu)  # type: ignore[assignment]
        if call.arrays and not valid.arrays:
            valid.arrays = {operand: gpu.upload(array) for operand, array in call.arrays.items()}
        operands |= valid.arrays
        for index, output in call.outputs.items():
            value = _made(gpu, output, places.get(index))
            operands[output.operand] = value.buffer  # type: ignore[assignment]
            if 0 <= index < len(node.outputs) and node.outputs[index]:
                env[node.outputs[index]] = Held.of_device(value)
        for index, array in call.host_outputs.items():
            if index < len(node.outputs) and node.outputs[index]:
                env[node.outputs[index]] = Held.of_array(array)
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
    """A call that nodes of one run share: its route once chosen, its arrays once uploaded."""

    call: Call
    choice: Choice | None = None
    arrays: dict[str, DeviceBuffer] = field(default_factory=dict)


_LARGE = 4096  # bytes of a host input that is not worth comparing


def _validated(
    one: GpuNode,
    values: Sequence[Value | None],
    given_away: frozenset[int],
    alike: dict[Any, Validated],
) -> Validated:
    """The call of `one` on `values`, that of an equal node on equal values where there was one."""
    parts: list[Any] = [one.signature, given_away]
    for value in values:
        if value is None:
            parts.append(None)
            continue
        spec, host = value.spec, value.host
        if host is not None and host.nbytes > _LARGE:
            return Validated(one.spec.call(one.node, values, given_away))
        data = None if host is None else host.tobytes()
        parts.append((spec.dtype, spec.shape, value.room, data))
    key = tuple(parts)
    valid = alike.get(key)
    if valid is None:
        valid = alike[key] = Validated(one.spec.call(one.node, values, given_away))
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
