"""A session in a process of its own, over a pipe: `worker.py` is what runs there."""

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from ort_webgpu.errors import DeviceLostError, OrtWebGpuError

__all__ = ["Host", "RemoteError", "RemoteSession"]


_WORKER = Path(__file__).with_name("worker.py")


class Arg(NamedTuple):
    """What is told of ORT's NodeArg."""

    name: str
    type: str
    shape: list[Any]


class RemoteError(OrtWebGpuError):
    """What the session in the other process raised, by type name and message."""


class Host:
    """A process that holds one session at a time."""

    def __init__(self, python: str | None = None):
        # The file, not the module: the interpreter need not have this package.
        self._process = subprocess.Popen(
            [python or sys.executable, str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.python = python

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def ask(self, *request: Any) -> Any:
        """The answer to `request`.

        Raises RemoteError with what the other side raised; DeviceLostError where the process died.
        """
        process = self._process
        try:
            pickle.dump(request, process.stdin, protocol=4)  # type: ignore[arg-type]
            process.stdin.flush()  # type: ignore[union-attr]
            kind, answer = pickle.load(process.stdout)  # type: ignore[arg-type]
        except (EOFError, OSError, ValueError, pickle.UnpicklingError) as gone:
            process.wait()
            raise DeviceLostError(
                f"the process that ran the session ended with status {process.returncode};"
                " its crash or the loss of its device is the finding"
            ) from gone
        if kind == "error":
            raise RemoteError(answer)
        return answer

    def close(self) -> None:
        """End the process."""
        process = self._process
        if process.stdin and not process.stdin.closed:
            # a request that the dead process never read cannot be flushed; the file closes anyway
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout:
            process.stdout.close()

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self.close()


class RemoteSession:
    """What comparisons ask of a session, of one on a Host.

    It lives until the host opens another one.
    """

    def __init__(self, candidate: Any, model: str | os.PathLike | bytes, host: Host):
        source = model if isinstance(model, bytes) else str(Path(model).resolve())
        self._host = host
        facts = host.ask("open", {**asdict(candidate), "routes": dict(candidate.routes)}, source)
        self._inputs = [Arg(*arg) for arg in facts["inputs"]]
        self._outputs = [Arg(*arg) for arg in facts["outputs"]]
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
        return self._host.ask("run", list(output_names or ()), dict(input_feed))

    def run_traced(self, output_names: Any, input_feed: Any, observer: Any) -> list[Any]:
        """As WebGPUSession.run_traced; `observer` hears of nothing where the session is another."""
        values, calls = self._host.ask("trace", list(output_names or ()), dict(input_feed))
        for call in calls:
            observer(call)
        return values

    def explain(self) -> Any:
        """The Explanation of the session, None where it is none of ours."""
        return self._host.ask("explain")
