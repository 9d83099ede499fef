"""The oracles in one place: ORT's CPU EP where it can serve, else float64 numpy."""

from functools import lru_cache

from ort_webgpu.conformance.case import Array, Case, Expected
from ort_webgpu.conformance.oracle_numpy_gqa import group_query_attention
from ort_webgpu.conformance.oracle_ort import run_on_ort, why_not_on_ort

__all__ = ["NUMPY_ORACLES", "numpy_oracle", "oracle", "ort_oracle", "why_not_on_ort"]

NUMPY_ORACLES = {
    "GroupQueryAttention": group_query_attention,
}


@lru_cache(maxsize=512)
def oracle(case: Case) -> Expected:
    """What is right for `case`, from the first oracle that can serve.

    Which elements the contract leaves unspecified always comes from the numpy reference.
    """
    if why_not_on_ort(case) is None:
        return ort_oracle(case)
    return numpy_oracle(case)


@lru_cache(maxsize=512)
def numpy_oracle(case: Case) -> Expected:
    """The float64 reference's answer; KeyError-free for every operator of the corpus."""
    return NUMPY_ORACLES[case.op_type](case)


def ort_oracle(case: Case) -> Expected:
    """ORT CPU's answer; ValueError with the reason where it cannot serve."""
    reason = why_not_on_ort(case)
    if reason is not None:
        raise ValueError(f"{case.name}: {reason}")
    answers = iter(run_on_ort(case))
    reference = numpy_oracle(case)
    outputs: list[Array | None] = []
    for values in reference.outputs:
        outputs.append(None if values is None else next(answers))
    return Expected(tuple(outputs), reference.care, "ORT CPU EP")
