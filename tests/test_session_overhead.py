"""What a session costs beside its kernels: medians of paired runs, so that load cancels out."""

import statistics
import time

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from session_helpers import options

from ort_webgpu import WebGPUSession


def trivial() -> bytes:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n"]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y])
    imports = [helper.make_opsetid("", 18)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=imports, ir_version=9)
    return model.SerializeToString()


def once(session: onnxruntime.InferenceSession, feeds, count: int = 200) -> float:
    start = time.perf_counter()
    for _ in range(count):
        session.run(None, feeds)
    return time.perf_counter() - start


@pytest.mark.slow
def test_nothing_to_offload_costs_what_ort_costs():
    """The smallest model there is, so that the share of Python is the largest there can be."""
    ours = WebGPUSession(trivial(), options())
    theirs = onnxruntime.InferenceSession(trivial(), options())
    feeds = {"x": np.ones(3, np.float32)}
    once(ours, feeds), once(theirs, feeds)
    ratios = [once(ours, feeds) / once(theirs, feeds) for _ in range(101)]
    assert statistics.median(ratios) <= 1.05
