"""IOBinding for sessions that are a plan: what is bound is kept here, and read back by the run.

ORT's own binding cannot be read back where a raw pointer was bound. ORT's binding to the stand-in
is made as well, so that a mistake in a name, type or device is ORT's error, in its words.

Memory of the caller's that the last run wrote a present to, and that is now bound as a past, is not
uploaded again: the run keeps the present on the device and a copy of its bytes on the host, and
takes the device's where the memory still holds the very same bytes. So nothing is assumed of what
the caller does with the memory between two runs; the price is that copy. Rows that were appended to
such a past are all that is downloaded for the next present.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as _ort

from ort_webgpu.device import Gpu
from ort_webgpu.errors import InvalidInputError
from ort_webgpu.ops.spec import TensorSpec
from ort_webgpu.values import DeviceValue, Held, to_host

__all__ = ["PlanBinding", "SessionBinding"]


class _NewOnDevice:
    """Target of an output that is to be a new value on the device."""


_ON_DEVICE = _NewOnDevice()
Target: TypeAlias = np.ndarray | onnxruntime.OrtValue | DeviceValue | _NewOnDevice | None


@dataclass(frozen=True)
class _Mirror:
    """A present of the last run: on the device, and its bytes on the host. `array` may have room
    for more rows than the value."""

    value: DeviceValue
    array: np.ndarray

    def rows(self) -> np.ndarray:
        """The bytes of the value's own rows."""
        return self.array[:, :, : self.value.shape[2]]

    def holds(self, array: np.ndarray) -> bool:
        """Whether `array` is still what the device has, bit for bit."""
        if array.dtype != self.value.dtype or array.shape != self.value.shape:
            return False
        whole = f"u{array.dtype.itemsize}"  # as integers: a NaN equals itself
        return bool(np.array_equal(array.view(whole), self.rows().view(whole)))


class SessionBinding(onnxruntime.IOBinding):
    """ORT's binding, for a session that is all ORT's: what is to be on the device is on the CPU.

    Copied or pickled, it is one without bound values, of the copied session; ORT's own cannot be.
    """

    def __init__(self, session: Any):
        super().__init__(session)
        self._owner = session

    def bind_ortvalue_input(self, name: str, ortvalue: Any) -> None:
        """Bind an OrtValue, or a copy of a DeviceValue."""
        if isinstance(ortvalue, DeviceValue):
            ortvalue = onnxruntime.OrtValue.ortvalue_from_numpy(ortvalue.numpy())
        super().bind_ortvalue_input(name, ortvalue)

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Bind an output; device type "webgpu" means the CPU here."""
        place = "cpu" if device_type == "webgpu" else device_type
        super().bind_output(name, place, device_id, element_type, shape, buffer_ptr)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, tuple[Any, ...]]:
        return type(self), (self._owner,)


class PlanBinding(SessionBinding):
    """An `onnxruntime.IOBinding` to a `WebGPUSession` that offloads nodes.

    Device types are "cpu" and "webgpu". A past and a present that are bound to one value (one
    pointer, OrtValue or DeviceValue) are updated in place.
    """

    def __init__(self, session: Any):
        super().__init__(session)
        self._inputs = {arg.name for arg in session.get_inputs()}
        self._outputs = {arg.name for arg in session.get_outputs()}
        self.feeds: dict[str, Any] = {}
        self.targets: dict[str, Target] = {}
        self._results: dict[str, onnxruntime.OrtValue | DeviceValue] = {}
        self._mirrors: dict[int, _Mirror] = {}

    # -- binding ---------------------------------------------------------------------------------

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
        """Bind memory of the caller's, which must stay until the last run with it.

        `element_type` is numpy's or ONNX's number. A value without elements may come with any
        pointer.
        """
        if device_type == "webgpu":
            raise InvalidInputError(
                f"input {name!r}: memory of a WebGPU device has no address; bind a DeviceValue with"
                " bind_ortvalue_input"
            )
        super().bind_input(name, device_type, device_id, element_type, shape, buffer_ptr)
        self.feeds[name] = _array_at(element_type, shape, buffer_ptr)

    def bind_ortvalue_input(self, name: str, ortvalue: Any) -> None:
        """Bind an OrtValue or a DeviceValue."""
        if isinstance(ortvalue, DeviceValue):
            _known(name, self._inputs, "input")
        else:
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
        """Bind an output to memory of the caller's, or to a new value at each run: an OrtValue, or
        for device type "webgpu" a DeviceValue."""
        if device_type == "webgpu":
            _known(name, self._outputs, "output")
            if buffer_ptr is not None:
                raise InvalidInputError(
                    f"output {name!r}: memory of a WebGPU device has no address; bind a DeviceValue"
                    " with bind_ortvalue_output, or leave out buffer_ptr"
                )
            self.targets[name] = _ON_DEVICE
            return
        super().bind_output(name, device_type, device_id, element_type, shape, buffer_ptr)
        bound = buffer_ptr is not None and shape is not None
        self.targets[name] = _array_at(element_type, shape, buffer_ptr) if bound else None

    def bind_ortvalue_output(self, name: str, ortvalue: Any) -> None:
        """Bind an output to an OrtValue or a DeviceValue, which is overwritten at each run."""
        if isinstance(ortvalue, DeviceValue):
            _known(name, self._outputs, "output")
        else:
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

    # -- results ---------------------------------------------------------------------------------

    def get_outputs(self) -> list[Any]:
        """The bound outputs of the last run, in the order they were bound: OrtValues, and
        DeviceValues for those that stayed on the device."""
        return [self._results[name] for name in self.targets if name in self._results]

    def get_outputs_as_ortvaluevector(self) -> Any:
        """The same as ORT's own vector; what is on the device is copied to the CPU."""
        vector = _ort.OrtValueVector()
        for value in self.get_outputs():
            if isinstance(value, DeviceValue):
                value = onnxruntime.OrtValue.ortvalue_from_numpy(value.numpy())
            vector.push_back(value._get_c_value())
        return vector

    def copy_outputs_to_cpu(self) -> list[np.ndarray]:
        """The bound outputs of the last run as arrays of the caller's own."""
        return [value.numpy().copy() for value in self.get_outputs()]

    # -- running ---------------------------------------------------------------------------------

    def run(self, session: Any, run_options: Any = None) -> None:
        """Run `session` on what is bound."""
        plan = session._plan
        pairs = {p.past: p.present for p in session._built.pairs if p.present in self.targets}
        known: dict[str, _Mirror] = {}
        given = {
            name: self._recognized(name, value, known) if name in pairs else value
            for name, value in self.feeds.items()
        }
        names, feeds = session._taken(list(self.targets), given)
        for past, present in pairs.items():
            if past in feeds and _one_value(self.feeds[past], self.targets[present]):
                feeds[past].own = True
        kept = frozenset(pairs.values())
        resident = kept | {n for n, t in self.targets.items() if isinstance(t, _NewOnDevice)}
        pasts = {present: known.get(past) for past, present in pairs.items()}
        try:
            held = plan.run(feeds, names, run_options, ort_values=True, resident=resident)
            self._deliver(plan, feeds, dict(zip(names, held, strict=True)), pasts)
        except Exception:
            self._mirrors = {}  # a run in place may have come half way
            raise

    def _recognized(self, name: str, value: Any, known: dict[str, _Mirror]) -> Any:
        """The device's copy of a past that the last run wrote, if the memory is unchanged."""
        array = value.numpy() if isinstance(value, onnxruntime.OrtValue) else value
        if not isinstance(array, np.ndarray) or not array.size:
            return value
        mirror = self._mirrors.get(array.ctypes.data)
        if mirror is None or not mirror.holds(array):
            return value
        known[name] = mirror
        return mirror.value

    def _deliver(
        self,
        plan: Any,
        feeds: Mapping[str, Held],
        held: Mapping[str, Held],
        pasts: Mapping[str, _Mirror | None],
    ) -> None:
        """Put each output where it is bound to; one readback for all."""
        wanted, grown = [], {}
        for name, one in held.items():
            if isinstance(self.targets[name], DeviceValue | _NewOnDevice):
                continue
            grown[name] = _appended(one.device, pasts.get(name))
            wanted.append(grown[name] or one)
        to_host(wanted)
        mirrors: dict[int, _Mirror] = {}
        results: dict[str, onnxruntime.OrtValue | DeviceValue] = {}
        for name, one in held.items():
            target, tail = self.targets[name], grown.get(name)
            if isinstance(target, _NewOnDevice):
                results[name] = plan.fetch(feeds, (name,), [one], frozenset({name}))[0]
                continue
            if isinstance(target, DeviceValue):
                _overwrite(name, target, one, plan.gpu)
                results[name] = target
                continue
            mirror = _mirrored(one, tail, pasts[name]) if name in pasts else None
            array = mirror.rows() if mirror is not None and tail is not None else None
            results[name] = _written(name, target, plan, feeds, one, array)
            if mirror is not None:
                mirrors[results[name].data_ptr()] = mirror  # type: ignore[union-attr]
        self._results, self._mirrors = results, mirrors


def _written(
    name: str,
    target: Any,
    plan: Any,
    feeds: Mapping[str, Held],
    held: Held,
    array: np.ndarray | None,
) -> onnxruntime.OrtValue:
    """The OrtValue over the memory that `name` is bound to, once it holds the result; `array` is
    the result where it is known on the host."""
    if target is None:
        owned = held if array is None else Held.of_array(np.array(array, order="C"))
        return plan.fetch_ort(feeds, (name,), [owned])[0]
    value = held.host() if array is None else array
    if isinstance(target, onnxruntime.OrtValue):
        _fill(name, target.numpy(), value)
        return target
    _fill(name, target, value)
    return onnxruntime.OrtValue.ortvalue_from_numpy(target)


def _appended(value: DeviceValue | None, past: _Mirror | None) -> Held | None:
    """The rows that a present has beyond its past, where it continues the past's storage and the
    past's rows are known not to have changed."""
    if value is None or past is None or value.buffer is not past.value.buffer:
        return None
    old, new = past.value.shape[2], value.shape[2]
    if value.rows is None or new <= old:
        return None
    batch, heads, _, width = value.shape
    spec = TensorSpec(value.spec.dtype, (batch, heads, new - old, width))
    size = spec.nbytes // (batch * heads)
    row = size // (new - old)
    buffer = value.gpu.allocate(spec.nbytes)  # type: ignore[union-attr]
    moves = [
        (value.buffer, buffer, (i * value.rows.capacity + old) * row, i * size, size)
        for i in range(batch * heads)
    ]
    value.gpu.move(moves)  # type: ignore[union-attr, arg-type]
    return Held.of_device(DeviceValue(value.gpu, buffer, spec))


def _mirrored(one: Held, tail: Held | None, past: _Mirror | None) -> _Mirror | None:
    """The mirror of a present; its array grows with the device's storage."""
    value = one.device
    if value is None or not value.spec.size:
        return None
    if tail is None or past is None:
        return _Mirror(value, one.host().copy())
    old, new = past.value.shape[2], value.shape[2]
    array = past.array
    if array.shape[2] < new:
        batch, heads, _, width = value.shape
        array = np.empty((batch, heads, value.capacity or new, width), value.dtype)
        array[:, :, :old] = past.rows()
    array[:, :, old:new] = tail.host()
    return _Mirror(value, array)


def _overwrite(name: str, target: DeviceValue, held: Held, gpu: Gpu) -> None:
    """Copy a result into a bound DeviceValue, unless it was computed there."""
    spec = held.spec
    if target.spec != spec or target.gpu is not gpu:
        raise InvalidInputError(
            f"output {name!r} is bound to {target!r}, but the run makes {spec.dtype}"
            f" {list(spec.shape)} on {gpu.info.name!r}; bind a value of that shape, or none"
        )
    source = held.on_device(gpu)
    if target.buffer is None or source.buffer is target.buffer or not spec.size:
        return
    packed = held.buffer(gpu)
    if target.is_dense:
        gpu.copy(packed, target.buffer, spec.nbytes)
    else:
        gpu.move([(packed, target.buffer, to, start, n) for start, to, n in target.regions()])


def _one_value(source: Any, target: Any) -> bool:
    """Whether a past and a present are bound to the same memory."""
    if source is target:
        return True
    if isinstance(source, DeviceValue) or isinstance(target, DeviceValue):
        return False
    first, second = _address(source), _address(target)
    return first is not None and first == second


def _address(value: Any) -> int | None:
    if isinstance(value, onnxruntime.OrtValue):
        return value.data_ptr()
    return value.ctypes.data if isinstance(value, np.ndarray) and value.size else None


def _known(name: str, names: set[str], kind: str) -> None:
    if name not in names:
        raise InvalidInputError(
            f"{name!r} is bound as an {kind}, but the model has the {kind}s {sorted(names)}"
        )


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
