"""Intake: feeds of a run as ORT takes them, and ORT's own errors for those that it does not."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from ort_webgpu.device import Gpu
from ort_webgpu.errors import DeviceError, InvalidInputError
from ort_webgpu.values import DTYPES, DeviceValue, Held

__all__ = ["Intake"]


class _Expected:
    """What a graph input takes: numpy dtype (None: no numeric tensor), rank and fixed dims."""

    __slots__ = ("dims", "dtype", "kind", "name", "rank", "shape")

    def __init__(self, arg: Any):
        self.kind: str = arg.type
        self.name = DTYPES.get(arg.type)
        self.dtype = np.dtype(self.name) if self.name else None
        # ORT writes [] for a scalar and for an unknown rank, and checks neither
        self.rank = len(arg.shape)
        dims = [(i, d) for i, d in enumerate(arg.shape) if isinstance(d, int) and d >= 0]
        self.dims = tuple(dims)
        self.shape = tuple(arg.shape)

    def fits(self, shape: Sequence[int]) -> bool:
        if not self.rank:
            return True
        if len(shape) != self.rank:
            return False
        for i, dim in self.dims:  # noqa: SIM110 (a generator takes longer than the rest)
            if shape[i] != dim:
                return False
        return True


class Intake:
    """Turns feeds into `Held` values.

    What is not plainly right is first run through `session`, the stand-in, which takes and refuses
    what the model's own session would, in ORT's words.
    """

    def __init__(
        self, session: Any, inputs: Sequence[Any], overridable: Sequence[Any], gpu: Gpu | None
    ):
        self._session = session
        self._gpu = gpu
        self._expected = {arg.name: _Expected(arg) for arg in (*inputs, *overridable)}
        optional = {arg.name for arg in inputs if arg.type.startswith("optional")}
        self._optional = frozenset(optional)
        self.required = frozenset(arg.name for arg in inputs) - self._optional

    def take(
        self, names: tuple[str, ...], feeds: Mapping[str, Any], outputs: tuple[str, ...]
    ) -> dict[str, Held]:
        """The feeds of a run for the outputs `names`; raises what ORT raises."""
        held: dict[str, Held] = {}
        odd = {}
        for name, value in feeds.items():
            taken = self._plain(name, value)
            if taken is None:
                odd[name] = value
            else:
                held[name] = taken
        if odd or (names is not outputs and not set(names).issubset(outputs)):
            self._session.run(list(names), {k: _stand_in(v) for k, v in feeds.items()}, None)
            held |= {name: self._converted(name, value) for name, value in odd.items()}
        for name in self._optional - feeds.keys():
            held[name] = Held.of_nothing()
        return held

    def _plain(self, name: str, value: Any) -> Held | None:
        """The value if it needs no second look."""
        expected = self._expected.get(name)
        if expected is None:
            return None
        if isinstance(value, DeviceValue):
            return self._resident(name, value, expected)
        if isinstance(value, np.ndarray):
            if value.dtype == expected.dtype and expected.fits(value.shape):
                return Held.of_array(np.asarray(value))
        elif isinstance(value, onnxruntime.OrtValue):
            raw = value._get_c_value()
            if (
                raw.is_tensor()
                and raw.data_type() == expected.kind
                and raw.device_name() == "cpu"
                and expected.fits(raw.shape())
            ):
                return Held.of_ort(raw)
        return None

    def _resident(self, name: str, value: DeviceValue, expected: _Expected) -> Held:
        if value.spec.dtype != expected.name or not expected.fits(value.spec.shape):
            raise InvalidInputError(
                f"input {name!r} is fed {value!r}; the model takes {expected.kind}"
                f" {list(expected.shape)}"
            )
        if value.gpu is not None and value.gpu is not self._gpu:
            here = self._gpu.info.name if self._gpu else "the CPU"
            raise DeviceError(
                f"input {name!r} is fed a value on {value.gpu.info.name!r}, but this session runs"
                f" on {here!r}; feed value.numpy(), or make both sessions with one adapter="
            )
        return Held.of_device(value)

    def _converted(self, name: str, value: Any) -> Held:
        """A value that ORT took: nested lists of numbers become a tensor of the input's type."""
        expected = self._expected[name]
        if isinstance(value, onnxruntime.OrtValue):
            return Held.of_ort(value._get_c_value()) if value.has_value() else Held.of_nothing()
        if value is None and not expected.kind.startswith("optional"):
            # ORT refuses it only in the first node that reads it, with this error
            raise Fail(f"[ONNXRuntimeError] : 1 : FAIL : Missing Input: {name}")
        if expected.dtype is not None:
            return Held.of_array(np.asarray(value, expected.dtype))
        return Held.of_python(value)


def _stand_in(value: Any) -> Any:
    """An array of a device value's type and shape, for ORT to check."""
    return np.zeros(value.shape, value.dtype) if isinstance(value, DeviceValue) else value
