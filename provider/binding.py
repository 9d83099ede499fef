"""IOBinding for sessions that are a plan: what is bound is kept here, and read back by the run.

ORT's own binding cannot be read back where a raw pointer was bound. ORT's binding to the stand-in
is made as well, so that a mistake in a name, type or device is ORT's error, in its words. A past
and a present bound to one value are computed apart and copied: rows of a static cache that hold no
key come out zero, where ORT's in-place form leaves them as they were.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime

from ort_webgpu.errors import InvalidInputError

__all__ = ["PlanBinding"]


class PlanBinding(onnxruntime.IOBinding):
    """An `onnxruntime.IOBinding` to a `WebGPUSession`; values live on the CPU."""

    def __init__(self, session: Any):
        super().__init__(session)
        self._names = tuple(output.name for output in session.get_outputs())
        self.feeds: dict[str, Any] = {}
        self.targets: dict[str, np.ndarray | onnxruntime.OrtValue | None] = {}
        self._results: dict[str, onnxruntime.OrtValue] = {}

    def bind_cpu_input(self, name: str, arr_on_cpu: np.ndarray) -> None:
        """Bind an array; it is read at each run."""
        super().bind_cpu_input(name, arr_on_cpu)
        self.feeds[name] = arr_on_cpu

    def bind_input(
        self,
        name: str,
        device_type: str,
        device_id: int,
        element_type: Any,
        shape: Sequence[int],
        buffer_ptr: int,
    ) -> None:
        """Bind memory of the caller's, which must stay until the last run with it."""
        super().bind_input(name, device_type, device_id, element_type, shape, buffer_ptr)
        self.feeds[name] = _array_at(element_type, shape, buffer_ptr)

    def bind_ortvalue_input(self, name: str, ortvalue: onnxruntime.OrtValue) -> None:
        """Bind an OrtValue."""
        super().bind_ortvalue_input(name, ortvalue)
        self.feeds[name] = ortvalue

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Bind an output to memory of the caller's, or to a new value at each run."""
        super().bind_output(name, device_type, device_id, element_type, shape, buffer_ptr)
        bound = buffer_ptr is not None and shape is not None
        self.targets[name] = _array_at(element_type, shape, buffer_ptr) if bound else None

    def bind_ortvalue_output(self, name: str, ortvalue: onnxruntime.OrtValue) -> None:
        """Bind an output to an OrtValue, which is overwritten at each run."""
        super().bind_ortvalue_output(name, ortvalue)
        self.targets[name] = ortvalue

    def clear_binding_inputs(self) -> None:
        """Forget the inputs."""
        super().clear_binding_inputs()
        self.feeds.clear()

    def clear_binding_outputs(self) -> None:
        """Forget the outputs and the results."""
        super().clear_binding_outputs()
        self.targets.clear()
        self._results.clear()

    def get_outputs(self) -> list[onnxruntime.OrtValue]:
        """The bound outputs of the last run, in the order they were bound."""
        return [self._results[name] for name in self.targets if name in self._results]

    def copy_outputs_to_cpu(self) -> list[np.ndarray]:
        """The bound outputs of the last run as arrays of the caller's own."""
        return [value.numpy().copy() for value in self.get_outputs()]

    def run(self, session: Any, run_options: Any = None) -> None:
        """Run `session` on what is bound."""
        names = list(self.targets)
        values = session.run_with_ort_values(names, _as_ort_values(self.feeds), run_options)
        for name, value in zip(names, values, strict=True):
            target = self.targets[name]
            if isinstance(target, onnxruntime.OrtValue):
                _fill(name, target.numpy(), value.numpy())
                value = target
            elif target is not None:
                _fill(name, target, value.numpy())
                value = onnxruntime.OrtValue.ortvalue_from_numpy(target)
            self._results[name] = value


def _as_ort_values(feeds: dict[str, Any]) -> dict[str, onnxruntime.OrtValue]:
    return {
        name: value
        if isinstance(value, onnxruntime.OrtValue)
        else onnxruntime.OrtValue.ortvalue_from_numpy(np.array(value, order="C", copy=None))
        for name, value in feeds.items()
    }


def _array_at(element_type: Any, shape: Sequence[int] | None, pointer: int | None) -> np.ndarray:
    """An array over memory that is not ours; element types as numpy's, or as onnx numbers them."""
    if isinstance(element_type, int):
        element_type = onnx.helper.tensor_dtype_to_np_dtype(element_type)
    dtype, dims = np.dtype(element_type), tuple(shape or ())
    count = int(np.prod(dims, dtype=np.int64))
    if count == 0:
        return np.empty(dims, dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer or 0)
    return np.frombuffer(memory, dtype).reshape(dims)


def _fill(name: str, target: np.ndarray, value: np.ndarray) -> None:
    if target.shape != value.shape or target.dtype != value.dtype:
        raise InvalidInputError(
            f"output {name!r} is bound to a buffer of shape {list(target.shape)} and type"
            f" {target.dtype}, but the run makes {list(value.shape)} of {value.dtype}; bind a"
            " buffer of that shape, or none"
        )
    np.copyto(target, value)
