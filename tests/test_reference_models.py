"""replace_unsupported: real models on ORT's CPU EP, and what else a file may hold."""

import shutil

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from ort_webgpu.graph_tools.reference import EXPANDABLE, replace_unsupported
from ort_webgpu.graph_tools.reference_types import element_types

CONTRIB = "com.microsoft"


def session(model):
    """A session on ORT's CPU EP, of a model in memory or of a path."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def replaced(path):
    return session(replace_unsupported(onnx.load(path, load_external_data=False)))


def run_named(sess, feeds):
    """Outputs by name; feeds are cut to the session's inputs and cast to their float type."""
    wanted = {}
    for value in sess.get_inputs():
        array = feeds[value.name]
        wanted[value.name] = array.astype(np.float16) if value.type == "tensor(float16)" else array
    return dict(zip((o.name for o in sess.get_outputs()), sess.run(None, wanted), strict=True))


def op_types(graph):
    for node in graph.node:
        yield node.op_type
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from op_types(attribute.g)


# ---------------------------------------------------------------- real models


@pytest.mark.parametrize(
    ("folder", "file", "key", "tolerance"),
    [
        ("packed_bert_tiny", "model_packed_fp32", "fp32", 2e-5),
        ("packed_bert_tiny", "model_packed_fp32_noembed", "fp32", 2e-5),
        ("packed_bert_tiny", "model_packed_fp16", "fp16", 6e-3),
        ("packed_minilm_2layer_fp16", "model_packed_fp16", "fp16", 6e-3),
    ],
)
def test_packed_models(shared, folder, file, key, tolerance):
    data = np.load(shared / "models" / folder / "io.npz")
    sess = replaced(shared / "models" / folder / f"{file}.onnx")
    got = run_named(sess, data)[sess.get_outputs()[0].name]
    valid = data["attention_mask"] > 0
    want = data[f"last_hidden_state_packed_{key}_expected"]
    np.testing.assert_allclose(got[valid], want[valid], rtol=0, atol=tolerance)
    assert not got[~valid].any()


@pytest.mark.parametrize(
    ("folder", "file", "rtol", "atol"),
    [
        ("dmmha_whisper_decoder", "model", 0, 2e-5),
        # The expected values are those of float32 weights: rounding the weights alone to float16
        # moves logits of size 26 by 1.6e-2, half a unit of float16 in their last place.
        ("dmmha_whisper_decoder", "model_fp16", 1.5e-2, 1.5e-2),
        ("dmmha_t5_decoder", "model_rpb_decomposed", 0, 2e-5),
        ("dmmha_t5_decoder", "model_as_emitted", 0, 2e-5),
    ],
)
def test_decoder_models_at_every_step(shared, folder, file, rtol, atol):
    data = np.load(shared / "models" / folder / "io.npz")
    sess = replaced(shared / "models" / folder / f"{file}.onnx")
    feeds, steps = {}, {name.split(".")[0] for name in data.files}
    for step in sorted(steps):
        feeds |= {n.split(".in.")[1]: data[n] for n in data.files if n.startswith(f"{step}.in.")}
        got = run_named(sess, feeds)
        for name in (n for n in data.files if n.startswith(f"{step}.ref.")):
            value, want = got[name.split(".ref.")[1]], data[name]
            value = value[:, :, : want.shape[2]] if value.ndim == 4 else value
            np.testing.assert_allclose(value, want, rtol=rtol, atol=atol, err_msg=name)
        feeds |= {n.replace("present", "past"): a for n, a in got.items() if n != "logits"}
    assert len(steps) >= 5


@pytest.mark.parametrize(("file", "atol"), [("model", 2e-5), ("model_fp16", 1.5e-2)])
def test_whisper_decoder_with_beams(shared, file, atol):
    folder = shared / "models" / "dmmha_whisper_decoder"
    data, first = np.load(folder / "io_beam.npz"), np.load(folder / "io.npz")
    feeds = {n[3:]: data[n] for n in data.files if n.startswith("in.")}
    for name in (n for n in first.files if "cross" in n):
        feeds[name.split(".in.")[1]] = np.repeat(first[name], 2, axis=0)
    got = run_named(replaced(folder / f"{file}.onnx"), feeds)
    rtol = 0 if file == "model" else atol
    np.testing.assert_allclose(got["logits"], data["ref.logits"], rtol=rtol, atol=atol)
    for name in (n for n in got if n != "logits"):
        np.testing.assert_allclose(got[name], data[f"ort_cpu.{name}"], rtol=rtol, atol=atol)


def test_qwen3_with_fused_norm_keeps_its_external_data(shared, tmp_path):
    folder = shared / "models" / "gqa_qwen3_fp32_fused_qknorm"
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    result = replace_unsupported(model)
    assert result.graph.initializer == model.graph.initializer
    onnx.save(result, tmp_path / "model.onnx")
    shutil.copy(folder / "model.onnx.data", tmp_path)
    data, sess = np.load(folder / "io.npz"), session(tmp_path / "model.onnx")
    feeds = {
        f"past_key_values.{i}.{kind}": np.zeros((2, 2, 0, 64), np.float32)
        for i in range(2)
        for kind in ("key", "value")
    }
    for step in range(5):
        prefix = f"step{step}."
        feeds |= {n[len(prefix) + 3 :]: data[n] for n in data.files if n.startswith(prefix + "in.")}
        got = run_named(sess, feeds)
        for name, value in got.items():
            want = data[f"{prefix}out.{name}"]
            np.testing.assert_allclose(value, want, rtol=1e-5, atol=2e-5, err_msg=name)
        feeds |= {
            n.replace("present", "past_key_values"): a for n, a in got.items() if n != "logits"
        }


@pytest.mark.parametrize(("beams", "penalty"), [(1, 30.0), (2, 8.0), (4, 3.0)])
def test_whisper_beam_search_gives_the_sequences_of_the_cpu_export(shared, beams, penalty):
    """Whole models: ORT runs the original of neither correctly on the CPU."""
    features = np.random.default_rng(7).standard_normal((2, 80, 3000)).astype(np.float32)
    feeds = {"input_features": features, "length_penalty": np.array([1], np.float32)}
    feeds["repetition_penalty"] = np.array([penalty], np.float32)
    counts = {"max_length": 12, "min_length": 1, "num_beams": beams, "num_return_sequences": beams}
    feeds |= {name: np.array([count], np.int32) for name, count in counts.items()}
    sess = replaced(shared / "models" / "dmmha_whisper_beamsearch" / "whisper_beamsearch.onnx")
    reference = session(shared / "models" / "whisper_beamsearch_cpu" / "model.onnx")
    want = reference.run(None, feeds)[0]
    assert np.array_equal(sess.run(None, feeds)[0], want)
    assert len(np.unique(want)) > beams  # else beams could be mixed up unseen


def test_t5_beam_search_body_holds_no_replaced_operator(shared):
    model = onnx.load(shared / "models" / "dmmha_t5_beamsearch" / "t5_beam.onnx")
    assert not EXPANDABLE & set(op_types(replace_unsupported(model).graph))
    sess = replaced(shared / "models" / "dmmha_t5_beamsearch" / "t5_beam.onnx")
    counts = {"max_length": 8, "min_length": 1, "num_beams": 2, "num_return_sequences": 1}
    feeds = {name: np.array([count], np.int32) for name, count in counts.items()}
    feeds |= {n: np.ones(1, np.float32) for n in ("length_penalty", "repetition_penalty")}
    tokens = np.array([[5, 9, 33, 1], [7, 8, 9, 1]], np.int32)
    both = sess.run(None, feeds | {"input_ids": tokens})[0]
    for row in range(2):
        alone = sess.run(None, feeds | {"input_ids": tokens[row : row + 1]})[0]
        assert np.array_equal(alone[0], both[row])


# ---------------------------------------------------------------- what a file may hold


def restore_node(name="restore"):
    return helper.make_node("RestorePadding", ["x", "offset"], ["y"], name=name, domain=CONTRIB)


def tensor(name, elem_type, shape=None):
    return helper.make_value_info(name, helper.make_tensor_type_proto(elem_type, shape))


X = tensor("x", TensorProto.FLOAT, ["tokens", 3])
OFFSET = tensor("offset", TensorProto.INT32, ["batch", "seq"])
FEEDS = {
    "x": np.arange(6, dtype=np.float32).reshape(2, 3),
    "offset": np.array([[0, 2], [1, 3]], np.int32),
}
RESTORED = np.array([[[0, 1, 2], [0, 0, 0]], [[3, 4, 5], [0, 0, 0]]], np.float32)


def model_of(nodes, inputs, outputs, opset=17, **fields):
    graph = helper.make_graph(nodes, "graph", inputs, outputs)
    imports = [helper.make_opsetid(CONTRIB, 1), helper.make_opsetid("", opset)]
    imports += fields.pop("imports", [])
    return helper.make_model(graph, opset_imports=imports, ir_version=8, **fields)


def test_the_model_given_is_not_changed():
    model = model_of([restore_node()], [X, OFFSET], [tensor("y", TensorProto.FLOAT)])
    before = model.SerializeToString(deterministic=True)
    result = replace_unsupported(model)
    assert model.SerializeToString(deterministic=True) == before
    assert "RestorePadding" not in set(op_types(result.graph))
    assert np.array_equal(session(result).run(None, FEEDS)[0], RESTORED)


def test_only_the_operators_asked_for_are_replaced():
    model = model_of([restore_node()], [X, OFFSET], [tensor("y", TensorProto.FLOAT)])
    assert replace_unsupported(model, ["PackedAttention"]) == model
    assert replace_unsupported(model, ["RestorePadding"]) != model


def test_a_model_without_candidates_comes_back_equal():
    outputs = [tensor("y", TensorProto.FLOAT)]
    model = model_of([helper.make_node("Neg", ["x"], ["y"])], [X], outputs, opset=9)
    assert replace_unsupported(model) == model


def test_names_that_are_taken_are_avoided():
    """A value already called like one that the expansion would make."""
    model = model_of([restore_node()], [X, OFFSET], [tensor("y", TensorProto.FLOAT)])
    made = [n.output[0] for n in replace_unsupported(model).graph.node if n.output[0] != "y"]
    extra = helper.make_node("Neg", ["x"], [made[0]])
    outputs = [tensor("y", TensorProto.FLOAT), tensor(made[0], TensorProto.FLOAT)]
    clash = model_of([extra, restore_node()], [X, OFFSET], outputs)
    restored, negated = session(replace_unsupported(clash)).run(None, FEEDS)
    assert np.array_equal(restored, RESTORED)
    assert np.array_equal(negated, -FEEDS["x"])


def test_two_nodes_of_one_name_do_not_collide():
    second = helper.make_node(
        "RestorePadding", ["x", "offset"], ["z"], name="restore", domain=CONTRIB
    )
    outputs = [tensor("y", TensorProto.FLOAT), tensor("z", TensorProto.FLOAT)]
    model = model_of([restore_node(), second], [X, OFFSET], outputs)
    for got in session(replace_unsupported(model)).run(None, FEEDS):
        assert np.array_equal(got, RESTORED)


def test_a_node_in_nested_bodies_captures_the_outer_scope():
    """The body's float type comes from outside, and so do all of its values."""
    query = tensor("q", TensorProto.FLOAT16, ["b", 1, 8])
    keys = [tensor(n, TensorProto.FLOAT16, ["b", 2, "l", 4]) for n in ("k", "v")]
    attend = helper.make_node(
        "DecoderMaskedMultiHeadAttention", ["q2", "k", "v"], ["o"], domain=CONTRIB, num_heads=2
    )
    result = tensor("o", TensorProto.FLOAT16)
    inner = helper.make_graph([attend], "inner", [], [onnx.ValueInfoProto(name="o")])
    inner.output[0].CopyFrom(result)
    other = helper.make_graph(
        [helper.make_node("Identity", ["q2"], ["e"])],
        "else",
        [],
        [tensor("e", TensorProto.FLOAT16)],
    )
    branch = helper.make_node("If", ["cond"], ["r"], then_branch=inner, else_branch=other)
    middle = helper.make_graph([branch], "middle", [], [tensor("r", TensorProto.FLOAT16)])
    outer_else = helper.make_graph(
        [helper.make_node("Neg", ["q2"], ["n"])], "else", [], [tensor("n", TensorProto.FLOAT16)]
    )
    nodes = [
        helper.make_node("Add", ["q", "q"], ["q2"]),
        helper.make_node("If", ["cond"], ["y"], then_branch=middle, else_branch=outer_else),
    ]
    inputs = [query, *keys, tensor("cond", TensorProto.BOOL, [])]
    model = replace_unsupported(model_of(nodes, inputs, [tensor("y", TensorProto.FLOAT16)]))
    assert not EXPANDABLE & set(op_types(model.graph))
    rng = np.random.default_rng(0)
    feeds = {"q": rng.standard_normal((2, 1, 8)), "k": rng.standard_normal((2, 2, 3, 4))}
    feeds["v"] = np.broadcast_to(rng.standard_normal((2, 2, 1, 4)), (2, 2, 3, 4))
    feeds = {n: a.astype(np.float16) for n, a in feeds.items()} | {"cond": np.array(True)}
    got = session(model).run(None, feeds)[0]
    np.testing.assert_allclose(got.ravel(), feeds["v"][:, :, 0].ravel(), rtol=1e-3)


def test_a_function_that_holds_a_candidate_is_inlined_and_others_stay():
    local = "local.domain"
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(CONTRIB, 1)]
    pad = helper.make_function(local, "Pad2D", ["x", "offset"], ["y"], [restore_node()], imports)
    twice = helper.make_function(
        local, "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], imports[:1]
    )
    nodes = [
        helper.make_node("Pad2D", ["x", "offset"], ["p"], domain=local),
        helper.make_node("Twice", ["p"], ["y"], domain=local),
    ]
    model = model_of(
        nodes,
        [X, OFFSET],
        [tensor("y", TensorProto.FLOAT)],
        imports=[helper.make_opsetid(local, 1)],
        functions=[pad, twice],
    )
    result = replace_unsupported(model)
    assert [f.name for f in result.functions] == ["Twice"]
    assert np.array_equal(session(result).run(None, FEEDS)[0], 2 * RESTORED)


def test_a_model_that_imports_only_the_contrib_domain_gets_an_opset():
    model = model_of([restore_node()], [X, OFFSET], [tensor("y", TensorProto.FLOAT)])
    del model.opset_import[1]
    result = replace_unsupported(model)
    assert np.array_equal(session(result).run(None, FEEDS)[0], RESTORED)


def test_element_types_follow_schemas_where_a_file_declares_none():
    nodes = [
        helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("SimplifiedLayerNormalization", ["half", "w"], ["norm"]),
        helper.make_node("MatMul", ["norm", "m"], ["product"]),
        helper.make_node("Shape", ["product"], ["shape"]),
        helper.make_node("Less", ["product", "product"], ["less"]),
        helper.make_node("Where", ["less", "product", "product"], ["chosen"]),
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        helper.make_node("Split", ["chosen"], ["left", "right"]),
        helper.make_node(
            "EmbedLayerNormalization", ["ids", "", "e"], ["emb", "index"], domain=CONTRIB
        ),
    ]
    graph = helper.make_graph(nodes, "graph", [X], [])
    graph.initializer.append(TensorProto(name="e", data_type=TensorProto.FLOAT16))
    got = element_types(graph, {"": 17, CONTRIB: 1}, {"ids": TensorProto.INT32})
    half = ("half", "norm", "product", "chosen", "left", "right", "emb")
    assert {got[name] for name in half} == {TensorProto.FLOAT16}
    assert (got["shape"], got["less"]) == (TensorProto.INT64, TensorProto.BOOL)
    assert (got["zeros"], got["index"]) == (TensorProto.FLOAT, TensorProto.INT32)
