"""The corpus: `corpus()` holds what must come out right, `rejections()` what must be refused."""

from functools import lru_cache

from ort_webgpu.conformance.case import OPERATORS, Case, Expected, RejectCase
from ort_webgpu.conformance.cases_dmmha import generated_dmmha_cases
from ort_webgpu.conformance.cases_packed import generated_packed_cases
from ort_webgpu.conformance.cases_public import public_cases
from ort_webgpu.conformance.corpus_gqa import generated_gqa_cases
from ort_webgpu.conformance.rejects_gqa import gqa_rejections
from ort_webgpu.conformance.rejects_other import (
    dmmha_rejections,
    packed_rejections,
    padding_rejections,
)

__all__ = ["LEVELS", "OPERATORS", "Case", "Expected", "RejectCase", "corpus", "rejections"]

LEVELS = ("ci", "full")


def corpus(op_type: str | None = None, level: str = "ci") -> list[Case]:
    """Cases of one operator (None: all of them), the same objects at every call."""
    if level not in LEVELS:
        raise ValueError(f"level {level!r} is unknown; use one of {', '.join(LEVELS)}")
    _check_operator(op_type)
    return [c for c in _all_cases(level) if op_type in (None, c.op_type)]


def rejections(op_type: str | None = None) -> list[RejectCase]:
    """Nodes of one operator (None: all of them) that must be refused, and how."""
    _check_operator(op_type)
    return [c for c in _all_rejections() if op_type in (None, c.op_type)]


def _check_operator(op_type: str | None) -> None:
    if op_type is not None and op_type not in OPERATORS:
        raise ValueError(f"no cases for {op_type!r}; operators are {', '.join(OPERATORS)}")


@lru_cache(maxsize=2)
def _all_cases(level: str) -> tuple[Case, ...]:
    makers = (
        public_cases,
        generated_gqa_cases,
        generated_dmmha_cases,
        generated_packed_cases,
    )
    return tuple(case for make in makers for case in make(level))


@lru_cache(maxsize=1)
def _all_rejections() -> tuple[RejectCase, ...]:
    makers = (gqa_rejections, dmmha_rejections, packed_rejections, padding_rejections)
    return tuple(case for make in makers for case in make())
