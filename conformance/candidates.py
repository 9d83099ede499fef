"""What is tested: our session, ORT's CPU EP, or any other EP of ORT, in this process or another.

Names:

    ort-webgpu      WebGPUSession; adapter, backend, routes and offload are its arguments
    ort-cpu         plain ORT on its CPU EP
    reference       ORT's CPU EP, with standard operators for what it has no kernel for
    ort-webgpu-ep   ORT's own WebGPU EP: the plug-in package onnxruntime-ep-webgpu, or an
                    onnxruntime that has it built in (onnxruntime-webgpu)
    <name>          an EP that this onnxruntime has (get_available_providers()), or that
                    `library`, a plug-in's shared library, brings
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnxruntime as ort

from ort_webgpu import PlainSession, WebGPUSession
from ort_webgpu.conformance.remote import Host, RemoteSession
from ort_webgpu.errors import InvalidInputError, NoAdapterError

__all__ = ["REFERENCE", "Candidate", "CandidateError"]

_WEBGPU_EP = "WebGpuExecutionProvider"


class CandidateError(NoAdapterError):
    """The candidate is not on this machine; the message says what is and what to do."""


@dataclass(frozen=True)
class Candidate:
    """A way to run a model; `open` gives a session with `run`, `get_inputs`, `get_outputs`.

    `threads` is intra_op_num_threads, 0 for ORT's default. `isolated` runs it in a process of its
    own, so that a lost device or a crash ends only that; `python` is that process's interpreter
    (one with another onnxruntime, for instance), None for this one. `strict`: a node that the
    candidate would leave to the CPU is an error.
    """

    name: str = "ort-webgpu"
    adapter: str | int = "auto"
    backend: str = "auto"
    routes: Mapping[str, str] = field(default_factory=dict)
    offload: Any = "all"
    library: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    threads: int = 0
    isolated: bool = False
    python: str | None = None
    strict: bool = False

    @property
    def label(self) -> str:
        """A readable name with what differs from the defaults."""
        parts = [self.name]
        if self.name == "ort-webgpu":
            parts += [f"adapter={self.adapter}"] if self.adapter != "auto" else []
            parts += [f"backend={self.backend}"] if self.backend != "auto" else []
            parts += [f"{target}={route}" for target, route in self.routes.items()]
        parts += [f"python={self.python}"] if self.python else []
        return " ".join(parts)

    @property
    def remote(self) -> bool:
        """Whether it runs in a process of its own."""
        return self.isolated or self.python is not None

    @property
    def here(self) -> "Candidate":
        """The same in the process that asks."""
        return replace(self, isolated=False, python=None)

    def open(self, model: str | os.PathLike | bytes) -> Any:
        """A session on `model`.

        Raises CandidateError where the EP is missing, and what the session itself raises.
        """
        if self.remote:
            return RemoteSession(self.here, model, Host(self.python))
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.log_severity_level = 3
        if self.name == "ort-webgpu":
            return WebGPUSession(
                model,
                options,
                adapter=self.adapter,
                backend=self.backend,
                routes=self.routes,
                offload=self.offload,
                fallback="error" if self.strict else "cpu",
            )
        if self.name == "reference":
            return WebGPUSession(model, options, adapter="none")
        if self.name == "ort-cpu":
            return PlainSession(model, options, providers=["CPUExecutionProvider"])
        return _on_provider(self, model, options)


REFERENCE = Candidate("reference")


def _on_provider(candidate: Candidate, model: Any, options: Any) -> ort.InferenceSession:
    name = _WEBGPU_EP if candidate.name == "ort-webgpu-ep" else candidate.name
    library = candidate.library
    if candidate.strict:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if name in ort.get_available_providers():
        # ORT refuses the entry above beside a CPU EP that was asked for.
        others = [] if candidate.strict else ["CPUExecutionProvider"]
        providers = [(name, dict(candidate.options)), *others]
        return PlainSession(model, options, providers=providers)
    if library is None and candidate.name == "ort-webgpu-ep":
        library = _plugin_library()
    if library is None:
        known = ["ort-webgpu", "ort-cpu", "reference", "ort-webgpu-ep"]
        raise CandidateError(
            f"candidate {candidate.name!r} is none of {known} and no EP of this onnxruntime"
            f" ({ort.get_available_providers()}); name a plug-in's library for it"
        )
    _register(name, library)
    devices = [device for device in ort.get_ep_devices() if device.ep_name == name]
    if not devices:
        raise CandidateError(
            f"{library} is loaded, but {name} offers no device on this machine; it has"
            f" {sorted({device.ep_name for device in ort.get_ep_devices()})}. ORT's plug-ins need"
            " a hardware GPU that ORT itself finds"
        )
    options.add_provider_for_devices(devices[:1], dict(candidate.options))
    return PlainSession(model, options)


def _plugin_library() -> str:
    try:
        import onnxruntime_ep_webgpu
    except ImportError as missing:
        raise CandidateError(
            "candidate 'ort-webgpu-ep' needs ORT's plug-in: pip install onnxruntime-ep-webgpu, or"
            " name an interpreter that has onnxruntime-webgpu"
        ) from missing
    return onnxruntime_ep_webgpu.get_library_path()


_registered: set[str] = set()


def _register(name: str, library: str) -> None:
    """Load a plug-in once per process; ORT refuses a second time."""
    path = str(Path(library).resolve())
    if not Path(path).is_file():
        raise InvalidInputError(f"plug-in library {path!r} is no file; give its path")
    if path not in _registered:
        ort.register_execution_provider_library(name, path)
        _registered.add(path)
