"""The examples run, and their decode loop is right."""

import os
import subprocess
import sys
from pathlib import Path

import onnx
import onnxruntime
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
MODEL = EXAMPLES / "model"


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch):
    """A Decoder of the example model on plain onnxruntime."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from decode_loop import Decoder

    return Decoder(onnxruntime.InferenceSession(MODEL / "model.onnx"), MODEL)


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
