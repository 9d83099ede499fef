"""The exceptions of ort-webgpu.

    OrtWebGpuError                     everything below
    ├── InvalidModelError              the model, or one node of it, breaks the operator's contract
    ├── InvalidInputError              one call's values break it; also ORT's InvalidArgument
    ├── NotOffloadedError              fallback="error" and a node cannot run on the device
    └── DeviceError                    the adapter, the device or its memory
        ├── NoAdapterError             no adapter fits what was asked for
        ├── DeviceMemoryError          a buffer exceeds a limit, or the device is out of memory
        └── DeviceLostError            the device is gone; the session must be made again

Each message names the node (where there is one), what was found, what is allowed and what to do.
`InvalidInputError` derives from ORT's own `InvalidArgument`, and `InvalidModelError` from ORT's
`InvalidGraph`, so that code written against onnxruntime catches them as it always did.
"""

from onnxruntime.capi import onnxruntime_pybind11_state as _ort

__all__ = [
    "DeviceError",
    "DeviceLostError",
    "DeviceMemoryError",
    "InvalidInputError",
    "InvalidModelError",
    "NoAdapterError",
    "NotOffloadedError",
    "OrtWebGpuError",
]


class OrtWebGpuError(Exception):
    """Base of every exception that ort-webgpu raises on its own account."""


class InvalidModelError(OrtWebGpuError, _ort.InvalidGraph):
    """A model or node that no call could make valid."""


class InvalidInputError(OrtWebGpuError, _ort.InvalidArgument):
    """Values of one call that the operator's contract does not allow."""


class NotOffloadedError(OrtWebGpuError):
    """A node that would fall back to the CPU while `fallback="error"` forbids it."""


class DeviceError(OrtWebGpuError):
    """The adapter, the device or its memory."""


class NoAdapterError(DeviceError):
    """No adapter fits what was asked for."""


class DeviceMemoryError(DeviceError):
    """A buffer exceeds a limit of the device, or the device is out of memory."""


class DeviceLostError(DeviceError):
    """The device is gone; values on it are lost and the session must be made again."""
