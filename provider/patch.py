"""patch_onnxruntime: pipelines that construct onnxruntime.InferenceSession get a WebGPUSession.

The class itself is not replaced: a `__new__` on it returns an instance of our subclass, so it does
not matter when and how a library imported the name, nor that it derived a class from it. A derived
class gets a twin that also derives from WebGPUSession. Child processes started by fork are patched
as their parent is; those that are spawned are where ORT_WEBGPU_PATCH=1 is set and
`python -m ort_webgpu.patch --install` has been run for their Python.

Out of reach is what holds a C or C++ session, such as onnxruntime-genai.
"""

import argparse
import contextlib
import os
import shutil
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import onnxruntime

from ort_webgpu.binding import PlanBinding, SessionBinding
from ort_webgpu.errors import OrtWebGpuError
from ort_webgpu.session import WebGPUSession

__all__ = [
    "VARIABLE",
    "PlainSession",
    "is_patched",
    "patch_onnxruntime",
    "plain_onnxruntime",
    "unpatch_onnxruntime",
]

#: The environment variable that patches spawned children.
VARIABLE = "ORT_WEBGPU_PATCH"
_PTH, _MODULE = "ort_webgpu_patch.pth", "_ort_webgpu_autopatch.py"
_LINE = (
    f"import os; os.environ.get('{VARIABLE}', '0') not in ('', '0')"
    f" and __import__('{_MODULE[:-3]}')\n"
)
_OPTIONS = frozenset({"adapter", "backend", "offload", "fallback", "routes", "tuned"})

_Session = onnxruntime.InferenceSession
_Binding = onnxruntime.IOBinding
_twins: dict[type, type] = {}
_lock = threading.Lock()
_local = threading.local()
_state: list[dict[str, Any]] = []  # the options of each patch that is in force, the last one counts


class PlainSession(onnxruntime.InferenceSession):
    """ONNX Runtime's own session, in a patched process too."""


class _Patch:
    """What `patch_onnxruntime` returns: as a context manager it takes its patch back at the end."""

    def __init__(self, options: dict[str, Any], children: bool):
        self._options, self._children = options, children

    def __enter__(self) -> "_Patch":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _lock:
            _state[:] = [one for one in _state if one is not self._options]
            if self._children:
                os.environ.pop(VARIABLE, None)
            if not _state:
                _restore()


def patch_onnxruntime(*, children: bool = False, **options: Any) -> _Patch:
    """From here on, `onnxruntime.InferenceSession(...)` makes a WebGPUSession, in this process.

    Args:
        children: set ORT_WEBGPU_PATCH=1, so that processes spawned from here are patched as well
            (without the options). Raises OrtWebGpuError where it would have no effect.
        options: `adapter`, `backend`, `offload`, `fallback`, `routes` and `tuned` for these
            sessions, as WebGPUSession takes them.

    Calls need not be balanced: `unpatch_onnxruntime()` undoes all. `with patch_onnxruntime(): ...`
    undoes its own at the end. As `worker_process_setup_hook` of Ray it patches each worker.
    """
    if unknown := sorted(options.keys() - _OPTIONS):
        raise TypeError(f"patch_onnxruntime() takes no {unknown}; it takes {sorted(_OPTIONS)}")
    if children and not _installed():
        raise OrtWebGpuError(
            "children=True has no effect yet in this Python environment: spawned processes look for"
            f" {str(_site() / _PTH)!r}. Run `python -m ort_webgpu.patch --install` once"
        )
    given = dict(options)
    with _lock:
        _state.append(given)
        _Session.__new__ = staticmethod(_new_session)
        _Binding.__new__ = staticmethod(_new_binding)
        if children:
            os.environ[VARIABLE] = "1"
    return _Patch(given, children)


def unpatch_onnxruntime() -> None:
    """Make `onnxruntime.InferenceSession(...)` ORT's own again; sessions stay as they are."""
    with _lock:
        _state.clear()
        os.environ.pop(VARIABLE, None)
        _restore()


def is_patched() -> bool:
    """Whether a patch is in force."""
    return bool(_state)


@contextlib.contextmanager
def plain_onnxruntime() -> Iterator[None]:
    """Within it, this thread gets ONNX Runtime's own sessions though the process is patched.

    For code that constructs them itself; who can name a class takes `PlainSession`.
    """
    depth = getattr(_local, "plain", 0)
    _local.plain = depth + 1
    try:
        yield
    finally:
        _local.plain = depth


def _restore() -> None:
    # Without any `__new__` of its own the class would refuse arguments from now on: CPython does
    # not take back that object.__new__ was once overridden.
    _Session.__new__ = staticmethod(_plain_new)
    _Binding.__new__ = staticmethod(_plain_new)


def _plain_new(cls: type, *args: Any, **kwargs: Any) -> Any:
    return object.__new__(cls)


def _new_session(cls: type, *args: Any, **kwargs: Any) -> Any:
    if issubclass(cls, WebGPUSession | PlainSession) or getattr(_local, "plain", 0) > 0:
        return object.__new__(cls)
    if cls is _Session:
        # ORT itself makes a bare instance to put a session of a model package in
        made = object.__new__(WebGPUSession if args or kwargs else _Session)
    else:
        made = object.__new__(_twin(cls))
    if isinstance(made, WebGPUSession):
        made._patch_options = _state[-1] if _state else {}
    return made


def _new_binding(cls: type, *args: Any, **kwargs: Any) -> Any:
    session = args[0] if args else kwargs.get("session")
    if cls is not _Binding or not isinstance(session, WebGPUSession):
        return object.__new__(cls)
    return object.__new__(SessionBinding if session._plan is None else PlanBinding)


def _twin(cls: type) -> type:
    """A class that is `cls` and a WebGPUSession, with the name of `cls`."""
    twin = _twins.get(cls)
    if twin is None:
        body = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "__reduce_ex__": lambda self, protocol: (
                _rebuilt,
                (cls, dict(vars(self._wishes))),
                self.__getstate__(),
            ),
        }
        twin = _twins.setdefault(cls, type(cls.__name__, (cls, WebGPUSession), body))
    return twin


def _rebuilt(cls: type, wishes: dict[str, Any]) -> Any:
    """An instance for unpickling to fill; `cls.__setstate__` may call `__init__` or ours."""
    made: Any = object.__new__(_twin(cls))
    made._patch_options = wishes
    return made


# -- spawned processes -----------------------------------------------------------------------------


def _site() -> Path:
    return Path(sysconfig.get_path("purelib"))


def _installed() -> bool:
    return (_site() / _PTH).is_file() and (_site() / _MODULE).is_file()


def _install(folder: Path) -> None:
    shutil.copyfile(Path(__file__).with_name("_autopatch.py"), folder / _MODULE)
    (folder / _PTH).write_text(_LINE)


def _uninstall(folder: Path) -> None:
    for name in (_PTH, _MODULE):
        (folder / name).unlink(missing_ok=True)


def _main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ort_webgpu.patch",
        description=f"Make {VARIABLE}=1 patch every process of this Python environment.",
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument(
        "--install", action="store_true", help="write a .pth file that looks for it"
    )
    action.add_argument("--uninstall", action="store_true", help="remove that file")
    action.add_argument("--status", action="store_true", help="say whether it is there")
    parser.add_argument("--folder", type=Path, default=_site(), help="instead of site-packages")
    given = parser.parse_args()
    if given.install:
        _install(given.folder)
    elif given.uninstall:
        _uninstall(given.folder)
    there = (given.folder / _PTH).is_file()
    print(f"{given.folder / _PTH}: {'installed' if there else 'not installed'}")


if __name__ == "__main__":
    _main()
