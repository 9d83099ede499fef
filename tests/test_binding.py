"""I/O binding: what ORT's takes, raw pointers as optimum binds them, device values, in place."""

import ctypes

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from session_helpers import MODEL, feeds, options, same
from test_cache import PASTS, PRESENTS, NumpyLoop, greedy
from test_device_values import _shape_model

from ort_webgpu import DeviceValue, InvalidInputError, WebGPUSession


@pytest.fixture(scope="module")
def session():
    return WebGPUSession(MODEL, options(), adapter="llvmpipe")


@pytest.fixture(scope="module")
def reference():
    return WebGPUSession(MODEL, options(), adapter="none")


class PointerLoop:
    """optimum's way: one binding, raw pointers in and out, new memory for each present."""

    def __init__(self, session, onnx_types: bool = False):
        self.session, self.binding = session, session.io_binding()
        self.pasts = {name: np.zeros((1, 2, 0, 32), np.float32) for name in PASTS}
        self.float, self.int = (1, 7) if onnx_types else (np.float32, np.int64)
        self.length = 0

    def run(self, tokens) -> np.ndarray:
        ids = np.array(tokens, np.int64)
        self.length += ids.shape[1]
        mask = np.ones((1, self.length), np.int64)
        dummy = np.zeros(1, np.float32)  # a pointer for values without elements
        for name, value, kind in (
            ("input_ids", ids, self.int),
            ("attention_mask", mask, self.int),
            *((n, v, self.float) for n, v in self.pasts.items()),
        ):
            pointer = value.ctypes.data if value.size else dummy.ctypes.data
            self.binding.bind_input(name, "cpu", 0, kind, value.shape, pointer)
        logits = np.empty((1, ids.shape[1], 512), np.float32)
        presents = {name: np.empty((1, 2, self.length, 32), np.float32) for name in PASTS}
        self._bind_output("logits", logits)
        for past, present in zip(PASTS, PRESENTS, strict=True):
            self._bind_output(present, presents[past])
        self.session.run_with_iobinding(self.binding)
        self.pasts = presents
        return logits

    def _bind_output(self, name, array) -> None:
        self.binding.bind_output(name, "cpu", 0, self.float, array.shape, array.ctypes.data)


class DeviceLoop:
    """Presents stay on the device and are bound as pasts."""

    def __init__(self, session):
        self.session, self.binding = session, session.io_binding()
        for name in PASTS:
            empty = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((1, 2, 0, 32), np.float32))
            self.binding.bind_ortvalue_input(name, empty)
        self.binding.bind_output("logits")
        for name in PRESENTS:
            self.binding.bind_output(name, "webgpu")
        self.length = 0

    def run(self, tokens) -> np.ndarray:
        self.length += len(tokens[0])
        self.binding.bind_cpu_input("input_ids", np.array(tokens, np.int64))
        self.binding.bind_cpu_input("attention_mask", np.ones((1, self.length), np.int64))
        self.session.run_with_iobinding(self.binding)
        logits, *presents = self.binding.get_outputs()
        for name, value in zip(PASTS, presents, strict=True):
            assert isinstance(value, DeviceValue)
            self.binding.bind_ortvalue_input(name, value)
        return logits.numpy()


@pytest.mark.parametrize(("make", "doublings"), [(PointerLoop, 3), (DeviceLoop, 0)])
def test_greedy_loop_through_binding(session, reference, make, doublings):
    """Bytes of a step do not depend on the context, though PointerLoop has each present in new
    memory of its own: it reads a present back whole only where the storage was doubled."""
    count = 256
    expected = greedy(NumpyLoop(reference), count)
    counters = session._plan.gpu.counters
    loop = make(session)
    moved = []
    run = loop.run

    def counted(tokens):
        before = counters.bytes_up + counters.bytes_down
        logits = run(tokens)
        moved.append(counters.bytes_up + counters.bytes_down - before)
        return logits

    loop.run = counted
    assert greedy(loop, count) == expected
    usual = sorted(moved[1:])[: count - doublings]
    assert len(set(usual)) == 1 and usual[-1] <= 64 << 10


def test_onnx_element_types(session, reference):
    loop = PointerLoop(session, onnx_types=True)
    assert greedy(loop, 5) == greedy(NumpyLoop(reference), 5)


def test_memory_that_the_caller_changed_is_read_again(session, reference):
    ours, theirs = PointerLoop(session), NumpyLoop(reference)
    for tokens in ([[5, 9, 200]], [[7]], [[8]]):
        same([ours.run(tokens)], [theirs.run(tokens)])
        for loop in (ours, theirs):
            loop.pasts[PASTS[2]][0, 1, 1, :4] += 0.5
    for name in PASTS:
        same([ours.pasts[name]], [theirs.pasts[name]])


def _static_feeds(rng, rows: int) -> dict[str, np.ndarray]:
    return {
        "qkv": rng.standard_normal((1, 1, 64), dtype=np.float32),
        "past_k": rng.standard_normal((1, 1, rows, 16), dtype=np.float32),
        "past_v": rng.standard_normal((1, 1, rows, 16), dtype=np.float32),
        "seqlens": np.array([4], np.int32),
    }


def _static_model() -> bytes:
    """One GQA node whose cache keeps its size: total_sequence_length is an input."""
    model = onnx.load_from_string(_shape_model())
    graph = model.graph
    kept = [node for node in graph.node if node.op_type in ("GroupQueryAttention", "Neg")]
    del graph.node[:], graph.output[3:]
    graph.node.extend(kept)
    graph.input.append(helper.make_tensor_value_info("total", TensorProto.INT32, [1]))
    return model.SerializeToString()


@pytest.mark.parametrize("form", ["pointer", "ortvalue", "devicevalue"])
def test_past_and_present_bound_to_one_value_are_updated_in_place(rng, form):
    session = WebGPUSession(_static_model(), options(), adapter="llvmpipe")
    given = {**_static_feeds(rng, 8), "total": np.array([5], np.int32)}
    expected = session.run(None, given)
    binding = session.io_binding()
    for name in ("qkv", "seqlens", "total"):
        binding.bind_cpu_input(name, given[name])
    places = {}
    for past, present in (("past_k", "present_k"), ("past_v", "present_v")):
        array = given[past].copy()
        if form == "pointer":
            where = ("cpu", 0, np.float32, array.shape, array.ctypes.data)
            binding.bind_input(past, *where)
            binding.bind_output(present, *where)
            places[past] = array
            continue
        value = session.device_value(array)
        if form == "ortvalue":
            value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        binding.bind_ortvalue_input(past, value)
        binding.bind_ortvalue_output(present, value)
        places[past] = value
    binding.bind_output("z")
    session.run_with_iobinding(binding)
    same([binding.copy_outputs_to_cpu()[2]], [expected[0]])
    for past, result in zip(("past_k", "past_v"), expected[1:], strict=True):
        found = np.asarray(places[past] if form != "ortvalue" else places[past].numpy())
        same([found[:, :, :5]], [result[:, :, :5]])
        # rows behind the last key are left as they were, as ORT leaves them
        assert found[:, :, 5:].tobytes() == given[past][:, :, 5:].tobytes()


def test_device_value_as_target_of_a_result_made_elsewhere(session, rng):
    given = feeds(past=3)
    logits, key = session.run(["logits", "present.0.key"], given)
    target = session.device_value(np.zeros_like(key))
    binding = session.io_binding()
    for name, value in given.items():
        binding.bind_cpu_input(name, value)
    binding.bind_ortvalue_output("present.0.key", target)
    binding.bind_output("logits", "webgpu")
    session.run_with_iobinding(binding)
    first, second = binding.get_outputs()
    assert first is target and isinstance(second, DeviceValue)
    same([target.numpy(), second.numpy()], [key, logits])
    assert [v.shape() for v in binding.get_outputs_as_ortvaluevector()] == [
        list(key.shape),
        list(logits.shape),
    ]


@pytest.mark.parametrize("target", ["pointer", "ortvalue", "devicevalue"])
def test_wrong_shapes_raise(session, target):
    binding = session.io_binding()
    for name, value in feeds().items():
        binding.bind_cpu_input(name, value)
    wrong = np.zeros((2, 2, 6, 32), np.float32)
    if target == "pointer":
        where = ("cpu", 0, np.float32, wrong.shape, wrong.ctypes.data)
        binding.bind_output("present.0.key", *where)
    elif target == "ortvalue":
        value = onnxruntime.OrtValue.ortvalue_from_numpy(wrong)
        binding.bind_ortvalue_output("present.0.key", value)
    else:
        binding.bind_ortvalue_output("present.0.key", session.device_value(wrong))
    with pytest.raises(InvalidInputError, match=r"'present.0.key' is bound to .*\[2, 2, 5, 32\]"):
        session.run_with_iobinding(binding)
    assert not wrong.any()


def test_wrong_types_and_names_raise(session):
    memory = (ctypes.c_char * 64)()
    pointer = ctypes.addressof(memory)
    binding = session.io_binding()
    for name, value in feeds().items():
        binding.bind_cpu_input(name, value)
    binding.bind_input("input_ids", "cpu", 0, np.float32, (2, 5), pointer)
    binding.bind_output("logits")
    with pytest.raises(Exception, match=r"[Uu]nexpected input data type"):
        session.run_with_iobinding(binding)
    value = session.device_value(np.zeros(1, np.float32))
    with pytest.raises(InvalidInputError, match="the model has the inputs"):
        binding.bind_ortvalue_input("nothing", value)
    with pytest.raises(InvalidInputError, match="the model has the outputs"):
        binding.bind_output("nothing", "webgpu")
    with pytest.raises(InvalidInputError, match="has no address"):
        binding.bind_input("input_ids", "webgpu", 0, np.int64, (2, 5), pointer)
    with pytest.raises(InvalidInputError, match="has no address"):
        binding.bind_output("logits", "webgpu", 0, np.float32, (2, 5, 512), pointer)


def test_run_with_ort_values_takes_device_values(session, reference):
    given = feeds()
    mixed = {k: onnxruntime.OrtValue.ortvalue_from_numpy(v) for k, v in given.items()}
    mixed["past_key_values.1.key"] = session.device_value(given["past_key_values.1.key"])
    (logits,) = session.run_with_ort_values(["logits"], mixed)
    same([logits.numpy()], reference.run(["logits"], given))
