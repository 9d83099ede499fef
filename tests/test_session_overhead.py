"""What a session costs beside its kernels: what a decode step asks of the device, counted, and
medians of paired runs, in which load cancels out."""

import statistics
import time
from dataclasses import asdict, astuple, replace

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from session_helpers import MODEL, feeds, options

from ort_webgpu import WebGPUSession
from ort_webgpu.conformance.bench_peer_ort import feeds_of, gqa_chain
from ort_webgpu.conformance.bench_works import GqaWork


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


def added(counters, step):
    """What `step` adds to `counters`."""
    before = replace(counters)
    step()
    pairs = zip(astuple(counters), astuple(before), strict=True)
    return type(counters)(*(after - then for after, then in pairs))


def settled(session, step):
    """What each of 20 steps adds from the third on, none of which makes anything."""
    counters = session._plan.gpu.counters
    step(), step()
    for _ in range(20):
        found = added(counters, step)
        assert (found.allocations, found.pipelines, found.bind_groups) == (0, 0, 0)
        yield found


def decode_loop(session, given, **names):
    """Steps of a loop on a cache; `names` are the feeds that grow, as functions of the length."""
    cache = session.new_cache(batch_size=len(given["input_ids" if "input_ids" in given else "q"]))
    session.run(None, given, cache=cache)

    def step():
        length = cache.length + 1
        fed = {name: given[name] for name in ("q", "k", "v") if name in given}
        fed |= {name: make(length) for name, make in names.items()}
        session.run(None, fed, cache=cache)

    return step


def test_a_decode_step_makes_nothing_and_submits_once_a_group(adapter):
    """Four layers with CPU nodes between: a submit each, readback included. From the third step no
    step makes buffers, pipelines or bind groups, though each sees one key more."""
    session = WebGPUSession(MODEL, options(), adapter=adapter)
    step = decode_loop(
        session,
        feeds(),
        input_ids=lambda _: np.full((2, 1), 7, np.int64),
        attention_mask=lambda length: np.ones((2, length), np.int64),
    )
    for found in settled(session, step):
        assert found.submits == 4


def test_layers_without_a_border_are_one_submit(adapter):
    work = GqaWork("chain", 1, past=20, heads=4, kv_heads=2, head_size=32, dtype="float32")
    session = WebGPUSession(gqa_chain(asdict(work), 6), options(), adapter=adapter)
    step = decode_loop(
        session,
        feeds_of(asdict(work), 6),
        seqlens=lambda length: np.full(1, length - 1, np.int32),
        total=lambda length: np.array([length], np.int32),
    )
    for found in settled(session, step):
        assert found.submits == 1
        assert found.bytes_up < 64 << 10
