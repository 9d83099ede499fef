"""Tests with the real libraries: `pytest -m peers -W default tests/peers` where they are there.

They run on SwiftShader alone: torch does not survive beside the LLVM of lavapipe.
"""

import os

import pytest

import ort_webgpu


@pytest.fixture
def patched(monkeypatch):
    """onnxruntime patched, the sessions on SwiftShader; yields the log of sessions made."""
    monkeypatch.setenv("VK_DRIVER_FILES", SWIFTSHADER)
    if not any("swiftshader" in one.name.lower() for one in ort_webgpu.devices("wgpu")):
        pytest.skip(f"no SwiftShader; VK_DRIVER_FILES={os.environ['VK_DRIVER_FILES']}")
    with ort_webgpu.patch_onnxruntime(adapter="swiftshader"):
        yield


SWIFTSHADER = os.environ.get("SWIFTSHADER_ICD", "/usr/lib/chromium/vk_swiftshader_icd.json")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Not even imported where they are not asked for: torch would come with them."""
    wanted = config.option.markexpr
    return True if "peers" not in wanted or "not peers" in wanted else None
