"""The real models of the shared folder: cut at their attention nodes, every bit stays."""

import numpy as np
import onnx
import pytest
from stitching import Stitched, check, indexes, same, whole

from ort_webgpu.graph_tools import ModelFile, extract, nested_candidates, partition

GQA_FOLDERS = [
    "gqa_gemma2_fp32_window_softcap",
    "gqa_gemma2_fp32_windowed_cache",
    "gqa_gptoss_fp32_window_sink",
    "gqa_llama_fp16_separate_rope",
    "gqa_llama_trained_fp16",
    "gqa_llama_trained_fp32",
    "gqa_llama_trained_int4",
]


def step_inputs(arrays, step: int) -> dict[str, np.ndarray]:
    """What an io.npz file feeds at `step`: all inputs at step 0, later those that change."""
    prefix = f"step{step}.in."
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def first_past(model: ModelFile, arrays) -> dict[str, np.ndarray]:
    """The past of step 0: empty, or as long as the window of a layer that keeps only that."""
    past = {}
    for index in indexes(model, "GroupQueryAttention"):
        node = model.nodes[index]
        windowed = node.attributes.get("sliding_window_cache", 0)
        length = node.attributes["local_window_size"] if windowed else 0
        for name, present in zip(node.inputs[3:5], node.outputs[1:3], strict=True):
            like = arrays[f"step0.out.{present}"]
            past[name] = np.zeros((*like.shape[:2], length, like.shape[3]), like.dtype)
    return past


@pytest.mark.parametrize("folder", GQA_FOLDERS)
def test_decoder_steps(shared, folder):
    path = shared / "models" / folder / "model.onnx"
    model = ModelFile.open(path)
    attention = indexes(model, "GroupQueryAttention")
    stitched = Stitched(model, attention)
    assert len(stitched.stages) == len(attention) + 1
    assert sum(sub.proto.ByteSize() for sub, _ in stitched.steps) < 200_000
    plain = whole(path)
    arrays = dict(np.load(path.with_name("io.npz")))
    feeds = first_past(model, arrays)
    for step in range(3):
        feeds |= step_inputs(arrays, step)
        expected = dict(zip(model.outputs, plain.run(None, feeds), strict=True))
        for name, found in zip(model.outputs, stitched.run(feeds), strict=True):
            assert same(found, expected[name]), f"output {name!r} differs at step {step}"
        feeds = {n.replace("present", "past_key_values"): v for n, v in expected.items()}
        del feeds["logits"]


@pytest.mark.parametrize("folder", [*GQA_FOLDERS, "gqa_qwen3_fp32_fused_qknorm"])
def test_no_weight_of_a_file_is_copied(shared, folder):
    model = ModelFile.open(shared / "models" / folder / "model.onnx")
    for weight in model.weights.values():
        assert weight.external
        array = weight.array()
        assert array.shape == weight.shape
        assert not array.flags.owndata and not array.flags.writeable
        assert isinstance(array.base, np.memmap) or isinstance(array.base.base, np.memmap)


def test_encoder_with_inline_weights(shared):
    folder = shared / "models" / "packed_bert_tiny"
    names = ("input_ids", "attention_mask", "token_type_ids")
    arrays = np.load(folder / "io.npz")
    session = whole(folder / "model_fused_fp32.onnx")
    kinds = {"tensor(int32)": np.int32, "tensor(int64)": np.int64}
    inputs = {i.name: kinds[i.type] for i in session.get_inputs()}
    feeds = {name: arrays[name].astype(inputs[name]) for name in names if name in inputs}
    stitched = check(folder / "model_fused_fp32.onnx", feeds, "Attention")
    assert len(stitched.stages) == 4


@pytest.mark.parametrize(
    ("name", "op_type", "optimize"),
    [
        ("dmmha_t5_decoder/ref_decoder_raw.onnx", "Softmax", False),
        ("dmmha_whisper_decoder/ref_mha_decoder.onnx", "MultiHeadAttention", True),
    ],
)
def test_encoder_decoder_step(shared, name, op_type, optimize):
    path = shared / "models" / name
    given = step_inputs(dict(np.load(path.with_name("io.npz"))), 0)
    model = ModelFile.open(path)
    feeds = {n: given[n] for n in model.inputs if n in given}
    stitched = check(path, feeds, op_type, optimize=optimize)
    assert len(stitched.stages) == 5


def test_models_without_a_cpu_kernel_are_cut_too(shared):
    path = shared / "models" / "packed_bert_tiny" / "model_packed_fp32.onnx"
    model = ModelFile.open(path)
    stages = partition(model, indexes(model, "RemovePadding", "PackedAttention", "RestorePadding"))
    kinds = [model.nodes[i].op_type for stage in stages for i in stage.gpu]
    assert kinds == ["RemovePadding", *["PackedAttention"] * 3, "RestorePadding"]
    # RemovePadding feeds the first PackedAttention directly.
    assert [bool(stage.cpu) for stage in stages] == [True, False, True, True, True]


def test_candidates_in_beam_search_bodies_are_named(shared):
    path = shared / "models" / "dmmha_t5_beamsearch" / "t5_beam.onnx"
    model = ModelFile.open(path)
    found = nested_candidates(model, lambda n: n.op_type == "DecoderMaskedMultiHeadAttention")
    assert len(found) == 4
    assert {nested.path.rpartition(".")[2] for nested in found} == {"decoder"}
    assert "body of a BeamSearch node" in found[0].reason


def test_every_field_of_a_real_file_survives(shared):
    path = shared / "models" / "dmmha_whisper_decoder" / "model.onnx"
    model = ModelFile.open(path)
    sub = extract(model, range(len(model.nodes)), model.outputs, {})
    original = onnx.load(path)
    imports = [(o.domain, o.version) for o in sub.proto.opset_import]
    assert imports == [("com.microsoft", 1), ("", 17)]
    assert sub.proto.ir_version == original.ir_version == 8
    assert list(sub.proto.graph.node) == list(original.graph.node)
    assert {v.name: v for v in sub.proto.graph.output} == {v.name: v for v in original.graph.output}
    assert {v.name: v for v in sub.proto.graph.input} == {
        v.name: v for v in original.graph.input if v.name in sub.inputs
    }
