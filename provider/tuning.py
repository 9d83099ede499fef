"""What `ort-webgpu tune` measured, in the user's cache directory: one JSON file for each adapter.

A file counts only for the adapter, driver, WebGPU package and version of this package that it was
measured with; any other is left alone until it is measured again. Sessions read it once a process.
"""

import hashlib
import json
import math
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import platformdirs

from ort_webgpu._version import __version__
from ort_webgpu.adapters import PACKAGES, AdapterInfo
from ort_webgpu.errors import OrtWebGpuError
from ort_webgpu.ops.tuned import CallClass, Finding, Tuned

__all__ = ["VARIABLE", "Stored", "clear", "file_of", "load", "read", "store"]

#: The environment variable that names another directory than the user's cache.
VARIABLE = "ORT_WEBGPU_CACHE_DIR"

_FORMAT = 1


@dataclass(frozen=True)
class Stored:
    """What the file at `path` says of an adapter. `obstacle`: why it is not used, "" if it is or
    if there is none; `damaged`: it could not be read at all."""

    path: Path
    tuned: Tuned = Tuned()  # noqa: RUF009 (it is frozen)
    obstacle: str = ""
    damaged: bool = False


_loaded: dict[Path, Stored] = {}
_lock = threading.Lock()


def file_of(info: AdapterInfo) -> Path:
    """Where the results of an adapter are, whether there are any or not."""
    place = os.environ.get(VARIABLE)
    folder = Path(place) if place else platformdirs.user_cache_path("ort-webgpu", appauthor=False)
    plain = re.sub(r"[^a-z0-9]+", "-", f"{info.name} {info.backend}".lower()).strip("-")
    digest = hashlib.sha256("\n".join((info.name, info.backend, info.api)).encode()).hexdigest()
    return folder / "tuned" / f"{plain[:60]}-{digest[:8]}.json"


def load(info: AdapterInfo) -> Stored:
    """As `read`, once a process and adapter; a damaged file gives one warning and no results."""
    path = file_of(info)
    with _lock:
        known = _loaded.get(path)
        if known is not None:
            return known
        found = _loaded[path] = read(info)
    if found.damaged:
        warnings.warn(found.obstacle, RuntimeWarning, stacklevel=7)
    return found


def read(info: AdapterInfo) -> Stored:
    """What is stored for the adapter. Raises nothing, whatever the file holds."""
    path = file_of(info)
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return Stored(path)
    except (OSError, ValueError, RecursionError) as error:
        return _damaged(path, str(error))
    if not isinstance(data, dict) or not isinstance(data.get("key"), dict):
        return _damaged(path, "it is no file of `ort-webgpu tune`")
    key, made_with = _key(info), data["key"]
    changed = [name for name, value in key.items() if made_with.get(name) != value]
    if changed:
        listed = ", ".join(f"{n} {made_with.get(n)!r}, here {key[n]!r}" for n in changed)
        return Stored(
            path,
            obstacle=f"tuned results in {str(path)!r} are not used: they were measured with"
            f" {listed}. Measure again with `ort-webgpu tune`",
        )
    try:
        return Stored(path, Tuned(tuple(_finding(one) for one in data["findings"])))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        return _damaged(path, f"{type(error).__name__}: {error}")


def store(info: AdapterInfo, findings: Sequence[Finding]) -> Path:
    """Add `findings` to the file, in place of those of the same classes of calls.

    Raises OrtWebGpuError where it cannot be written; a file that is there is whole at any time.
    """
    path = file_of(info)
    kept = {finding.calls: finding for finding in (*read(info).tuned.findings, *findings)}
    data = {"key": _key(info), "findings": [asdict(finding) for finding in kept.values()]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".json")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(data, file, indent=1)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OrtWebGpuError(
            f"cannot write tuned results to {str(path)!r}: {error}. Set {VARIABLE} to a folder"
            " that can be written"
        ) from error
    with _lock:
        _loaded.pop(path, None)
    return path


def clear(info: AdapterInfo) -> bool:
    """Delete the adapter's file; whether there was one. Raises OrtWebGpuError where it stays."""
    path = file_of(info)
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise OrtWebGpuError(f"cannot delete {str(path)!r}: {error}. Delete it by hand") from error
    finally:
        with _lock:
            _loaded.pop(path, None)
    return True


def _key(info: AdapterInfo) -> dict[str, Any]:
    """What must be equal for results to hold; names of its entries are shown to users."""
    try:
        package = version(PACKAGES.get(info.backend, info.backend))
    except PackageNotFoundError:
        package = ""
    return {
        "format": _FORMAT,
        "adapter": info.name,
        "API": info.api,
        "backend": f"{info.backend} {package}".strip(),
        "driver": info.driver,
        "ort-webgpu": __version__,
    }


def _damaged(path: Path, why: str) -> Stored:
    return Stored(
        path,
        obstacle=f"tuned results in {str(path)!r} are ignored, since they cannot be read: {why}."
        " Delete the file with `ort-webgpu tune --clear`, or measure again with `ort-webgpu tune`",
        damaged=True,
    )


# -- plain data to findings; KeyError, TypeError and ValueError where it is not that ---------------


def _finding(data: Any) -> Finding:
    times = tuple(_time(pair) for pair in _checked(data["times"], list))
    if not times:
        raise ValueError("a finding without times")
    return Finding(
        _calls(data["calls"]),
        times,
        _time(data["by_rule"]),
        tuple(
            (_checked(route, str), tuple(_size(n) for n in _checked(setting, list)))
            for route, setting in _checked(data["settings"], list)
        ),
        _checked(data["date"], str),
    )


def _calls(data: Any) -> CallClass:
    sizes = ("rows", "keys", "heads", "head_size", "v_head_size")
    features = tuple(_checked(name, str) for name in _checked(data["features"], list))
    rows, keys, heads, head_size, v_head_size = (_size(data[name]) for name in sizes)
    kv_dtype = _checked(data["kv_dtype"], str)
    return CallClass(rows, keys, heads, head_size, v_head_size, kv_dtype, features)


def _time(pair: Any) -> tuple[str, float]:
    route, seconds = pair
    if not isinstance(seconds, float) or not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"{seconds!r} is no time")
    return _checked(route, str), seconds


def _size(value: Any) -> int:
    if type(value) is not int or not 0 < value < 1 << 40:
        raise ValueError(f"{value!r} is no size")
    return value


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
