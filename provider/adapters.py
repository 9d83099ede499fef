"""The adapters of the machine: what there is, which one is meant, what its device can do.

The only file that imports wgpu or wgpudawn.
"""

import contextlib
import importlib
import os
from dataclasses import dataclass
from typing import Any

from ort_webgpu.errors import NoAdapterError
from ort_webgpu.ops.spec import Caps

__all__ = ["PACKAGES", "AdapterInfo", "adapters", "find", "package", "request"]

PACKAGES = {"wgpu": "wgpu", "dawn": "wgpudawn"}  # by backend


@dataclass(frozen=True)
class AdapterInfo:
    """One adapter of one backend package, as `ort-webgpu devices` lists it."""

    index: int
    name: str
    backend: str
    api: str
    kind: str
    driver: str

    @property
    def software(self) -> bool:
        return self.kind == "CPU"


_LIMITS = (
    "max-compute-workgroup-storage-size",
    "max-compute-invocations-per-workgroup",
    "max-compute-workgroup-size-x",
    "max-compute-workgroups-per-dimension",
    "max-storage-buffers-per-shader-stage",
    "max-storage-buffer-binding-size",
    "max-buffer-size",
    "min-storage-buffer-offset-alignment",
)


def package(backend: str) -> Any | None:
    """The backend's Python package, set up; None where it is not installed."""
    try:
        found = importlib.import_module(PACKAGES[backend])
    except ImportError:
        return None
    if backend == "dawn":
        extras = importlib.import_module("wgpudawn.backends.dawn.extras")
        toggles = ["allow_unsafe_apis", "vulkan_enable_f16_on_nvidia"]
        # where the process has made Dawn's instance before, it keeps the toggles it was given
        with contextlib.suppress(RuntimeError):
            extras.set_instance_extras(
                enable_toggles=toggles, disable_toggles=["timestamp_quantization"]
            )
    return found


def _list(backend: str) -> list[tuple[AdapterInfo, Any]]:
    backend_package = package(backend)
    if backend_package is None:
        return []
    found: list[tuple[AdapterInfo, Any]] = []
    for raw in backend_package.gpu.enumerate_adapters_sync():
        about = raw.info
        if about["backend_type"] in ("OpenGL", "OpenGLES"):
            continue  # no compute shaders to speak of, and the same devices appear through Vulkan
        name = about["device"] or about["description"] or about["vendor"]
        driver = about["description"] or about["vendor"]
        info = AdapterInfo(
            len(found), name, backend, about["backend_type"], about["adapter_type"], driver
        )
        found.append((info, raw))
    return found


def adapters(backend: str = "auto") -> list[AdapterInfo]:
    """The adapters that can be had, best first within each backend package.

    `backend`: "wgpu" (wgpu-native), "dawn" (wgpudawn), or "auto" for both where installed.
    """
    return [info for name in _backends(backend) for info, _ in _list(name)]


def _backends(backend: str) -> tuple[str, ...]:
    if backend == "auto":
        return tuple(PACKAGES)
    if backend not in PACKAGES:
        raise NoAdapterError(
            f'backend={backend!r} is none of "auto", {", ".join(map(repr, PACKAGES))}'
        )
    return (backend,)


def find(adapter: str | int, backend: str) -> tuple[AdapterInfo, Any] | None:
    """What `adapter` means (see device.open_gpu) and its wgpu object; None for "none", or if "auto"
    has none. Raises NoAdapterError where one was asked for."""
    if adapter == "auto":
        adapter = os.environ.get("ORT_WEBGPU_ADAPTER", "auto")
        if adapter.isdecimal():
            adapter = int(adapter)
    if adapter == "none":
        return None
    listed: list[tuple[AdapterInfo, Any]] = []
    chosen = None
    for name in _backends(backend):  # "auto" asks Dawn only for what wgpu-native has not
        found = _list(name)
        listed += found
        chosen = chosen or _choose(adapter, found)
        if chosen is not None:
            break
    if chosen is None:
        if adapter == "auto":
            return None
        names = ", ".join(f"{i.name} ({i.backend}, {i.kind})" for i, _ in listed) or "none at all"
        raise NoAdapterError(
            f"no adapter fits adapter={adapter!r}, backend={backend!r}; there are: {names}."
            ' Use adapter="auto" to take what there is, or "none" for the CPU'
        )
    return chosen


def _choose(adapter: str | int, listed: list[tuple[AdapterInfo, Any]]) -> Any | None:
    rank = {"DiscreteGPU": 0, "IntegratedGPU": 1, "Unknown": 2, "CPU": 3}
    ordered = sorted(listed, key=lambda pair: rank.get(pair[0].kind, 2))
    if isinstance(adapter, int):
        return listed[adapter] if 0 <= adapter < len(listed) else None
    if adapter == "hardware":
        ordered = [pair for pair in ordered if not pair[0].software]
    elif adapter == "software":
        ordered = [pair for pair in ordered if pair[0].software]
    elif adapter != "auto":
        wanted = adapter.lower()
        ordered = [p for p in ordered if wanted in f"{p[0].name} {p[0].driver}".lower()]
    return ordered[0] if ordered else None


def request(info: AdapterInfo, adapter: Any) -> tuple[Any, Caps]:
    """A device with every feature and limit that kernels can use, and its caps."""
    available = set(adapter.features)
    subgroup_feature = "subgroups" if info.backend == "dawn" else "subgroup"
    wanted = {subgroup_feature, "shader-f16", "timestamp-query"}
    if info.backend == "dawn":
        wanted.add("chromium-experimental-subgroup-matrix")
    features = sorted(wanted & available)
    limits = {k: v for k, v in adapter.limits.items() if k in _LIMITS}
    try:
        device = adapter.request_device_sync(required_features=features, required_limits=limits)
    except Exception as error:
        raise NoAdapterError(
            f"adapter {info.name!r} refused a device with features {features}: {error}"
        ) from error
    low = int(adapter.info.get("stackgroup_min_size") or adapter.info.get("subgroup_min_size") or 0)
    high = int(
        adapter.info.get("stackgroup_max_size") or adapter.info.get("subgroup_max_size") or 0
    )
    if subgroup_feature not in features:
        low = high = 0
    return device, Caps(
        name=info.name,
        backend=info.backend,
        dialect="tint" if info.backend == "dawn" else "naga",
        software=info.software,
        workgroup_memory=limits["max-compute-workgroup-storage-size"],
        workgroup_invocations=min(
            limits["max-compute-invocations-per-workgroup"],
            limits["max-compute-workgroup-size-x"],
        ),
        workgroups_per_dimension=limits["max-compute-workgroups-per-dimension"],
        storage_buffers=limits["max-storage-buffers-per-shader-stage"],
        storage_binding=limits["max-storage-buffer-binding-size"],
        buffer_size=limits["max-buffer-size"],
        offset_alignment=limits["min-storage-buffer-offset-alignment"],
        subgroup_min=low,
        subgroup_max=high,
        f16="shader-f16" in features,
        timestamps="timestamp-query" in features,
        matrix_tiles=_matrix_tiles(adapter) if len(features) and "matrix" in str(features) else (),
    )


def _matrix_tiles(adapter: Any) -> tuple[tuple[int, int, int, str, str], ...]:
    extras = importlib.import_module("wgpudawn.backends.dawn.extras")
    tiles = []
    for config in extras.get_adapter_properties(adapter).get("subgroup_matrix_configs", ()):
        about = config if isinstance(config, dict) else vars(config)
        tiles.append(
            (
                about["m"],
                about["n"],
                about["k"],
                str(about["component_type"]),
                str(about["result_component_type"]),
            )
        )
    return tuple(tiles)
