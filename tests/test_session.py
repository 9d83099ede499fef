"""WebGPUSession as a drop-in: what libraries touch on a session is what ORT's own session has.

The model is the small decoder of examples/model: four GroupQueryAttention nodes on the device.
"""

import copy
import ctypes
import json
import pickle
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state
from session_helpers import BOTH, MODEL, feeds, options, outcome, same

from ort_webgpu import NoAdapterError, WebGPUSession


@pytest.fixture(scope="module")
def ours(software) -> WebGPUSession:
    return WebGPUSession(MODEL, options(), adapter=software)


def describe(args) -> list:
    return [(arg.name, arg.type, arg.shape) for arg in args]


def trivial(op_type: str = "Neg") -> bytes:
    value = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n"]) for n in "xy"]
    graph = helper.make_graph([helper.make_node(op_type, ["x"], ["y"])], "g", value[:1], value[1:])
    imports = [helper.make_opsetid("", 18)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9).SerializeToString()


# -- what a session says of itself -----------------------------------------------------------------


def test_interface_is_that_of_the_model(ours, theirs):
    assert describe(ours.get_inputs()) == describe(theirs.get_inputs())
    assert describe(ours.get_outputs()) == describe(theirs.get_outputs())
    assert ours.get_overridable_initializers() == theirs.get_overridable_initializers() == []
    for field in (
        "custom_metadata_map",
        "description",
        "domain",
        "graph_description",
        "graph_name",
        "producer_name",
        "version",
    ):
        assert getattr(ours.get_modelmeta(), field) == getattr(theirs.get_modelmeta(), field)


def test_output_that_a_graph_lists_twice(make):
    """As ORT's own test_gqa_cpu.py does with the presents of a prompt."""
    model = onnx.load(MODEL)
    model.graph.output.append(model.graph.output[1])
    session = make(model.SerializeToString(), options())
    reference = onnxruntime.InferenceSession(model.SerializeToString(), options())
    assert describe(session.get_outputs()) == describe(reference.get_outputs())
    same(session.run(None, feeds()), reference.run(None, feeds()))


def test_metadata_of_the_original_survives(make):
    proto = onnx.load(MODEL, load_external_data=False)
    proto.model_version, proto.doc_string, proto.domain = 7, "about", "here"
    proto.graph.doc_string = "graph"
    proto.metadata_props.add(key="charset", value="abc")
    entries = {"session.model_external_initializers_file_folder_path": str(MODEL.parent)}
    given = options()
    for key, value in entries.items():
        given.add_session_config_entry(key, value)
    session = make(proto, given)
    meta = session.get_modelmeta()
    assert session.get_providers() == BOTH
    assert (meta.version, meta.description, meta.domain) == (7, "about", "here")
    assert (meta.graph_description, meta.custom_metadata_map) == ("graph", {"charset": "abc"})


def test_private_attributes_that_libraries_read(ours, theirs):
    assert isinstance(ours, onnxruntime.InferenceSession)
    assert isinstance(ours._sess, ort_state.InferenceSession)
    assert Path(ours._model_path) == MODEL
    assert set(vars(theirs)) <= set(vars(ours))
    with pytest.raises(AttributeError):
        _ = ours.coreml_dimension_overrides
    ours.label = "set by somebody"
    assert ours.label == "set by somebody"


def test_providers(ours, make):
    assert ours.get_providers() == BOTH
    assert list(ours.get_provider_options()) == BOTH
    for providers in (
        ["CPUExecutionProvider"],
        [("CPUExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})],
        ["WebGpuExecutionProvider", "CPUExecutionProvider"],
        [("WebGpuExecutionProvider", {"x": 1})],
    ):
        assert make(providers=providers).get_providers() == BOTH
    with pytest.warns(UserWarning, match="not in available provider names") as caught:
        session = make(providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
    assert len(caught) == 1
    assert session.get_providers() == BOTH


def test_set_providers(make, theirs):
    session = make()
    session.set_providers(["CPUExecutionProvider"])
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert "all on the CPU" in str(session.explain())
    same(session.run(None, feeds()), theirs.run(None, feeds()))
    session.set_providers(["WebGpuExecutionProvider"], provider_options=[{}])
    assert session.get_providers() == BOTH
    session.disable_fallback()
    assert session._enable_fallback is False
    session.enable_fallback()
    assert session._enable_fallback is True


def test_explain(ours):
    ours.run(None, feeds())
    rows = ours.explain().rows
    assert [row.placed for row in rows] == ["webgpu"] * 4
    assert all(row.op_type == "GroupQueryAttention" and row.route for row in rows)
    assert all(name in str(ours.explain()) for name in ("webgpu", rows[0].node, rows[0].route))


# -- runs ------------------------------------------------------------------------------------------


def test_outputs_by_name_none_and_empty_list(ours, theirs):
    expected = theirs.run(None, feeds())
    same(ours.run(None, feeds()), expected)
    same(ours.run([], feeds(), onnxruntime.RunOptions()), expected)
    third = theirs.get_outputs()[3].name
    same(ours.run([third, "logits"], feeds()), [expected[3], expected[0]])


def test_past_with_keys(ours, theirs):
    step = feeds(tokens=((3,), (4,)), past=6)
    same(ours.run(None, step), theirs.run(None, step))


def test_layouts_of_feeds(ours, theirs):
    plain = feeds(past=3, tokens=((1,), (2,)))
    expected = theirs.run(None, plain)
    odd = {}
    for name, value in plain.items():
        if name.endswith("key"):
            odd[name] = np.asfortranarray(value)
        elif name.endswith("value"):
            odd[name] = value[:, :, ::-1].copy()[:, :, ::-1]
        else:
            odd[name] = np.repeat(value, 2, axis=0)[::2]
        odd[name].flags.writeable = False
    assert not odd["past_key_values.0.value"].flags.c_contiguous
    same(ours.run(None, odd), expected)


def test_feeds_that_are_no_arrays(ours, theirs):
    given = feeds()
    expected = theirs.run(None, given)
    wrapped = {n: onnxruntime.OrtValue.ortvalue_from_numpy(v) for n, v in given.items()}
    same(ours.run(None, wrapped), expected)
    same(ours.run(None, {**wrapped, "input_ids": given["input_ids"].tolist()}), expected)
    values = ours.run_with_ort_values(None, wrapped)
    assert all(isinstance(value, onnxruntime.OrtValue) for value in values)
    same([value.numpy() for value in values], expected)


def test_results_belong_to_the_caller(ours, theirs):
    first = ours.run(None, feeds())
    kept = [array.copy() for array in first]
    for array in first:
        array[:] = 0
    same(ours.run(None, feeds()), kept)


MISTAKES = {
    "nothing": lambda f: (None, {}),
    "one missing": lambda f: (None, {n: v for n, v in f.items() if n != "attention_mask"}),
    "unknown input": lambda f: (None, {**f, "zz": f["input_ids"]}),
    "unknown output": lambda f: (["zz"], f),
    "dtype": lambda f: (None, {**f, "input_ids": f["input_ids"].astype(np.int32)}),
    "rank": lambda f: (None, {**f, "input_ids": f["input_ids"][0]}),
    "dim": lambda f: (None, {**f, "past_key_values.0.key": np.zeros((2, 3, 0, 32), np.float32)}),
    "number": lambda f: (None, {**f, "input_ids": 3}),
    "text": lambda f: (None, {**f, "input_ids": "three"}),
    "none": lambda f: (None, {**f, "input_ids": None}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors_of_a_run_are_those_of_ort(ours, theirs, mistake):
    names, given = MISTAKES[mistake](feeds())
    expected = outcome(lambda: theirs.run(names, given))
    found = outcome(lambda: ours.run(names, given))
    assert expected is not None
    if mistake == "none":  # ORT's text names its own source and the first node that reads the value
        assert found[0] is expected[0] and "Missing Input: input_ids" in found[1]
    else:
        assert found == expected


def test_run_async(ours, theirs):
    expected = theirs.run(None, feeds())
    done = threading.Event()
    calls = []

    def callback(*arguments) -> None:
        calls.append(arguments)
        done.set()

    ours.run_async(None, feeds(), callback, "mine")
    assert done.wait(60)
    (results, user_data, error) = calls[0]
    same(results, expected)
    assert (user_data, error) == ("mine", "")
    done.clear()
    ours.run_async(["zz"], feeds(), callback, "mine")
    assert done.wait(60)
    assert calls[1][0] == [] and "Invalid output name" in calls[1][2]


def test_terminate_flag(ours, theirs):
    run_options = onnxruntime.RunOptions()
    run_options.terminate = True
    expected = outcome(lambda: theirs.run(None, feeds(), run_options))
    assert expected is not None
    assert outcome(lambda: ours.run(None, feeds(), run_options)) == expected


def test_threads(ours, theirs):
    prompts = [feeds(tokens=((n + 1,) * (n + 2),)) for n in range(4)]
    results: dict[int, list] = {}

    def work(n: int) -> None:
        for _ in range(3):
            results[n] = ours.run(None, prompts[n])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, prompt in enumerate(prompts):
        same(results[n], theirs.run(None, prompt))


def test_io_binding(ours, theirs):
    given = feeds()
    expected = theirs.run(None, given)
    binding = ours.io_binding()
    for name, value in given.items():
        if name == "input_ids":
            binding.bind_input(name, "cpu", 0, np.int64, value.shape, value.ctypes.data)
        elif name == "attention_mask":
            binding.bind_input(name, "cpu", 0, 7, value.shape, value.ctypes.data)
        else:
            binding.bind_cpu_input(name, value)
    logits = np.zeros_like(expected[0])
    binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
    key = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros_like(expected[1]))
    binding.bind_ortvalue_output("present.0.key", key)
    binding.bind_output("present.0.value")
    ours.run_with_iobinding(binding)
    same([logits, key.numpy()], expected[:2])
    names = [output.name for output in theirs.get_outputs()]
    value = expected[names.index("present.0.value")]
    same(binding.copy_outputs_to_cpu(), [expected[0], expected[1], value])
    assert [v.data_ptr() for v in binding.get_outputs()[:2]] == [logits.ctypes.data, key.data_ptr()]


def test_bound_output_of_a_wrong_shape_raises(ours):
    binding = ours.io_binding()
    for name, value in feeds().items():
        binding.bind_cpu_input(name, value)
    memory = (ctypes.c_float * 6)()
    binding.bind_output("logits", "cpu", 0, np.float32, (2, 3), ctypes.addressof(memory))
    with pytest.raises(ort_state.InvalidArgument, match=r"'logits' is bound to .*\[2, 3\]"):
        ours.run_with_iobinding(binding)


# -- options ---------------------------------------------------------------------------------------


def test_options_reach_every_segment(make):
    given = options(enable_mem_pattern=False, graph_optimization_level=ort_level(0))
    given.add_session_config_entry("session.set_denormal_as_zero", "1")
    session = make(MODEL, given, disabled_optimizers=["ConstantFolding"])
    for segment in session._plan.sessions:
        used = segment.session_options
        assert (used.intra_op_num_threads, used.enable_mem_pattern) == (1, False)
        assert used.graph_optimization_level == ort_level(0)
        assert used.get_session_config_entry("session.set_denormal_as_zero") == "1"
    assert session.get_session_options().graph_optimization_level == ort_level(0)
    assert given.intra_op_num_threads == 1 and given.profile_file_prefix != "_segment0"


def ort_level(number: int):
    return list(onnxruntime.GraphOptimizationLevel.__members__.values())[number]


def test_free_dimension_override(make):
    given = options()
    given.add_free_dimension_override_by_name("batch_size", 2)
    session, reference = make(MODEL, given), onnxruntime.InferenceSession(MODEL, given)
    assert session.get_inputs()[0].shape == [2, "sequence_length"]
    assert describe(session.get_inputs()) == describe(reference.get_inputs())
    assert describe(session.get_outputs()) == describe(reference.get_outputs())
    same(session.run(None, feeds()), reference.run(None, feeds()))
    wrong = feeds(tokens=((1, 2, 3),))
    expected = outcome(lambda: reference.run(None, wrong))
    assert expected is not None
    assert outcome(lambda: session.run(None, wrong)) == expected


def test_profile_names_the_provider_of_each_node(make, tmp_path):
    session = make(
        MODEL, options(enable_profiling=True, profile_file_prefix=str(tmp_path / "profile"))
    )
    session.run(None, feeds())
    path = Path(session.end_profiling())
    assert list(tmp_path.iterdir()) == [path]
    nodes = [event for event in json.loads(path.read_text()) if event["cat"] == "Node"]
    providers = Counter(event["args"].get("provider") for event in nodes)
    assert providers["WebGpuExecutionProvider"] == 4
    assert providers["CPUExecutionProvider"] > 20
    assert {e["args"]["op_name"] for e in nodes if e["args"].get("route")} == {
        "GroupQueryAttention"
    }


def test_assignment_info(make, ours):
    given = options()
    given.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    subgraphs = make(MODEL, given).get_provider_graph_assignment_info()
    nodes = [(g.ep_name, n.op_type) for g in subgraphs for n in g.get_nodes()]
    assert nodes.count(("WebGpuExecutionProvider", "GroupQueryAttention")) == 4
    assert {ep for ep, op_type in nodes if op_type != "GroupQueryAttention"} == {BOTH[1]}
    with pytest.raises(ort_state.Fail, match="record_ep_graph_assignment_info"):
        ours.get_provider_graph_assignment_info()


def test_optimized_model_is_the_whole_model(make, tmp_path, theirs):
    target = tmp_path / "optimized.onnx"
    session = make(MODEL, options(optimized_model_filepath=str(target)))
    assert session.get_providers() == ["CPUExecutionProvider"]
    written = onnx.load(target, load_external_data=False)
    assert [value.name for value in written.graph.output] == [o.name for o in theirs.get_outputs()]
    assert sum(node.op_type == "GroupQueryAttention" for node in written.graph.node) == 4


# -- making ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["no/such/model.onnx", b"", b"no model", 7, None])
def test_errors_of_loading_are_those_of_ort(source, capsys):
    expected = outcome(lambda: onnxruntime.InferenceSession(source))
    assert expected is not None
    assert outcome(lambda: WebGPUSession(source)) == expected


def test_broken_node_is_ort_s_error():
    proto = onnx.load(MODEL, load_external_data=False)
    node = next(n for n in proto.graph.node if n.op_type == "GroupQueryAttention")
    del node.attribute[:]
    data = proto.SerializeToString()
    expected = outcome(lambda: onnxruntime.InferenceSession(data))
    assert expected is not None and "num_heads" in expected[1]
    assert outcome(lambda: WebGPUSession(data)) == expected


def test_nothing_to_offload_is_one_ort_session():
    session = WebGPUSession(trivial(), adapter="no such adapter")
    assert session.get_providers() == onnxruntime.InferenceSession(trivial()).get_providers()
    assert session._plan is None
    (result,) = session.run(None, {"x": np.ones(3, np.float32)})
    assert result.tolist() == [-1, -1, -1]
    assert "0 attention nodes found" in str(session.explain())


def test_offload_none_and_unknown_adapter(theirs):
    session = WebGPUSession(MODEL, offload="none")
    assert session.get_providers() == theirs.get_providers()
    assert {row.reason for row in session.explain().rows} == {"left out by offload="}
    with pytest.raises(NoAdapterError, match="no such adapter"):
        WebGPUSession(MODEL, adapter="no such adapter")


def test_words_that_are_not_allowed():
    for arguments in ({"fallback": "gpu"}, {"backend": "cuda"}):
        with pytest.raises(ValueError, match="is n"):
            WebGPUSession(MODEL, **arguments)


def test_environment_variable_names_the_adapter(monkeypatch, software):
    monkeypatch.setenv("ORT_WEBGPU_ADAPTER", software)
    session = WebGPUSession(MODEL, options())
    assert session.get_provider_options()[BOTH[0]]["adapter"] == software
    monkeypatch.setenv("ORT_WEBGPU_ADAPTER", "none")
    with pytest.warns(RuntimeWarning, match="4 attention node"):
        session = WebGPUSession(MODEL, options())
    assert session.get_providers() == ["CPUExecutionProvider"]


class Pickable(WebGPUSession):
    """A subclass as libraries write them: own constructor and state, `__init__` called again."""

    def __init__(self, path, **kwargs):
        super().__init__(path, **kwargs)
        self.path = path

    def __getstate__(self):
        return {"path": self.path}

    def __setstate__(self, values):
        self.__init__(values["path"], sess_options=options(), adapter="software")


def test_subclass_that_calls_init_again(software, theirs):
    session = Pickable(MODEL, sess_options=options(), adapter=software)
    copied = pickle.loads(pickle.dumps(session))
    assert type(copied) is Pickable and copied.path == MODEL
    same(copied.run(None, feeds()), theirs.run(None, feeds()))


def test_pickle_and_deepcopy_open_the_model_again(make, theirs):
    given = options(graph_optimization_level=ort_level(1))
    session = make(MODEL, given, providers=["CPUExecutionProvider"], routes={})
    session.tag = [1, 2]
    session.disable_fallback()
    for copied in (pickle.loads(pickle.dumps(session)), copy.deepcopy(session)):
        assert copied.get_providers() == BOTH
        assert copied.get_session_options().graph_optimization_level == ort_level(1)
        assert copied.tag == [1, 2] and copied._enable_fallback is False
        same(copied.run(None, feeds()), theirs.run(None, feeds()))


def test_second_session_compiles_nothing(make):
    first = make()
    first.run(None, feeds())
    gpu = first._plan.gpu
    before = gpu.counters.pipelines
    second = make()
    second.run(None, feeds())
    assert second._plan.gpu is gpu
    assert gpu.counters.pipelines == before
