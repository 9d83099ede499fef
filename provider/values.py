"""Values of one run: where each one is (ORT, numpy, the device), and the ways between these places.

A `Held` moves a value at most once in each direction and remembers the result, so a KV cache that
two nodes read is uploaded once, and what stays on the device is never downloaded.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as _ort

from ort_webgpu.device import DeviceBuffer, Gpu
from ort_webgpu.graph_tools import Weight
from ort_webgpu.ops.spec import TensorSpec, Value

__all__ = ["DTYPES", "DeviceValue", "Held", "fetch", "to_host"]

#: numpy's name for the element type of each tensor type that ORT writes so and numpy has.
DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(bool)": "bool",
    **{f"tensor({k}{n})": f"{k}{n}" for k in ("int", "uint") for n in (8, 16, 32, 64)},
}

_CPU = onnxruntime.OrtDevice.make("cpu", 0)._get_c_device()
_NUMERIC = frozenset("biuf")

# Buffers of initializers that lie in files, shared by the sessions of a process. A DeviceBuffer
# keeps its Gpu alive, so the id of the Gpu in a key stays its own while the entry lives.
_shared: weakref.WeakValueDictionary[tuple, DeviceBuffer] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class DeviceValue:
    """A dense, row-major tensor in a buffer of `gpu`."""

    gpu: Gpu
    buffer: DeviceBuffer
    spec: TensorSpec


class Held:
    """One value of a run. Made by one of the `of_...` constructors; never changed by a reader.

    A value that is no numeric tensor (string tensor, sequence, map, optional without a value) and
    came as a Python object stays one; `is_python` tells it, and only `feed` may be asked of it.
    """

    __slots__ = ("_array", "_device", "_host_value", "_ort", "_python", "_source", "_spec")

    def __init__(self) -> None:
        self._array: np.ndarray | None = None
        self._ort: Any = None
        self._device: DeviceValue | None = None
        self._python: tuple[Any] | None = None
        self._spec: TensorSpec | None = None
        self._host_value: Value | None = None
        self._source: tuple | None = None

    @classmethod
    def of_array(cls, array: np.ndarray) -> "Held":
        """A numeric array of any layout; it is read until the run is over, never written."""
        held = cls()
        # ascontiguousarray would make a vector of a scalar
        held._array = array if array.flags.c_contiguous else array.copy(order="C")
        return held

    @classmethod
    def of_ort(cls, value: Any) -> "Held":
        """A `C.OrtValue` on the CPU: a tensor, sequence or map."""
        held = cls()
        held._ort = value
        return held

    @classmethod
    def of_device(cls, value: DeviceValue) -> "Held":
        """A tensor on the device."""
        held = cls()
        held._device = value
        held._spec = value.spec
        return held

    @classmethod
    def of_weight(cls, weight: Weight) -> "Held":
        """An initializer that numpy has a type for."""
        held = cls.of_array(weight.array())
        if weight.path is not None:
            changed = weight.path.stat().st_mtime_ns
            held._source = (str(weight.path), changed, weight.offset, weight.length)
        return held

    @classmethod
    def of_nothing(cls, value: Any = None) -> "Held":
        """An optional without a value; `value` is the `C.OrtValue` that says so, if any."""
        held = cls()
        held._ort, held._python = value, (None,)
        return held

    @classmethod
    def of_python(cls, value: Any) -> "Held":
        """What ORT takes and gives as Python objects; a numeric array is held as an array."""
        if isinstance(value, np.ndarray) and value.dtype.kind in _NUMERIC:
            return cls.of_array(value)
        held = cls()
        held._python = (value,)
        return held

    @property
    def is_python(self) -> bool:
        """Whether this is a Python object with no tensor or OrtValue to stand for it."""
        return self._python is not None

    @property
    def on_device_only(self) -> bool:
        """Whether reading the value on the host needs a download."""
        return self._array is None and self._ort is None and self._python is None

    @property
    def array(self) -> np.ndarray | None:
        """The value as an array, if it has been one."""
        return self._array

    @property
    def device(self) -> DeviceValue | None:
        """The value on the device, if it has been there."""
        return self._device

    @property
    def spec(self) -> TensorSpec:
        """Element type and shape of a numeric tensor."""
        if self._spec is None:
            if self._array is not None:
                self._spec = TensorSpec(self._array.dtype.name, self._array.shape)
            else:
                dtype = DTYPES[self._ort.data_type()]
                self._spec = TensorSpec(dtype, tuple(self._ort.shape()))
        return self._spec

    def host(self) -> np.ndarray:
        """The tensor as an array, not to be written."""
        if self._array is None:
            if self._ort is not None:
                self._array = self._ort.numpy()
            else:
                to_host([self])
        return self._array  # type: ignore[return-value]

    def ort(self) -> Any:
        """The value as a `C.OrtValue`; a tensor shares its memory with `host()`."""
        if self._ort is None:
            self._ort = _ort.OrtValue.ortvalue_from_numpy(self.host(), _CPU)
        return self._ort

    def feed(self) -> Any:
        """The value as `C.InferenceSession.run` takes it."""
        if self._python is not None:
            return self._python[0]
        return onnxruntime.OrtValue(self.ort()) if self._array is None else self._array

    def buffer(self, gpu: Gpu) -> DeviceBuffer:
        """The tensor on the device, uploaded if it is not there."""
        if self._device is None:
            self._device = DeviceValue(gpu, self._upload(gpu), self.spec)
        return self._device.buffer

    def value(self, with_data: bool) -> Value:
        """What an operator's contract sees of it; the data too where it reads it on the host."""
        if not with_data:
            return self._host_value or Value(self.spec)
        if self._host_value is None:
            self._host_value = Value(self.spec, self.host())
        return self._host_value

    def _upload(self, gpu: Gpu) -> DeviceBuffer:
        if self._source is None:
            return gpu.upload(self.host())
        key = (id(gpu), *self._source)
        buffer = _shared.get(key)
        if buffer is None:
            buffer = gpu.upload(self.host())
            _shared[key] = buffer
        return buffer


def to_host(values: Iterable[Held]) -> None:
    """Download those of `values` that are on a device only, in one transfer."""
    wanted = [held for held in values if held.on_device_only]
    if not wanted:
        return
    places = [held.device for held in wanted]
    arrays = places[0].gpu.download([(place.buffer, place.spec) for place in places])  # type: ignore[union-attr]
    for held, array in zip(wanted, arrays, strict=True):
        held._array = array


def fetch(values: Sequence[Held], borrowed: frozenset[int] = frozenset()) -> list[Any]:
    """`values` as `InferenceSession.run` returns them, each for the caller to keep and to change.

    `borrowed` are the positions whose memory belongs to somebody else (a feed, an initializer).
    """
    to_host(values)
    results = []
    for position, held in enumerate(values):
        if held.is_python:
            results.append(held.feed())
        else:
            array = held.host()
            results.append(array.copy() if position in borrowed else array)
    return results
