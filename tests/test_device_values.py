"""Values that stay on the device: fed, returned, grown in place, never silently shared."""

import gc

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from session_helpers import MODEL, feeds, options

from ort_webgpu import (
    DeviceError,
    DeviceLostError,
    DeviceValue,
    InvalidInputError,
    WebGPUSession,
    device,
    pool,
)
from ort_webgpu.ops.spec import TensorSpec

PASTS = [f"past_key_values.{layer}.{part}" for layer in range(4) for part in ("key", "value")]
PRESENTS = [name.replace("past_key_values", "present") for name in PASTS]


@pytest.fixture(scope="module")
def session():
    return WebGPUSession(MODEL, options(), adapter="llvmpipe")


@pytest.fixture(scope="module")
def reference():
    return WebGPUSession(MODEL, options(), adapter="none")


def step(session, given, **kwargs):
    """Logits, and the presents under the names of the pasts."""
    logits, *presents = session.run(["logits", *PRESENTS], given, **kwargs)
    return logits, dict(zip(PASTS, presents, strict=True))


def following(given, pasts, token: int) -> dict:
    batch, seen = given["attention_mask"].shape
    return {
        "input_ids": np.full((batch, 1), token, np.int64),
        "attention_mask": np.ones((batch, seen + 1), np.int64),
        **pasts,
    }


def test_device_outputs_feed_the_next_run(session, reference):
    ours, theirs = feeds(), feeds()
    for token in (3, 7, 250):
        logits, pasts = step(session, ours, device_outputs=["present*"])
        expected, arrays = step(reference, theirs)
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
        for name in PASTS:
            assert isinstance(pasts[name], DeviceValue)
            assert pasts[name].shape == arrays[name].shape
            np.testing.assert_allclose(pasts[name].numpy(), arrays[name], rtol=1e-4, atol=1e-4)
        ours, theirs = following(ours, pasts, token), following(theirs, arrays, token)


def test_growth_copies_nothing_until_the_capacity_doubles(session):
    given = feeds()
    places = []
    for token in range(70):
        _, pasts = step(session, given, device_outputs=["present*"])
        value = pasts[PASTS[0]]
        assert value.shape[2] == 5 + token and value.capacity >= value.shape[2]
        places.append((value.buffer, value.capacity))
        given = following(given, pasts, token)
    assert [capacity for _, capacity in places] == [64] * 60 + [128] * 10
    assert len({id(buffer) for buffer, _ in places}) == 2


def test_bytes_moved_do_not_depend_on_the_context(session):
    counters = session._plan.gpu.counters
    moved = {}
    for past in (10, 400):
        _, pasts = step(session, feeds(past=past), device_outputs=["present*"])
        given = following(feeds(past=past), pasts, 9)
        before = counters.bytes_up + counters.bytes_down
        step(session, given, device_outputs=["present*"])
        moved[past] = counters.bytes_up + counters.bytes_down - before
    assert moved[10] == moved[400] <= 64 << 10


def test_memory_of_garbage_cycles_is_used_again(session):
    """The garbage collector runs the finalizers of all that a cycle holds, wgpu's buffers too."""
    gpu = session._plan.gpu
    gc.collect()
    kept = gpu.allocate(54321)
    for turn in range(3):
        cycle: list = [gpu.allocate(54321)]
        cycle.append(cycle)
        serial = cycle[0].serial
        del cycle
        gc.collect()
        again = gpu.upload(np.full(54321, turn, np.uint8))
        assert again.serial == serial != kept.serial
        assert (DeviceValue(gpu, again, TensorSpec("uint8", (54321,))).numpy() == turn).all()


def test_idle_memory_of_other_sizes_makes_room(adapter, monkeypatch):
    """Once the pool was full, memory of sizes that had come late was made anew for each run."""
    monkeypatch.setattr(pool, "POOL_LIMIT", 1 << 20)
    gpu = device.open_gpu(adapter)
    early = [gpu.allocate(1 << 18) for _ in range(4)]
    before = gpu.counters.allocated_bytes
    del early
    serials = set()
    for _ in range(3):
        late = [gpu.allocate(3 << 17) for _ in range(2)]
        serials.add(tuple(one.serial for one in late))
        del late
    gpu.allocate(16)
    assert len(serials) == 1
    # the early ones had to go for it
    assert gpu.counters.allocated_bytes < before + (3 << 18)


def test_two_continuations_of_one_value_do_not_meet(session, reference):
    _, pasts = step(session, feeds(), device_outputs=["present*"])
    arrays = {name: value.numpy() for name, value in pasts.items()}
    results = {}
    for token in (11, 12):
        results[token] = step(session, following(feeds(), pasts, token), device_outputs=["*"])
    for token, (logits, presents) in results.items():
        expected, wanted = step(reference, following(feeds(), arrays, token))
        np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-4, atol=1e-4)
        for name in PASTS:
            np.testing.assert_allclose(presents[name], wanted[name], rtol=1e-4, atol=1e-4)
    for name in PASTS:
        assert pasts[name].numpy().tobytes() == arrays[name].tobytes()
        assert results[11][1][name].buffer is pasts[name].buffer
        assert results[12][1][name].buffer is not pasts[name].buffer


def test_ragged_batch_does_not_write_into_an_older_value(session, reference):
    """Row 1 is padded on the right: its next key goes to a row that the old value has."""
    prompt = feeds()
    prompt["attention_mask"][1, 3:] = 0
    _, pasts = step(session, prompt, device_outputs=["present*"])
    _, arrays = step(reference, prompt)
    before = {name: value.numpy() for name, value in pasts.items()}
    given = following(prompt, pasts, 9)
    given["attention_mask"][1, 4:] = 0
    logits, presents = step(session, given, device_outputs=["present*"])
    expected, wanted = step(reference, {**given, **arrays})
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    for name in PASTS:
        assert pasts[name].numpy().tobytes() == before[name].tobytes()
        np.testing.assert_allclose(presents[name], wanted[name], rtol=1e-4, atol=1e-4)


def test_value_on_the_cpu_where_there_is_no_device(reference):
    logits, pasts = step(reference, feeds(), device_outputs=["present*"])
    expected, arrays = step(reference, feeds())
    assert pasts[PASTS[0]].device_name() == "cpu"
    np.testing.assert_array_equal(pasts[PASTS[0]], arrays[PASTS[0]])
    again, _ = step(reference, following(feeds(), pasts, 4))
    same, _ = step(reference, following(feeds(), arrays, 4))
    np.testing.assert_array_equal(again, same)
    np.testing.assert_array_equal(logits, expected)


def test_value_is_an_array_to_numpy_and_dlpack(session, rng):
    array = rng.standard_normal((2, 3), dtype=np.float32)
    value = session.device_value(array)
    assert (value.dtype, value.shape, value.nbytes) == (np.float32, (2, 3), 24)
    np.testing.assert_array_equal(np.asarray(value), array)
    np.testing.assert_array_equal(np.from_dlpack(value), array)
    assert value.capacity is None and value.device_name() == "webgpu"
    with pytest.raises(ValueError, match="by a copy"):
        np.array(value, copy=False)


def test_wrong_shape_and_pattern_are_refused(session):
    given = feeds()
    given["input_ids"] = session.device_value(np.zeros((2, 5), np.float32))
    with pytest.raises(InvalidInputError, match=r"input 'input_ids' is fed .*tensor\(int64\)"):
        session.run(None, given)
    with pytest.raises(InvalidInputError, match="fits none of the outputs"):
        session.run(None, feeds(), device_outputs=["presents*"])


def test_value_of_another_device_is_refused(session, reference, adapter_names):
    if not any("swiftshader" in name.lower() for name in adapter_names):
        pytest.skip("needs a second adapter")
    other = WebGPUSession(MODEL, options(), adapter="swiftshader")
    given = feeds()
    given["past_key_values.0.key"] = other.device_value(given["past_key_values.0.key"])
    with pytest.raises(DeviceError, match=r"feed value.numpy\(\)"):
        session.run(None, given)
    # where there is no device, values of one are read back
    expected, _ = step(reference, feeds())
    np.testing.assert_array_equal(step(reference, given)[0], expected)


def test_values_of_a_lost_device_say_so(session, monkeypatch):
    _, pasts = step(session, feeds(), device_outputs=["present*"])
    with monkeypatch.context() as patched:
        patched.setattr(session._plan.gpu, "_lost", "made so by the test")
        with pytest.raises(DeviceLostError, match="make a new session"):
            pasts[PASTS[0]].numpy()
        with pytest.raises(DeviceLostError, match="make a new session"):
            step(session, following(feeds(), pasts, 4))
    assert pasts[PASTS[0]].numpy().shape == (2, 2, 5, 32)


def _shape_model() -> bytes:
    """A GQA node, and nodes that read only the shapes of its past and present."""
    gqa = helper.make_node(
        "GroupQueryAttention",
        ["qkv", "", "", "past_k", "past_v", "seqlens", "total"],
        ["y", "present_k", "present_v"],
        "attention",
        domain="com.microsoft",
        num_heads=2,
        kv_num_heads=1,
    )
    nodes = [
        helper.make_node("Shape", ["past_k"], ["past_rows"], start=2, end=3),
        helper.make_node("Shape", ["qkv"], ["new_rows"], start=1, end=2),
        helper.make_node("Add", ["past_rows", "new_rows"], ["sum"]),
        helper.make_node("Cast", ["sum"], ["total"], to=TensorProto.INT32),
        gqa,
        helper.make_node("Shape", ["present_v"], ["shape"]),
        helper.make_node("Size", ["present_k"], ["size"]),
        helper.make_node("Neg", ["y"], ["z"]),
    ]

    def value(name, elem_type, shape):
        return helper.make_tensor_value_info(name, elem_type, shape)

    caches = {n: value(n, TensorProto.FLOAT, ["B", 1, n, 16]) for n in ("past_k", "past_v")}
    graph = helper.make_graph(
        nodes,
        "shapes",
        [
            value("qkv", TensorProto.FLOAT, ["B", "S", 64]),
            value("seqlens", TensorProto.INT32, ["B"]),
            *caches.values(),
        ],
        [
            value("z", TensorProto.FLOAT, ["B", "S", 32]),
            value("present_k", TensorProto.FLOAT, ["B", 1, "T", 16]),
            value("present_v", TensorProto.FLOAT, ["B", 1, "T", 16]),
            value("shape", TensorProto.INT64, [4]),
            value("size", TensorProto.INT64, []),
        ],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(graph, opset_imports=imports, ir_version=9)
    onnx.checker.check_model(made)
    return made.SerializeToString()


def test_shape_readers_see_the_logical_shape_and_move_nothing(rng):
    session = WebGPUSession(_shape_model(), options(), adapter="llvmpipe")
    plain = WebGPUSession(_shape_model(), options(), adapter="none")
    counters = session._plan.gpu.counters
    ours = theirs = [np.zeros((1, 1, 0, 16), np.float32)] * 2
    for rows in (3, 1, 1, 40, 1):
        past = theirs[0].shape[2]
        given = {
            "qkv": rng.standard_normal((1, rows, 64), dtype=np.float32),
            "seqlens": np.full(1, past + rows - 1, np.int32),
        }
        before = counters.bytes_up + counters.bytes_down
        z, *ours, shape, size = session.run(
            None, {**given, "past_k": ours[0], "past_v": ours[1]}, device_outputs=["present_*"]
        )
        moved = counters.bytes_up + counters.bytes_down - before
        expected = plain.run(None, {**given, "past_k": theirs[0], "past_v": theirs[1]})
        theirs = expected[1:3]
        np.testing.assert_allclose(z, expected[0], rtol=1e-5, atol=1e-5)
        assert shape.tolist() == [1, 1, past + rows, 16] and shape.dtype == np.int64
        assert size == (past + rows) * 16
        assert moved < given["qkv"].nbytes + z.nbytes + 1024
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
