"""The far end of `RemoteSession`: a session on stdin and stdout.

A script as well as a module. Other interpreters may run it, so it imports nothing but the standard
library before it is asked for a session, and then only what that session needs.
"""

import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["main"]


def main() -> int:
    """Answer requests until stdin ends."""
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get among the answers
    session: Any = None
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return 0
        try:
            if request[0] == "open":
                session = _open(request[1], request[2])
                answer: Any = _facts(session)
            else:
                answer = _ANSWERS[request[0]](session, *request[1:])
            reply = ("ok", answer)
        except Exception as error:
            reply = ("error", f"{type(error).__name__}: {error}")
        pickle.dump(reply, channel, protocol=4)
        channel.flush()


def _run(session: Any, names: Any, feeds: Any) -> Any:
    return session.run(names or None, feeds)


def _trace(session: Any, names: Any, feeds: Any) -> Any:
    """The results, and the calls of offloaded nodes where the session is ours."""
    calls: list[Any] = []
    if not hasattr(session, "run_traced"):
        return _run(session, names, feeds), calls
    return session.run_traced(names or None, feeds, calls.append), calls


def _explain(session: Any) -> Any:
    return session.explain() if hasattr(session, "explain") else None


_ANSWERS: dict[str, Callable[..., Any]] = {"run": _run, "trace": _trace, "explain": _explain}


def _open(candidate: dict[str, Any], model: Any) -> Any:
    try:
        from ort_webgpu.conformance.candidates import Candidate
    except ImportError:
        return _foreign(candidate, model)
    return Candidate(**candidate).open(model)


def _foreign(candidate: dict[str, Any], model: Any) -> Any:
    """A session where this package is not installed: on an EP that its onnxruntime has."""
    import onnxruntime as ort

    names = {"ort-cpu": "CPUExecutionProvider", "ort-webgpu-ep": "WebGpuExecutionProvider"}
    name = names.get(candidate["name"], candidate["name"])
    if name not in ort.get_available_providers():
        raise ValueError(
            f"{sys.executable} has onnxruntime {ort.__version__} without {name}; it has"
            f" {ort.get_available_providers()}"
        )
    options = ort.SessionOptions()
    options.intra_op_num_threads = candidate["threads"]
    options.log_severity_level = 3
    providers: list[Any] = [(name, dict(candidate["options"]))]
    if not candidate["strict"]:
        providers.append("CPUExecutionProvider")
    elif name != "CPUExecutionProvider":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    return ort.InferenceSession(model, options, providers=providers)


def _facts(session: Any) -> dict[str, Any]:
    return {
        "inputs": [(a.name, a.type, a.shape) for a in session.get_inputs()],
        "outputs": [(a.name, a.type, a.shape) for a in session.get_outputs()],
        "providers": session.get_providers(),
    }


if __name__ == "__main__":
    raise SystemExit(main())
