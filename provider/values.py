"""Values of one run: where each one is (ORT, numpy, the device), and the ways between these places.

A `Held` moves a value at most once in each direction and remembers the result, so a KV cache that
two nodes read is uploaded once, and what stays on the device is never downloaded.
"""

import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as _ort

from ort_webgpu.device import DeviceBuffer, Gpu
from ort_webgpu.graph_tools import Weight
from ort_webgpu.ops.spec import Room, TensorSpec, Value

__all__ = ["DTYPES", "DeviceValue", "Held", "Rows", "fetch", "to_host"]

#: numpy's name for the element type of each tensor type that ORT writes so and numpy has.
DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(bool)": "bool",
    **{f"tensor({k}{n})": f"{k}{n}" for k in ("int", "uint") for n in (8, 16, 32, 64)},
}

_KINDS = {name: kind for kind, name in DTYPES.items()}
_NAMES = {np.dtype(name): name for name in DTYPES.values()}  # numpy takes 3 us to make a name
_CPU = onnxruntime.OrtDevice.make("cpu", 0)._get_c_device()
_NUMERIC = frozenset("biuf")

# Buffers of initializers that lie in files, shared by the sessions of a process. A DeviceBuffer
# keeps its Gpu alive, so the id of the Gpu in a key stays its own while the entry lives.
_shared: weakref.WeakValueDictionary[tuple, DeviceBuffer] = weakref.WeakValueDictionary()


@dataclass
class Rows:
    """Who uses which rows (axis 2) of a buffer (batch, heads, `capacity`, width).

    Values in one buffer begin at its row 0, so all share their first rows. `filled` counts the rows
    that the longest of them has, `written` those that may be other than zero. `fixed`: the caller
    chose the capacity. `shared`: several owners, none of which may overwrite a row.
    """

    capacity: int
    filled: int
    written: int
    fixed: bool = False
    shared: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def claim(self, old: int, new: int) -> bool:
        """Let a value of `old` rows continue as one of `new`; False where another has done so."""
        with self.lock:
            if self.filled != old:
                return False
            self.filled, self.written = new, max(self.written, new)
            return True

    def give_up(self, rows: int) -> None:
        """The only owner goes back to `rows`."""
        with self.lock:
            if not self.shared:
                self.filled = min(self.filled, rows)


class DeviceValue:
    """A tensor that stays where it was made: in memory of a WebGPU device, or on the CPU where a
    session has no device.

    It can be fed to any session on the same device. It never changes, save where its owner gives it
    away to be overwritten: bound as past and as present of an I/O binding. Thread-safe.
    """

    __slots__ = ("__weakref__", "_array", "buffer", "gpu", "rows", "spec")

    def __init__(
        self,
        gpu: Gpu | None,
        buffer: DeviceBuffer | None,
        spec: TensorSpec,
        rows: Rows | None = None,
        array: np.ndarray | None = None,
    ):
        self.gpu, self.buffer, self.spec, self.rows, self._array = gpu, buffer, spec, rows, array

    @classmethod
    def of_array(cls, array: np.ndarray, gpu: Gpu | None) -> "DeviceValue":
        """A copy of a numeric `array`, on `gpu` if there is one."""
        array = np.asarray(array)
        spec = TensorSpec(array.dtype.name, array.shape)
        if gpu is None:
            return cls(None, None, spec, array=array.copy())
        return cls(gpu, gpu.upload(array), spec)

    @property
    def dtype(self) -> np.dtype:
        """The element type, as numpy's."""
        return np.dtype(self.spec.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape; memory reserved for more rows does not count."""
        return self.spec.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without memory reserved for more rows."""
        return self.spec.nbytes

    @property
    def capacity(self) -> int | None:
        """Rows of axis 2 that the memory has room for; None for a value that has no spare room."""
        return None if self.rows is None else self.rows.capacity

    def device_name(self) -> str:
        """ "webgpu" or "cpu"."""
        return "cpu" if self.gpu is None else "webgpu"

    def numpy(self) -> np.ndarray:
        """The value as an array of the caller's own; DeviceLostError if its device is gone."""
        if self._array is not None:
            return self._array.copy()
        held = Held.of_device(self)
        to_host([held])
        return held.host()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a value on a device becomes an array only by a copy")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **kwargs: Any) -> Any:
        """A copy on the CPU: WebGPU has no device type in DLPack."""
        return self.numpy().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __repr__(self) -> str:
        room = "" if self.rows is None else f", capacity {self.rows.capacity}"
        return f"<DeviceValue {self.spec.dtype} {list(self.shape)} on {self.device_name()}{room}>"

    @property
    def is_dense(self) -> bool:
        """Whether the buffer holds the tensor row-major without gaps."""
        return self.rows is None or self.rows.capacity == self.spec.shape[2]

    def regions(self) -> list[tuple[int, int, int]]:
        """(offset in the buffer, offset in the dense tensor, bytes) of each head's rows."""
        assert self.rows is not None
        batch, heads, used, _ = self.spec.shape
        if not self.spec.size:
            return []
        size = self.spec.nbytes // (batch * heads)
        stride = size // used * self.rows.capacity
        return [(i * stride, i * size, size) for i in range(batch * heads)]

    def dense(self) -> DeviceBuffer:
        """The tensor row-major, copied on the device where its rows lie apart."""
        assert self.gpu is not None and self.buffer is not None
        if self.is_dense:
            return self.buffer
        packed = self.gpu.allocate(self.spec.nbytes)
        self.gpu.move([(self.buffer, packed, *region) for region in self.regions()])
        return packed

    def room(self, limit: int) -> Room:
        """What may be written behind its rows; `limit` is the Room's."""
        rows = self.rows
        used = self.spec.shape[2]
        if rows is None:
            return Room(used, True, True, False, limit)
        with rows.lock:
            alone, clean = rows.filled == used, rows.written <= used
        return Room(rows.capacity, alone, clean, rows.fixed, limit)


class Held:
    """One value of a run. Made by one of the `of_...` constructors; never changed by a reader.

    A value that is no numeric tensor (string tensor, sequence, map, optional without a value) and
    came as a Python object stays one; `is_python` tells it, and only `feed` may be asked of it.
    """

    __slots__ = (
        "_array",
        "_dense",
        "_device",
        "_ort",
        "_python",
        "_source",
        "_spec",
        "own",
    )

    def __init__(self) -> None:
        #: Whether the run may overwrite it: its owner has no use for it any more.
        self.own = False
        self._dense: DeviceBuffer | None = None
        self._array: np.ndarray | None = None
        self._ort: Any = None
        self._device: DeviceValue | None = None
        self._python: tuple[Any] | None = None
        self._spec: TensorSpec | None = None
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
        if value._array is not None:
            return cls.of_array(value._array)
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
    def kind(self) -> str:
        """ORT's name of the type, such as "tensor(float)", of what is no Python object."""
        if self._array is None and self._device is None:
            return str(self._ort.data_type())
        return _KINDS[self.spec.dtype]

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
                kind = self._array.dtype
                self._spec = TensorSpec(_NAMES.get(kind) or kind.name, self._array.shape)
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

    def on_device(self, gpu: Gpu) -> DeviceValue:
        """The tensor on the device, uploaded if it is not there."""
        if self._device is None:
            self._device = DeviceValue(gpu, self._upload(gpu), self.spec)
        return self._device

    def buffer(self, gpu: Gpu) -> DeviceBuffer:
        """As `on_device`, row-major without gaps."""
        if self._dense is None:
            self._dense = self.on_device(gpu).dense()
        return self._dense

    def value(self, with_data: bool, room: Room | None = None) -> Value:
        """What an operator's contract sees of it; the data too where it reads it on the host."""
        return Value(self.spec, self.host() if with_data else None, room)

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
    buffers = [held._dense or place.dense() for held, place in zip(wanted, places, strict=True)]  # type: ignore[union-attr]
    specs = [place.spec for place in places]  # type: ignore[union-attr]
    arrays = places[0].gpu.download(list(zip(buffers, specs, strict=True)))  # type: ignore[union-attr]
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
