"""The examples run, and their decode loop is right."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
MODEL = EXAMPLES / "model"
README = EXAMPLES.parent / "README.md"


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch):
    """A Decoder of the example model on plain onnxruntime."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from decode_loop import Decoder

    return Decoder(onnxruntime.InferenceSession(MODEL / "model.onnx"), MODEL)


@pytest.fixture
def embedding(monkeypatch: pytest.MonkeyPatch):
    """The module embed_sentences."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import embed_sentences

    return embed_sentences


def run_example(name: str, *args: str, adapter: str = "none") -> str:
    """The standard output of a script, which must end well."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *args],
        capture_output=True,
        text=True,
        env=_environment(adapter),
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _environment(adapter: str) -> dict[str, str]:
    return {**os.environ, "ORT_WEBGPU_ADAPTER": adapter, "PYTHONIOENCODING": "utf-8"}


def test_decoding_with_a_cache_gives_the_tokens_of_decoding_without(decoder):
    tokens = decoder.tokenizer.encode("The with statement").ids
    cached = [token for token, _ in decoder.greedy(tokens, 10)]
    for token in cached:
        logits, *_ = decoder.session.run(None, decoder.first_feeds(tokens))
        assert token == int(logits[0, -1].argmax())
        tokens = [*tokens, token]
    assert len(cached) == 10


def test_decoding_stops_where_the_context_is_full(decoder):
    prompt = decoder.tokenizer.encode("try" * 300).ids[: decoder.context_length - 3]
    assert len(prompt) == decoder.context_length - 3
    decoder.end_tokens = set()
    assert len(list(decoder.greedy(prompt, 10))) == 3


def test_decoding_stops_at_an_end_token(decoder):
    prompt = decoder.tokenizer.encode("The with statement").ids
    first, second, *_ = (token for token, _ in decoder.greedy(prompt, 4))
    assert first != second
    decoder.end_tokens = {second}
    assert [token for token, _ in decoder.greedy(prompt, 4)] == [first]


def test_tokenizer_gives_text_back(decoder):
    text = 'def f(x):\n    return "é" + x'
    assert decoder.tokenizer.decode(decoder.tokenizer.encode(text).ids) == text


def test_quickstart(adapter: str):
    printed = run_example("quickstart.py", "--tokens", "12", adapter=adapter)
    assert "the same 12 tokens from both" in printed
    assert printed.count("GroupQueryAttention") >= 4


def test_decode_loop_continues_the_prompt(adapter: str, decoder):
    prompt = "The with statement"
    printed = run_example("decode_loop.py", "--prompt", prompt, "--tokens", "6", adapter=adapter)
    ids = decoder.tokenizer.encode(prompt).ids
    expected = [token for token, _ in decoder.greedy(ids, 6)]
    assert printed == decoder.tokenizer.decode(ids + expected) + "\n"


def test_compare_model_is_within_its_bound(adapter: str):
    printed = run_example("compare_model.py", "--steps", "3", adapter=adapter)
    assert printed.endswith("all within 0.001\n")
    assert printed.count("present.") == 8


def test_compare_model_tells_what_is_beyond(adapter: str):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "compare_model.py", "--steps", "1", "--atol", "-1"],
        capture_output=True,
        text=True,
        env=_environment(adapter),
    )
    assert done.returncode == 1, done.stderr
    assert "beyond -1.0: logits, present.0.key" in done.stdout


def test_partial_offload_moves_one_node_of_four(adapter: str):
    from ort_webgpu import WebGPUSession

    printed = run_example("partial_offload.py", adapter=adapter)
    assert printed.count("GroupQueryAttention") >= 4
    graph = onnx.load(MODEL / "model.onnx", load_external_data=False).graph
    nodes = [node.name for node in graph.node if node.op_type == "GroupQueryAttention"]
    session = WebGPUSession(MODEL / "model.onnx", adapter=adapter, offload=nodes[:1])
    assert [row.placed for row in session.explain().rows] == ["webgpu", "cpu", "cpu", "cpu"]
    assert [row.node for row in session.explain().rows] == nodes


def test_embed_sentences_prints_similarities_and_placement(adapter: str):
    printed = run_example("embed_sentences.py", adapter=adapter)
    diagonal = [line.split()[-6:][i] for i, line in enumerate(printed.splitlines()[1:7])]
    assert diagonal == ["1.000"] * 6
    for op_type, count in {"RemovePadding": 1, "PackedAttention": 2, "RestorePadding": 1}.items():
        rows = [line.split() for line in printed.splitlines() if line.startswith(f"{op_type}_")]
        assert [row[2] for row in rows] == ["webgpu"] * count


def test_embeddings_on_the_device_are_those_on_the_cpu(adapter: str, embedding):
    from ort_webgpu import WebGPUSession

    path = embedding.FOLDER / "model.onnx"
    tokenizer = embedding.load_tokenizer(embedding.FOLDER / "vocab.json")
    on = {
        name: embedding.embed(WebGPUSession(path, adapter=name), tokenizer, embedding.SENTENCES)
        for name in (adapter, "none")
    }
    np.testing.assert_allclose(on[adapter], on["none"], rtol=0, atol=6e-3)
    # sentences 0 and 1, 2 and 3, 4 and 5 say alike things
    alike = on[adapter] @ on[adapter].T - 2 * np.eye(6)
    assert alike.argmax(1).tolist() == [1, 0, 3, 2, 5, 4]


def test_padding_does_not_change_an_embedding(embedding):
    from ort_webgpu import WebGPUSession

    session = WebGPUSession(embedding.FOLDER / "model.onnx", adapter="none")
    tokenizer = embedding.load_tokenizer(embedding.FOLDER / "vocab.json")
    alone = embedding.embed(session, tokenizer, embedding.SENTENCES[:1])
    beside = embedding.embed(session, tokenizer, embedding.SENTENCES[:3])[:1]
    np.testing.assert_allclose(alone, beside, rtol=0, atol=2e-3)


def test_embed_sentences_names_words_that_it_lacks():
    done = subprocess.run(
        [sys.executable, EXAMPLES / "embed_sentences.py", "a file", "the 犬 runs"],
        capture_output=True,
        encoding="utf-8",
        env=_environment("none"),
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith("'the 犬 runs': the cut vocabulary lacks 犬")


@pytest.mark.parametrize("place", ["llvmpipe", "none"])
def test_cached_decoding_gives_the_same_tokens_each_way(place: str):
    printed = run_example("cached_decoding.py", "--tokens", "8", adapter=place)
    assert printed.count("same tokens") == 4 and "OTHER" not in printed


@pytest.mark.peers
def test_embed_dataset_patches_each_worker():
    pytest.importorskip("ray")
    printed = run_example("embed_dataset.py", "--rows", "48", adapter="swiftshader")
    assert "48 embeddings of 384 numbers" in printed
    assert "computed by WebGpuExecutionProvider\n" in printed


def test_the_code_in_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: str):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.S)
    assert blocks
    for name in ("model.onnx", "model.onnx.data"):
        shutil.copy(MODEL / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORT_WEBGPU_ADAPTER", adapter)
    prompt = {"input_ids": np.array([[5, 6, 7]]), "attention_mask": np.ones((1, 3), np.int64)}
    pasts = {f"past_key_values.{i}.{kind}" for i in range(4) for kind in ("key", "value")}
    empty = dict.fromkeys(pasts, np.zeros((1, 2, 0, 32), np.float32))
    names = {"feeds": {**prompt, **empty}, "prompt_feeds": prompt}
    plain = onnxruntime.InferenceSession("model.onnx").run(None, names["feeds"])
    try:
        for block in blocks:
            exec(block, names)
        patched = onnxruntime.InferenceSession("model.onnx")
        assert isinstance(patched, names["WebGPUSession"])
    finally:
        names["ort_webgpu"].unpatch_onnxruntime()
    np.testing.assert_allclose(names["logits"], plain[0], rtol=0, atol=1e-4)
    np.testing.assert_allclose(names["first_present"], plain[1], rtol=0, atol=1e-5)
    bound = names["binding"].copy_outputs_to_cpu()
    np.testing.assert_allclose(bound[0], plain[0], rtol=0, atol=1e-4)
    assert names["branch"].length == 3


def test_the_readme_names_every_command_and_operator():
    from ort_webgpu.cli import app
    from ort_webgpu.ops import OPS

    text = README.read_text("utf-8")
    commands = {one.name or one.callback.__name__ for one in app.registered_commands}
    assert set(re.findall(r"^\| `ort-webgpu (\w+)", text, re.M)) == commands
    assert all(op_type in text for _, op_type in OPS)
    named = set(re.findall(r"\((examples/\S+?|[A-Z]\w+\.md)\)", text))
    assert all((README.parent / path).exists() for path in named)


def test_every_route_is_in_the_readme_in_the_order_of_preference():
    from ort_webgpu.ops import OPS

    rows = re.findall(r"^\| (`\w+`.*?) \|", README.read_text("utf-8"), re.M)
    told = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    for spec in OPS.values():
        names = [r.name for r in spec.routes if not r.forced_only]
        names = [
            name for name in names if not name.startswith(("matrix_staged_", "matrix_direct_"))
        ]
        assert [name for name in told if name in names] == names, spec.op_type
