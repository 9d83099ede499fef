"""Differential tests: whole models compared, the corpus of single-node cases, oracles, reports."""

from ort_webgpu.conformance.candidates import REFERENCE, Candidate, CandidateError
from ort_webgpu.conformance.cases import corpus, rejections
from ort_webgpu.conformance.checks import MismatchError
from ort_webgpu.conformance.compare import Comparison, Options, compare_model
from ort_webgpu.conformance.generate import InputOptions
from ort_webgpu.conformance.suite import Suite, run_suite, select
from ort_webgpu.conformance.testing import assert_matches_cpu
from ort_webgpu.conformance.tolerances import Tolerance

__all__ = [
    "REFERENCE",
    "Candidate",
    "CandidateError",
    "Comparison",
    "InputOptions",
    "MismatchError",
    "Options",
    "Suite",
    "Tolerance",
    "assert_matches_cpu",
    "compare_model",
    "corpus",
    "rejections",
    "run_suite",
    "select",
]
