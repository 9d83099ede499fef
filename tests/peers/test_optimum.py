"""optimum's models on our sessions: a genai-built decoder and an exported encoder."""

import shutil

import numpy as np
import onnxruntime
import pytest

import ort_webgpu

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
ort_models = pytest.importorskip("optimum.onnxruntime")

PROMPTS = [[5, 9, 200, 31, 7], [8, 8, 1, 77, 250]]


@pytest.fixture(scope="module")
def decoder(shared, tmp_path_factory):
    """The folder of the model builder, with the config.json that optimum asks for."""
    folder = tmp_path_factory.mktemp("decoder") / "llama"
    shutil.copytree(shared / "models" / "gqa_llama_trained_fp32", folder)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    config.save_pretrained(folder)
    return folder


def _generated(folder, use_io_binding: bool, **kwargs):
    model = ort_models.ORTModelForCausalLM.from_pretrained(folder, use_io_binding=use_io_binding)
    tokens = model.generate(
        input_ids=torch.tensor(PROMPTS),
        attention_mask=torch.ones(2, 5, dtype=torch.int64),
        max_new_tokens=12,
        min_new_tokens=12,
        do_sample=False,
        **kwargs,
    )
    return model, tokens.tolist()


@pytest.mark.parametrize("use_io_binding", [False, True])
@pytest.mark.parametrize("beams", [1, 3])
def test_decoder_generates_the_same_tokens(decoder, patched, use_io_binding, beams):
    with ort_webgpu.plain_onnxruntime():
        plain, expected = _generated(decoder, use_io_binding, num_beams=beams)
    assert not isinstance(plain.session, ort_webgpu.WebGPUSession)
    model, tokens = _generated(decoder, use_io_binding, num_beams=beams)
    assert isinstance(model.session, ort_webgpu.WebGPUSession)
    placed = [row.placed for row in model.session.explain().rows]
    assert placed == ["webgpu"] * 4
    assert tokens == expected


def test_encoder_gives_the_same_features(patched, tmp_path):
    config = transformers.BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    load = ort_models.ORTModelForFeatureExtraction.from_pretrained
    ids = torch.tensor([[3, 14, 15, 92, 65]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    results = []
    for patch in (True, False):
        if patch:
            model = load(tmp_path / "bert", export=True)
            model.save_pretrained(tmp_path / "onnx")
            assert type(model.session) is ort_webgpu.WebGPUSession
        else:
            with ort_webgpu.plain_onnxruntime():
                model = load(tmp_path / "onnx")
            assert type(model.session) is onnxruntime.InferenceSession
        results.append(model(**inputs).last_hidden_state.numpy())
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-5)
