"""ort-webgpu: the attention operators of ONNX models on WebGPU, the rest on ORT's CPU EP."""

from ort_webgpu._version import __version__
from ort_webgpu.adapters import AdapterInfo
from ort_webgpu.adapters import adapters as devices
from ort_webgpu.cache import Cache
from ort_webgpu.errors import (
    DeviceError,
    DeviceLostError,
    DeviceMemoryError,
    InvalidInputError,
    InvalidModelError,
    NoAdapterError,
    NotOffloadedError,
    OrtWebGpuError,
)
from ort_webgpu.explain import Explanation, Row
from ort_webgpu.patch import (
    PlainSession,
    patch_onnxruntime,
    plain_onnxruntime,
    unpatch_onnxruntime,
)
from ort_webgpu.session import WebGPUSession
from ort_webgpu.trace import NodeCall
from ort_webgpu.values import DeviceValue

__all__ = [
    "AdapterInfo",
    "Cache",
    "DeviceError",
    "DeviceLostError",
    "DeviceMemoryError",
    "DeviceValue",
    "Explanation",
    "InvalidInputError",
    "InvalidModelError",
    "NoAdapterError",
    "NodeCall",
    "NotOffloadedError",
    "OrtWebGpuError",
    "PlainSession",
    "Row",
    "WebGPUSession",
    "__version__",
    "devices",
    "patch_onnxruntime",
    "plain_onnxruntime",
    "unpatch_onnxruntime",
]
