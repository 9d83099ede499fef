"""Plan: a model as steps, CPU sessions and device submits in turn, and the run over them.

A plan is immutable once built; all that a run makes lives in its own environment (value name to
`Held`), so several threads may run one plan at once.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
from onnxruntime import OrtValue
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from ort_webgpu.device import Gpu
from ort_webgpu.errors import InvalidInputError, NotOffloadedError
from ort_webgpu.explain import NOT_RUN, AssignedNode, AssignedSubgraph, Row
from ort_webgpu.graph_tools import (
    ModelFile,
    Node,
    Stage,
    needed_outputs,
    partition,
    type_from_node_arg,
)
from ort_webgpu.graph_tools.partition import reads
from ort_webgpu.graph_tools.reference import EXPANDABLE
from ort_webgpu.ops.spec import Caps, Known
from ort_webgpu.overlap import split_stages
from ort_webgpu.placement import Placement, needs_expansion
from ort_webgpu.profiling import PROVIDER, DeviceEvents
from ort_webgpu.segments import SegmentFactory
from ort_webgpu.steps import Choice, Chooser, CpuStep, Env, GpuNode, GpuStep, Seen, ShapeStep
from ort_webgpu.trace import Observer, node_call
from ort_webgpu.values import DTYPES, DeviceValue, Held, fetch, to_host

_TERMINATED = "Exiting due to terminate flag being set to true."

__all__ = ["Kinds", "Plan", "build_plan"]

Step = CpuStep | ShapeStep | GpuStep
Kinds = Mapping[str, tuple[str, list[Any]]]
"""Type string and shape of each value that a node makes, as ORT's NodeArg has them."""


@dataclass(frozen=True)
class _Entry:
    """One step of a schedule: what it hands out, which of it the host reads next, unless the caller
    takes it on the device, and which values nobody reads after it."""

    step: Step
    work: tuple[Any, ...]
    as_objects: bool
    read_next: frozenset[str]
    dropped: tuple[str, ...]


@dataclass
class Plan:
    """Steps in order. `constants` are initializers that device nodes or the caller read."""

    steps: tuple[Step, ...]
    constants: dict[str, Held]
    gpu: Gpu
    placement: Placement
    chooser: Chooser
    events: DeviceEvents | None = None
    _schedules: dict[tuple, tuple[_Entry, ...]] = field(default_factory=dict)

    @property
    def sessions(self) -> list[Any]:
        """The ORT sessions, in the order they run."""
        return [step.segment.session for step in self.steps if isinstance(step, CpuStep)]

    @property
    def gpu_nodes(self) -> list[GpuNode]:
        """Offloaded nodes, in graph order."""
        steps = (step for step in self.steps if isinstance(step, GpuStep))
        return sorted((one for step in steps for one in step.nodes), key=lambda o: o.node.index)

    def run(
        self,
        feeds: Mapping[str, Held],
        names: tuple[str, ...],
        run_options: Any = None,
        ort_values: bool = False,
        observer: Observer | None = None,
        resident: frozenset[str] = frozenset(),
    ) -> list[Held]:
        """The values `names` for the graph inputs `feeds`; steps that they don't need are skipped.

        `names` must be outputs of the model. `ort_values`: the caller wants no Python object for a
        sequence, map or optional. `resident` are those that the caller takes on the device.
        `observer` gets the NodeCall of every offloaded node, in order.
        Errors are those of ORT and of the operators.
        """
        key = (names, ort_values)
        schedule = self._schedules.get(key)
        if schedule is None:
            schedule = self._schedules[key] = self._schedule(names, ort_values)
        env: Env = {**self.constants, **feeds}
        seen = Seen()
        for entry in schedule:
            if isinstance(entry.step, CpuStep):
                entry.step.run(env, entry.work, entry.as_objects, run_options)
            elif isinstance(entry.step, ShapeStep):
                entry.step.run(env, entry.work)
            else:
                if run_options is not None and run_options.terminate:
                    raise Fail(f"[ONNXRuntimeError] : 1 : FAIL : {_TERMINATED}")
                more = not entry.read_next <= resident
                entry.step.run(env, entry.work, run_options, resident, seen, more)
                if observer is not None:
                    for one in entry.work:
                        observer(node_call(one, env, self.chooser.caps))
            for name in entry.dropped:
                env.pop(name, None)
        return [env[name] for name in names]

    def fetch(
        self,
        feeds: Mapping[str, Held],
        names: tuple[str, ...],
        held: list[Held],
        resident: frozenset[str] = frozenset(),
    ) -> list[Any]:
        """`held`, as `run` gave them for `names`, as the caller gets them: its own to change.

        Those in `resident` become DeviceValues.
        """
        places = {
            i: self._resident(name, one, name in feeds or name in self.constants)
            for i, (name, one) in enumerate(zip(names, held, strict=True))
            if name in resident
        }
        rest = [one for i, one in enumerate(held) if i not in places]
        kept = tuple(name for i, name in enumerate(names) if i not in places)
        arrays = iter(fetch(rest, self._borrowed(feeds, kept)))
        return [places[i] if i in places else next(arrays) for i in range(len(names))]

    def _resident(self, name: str, held: Held, borrowed: bool) -> DeviceValue:
        if held.is_python or held.kind not in DTYPES:
            raise InvalidInputError(
                f"output {name!r} is no numeric tensor, so it cannot stay on the device; leave it"
                " out of device_outputs"
            )
        if borrowed and held.device is None:
            return DeviceValue.of_array(held.host(), self.gpu)
        return held.on_device(self.gpu)

    def fetch_ort(
        self, feeds: Mapping[str, Held], names: tuple[str, ...], held: list[Held]
    ) -> list[OrtValue]:
        """As `fetch`, each as an OrtValue."""
        to_host(held)
        borrowed = self._borrowed(feeds, names)
        owned = [Held.of_array(h.host().copy()) if i in borrowed else h for i, h in enumerate(held)]
        return [OrtValue(h.ort(), h.array) for h in owned]

    def assignment(self) -> list[Any]:
        """ORT's records of its sessions, and ours of the device, as ORT's objects look."""
        subgraphs = [g for s in self.sessions for g in s.get_provider_graph_assignment_info()]
        for one in self.gpu_nodes:
            node = AssignedNode(one.node.domain, one.node.name, one.node.op_type)
            subgraphs.append(AssignedSubgraph(PROVIDER, (node,)))
        return subgraphs

    def _borrowed(self, feeds: Mapping[str, Held], names: tuple[str, ...]) -> frozenset[int]:
        """Positions of values whose memory is a feed's, an initializer's or an earlier result's."""
        return frozenset(
            i
            for i, name in enumerate(names)
            if name in feeds or name in self.constants or name in names[:i]
        )

    def rows(self) -> list[Row]:
        """One row for each candidate node."""
        rows = []
        for one in self.gpu_nodes:
            choice = one.choice
            placed, why = "webgpu", "offloaded"
            route = NOT_RUN if choice is None else choice.route.name if choice.route else None
            if choice is not None and choice.finding is not None:
                why = f"offloaded; {choice.finding}"
            if one.moved is not None:
                placed, why, route = "cpu", one.moved, None
            rejected = self.chooser.others(one.spec, choice) if choice else {}
            rows.append(Row(one.node.name, one.node.op_type, placed, route, why, rejected))
        return rows

    def _schedule(self, names: tuple[str, ...], ort_values: bool) -> tuple[_Entry, ...]:
        needed = set(names)
        entries: list[tuple[Step, tuple[Any, ...], bool, set[str]]] = []
        for step in reversed(self.steps):
            made = frozenset(needed.intersection(step.outputs))
            if not made:
                continue
            work: tuple[Any, ...]
            if isinstance(step, ShapeStep):
                work, as_objects = tuple(made), False
            elif isinstance(step, CpuStep):
                work = tuple(name for name in step.outputs if name in made)
                as_objects = not ort_values and not step.objects.isdisjoint(names)
            else:
                work, as_objects = step.needed(made), False
            read = step.reads(made)
            needed |= read
            entries.append((step, work, as_objects, read))
        kept, following = set(names), set(names)
        schedule = []
        for step, work, as_objects, read in entries:  # the last comes first
            read_next = following.intersection(step.outputs)
            dropped = tuple(read - kept)
            schedule.append(_Entry(step, work, as_objects, frozenset(read_next), dropped))
            kept |= read
            following = read if isinstance(step, CpuStep) else set()
        return tuple(reversed(schedule))


def build_plan(
    factory: SegmentFactory,
    placement: Placement,
    kinds: Kinds,
    gpu: Gpu,
    forced: Mapping[str, str],
    may_move: bool,
    caps: Caps | None = None,
) -> Plan:
    """Cut the model of `factory` and make a session of each part.

    `may_move`: a node that no route takes at run time goes to the CPU, else NotOffloadedError.
    `caps` are those that routes are chosen by, the device's own if None.
    """
    model = factory.model
    stages = split_stages(model, partition(model, frozenset(placement.offloaded)))
    stages, shapes = _without_shapes(model, stages, placement)
    readers = _readers(model)
    types = {n: _type(kind, shape, n in model.outputs) for n, (kind, shape) in kinds.items()}
    simple = {name: kind for name, (kind, _) in kinds.items()}
    profiling = factory.options is not None and factory.options.enable_profiling
    events = DeviceEvents() if profiling else None
    chooser = Chooser(gpu, forced, caps)
    twins = _Twins(factory, types, simple, may_move)

    steps: list[Step] = []
    waiting: list[GpuNode] = []

    def flush() -> None:
        if waiting:
            steps.append(GpuStep(tuple(waiting), gpu, chooser, twins.step, events))
            waiting.clear()

    for number, (stage, outputs) in enumerate(
        zip(stages, needed_outputs(model, stages), strict=True)
    ):
        if shapes[number]:
            flush()
            steps.append(ShapeStep(shapes[number]))
        if outputs:
            flush()
            expanded = _expanded(factory, stage, simple, placement)
            segment = factory.segment(stage.cpu, outputs, types, expanded, f"_segment{number}")
            steps.append(CpuStep.of(segment))
        for i in stage.gpu:
            node = model.nodes[i]
            sole = frozenset(
                k
                for k, name in enumerate(node.inputs)
                if readers[name] == 1 and node.inputs.count(name) == 1
            )
            waiting.append(GpuNode.of(node, placement.offloaded[i], sole))
    flush()
    _warm(model, placement, kinds, gpu, chooser)
    return Plan(tuple(steps), _constants(factory, steps), gpu, placement, chooser, events)


def _warm(model: ModelFile, placement: Placement, kinds: Kinds, gpu: Gpu, chooser: Chooser) -> None:
    """Compile the kernels that the session will likely need, so that no run waits for them."""
    for i, spec in placement.offloaded.items():
        node = model.nodes[i]
        known = [_known(name, model, kinds) for name in node.inputs]
        for call in spec.typical_calls(node, known):
            try:
                program = chooser.choose(node, spec, call.problem).program
            except NotOffloadedError:  # by a forced route; such a call may never come
                continue
            if program is not None:
                gpu.warm(launch.kernel for launch in program.launches)


def _known(name: str, model: ModelFile, kinds: Kinds) -> Known | None:
    """Dtype and sizes of a value, as far as the model and ORT tell them."""
    weight = model.weights.get(name)
    if weight is not None:
        return Known(str(weight.dtype), tuple(weight.shape)) if weight.dtype is not None else None
    if name in kinds:
        kind, shape = kinds[name]
        dtype = DTYPES.get(kind)
        return Known(dtype, tuple(shape)) if dtype else None
    tensor = model.value_types[name].tensor_type if name in model.value_types else None
    if tensor is None or not tensor.elem_type:
        return None
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    sizes = (d.dim_value if d.HasField("dim_value") else d.dim_param for d in tensor.shape.dim)
    return Known(dtype, tuple(sizes))


def _without_shapes(
    model: ModelFile, stages: Sequence[Stage], placement: Placement
) -> tuple[list[Stage], list[tuple[Node, ...]]]:
    """The stages without the Shape and Size nodes of values that the device reads or makes, and
    those nodes, by stage."""
    there: set[str] = set()
    for i, spec in placement.offloaded.items():
        node = model.nodes[i]
        there.update(node.outputs)
        there.update(n for k, n in enumerate(node.inputs) if k not in spec.host_inputs)
    there -= model.weights.keys() | {""}
    left, taken = [], []
    for stage in stages:
        ours = [
            i
            for i in stage.cpu
            if (model.nodes[i].domain, model.nodes[i].op_type) in (("", "Shape"), ("", "Size"))
            and model.nodes[i].inputs[0] in there
        ]
        left.append(Stage(tuple(i for i in stage.cpu if i not in ours), stage.gpu))
        taken.append(tuple(model.nodes[i] for i in ours))
    return left, taken


def _readers(model: ModelFile) -> Counter[str]:
    """How many nodes, other than Shape and Size, read each value; the caller counts as one."""
    found = Counter(model.outputs)
    for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
        if node.op_type not in ("Shape", "Size"):
            found.update(reads(proto))
    return found


def _type(kind: str, shape: Sequence[Any], declared: bool) -> onnx.TypeProto:
    """The type of a segment's input. ORT refuses feeds that break fixed dims, and the dims that a
    file declares for an output may be stale, which ORT only warns of: they are left open."""
    if declared:
        shape = [dim if isinstance(dim, str) else None for dim in shape]
    return type_from_node_arg(kind, shape)


def _expanded(
    factory: SegmentFactory, stage: Stage, kinds: Mapping[str, str], placement: Placement
) -> set[str]:
    """Operators of a segment that ORT's CPU EP cannot run, those in bodies included."""
    nodes = [factory.model.nodes[i] for i in stage.cpu]
    found = {node.op_type for node in nodes if needs_expansion(node, kinds)}
    if any(isinstance(value, onnx.GraphProto) for n in nodes for value in n.attributes.values()):
        found |= EXPANDABLE
    return found


def _constants(factory: SegmentFactory, steps: Sequence[Step]) -> dict[str, Held]:
    """Initializers that are read outside of ORT sessions."""
    model = factory.model
    device = (one.node for step in steps if isinstance(step, GpuStep) for one in step.nodes)
    read = {name for node in device for name in node.inputs} | set(model.outputs)
    made = {name for step in steps for name in step.outputs}
    found = {}
    for name in read - made:
        weight = model.weights.get(name)
        if weight is not None and weight.dtype is not None:
            found[name] = Held.of_weight(weight)
    return found


@dataclass
class _Twins:
    """CPU sessions of single offloaded nodes, made when the device turns one down at run time."""

    factory: SegmentFactory
    types: Mapping[str, onnx.TypeProto]
    kinds: Mapping[str, str]
    allowed: bool
    made: dict[int, CpuStep] = field(default_factory=dict)

    def step(self, one: GpuNode, choice: Choice) -> CpuStep:
        """The step that runs `one` on the CPU. Raises NotOffloadedError where none may."""
        reasons = "; ".join(f"{name}: {why}" for name, why in choice.rejected.items())
        if not self.allowed:
            raise NotOffloadedError(
                f'{one.node}: no route takes this call ({reasons}) and fallback="error" forbids the'
                ' CPU. Use fallback="cpu", other shapes, or another adapter'
            )
        step = self.made.get(one.node.index)
        if step is None:
            expanded = {one.node.op_type} if needs_expansion(one.node, self.kinds) else set()
            outputs = [name for name in one.node.outputs if name]
            segment = self.factory.segment(
                [one.node.index], outputs, self.types, expanded, f"_node{one.node.index}"
            )
            step = self.made[one.node.index] = CpuStep.of(segment)
        one.moved = f"no route took the last call: {reasons}"
        return step
