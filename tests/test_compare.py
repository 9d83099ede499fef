"""compare: whole models, node by node, repros, reports, golden runs."""

import json
import runpy
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from broken_route import broken  # noqa: F401 (a fixture)
from onnx import TensorProto, helper
from session_helpers import MODEL, feeds

from ort_webgpu import WebGPUSession
from ort_webgpu.conformance import Candidate, InputOptions, MismatchError, Options, Tolerance
from ort_webgpu.conformance.cases import corpus
from ort_webgpu.conformance.compare import compare_model, recheck
from ort_webgpu.conformance.difference import difference
from ort_webgpu.conformance.generate import Inputs
from ort_webgpu.conformance.golden import load_steps, save_steps
from ort_webgpu.conformance.replay import replay
from ort_webgpu.conformance.report import verdicts, write_json, write_junit
from ort_webgpu.conformance.report_html import html_page
from ort_webgpu.conformance.repro import failure, repro_of_node, shrink
from ort_webgpu.conformance.testing import assert_matches_cpu
from ort_webgpu.errors import DeviceLostError, InvalidInputError
from ort_webgpu.graph_tools import ModelFile

NODE = "/model/layers.2/attn/GroupQueryAttention"
FOLDERS = (
    "dmmha_t5_decoder/model_rpb_decomposed.onnx",
    "dmmha_whisper_decoder/model.onnx",
    "dmmha_whisper_decoder/model_fp16.onnx",
    "gqa_gemma2_fp32_window_softcap/model.onnx",
    "gqa_gemma2_fp32_windowed_cache/model.onnx",
    "gqa_gptoss_fp32_window_sink/model.onnx",
    "gqa_llama_fp16_separate_rope/model.onnx",
    "gqa_llama_trained_fp16/model.onnx",
    "gqa_llama_trained_fp32/model.onnx",
    "gqa_llama_trained_int4/model.onnx",
    "gqa_qwen3_fp32_fused_qknorm/model.onnx",
    "packed_bert_tiny/model_packed_fp16.onnx",
    "packed_bert_tiny/model_packed_fp32.onnx",
    "packed_minilm_2layer_fp16/model_packed_fp16.onnx",
)


def bad_node(adapter: str, broken: str) -> Candidate:  # noqa: F811
    return Candidate(adapter=adapter, routes={NODE: broken})


# -- differences -----------------------------------------------------------------------------------


def test_difference_knows_where_and_how_much():
    expected = np.array([[1.0, 2.0], [4.0, 8.0]], np.float32)
    actual = expected.copy()
    actual[1, 0] = 4.5
    found = difference("y", actual, expected, Tolerance(0.1, 0), top=(1,))
    assert not found.passed
    assert found.absolute.max == 0.5
    assert found.absolute.index == (1, 0)
    assert found.absolute.mean == 0.125
    assert found.required == (0.5, 0.125)
    assert found.ulp == pytest.approx(0.5 / np.spacing(np.float32(4)))
    assert found.top == {1: 1.0}
    assert sum(found.histogram) == 4
    assert difference("y", actual, expected, Tolerance(0.5, 0)).passed


def test_difference_counts_nan_and_inf_on_each_side():
    expected = np.array([np.nan, np.inf, 1, 1], np.float32)
    actual = np.array([np.nan, np.inf, np.nan, np.inf], np.float32)
    found = difference("y", actual, expected, Tolerance(1, 1))
    assert (found.nan, found.inf) == ((2, 1), (2, 1))
    assert "2 of 4" in found.problem


def test_difference_leaves_out_what_is_not_specified():
    expected = np.zeros((2, 3), np.float32)
    actual = np.array([[0, 0, 9], [0, 0, 9]], np.float32)
    care = np.array([[True, True, False]])
    assert difference("y", actual, expected, Tolerance(0, 0), care).passed


def test_difference_reports_shape_and_dtype():
    one = np.zeros(3, np.float32)
    assert "shape" in difference("y", one[:2], one, Tolerance(0, 0)).problem
    assert "dtype" in difference("y", one.astype(np.float16), one, Tolerance(0, 0)).problem


# -- generated inputs ------------------------------------------------------------------------------


def test_generated_inputs_are_valid_and_ragged():
    inputs = Inputs(ModelFile.open(MODEL), InputOptions(batch=4, length=9, past=3))
    made = inputs.first()
    ids, mask = made["input_ids"], made["attention_mask"]
    assert ids.shape == (4, 9)
    assert ids.min() >= 0
    assert ids.max() < 512
    lengths = mask.sum(1)
    assert mask.shape == (4, 12)
    assert len(set(lengths)) > 1
    np.testing.assert_array_equal(mask, np.arange(12) < lengths[:, None])
    assert made["past_key_values.3.value"].shape == (4, 2, 3, 32)


def test_generated_inputs_fit_those_that_are_given():
    inputs = Inputs(ModelFile.open(MODEL))
    made = inputs.first({"input_ids": np.ones((3, 5), np.int64)})
    assert made["attention_mask"].shape == (3, 5)
    assert made["past_key_values.0.key"].shape == (3, 2, 0, 32)


def test_an_input_that_the_model_has_not_is_refused():
    with pytest.raises(InvalidInputError, match=r"'ids'.*input_ids"):
        Inputs(ModelFile.open(MODEL)).first({"ids": np.ones((1, 1), np.int64)})


def test_next_feeds_carry_caches_and_the_greedy_token():
    inputs = Inputs(ModelFile.open(MODEL), InputOptions(batch=2, length=4))
    first = inputs.first()
    rng = np.random.default_rng(0)
    outputs = {"logits": rng.standard_normal((2, 4, 512)).astype(np.float32)}
    outputs |= {
        f"present.{i}.{kind}": np.full((2, 2, 4, 32), i, np.float32)
        for i in range(4)
        for kind in ("key", "value")
    }
    following = inputs.next(first, outputs, {})
    last = first["attention_mask"].sum(1) - 1
    np.testing.assert_array_equal(
        following["input_ids"][:, 0], outputs["logits"][[0, 1], last].argmax(-1)
    )
    np.testing.assert_array_equal(following["attention_mask"].sum(1), last + 2)
    np.testing.assert_array_equal(following["past_key_values.3.key"], outputs["present.3.key"])


# -- whole models ----------------------------------------------------------------------------------


def test_the_committed_model_agrees_over_a_decode_loop(adapter):
    found = compare_model(MODEL, Candidate(adapter=adapter), options=Options(steps=3, repeat=2))
    assert found.passed, found.to_dict()
    assert len(found.steps) == 3
    assert len(found.nodes) == 12
    assert found.first_bad_node is None
    assert {row["placed"] for row in found.placement["rows"]} == {"webgpu"}


@pytest.mark.parametrize("name", FOLDERS)
def test_compare_finds_nothing_in_the_real_models(name, shared, adapter_names):
    if not adapter_names:
        pytest.skip("no adapter")
    options = Options(steps=1 if "packed" in name else 3)
    found = compare_model(
        shared / "models" / name, Candidate(adapter=adapter_names[0]), options=options
    )
    problems = [output.problem for step in found.steps for output in step.outputs if output.problem]
    assert not problems
    assert found.passed, found.first_bad_node


def test_own_caches_and_iterations(adapter):
    options = Options(steps=2, iterations=2, own_caches=True)
    found = compare_model(MODEL, Candidate(adapter=adapter), options=options)
    assert found.passed
    assert [(step.iteration, step.step) for step in found.steps] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_broken_route_is_found_at_its_own_node(adapter, broken):  # noqa: F811
    found = compare_model(MODEL, bad_node(adapter, broken), options=Options(steps=2))
    assert not found.passed
    assert found.first_bad_node.node == NODE
    assert {node.node for node in found.nodes if not node.passed} == {NODE}
    assert {node.route for node in found.nodes if not node.passed} == {"broken"}
    # Whole-model outputs are off from that layer on only.
    bad = {output.name for output in found.steps[0].outputs if not output.passed}
    assert "logits" in bad
    assert not bad & {f"present.{layer}.key" for layer in range(3)}


def test_fail_fast_stops_at_the_first_bad_step(adapter, broken):  # noqa: F811
    options = Options(steps=4, fail_fast=True)
    assert len(compare_model(MODEL, bad_node(adapter, broken), options=options).steps) == 1


def test_the_repro_fails_the_same_way(adapter, broken, tmp_path, capsys):  # noqa: F811
    found = compare_model(MODEL, bad_node(adapter, broken))
    bad = found.first_bad_node
    scripts = repro_of_node(bad, bad_node(adapter, broken), tmp_path)
    assert len(scripts) == 2
    for script in scripts:
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(script))
        assert end.value.code
        assert "elements differ" in capsys.readouterr().out
    assert (
        bad.outputs[0].problem.split(";")[0]
        in json.loads((tmp_path / "repro.json").read_text())["problem"]
    )
    assert len(list((tmp_path / "shaders").iterdir())) == len(bad.shaders)
    big, small = (onnx.load(folder / "model.onnx") for folder in (tmp_path, tmp_path / "shrunk"))
    assert small.ByteSize() <= big.ByteSize()
    with np.load(tmp_path / "inputs.npz") as one, np.load(tmp_path / "shrunk/inputs.npz") as other:
        assert other["query"].size < one["query"].size
        assert other["query"].shape[0] == 1


def test_the_repro_of_a_right_route_passes(adapter, broken, tmp_path, capsys):  # noqa: F811
    bad = compare_model(MODEL, bad_node(adapter, broken)).first_bad_node
    script, *_ = repro_of_node(bad, bad_node(adapter, broken), tmp_path)
    script.write_text(script.read_text().replace("'broken'", "'serial'"))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script))
    assert not end.value.code
    assert "as expected" in capsys.readouterr().out


def test_shrinking_keeps_what_the_failure_needs():
    """A made-up failure that needs a window and two query rows keeps just these."""

    def fails(one) -> bool:
        return one.attributes.get("local_window_size", -1) >= 0 and one.first.shape[1] >= 2

    case = next(
        c
        for c in corpus("GroupQueryAttention")
        if {"window", "rotary", "bias", "prompt"} <= c.features
        and c.first.shape[0] > 1
        and fails(c)
    )
    small, dropped = shrink(case, fails)
    assert fails(small)
    assert small.first.shape[:2] == (1, 2)
    assert small.input("attention_bias") is None
    assert "do_rotary" not in small.attributes
    assert dropped


def test_no_failure_where_the_candidate_is_right(adapter):
    case = corpus("GroupQueryAttention")[0]
    assert failure(case, Candidate(adapter=adapter)) is None


def test_nonfinite_inputs_are_told_from_nonfinite_outputs(adapter):
    session = WebGPUSession(MODEL, adapter=adapter)
    given = feeds(past=2)
    given["past_key_values.1.value"][0, 0, 0, 0] = np.nan
    calls = []
    session.run_traced(None, given, calls.append)
    found = [replay(call) for call in calls]
    assert not found[0].nonfinite_inputs
    assert found[1].nonfinite_inputs == {"past_value": "1 NaN"}
    assert found[1].outputs[0].nan[1] > 0
    assert all(one.passed for one in found), [one.problem for one in found]


def test_outputs_that_change_between_runs_are_named(adapter, monkeypatch):
    real, count = WebGPUSession.run, iter(range(100))

    def unsteady(self, names, given, *rest):
        values = real(self, names, given, *rest)
        return [values[0] + 1e-6 * next(count), *values[1:]]

    monkeypatch.setattr(WebGPUSession, "run", unsteady)
    options = Options(repeat=3, nodes=False)
    (step,) = compare_model(MODEL, Candidate(adapter=adapter), options=options).steps
    assert step.changing == ("logits",)
    assert not step.passed


# -- files -----------------------------------------------------------------------------------------


def test_golden_runs_are_checked_again(adapter, tmp_path):
    ran = compare_model(MODEL, Candidate(adapter=adapter), options=Options(steps=2))
    path = tmp_path / "run.npz"
    save_steps(path, ran.golden)
    file = ModelFile.open(MODEL)
    saved = load_steps(path, file.inputs, file.outputs)
    again = compare_model(MODEL, Candidate(adapter=adapter), given=saved)
    assert again.passed
    assert len(again.steps) == 2
    assert again.reference == "the given outputs"
    off = [
        type(saved[0])(s.inputs, {**s.outputs, "logits": s.outputs["logits"] + 1}) for s in saved
    ]
    assert not recheck(MODEL, off, saved, {}).passed
    assert recheck(MODEL, off, saved, {"logits": Tolerance(1.001, 0)}).passed


def test_unknown_arrays_in_a_file_are_refused(tmp_path):
    np.savez(tmp_path / "in.npz", inputs_id=np.ones(1))
    with pytest.raises(InvalidInputError, match="inputs_id"):
        load_steps(tmp_path / "in.npz", ["input_ids"])


def test_reports_say_the_same(adapter, broken, tmp_path):  # noqa: F811
    found = compare_model(MODEL, bad_node(adapter, broken))
    write_json(tmp_path / "r.json", found.to_dict())
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["passed"] is False
    assert data["first_bad_node"] == NODE
    write_junit(tmp_path / "r.xml", "compare", verdicts(found))
    suite = ElementTree.parse(tmp_path / "r.xml").getroot()[0]
    failed = [test.get("name") for test in suite if test.find("failure") is not None]
    assert int(suite.get("failures")) == len(failed)
    assert f"step 0 {NODE}" in failed
    page = html_page(found)
    assert NODE in page
    assert page.count("<svg") == 3
    assert 'src="' not in page
    assert "<link" not in page


# -- processes -------------------------------------------------------------------------------------


def test_an_isolated_candidate_gives_the_same(adapter):
    session = Candidate(adapter=adapter, isolated=True).open(MODEL)
    given = feeds()
    ours = WebGPUSession(MODEL, adapter=adapter).run(["logits"], given)
    np.testing.assert_array_equal(session.run(["logits"], given)[0], ours[0])


def test_an_isolated_candidate_is_judged_node_by_node(adapter):
    candidate = Candidate(adapter=adapter, isolated=True, routes={"GroupQueryAttention": "serial"})
    found = compare_model(MODEL, candidate)
    assert found.passed
    assert [node.route for node in found.nodes] == ["serial"] * 4
    assert adapter in found.placement["adapter"]


def test_a_process_that_dies_is_an_error(adapter):
    session = Candidate("ort-cpu", isolated=True).open(MODEL)
    session._host._process.kill()
    with pytest.raises(DeviceLostError, match="ended with status"):
        session.run(None, feeds())


# -- in tests --------------------------------------------------------------------------------------


def test_assert_matches_cpu_takes_models_and_nodes(adapter):
    assert_matches_cpu(MODEL, adapter=adapter)
    case = corpus("GroupQueryAttention")[0]
    assert_matches_cpu(case.model().graph.node[0], case.feeds(), adapter=adapter)


def test_assert_matches_cpu_names_what_differs(adapter, broken):  # noqa: F811
    with pytest.raises(MismatchError, match=f"(?s)logits: .*node {NODE}"):
        assert_matches_cpu(MODEL, adapter=adapter, routes={NODE: broken})


def test_assert_matches_cpu_asks_for_a_nodes_inputs():
    node = helper.make_node("GroupQueryAttention", ["q", "k"], ["y"])
    with pytest.raises(InvalidInputError, match="'k'"):
        assert_matches_cpu(node, {"q": np.zeros((1, 1, 8), np.float32)})


def test_a_model_without_attention_compares_too():
    value = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n"]) for n in "xy"]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    found = compare_model(model.SerializeToString(), Candidate(adapter="none"))
    assert found.passed
    assert not found.nodes
