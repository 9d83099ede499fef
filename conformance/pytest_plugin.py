"""A pytest plugin that puts WebGPUSession in place of onnxruntime.InferenceSession.

    pytest -p ort_webgpu.conformance.pytest_plugin --ort-webgpu-adapter=auto TESTS

Tests that import InferenceSession, or look it up in the module when they use it, get ours. At the
end a line says how many of the attention nodes that ran were on the device.
"""

from typing import Any, ClassVar

import onnxruntime
import pytest

from ort_webgpu import WebGPUSession

__all__ = ["pytest_addoption", "pytest_configure", "pytest_terminal_summary"]


class _Replacement(WebGPUSession):
    """WebGPUSession with the keyword arguments of pytest's command line, and a count of nodes."""

    settings: ClassVar[dict[str, Any]] = {}
    placed: ClassVar[dict[str, int]] = {"webgpu": 0, "cpu": 0}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**self.settings, **kwargs})
        for row in self.explain().rows:
            self.placed[row.placed] += 1


def pytest_addoption(parser: pytest.Parser) -> None:
    """What WebGPUSession is made with."""
    group = parser.getgroup("ort-webgpu")
    group.addoption("--ort-webgpu-adapter", default="auto", help="adapter= of every session")
    group.addoption("--ort-webgpu-backend", default="auto", help="backend= of every session")
    group.addoption(
        "--ort-webgpu-route",
        action="append",
        default=[],
        help="OPERATOR=ROUTE, for routes= of every session",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Replace the class before any test module is imported."""
    pairs = [text.rpartition("=") for text in config.getoption("--ort-webgpu-route")]
    adapter = config.getoption("--ort-webgpu-adapter")
    _Replacement.settings.update(
        adapter=int(adapter) if adapter.isdigit() else adapter,
        backend=config.getoption("--ort-webgpu-backend"),
        routes={name: route for name, _, route in pairs},
    )
    onnxruntime.InferenceSession = _Replacement


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what ran where, so that a suite that passed on the CPU is not mistaken for a pass."""
    placed = _Replacement.placed
    terminalreporter.write_line(
        f"ort-webgpu: sessions had {placed['webgpu']} attention nodes on WebGPU, {placed['cpu']} on"
        " the CPU"
    )
