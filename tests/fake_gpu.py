"""A device made of numpy, and operators for it that ORT's CPU EP has too, so that plans are tested
without an adapter and compared with ORT itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ort_webgpu.adapters import AdapterInfo
from ort_webgpu.device import Counters
from ort_webgpu.ops.spec import Accepted, Call, Caps, OpSpec, Output, Rejected, Route
from ort_webgpu.wgsl.kernel import Binding, Kernel, Launch, Program


class Buffer:
    def __init__(self, nbytes: int):
        self.bytes = np.zeros(nbytes, np.uint8)


INFO = AdapterInfo(0, "numpy", "fake", "none", "DiscreteGPU", "")


@dataclass
class FakeGpu:
    """The part of `Gpu` that plans use; kernels are numpy functions, by template name."""

    caps: Caps = field(default_factory=Caps)
    info: AdapterInfo = INFO
    counters: Counters = field(default_factory=Counters)
    submits: list[list[str]] = field(default_factory=list)
    downloads: list[int] = field(default_factory=list)

    def allocate(self, nbytes: int) -> Buffer:
        return Buffer(nbytes)

    def upload(self, array: np.ndarray) -> Buffer:
        buffer = Buffer(array.nbytes)
        buffer.bytes[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.counters.bytes_up += array.nbytes
        return buffer

    def run(self, programs, more=False) -> None:
        self.submits.append([launch.kernel.template for p, _ in programs for launch in p.launches])
        for program, operands in programs:
            for launch in program.launches:
                KERNELS[launch.kernel.template](*(operands[n] for _, n in launch.operands))

    def download(self, wanted) -> list[np.ndarray]:
        self.downloads.append(len(wanted))
        return [b.bytes.view(spec.dtype).reshape(spec.shape).copy() for b, spec in wanted]


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _gelu(x: Buffer, y: Buffer) -> None:
    values = x.bytes.view(np.float32).astype(np.float64)
    y.bytes.view(np.float32)[:] = 0.5 * values * (1 + _erf(values / math.sqrt(2)))


KERNELS = {"gelu": _gelu, "gelu_small": _gelu}


class GeluRoute(Route):
    """`limit` rows at most; the problem is the shape."""

    def __init__(self, name: str, limit: int | None = None):
        self.name, self.limit = name, limit

    def check(self, problem, caps):
        if self.limit is not None and problem[0] > self.limit:
            return Rejected(f"{problem[0]} rows; {self.name} takes up to {self.limit}")
        return Accepted()

    def program(self, problem, caps):
        bindings = (Binding("x", "f32"), Binding("y", "f32", "read_write"))
        template = "gelu" if self.limit is None else "gelu_small"
        kernel = Kernel(template, (), bindings)
        return Program((Launch(kernel, (("x", "x"), ("y", "y")), 1),))


class Gelu(OpSpec):
    """com.microsoft.Gelu: y = x Phi(x), float32 only."""

    op_type = "Gelu"

    def __init__(self, routes: Sequence[Route], host_inputs=frozenset(), refused: str = ""):
        self.routes, self.host_inputs, self.refused = tuple(routes), host_inputs, refused

    def check_node(self, node, input_dtypes):
        if input_dtypes[0] != "float32":
            return Rejected(f"input 0 is {input_dtypes[0]}; float32 is allowed")
        if node.name == self.refused:
            return Rejected("refused by name")
        return Accepted()

    def call(self, node, values, in_place):
        if 0 in self.host_inputs:
            assert values[0].host is not None
        spec = values[0].spec
        return Call(spec.shape, {"x": 0}, {0: Output("y", spec)})
