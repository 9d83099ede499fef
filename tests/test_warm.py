"""Pipelines are compiled when a session is made, as far as its calls are known by then."""

from pathlib import Path

import numpy as np

from ort_webgpu import WebGPUSession
from ort_webgpu.device import open_gpu

MODEL = Path(__file__).parents[1] / "examples" / "model" / "model.onnx"


def step(session: WebGPUSession, tokens: int, past: int) -> None:
    """One call of the example model: `tokens` new ones behind `past`."""
    feeds = {
        "input_ids": np.full((1, tokens), 7, np.int64),
        "attention_mask": np.ones((1, past + tokens), np.int64),
    }
    for one in session.get_inputs():
        if one.name.startswith("past"):
            feeds[one.name] = np.ones((1, 2, past, 32), np.float32)
    session.run(None, feeds)


def test_decode_steps_and_second_sessions_compile_nothing(adapter):
    gpu = open_gpu(adapter)
    assert gpu is not None
    gpu._pipelines.clear()  # what other tests of this process have compiled
    before = gpu.counters.pipelines
    first = WebGPUSession(MODEL, adapter=adapter)
    made = gpu.counters.pipelines
    assert made > before
    step(first, 1, 20)
    step(first, 1, 400)
    assert gpu.counters.pipelines == made
    step(WebGPUSession(MODEL, adapter=adapter), 1, 21)
    assert gpu.counters.pipelines == made
