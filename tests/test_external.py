"""The runners of test suites that nobody here wrote, on a small checkout of the same layout."""

import json
from pathlib import Path

import pytest
from session_helpers import MODEL

from ort_webgpu.conformance import Candidate
from ort_webgpu.conformance.external import (
    PYTHON_TESTS,
    WEB_FILES,
    run_python_tests,
    run_web_cases,
    web_cases,
)
from ort_webgpu.errors import InvalidInputError

# One token attends to itself: the output is its value, the presents are the new rows.
WEB = """[
  // as ORT writes them: comments, absent inputs, seqlens_k one too long
  {"name": "GroupQueryAttention made here", "operator": "GroupQueryAttention",
   "attributes": [{"name": "num_heads", "data": 1, "type": "int"},
                  {"name": "kv_num_heads", "data": 1, "type": "int"}],
   "cases": [{"name": "T // 0", "inputs": [
      {"data": [0, 1, 2, 3, 4, 5, 6, 7], "dims": [1, 1, 8], "type": "float32"},
      {"data": [1, 1, 2, 3, 4, 5, 6, 7], "dims": [1, 1, 8], "type": "float32"},
      {"data": [2, 1, 2, 3, 4, 5, 6, 7], "dims": [1, 1, 8], "type": "float32"},
      {"data": null, "type": "float32"}, {"data": null, "type": "float32"},
      {"data": [1], "dims": [1], "type": "int32"},
      {"data": [1], "dims": [1], "type": "int32"}],
     "outputs": [
      {"data": [2, 1, 2, 3, 4, 5, 6, 7], "dims": [1, 1, 8], "type": "float32"},
      {"data": [1, 1, 2, 3, 4, 5, 6, 7], "dims": [1, 1, 1, 8], "type": "float32"},
      {"data": LAST, "dims": [1, 1, 1, 8], "type": "float32"},
   ]}]},
  {"name": "not ours", "operator": "Abs", "cases": []}
]"""
RIGHT, WRONG = "[2, 1, 2, 3, 4, 5, 6, 7]", "[2, 1, 2, 3, 4, 5, 6, 9]"

PYTHON = """
import onnxruntime
from onnxruntime import InferenceSession

def test_session_is_ours():
    session = InferenceSession({model!r}, providers=["CPUExecutionProvider"])
    assert {name!r} in str(session.explain().adapter)
    assert onnxruntime.InferenceSession is InferenceSession

def test_other():
    assert {passes}
"""


@pytest.fixture
def checkout(tmp_path: Path, adapter: str):
    """Writes a checkout whose tests pass, or not."""

    def write(passes: bool = True) -> Path:
        for name in WEB_FILES:
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(WEB.replace("LAST", RIGHT if passes else WRONG))
        for name in PYTHON_TESTS.values():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(PYTHON.format(model=str(MODEL), name=adapter, passes=passes))
        return tmp_path

    return write


def test_web_cases_are_read_as_they_are_written(checkout):
    (case, expected), *rest = web_cases(checkout() / WEB_FILES[0])
    assert not rest
    assert case.name == "GroupQueryAttention made here T // 0"
    assert case.attributes == {"num_heads": 1, "kv_num_heads": 1}
    assert case.input("past_key") is None
    assert case.require("seqlens_k").tolist() == [0]
    assert expected.outputs[0].tolist() == [[json.loads(RIGHT)]]


def test_web_cases_pass_and_fail(checkout, adapter):
    suite = run_web_cases(checkout(), Candidate(adapter=adapter))
    assert suite.passed, suite.results
    suite = run_web_cases(checkout(passes=False), Candidate(adapter=adapter))
    assert suite.counts() == {"failed": 1}
    assert "present_value" in suite.results[0].detail


def test_web_cases_of_single_features_are_run_as_well(checkout, adapter):
    file = checkout() / WEB_FILES[0]
    file.with_stem(f"{file.stem}-softcap").write_text(file.read_text())
    suite = run_web_cases(checkout(), Candidate(adapter=adapter))
    assert suite.counts() == {"passed": 2}
    assert {result.source for result in suite.results} == {
        "group-query-attention.jsonc",
        "group-query-attention-softcap.jsonc",
    }


def test_python_tests_run_on_our_session(checkout, adapter, capfd):
    status = run_python_tests(checkout(), ["gqa_cpu"], Candidate(adapter=adapter))
    text = capfd.readouterr().out
    assert status == 0, text
    assert "2 passed" in text
    assert "4 attention nodes on WebGPU, 0 on the CPU" in text


def test_a_failing_python_test_is_told(checkout, adapter):
    assert run_python_tests(checkout(passes=False), ["gqa_cpu"], Candidate(adapter=adapter)) == 1


def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match=r"test_gqa_cpu\.py"):
        run_python_tests(tmp_path, ["gqa_cpu"], Candidate())
