"""A session in a process of its own, over a pipe: `worker.py` is what runs there."""

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ort_webgpu.conformance import worker
from ort_webgpu.errors import DeviceLostError, OrtWebGpuError

__all__ = ["RemoteError", "RemoteSession"]


class RemoteError(OrtWebGpuError):
    """What the session in the other process raised, by type name and message."""


class RemoteSession:
    """`run`, `get_inputs`, `get_outputs` and `get_providers` of a session in another process.

    A process that dies raises DeviceLostError with the end of its stderr, from the call that it
    died in; the session is then of no more use.
    """

    def __init__(self, candidate: Any, model: str | os.PathLike | bytes, python: str | None = None):
        source = model if isinstance(model, bytes) else str(Path(model).resolve())
        # The file, not the module: the interpreter need not have this package.
        self._process = subprocess.Popen(
            [python or sys.executable, str(Path(worker.__file__)), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        facts = self._ask("open", {**asdict(candidate), "routes": dict(candidate.routes)}, source)
        self._inputs = [worker.Arg(*arg) for arg in facts["inputs"]]
        self._outputs = [worker.Arg(*arg) for arg in facts["outputs"]]
        self._providers = facts["providers"]

    def get_inputs(self) -> Sequence[Any]:
        """Objects with name, type and shape."""
        return self._inputs

    def get_outputs(self) -> Sequence[Any]:
        """Objects with name, type and shape."""
        return self._outputs

    def get_providers(self) -> Sequence[str]:
        """The EPs of the other session."""
        return self._providers

    def run(self, output_names: Any, input_feed: Any, run_options: Any = None) -> list[Any]:
        """As InferenceSession.run; run_options stay in this process and must be None."""
        if run_options is not None:
            raise ValueError("run_options cannot be sent to another process; use None")
        return self._ask("run", list(output_names or ()), dict(input_feed))

    def close(self) -> None:
        """End the process."""
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream:
                stream.close()

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self.close()

    def _ask(self, *request: Any) -> Any:
        process = self._process
        try:
            pickle.dump(request, process.stdin, protocol=4)  # type: ignore[arg-type]
            process.stdin.flush()  # type: ignore[union-attr]
            kind, answer = pickle.load(process.stdout)  # type: ignore[arg-type]
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as gone:
            process.wait()
            log = process.stderr.read().decode("utf-8", "replace")[-2000:]  # type: ignore[union-attr]
            raise DeviceLostError(
                f"the process that ran the session ended with status {process.returncode}:"
                f" {log.strip() or 'it wrote nothing'}"
            ) from gone
        if kind == "error":
            raise RemoteError(answer)
        return answer
