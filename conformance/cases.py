"""The corpus: `corpus()` holds what must come out right, `rejections()` what must be refused."""

from functools import lru_cache

from ort_webgpu.conformance.case import OPERATORS, Case, Expected, RejectCase
from ort_webgpu.conformance.cases_dmmha import generated_dmmha_cases
from ort_webgpu.conformance.cases_packed import generated_packed_cases
from ort_webgpu.conformance.corpus_gqa import generated_gqa_cases

__all__ = ["LEVELS", "OPERATORS", "Case", "Expected", "RejectCase", "corpus"]

LEVELS = ("ci", "full")


def corpus(op_type: str | None = None, level: str = "ci") -> list[Case]:
    """Cases of one operator (None: all of them), the same objects at every call."""
    if level not in LEVELS:
        raise ValueError(f"level {level!r} is unknown; use one of {', '.join(LEVELS)}")
    if op_type is not None and op_type not in OPERATORS:
        raise ValueError(f"no cases for {op_type!r}; operators are {', '.join(OPERATORS)}")
    return [c for c in _all_cases(level) if op_type in (None, c.op_type)]


@lru_cache(maxsize=2)
def _all_cases(level: str) -> tuple[Case, ...]:
    makers = (generated_gqa_cases, generated_dmmha_cases, generated_packed_cases)
    return tuple(case for make in makers for case in make(level))
