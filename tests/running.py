"""Runs one conformance case on a device, below the session: one route, poisoned memory, guards."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from onnx.helper import tensor_dtype_to_np_dtype

from ort_webgpu.conformance.case import OPERATORS, Case, RejectCase
from ort_webgpu.conformance.checks import compare_outputs
from ort_webgpu.conformance.oracles import numpy_oracle, oracle
from ort_webgpu.device import DeviceBuffer, Gpu, open_gpu
from ort_webgpu.graph_tools.nodes import Node
from ort_webgpu.ops import OPS
from ort_webgpu.ops.attention_core import AttentionProblem
from ort_webgpu.ops.spec import Call, Caps, OpSpec, Rejected, Route, TensorSpec, Value
from ort_webgpu.ops.tuned import Finding, Tuned

POISON = 0xC5  # every float made of these bytes is finite and far from any result
UNREAD = 0xFF  # every float made of these bytes is NaN, every signed integer -1
GUARD = 256  # bytes bound behind each operand: no kernel may write to them, or make use of them


def node_of(case: Case | RejectCase) -> Node:
    """The case's node."""
    return Node.from_proto(case.model().graph.node[0], 0)


def values_of(case: Case | RejectCase) -> list[Value | None]:
    """Its inputs, as a session would hand them to the operator."""
    return [None if a is None else Value(TensorSpec(a.dtype.name, a.shape), a) for a in case.inputs]


def spec_of(case: Case | RejectCase) -> OpSpec:
    """Its operator, told the declared types of the node's outputs."""
    graph = case.model().graph
    declared = {
        info.name: tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type).name
        for info in graph.output
    }
    dtypes = [declared.get(name) for name in graph.node[0].output]
    return OPS["com.microsoft", case.op_type].typed(dtypes)


def call_of(case: Case) -> Call:
    """The validated call, in place where the case says so."""
    in_place = frozenset({1, 2}) if case.in_place else frozenset[int]()
    return spec_of(case).call(node_of(case), values_of(case), in_place)


def accepting(case: Case, gpu: Gpu) -> Iterator[Route]:
    """The routes that take the case on this device."""
    problem = call_of(case).problem
    for route in spec_of(case).routes:
        if not isinstance(route.check(problem, gpu.caps), Rejected):
            yield route


def run_route(
    case: Case, gpu: Gpu, route: Route, poison: int = POISON, caps: Caps | None = None
) -> list[np.ndarray]:
    """The wanted outputs of `case` on `route`; fails if a guard behind an output was touched."""
    call = call_of(case)
    buffers: dict[str, DeviceBuffer] = {}
    for name, index in call.inputs.items():
        array = case.inputs[index]
        assert array is not None
        buffers[name] = gpu.upload(_with_guard(array, UNREAD))
    for name, array in call.arrays.items():
        buffers[name] = gpu.upload(_with_guard(array, UNREAD))
    for output in call.outputs.values():
        buffers[output.operand] = _guarded(case, gpu, output, poison)
    program = route.program(call.problem, caps or gpu.caps)
    gpu.run([(program, buffers)])
    results = dict(call.host_outputs)
    for index, output in sorted(call.outputs.items()):
        size = -(-output.spec.nbytes // 4) * 4
        raw = TensorSpec("uint8", (size + GUARD,))
        (data,) = gpu.download([(buffers[output.operand], raw)])
        if (data[-(-size // 16) * 16 :] != poison).any():
            pytest.fail(f"{case.name}: {route.name} wrote behind output {output.operand}")
        if index >= 0:
            tensor = data[: output.spec.nbytes].view(output.spec.dtype)
            results[index] = tensor.reshape(output.spec.shape)
    names = OPERATORS[case.op_type][1]
    assert len(results) == sum(case.wanted), f"{case.name}: outputs {names}"
    return [results[index] for index in sorted(results)]


def route_of(case: Case, name: str) -> Route:
    """The route of that name of the case's operator."""
    (route,) = [route for route in spec_of(case).routes if route.name == name]
    return route


def tuned_to(core: AttentionProblem, caps: Caps, name: str, setting: tuple[int, ...]) -> Caps:
    """Caps whose findings name a setting of a core route."""
    times = ((name, 1e-3),)
    finding = Finding(core.call_class, times, times[0], ((name, setting),))
    return replace(caps, tuned=Tuned((finding,)))


def check_route(case: Case, gpu: Gpu, route: Route, caps: Caps | None = None) -> None:
    """Fails where the route is wrong, or its answer depends on what memory held."""
    outputs = run_route(case, gpu, route, caps=caps)
    compare_outputs(outputs, oracle(case), case)
    again = run_route(case, gpu, route, poison=POISON ^ 0xFF, caps=caps)
    for first, second in zip(outputs, again, strict=True):
        assert first.tobytes() == second.tobytes(), route.name


def check_routes(case: Case, adapter: str, backend: str = "wgpu") -> list[str]:
    """Every accepting route: right, and the same bits again over other garbage."""
    gpu = open_gpu(adapter, backend)
    assert gpu is not None
    names = []
    for route in accepting(case, gpu):
        outputs = run_route(case, gpu, route)
        compare_outputs(outputs, numpy_oracle(case), case)
        again = run_route(case, gpu, route, poison=0x3B)
        assert all(np.array_equal(a, b) for a, b in zip(outputs, again, strict=True)), route.name
        names.append(route.name)
    return names


def _guarded(case: Case, gpu: Gpu, output, poison: int) -> DeviceBuffer:
    """A buffer with a guard behind the tensor; holds poison, or the past of an in-place case.

    The guard is bound as well: a device would drop, or move, what is written behind a binding.
    """
    content = np.full(output.spec.nbytes, poison, np.uint8)
    if case.in_place and output.alias is not None:
        past = case.inputs[output.alias]
        assert past is not None
        content[: past.nbytes] = np.ascontiguousarray(past).reshape(-1).view(np.uint8)
    return gpu.upload(_with_guard(content, poison))


def _with_guard(array: np.ndarray, poison: int) -> np.ndarray:
    """The bytes of `array`, and GUARD bytes of poison behind the whole words that they fill."""
    size = -(-array.nbytes // 4) * 4
    data = np.full(size + GUARD, poison, np.uint8)
    data[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return data
