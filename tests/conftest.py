"""Fixtures of all tests: the two software adapters, the shared folder, and a seed per test."""

import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from session_helpers import MODEL, options

from ort_webgpu import WebGPUSession
from ort_webgpu.adapters import adapters

REPOSITORY = Path(__file__).parents[1]

#: What part of an adapter's name tells it; also what `WebGPUSession(adapter=...)` takes.
ADAPTER_NAMES = {"lavapipe": "llvmpipe", "swiftshader": "SwiftShader"}


@pytest.fixture(scope="session")
def adapter_names() -> list[str]:
    """The names of the adapters that wgpu-native lists in this process."""
    return [info.name for info in adapters("wgpu")]


@pytest.fixture(params=ADAPTER_NAMES)
def adapter(request: pytest.FixtureRequest, adapter_names: list[str]) -> str:
    """Each software adapter in turn, as a value for `adapter=`; the test runs once on each."""
    wanted = ADAPTER_NAMES[request.param]
    if any(wanted.lower() in name.lower() for name in adapter_names):
        return wanted
    found = ", ".join(adapter_names) or "none"
    missing = (
        f"adapter {request.param} is missing; found: {found}."
        " `sh tests/run.sh` sets both up, or name their ICD files in VK_DRIVER_FILES"
    )
    if os.environ.get("CI") == "true":
        pytest.fail(missing)
    pytest.skip(missing)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The project's shared folder (real models and facts), which lies beside the checkout."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here; it holds models too large for the repository")
    return folder


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the test's own name, so that order and selection change nothing."""
    return np.random.default_rng(_seed(request))


@pytest.fixture(autouse=True, scope="session")
def _no_tuned_results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the user has tuned changes no test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORT_WEBGPU_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "untuned"))
        yield


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    random.seed(_seed(request))
    np.random.seed(_seed(request))


def _seed(request: pytest.FixtureRequest) -> int:
    # hash() of a string differs from process to process
    return zlib.crc32(request.node.nodeid.encode())


@pytest.fixture(scope="module")
def software(adapter_names) -> str:
    if not adapter_names:
        pytest.skip("no adapter at all; sh tests/run.sh sets software ones up")
    return adapter_names[0]


@pytest.fixture
def make(software):
    """Sessions on one adapter, with one CPU thread; arguments as WebGPUSession's."""

    def session(source=MODEL, sess_options=None, *args, **kwargs) -> WebGPUSession:
        kwargs.setdefault("adapter", software)
        return WebGPUSession(source, sess_options or options(), *args, **kwargs)

    return session


@pytest.fixture(scope="module")
def theirs() -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(MODEL, options(), providers=["CPUExecutionProvider"])
