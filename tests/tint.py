"""Tint's opinion of WGSL without a GPU: Dawn's Null backend has all features and runs no kernel."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

_PROGRAM = """
import json, sys
import wgpudawn
from wgpudawn.backends.dawn import extras
extras.set_instance_extras(enable_toggles=["allow_unsafe_apis"])
adapter = wgpudawn.gpu.request_adapter_sync()
features = ["subgroups", "shader-f16", "chromium-experimental-subgroup-matrix"]
device = adapter.request_device_sync(required_features=features)
errors = []
for text in json.load(sys.stdin):
    try:
        device.create_shader_module(code=text)
        errors.append("")
    except Exception as error:
        errors.append(str(error))
print("ERRORS" + json.dumps(errors))
"""


def tint(texts: list[str]) -> list[str]:
    """What Tint says of each text, "" where it takes it; skips the test where Dawn is missing."""
    if find_spec("wgpudawn") is None:
        pytest.skip("wgpudawn is not installed: pip install 'ort-webgpu[dawn]'")
    # Dawn makes its one instance for good, so a backend of its own needs a process of its own
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=json.dumps(texts),
        env={**os.environ, "WGPU_BACKEND_TYPE": "Null"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "ERRORS" in done.stdout, done.stderr
    return json.loads(done.stdout.rpartition("ERRORS")[2])
