"""Test suites of ONNX Runtime itself, run from a checkout that the user names.

Nothing of them is copied here: ORT's Python tests run with our session in place of theirs (see
pytest_plugin.py), and the literal cases of ORT's web tests are read from their file.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ort_webgpu.conformance.candidates import Candidate
from ort_webgpu.conformance.case import OPERATORS, Array, Case, Expected
from ort_webgpu.conformance.checks import problems
from ort_webgpu.conformance.oracle_ort import run_case
from ort_webgpu.conformance.suite import CaseResult, Suite
from ort_webgpu.errors import InvalidInputError, OrtWebGpuError

__all__ = ["PYTHON_TESTS", "WEB_FILES", "run_python_tests", "run_web_cases", "web_cases"]

PYTHON_TESTS = {
    "gqa_cpu": "onnxruntime/test/python/transformers/test_gqa_cpu.py",
    "gqa_cpu_quantized": "onnxruntime/test/python/transformers/test_gqa_cpu_quantized.py",
}
"""Suite name to file in the checkout. gqa_cpu needs torch and einops."""

WEB_FILES = ("js/web/test/data/ops/group-query-attention.jsonc",)

# A string is matched first, so that // within one is left alone.
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.S)
_TRAILING_COMMA = re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[\]}])', re.S)


def run_python_tests(
    checkout: Path, suites: Sequence[str], candidate: Candidate, arguments: Sequence[str] = ()
) -> int:
    """Run test files of ORT's under pytest, our session in place of theirs; pytest's exit status.

    `arguments` go to pytest. Raises InvalidInputError where the checkout lacks a file.
    """
    files = [_file(checkout, PYTHON_TESTS[suite]) for suite in suites]
    options = [f"--ort-webgpu-adapter={candidate.adapter}"]
    options += [f"--ort-webgpu-backend={candidate.backend}"]
    options += [f"--ort-webgpu-route={op}={route}" for op, route in candidate.routes.items()]
    command = [sys.executable, "-m", "pytest", "-p", "ort_webgpu.conformance.pytest_plugin"]
    # The checkout's own settings would load plugins of ORT's.
    command += ["-q", "-c", "/dev/null", f"--rootdir={files[0].parent}", *options, *arguments]
    return subprocess.run([*command, *map(str, files)], cwd=files[0].parent, check=False).returncode


def run_web_cases(checkout: Path, candidate: Candidate) -> Suite:
    """ORT's web cases on `candidate`, against the outputs that they state."""
    results = []
    for name in WEB_FILES:
        file = _file(checkout, name)
        # later checkouts have a file for each feature beside it
        for path in sorted(file.parent.glob(f"{file.stem}*{file.suffix}")):
            for case, expected in web_cases(path):
                results.append(_run(case, expected, replace(candidate, threads=1)))
    return Suite(candidate.label, "ORT's web tests", tuple(results))


def web_cases(path: Path) -> Iterator[tuple[Case, Expected]]:
    """Cases and expected outputs of one .jsonc file; other operators than ours are left out."""
    text = _COMMENT.sub(lambda match: match[1] or "", path.read_text("utf-8"))
    for group in json.loads(_TRAILING_COMMA.sub(lambda match: match[1] or "", text)):
        if group["operator"] not in OPERATORS:
            continue
        attributes = {a["name"]: a["data"] for a in group.get("attributes", ())}
        for one in group["cases"]:
            inputs = tuple(_array(tensor) for tensor in one["inputs"])
            outputs = tuple(_array(tensor) for tensor in one["outputs"])
            case = Case(
                name=f"{group['name']} {one['name']}",
                op_type=group["operator"],
                attributes=attributes,
                inputs=inputs,
                wanted=tuple(output is not None for output in outputs),
                source=path.name,
                features=frozenset({"web"}),
            )
            yield _with_right_lengths(case), Expected(outputs, (None,) * len(outputs), path.name)


def _with_right_lengths(case: Case) -> Case:
    """The web EP does not read seqlens_k, and its cases often hold the length where the contract
    wants length - 1."""
    names = OPERATORS[case.op_type][0]
    if "seqlens_k" not in names or case.input("seqlens_k") is None:
        return case
    lengths = case.require("seqlens_k")
    total = int(case.require("total_sequence_length").reshape(-1)[0])
    index = names.index("seqlens_k")
    fixed = np.minimum(lengths, total - 1)
    return replace(case, inputs=(*case.inputs[:index], fixed, *case.inputs[index + 1 :]))


def _array(tensor: dict[str, Any]) -> Array | None:
    if tensor.get("data") is None:
        return None
    return np.array(tensor["data"], np.dtype(tensor["type"])).reshape(tensor["dims"])


def _run(case: Case, expected: Expected, candidate: Candidate) -> CaseResult:
    start = time.perf_counter()
    try:
        session = candidate.open(case.model().SerializeToString())
        actual = run_case(session, case)
    except (OrtWebGpuError, ValueError, RuntimeError) as error:
        detail = f"{type(error).__name__}: {error}"
        return CaseResult(case.name, case.op_type, case.source, ("web",), "unsupported", detail)
    wrong = "; ".join(problems(actual, expected, case)) or None
    return CaseResult(
        case.name,
        case.op_type,
        case.source,
        ("web",),
        "failed" if wrong else "passed",
        wrong,
        oracle=expected.oracle,
        seconds=time.perf_counter() - start,
    )


def _file(checkout: Path, name: str) -> Path:
    path = checkout / name
    if not path.is_file():
        raise InvalidInputError(
            f"{checkout} has no {name}; name the root of a checkout of microsoft/onnxruntime"
        )
    return path.resolve()
