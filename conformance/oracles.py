"""The oracles in one place: ORT's CPU EP where it can serve, else float64 numpy."""

from functools import lru_cache

from ort_webgpu.conformance.case import Array, Case, Expected
from ort_webgpu.conformance.oracle_numpy_dmmha import decoder_masked_attention
from ort_webgpu.conformance.oracle_numpy_gqa import group_query_attention
from ort_webgpu.conformance.oracle_numpy_packed import (
    packed_attention,
    packed_multi_head_attention,
    remove_padding,
    restore_padding,
)
from ort_webgpu.conformance.oracle_ort import run_on_ort, why_not_on_ort
from ort_webgpu.conformance.oracle_ort_padded import run_padded_on_ort

__all__ = [
    "NUMPY_ORACLES",
    "answer",
    "numpy_oracle",
    "oracle",
    "ort_oracle",
    "ort_padded_oracle",
    "why_not_on_ort",
]

NUMPY_ORACLES = {
    "GroupQueryAttention": group_query_attention,
    "DecoderMaskedMultiHeadAttention": decoder_masked_attention,
    "PackedAttention": packed_attention,
    "PackedMultiHeadAttention": packed_multi_head_attention,
    "RemovePadding": remove_padding,
    "RestorePadding": restore_padding,
}
"""The float64 reference of every operator; each serves for all cases of the corpus."""


@lru_cache(maxsize=512)
def oracle(case: Case) -> Expected:
    """What is right for `case`, from the first oracle that can serve.

    Which elements the contract leaves unspecified always comes from the numpy reference.
    """
    if why_not_on_ort(case) is None:
        return ort_oracle(case)
    return numpy_oracle(case)


def answer(case: Case) -> Expected:
    """As `oracle`, but nothing is kept: for cases that are made once and may be large."""
    reference = NUMPY_ORACLES[case.op_type](case)
    if why_not_on_ort(case) is None:
        return _with_care(case, run_on_ort(case), "ORT CPU EP", reference)
    return reference


@lru_cache(maxsize=512)
def numpy_oracle(case: Case) -> Expected:
    """The float64 reference's answer."""
    return NUMPY_ORACLES[case.op_type](case)


def ort_oracle(case: Case) -> Expected:
    """ORT CPU's answer; ValueError with the reason where it cannot serve."""
    reason = why_not_on_ort(case)
    if reason is not None:
        raise ValueError(f"{case.name}: {reason}")
    return _with_care(case, run_on_ort(case), "ORT CPU EP")


def ort_padded_oracle(case: Case) -> Expected:
    """ORT CPU's answer to the padded form of a packed attention case, float32 inside."""
    if not case.op_type.startswith("Packed"):
        raise ValueError(f"{case.name}: only packed attention has a padded form")
    return _with_care(case, run_padded_on_ort(case), "ORT CPU EP on the padded form")


def _with_care(
    case: Case, answers: list[Array], name: str, reference: Expected | None = None
) -> Expected:
    reference = reference or numpy_oracle(case)
    rest = iter(answers)
    outputs = tuple(None if values is None else next(rest) for values in reference.outputs)
    return Expected(outputs, reference.care, name)
