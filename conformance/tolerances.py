"""The one tolerance table: |actual - expected| <= absolute + relative * |expected|, by dtype."""

from dataclasses import dataclass

import numpy as np

from ort_webgpu.conformance.case import Case

__all__ = [
    "DEFAULT",
    "EXACT",
    "EXCEPTIONS",
    "MODEL",
    "Tolerance",
    "ToleranceException",
    "model_tolerance",
    "scaled",
    "tolerance_for",
]


@dataclass(frozen=True)
class Tolerance:
    """Bounds of one comparison; both zero means bit-exact."""

    absolute: float
    relative: float


@dataclass(frozen=True)
class ToleranceException:
    """A wider tolerance for `dtype` outputs of cases that have all `features`, and why."""

    features: frozenset[str]
    dtype: str
    tolerance: Tolerance
    reason: str


DEFAULT = {
    "float32": Tolerance(1e-5, 1e-4),
    "float16": Tolerance(2.5e-3, 1e-3),
    "int8": Tolerance(0, 0),
    "uint8": Tolerance(0, 0),
    "int32": Tolerance(0, 0),
    "int64": Tolerance(0, 0),
}
"""What ORT's own OpTester uses for floats; integers are exact."""

EXACT = frozenset({"RemovePadding", "RestorePadding"})
"""Operators that only move their elements: every bit counts."""

EXCEPTIONS = (
    ToleranceException(
        frozenset({"projection"}),
        "float16",
        Tolerance(6e-3, 2e-3),
        "q, k, v may be rounded to float16 after the projection (as CUDA does) or stay float32",
    ),
    ToleranceException(
        frozenset({"mixed_cache"}),
        "float32",
        DEFAULT["float16"],
        "a float32 node with a float16 cache may attend to new rows before or after their rounding",
    ),
    ToleranceException(
        frozenset({"mask_addition"}),
        "float32",
        Tolerance(2e-3, 1e-3),
        "a fully masked row adds -10000 in float32, which leaves about 1e-3 of each logit",
    ),
    ToleranceException(
        frozenset({"mask_addition"}),
        "float16",
        Tolerance(4e-3, 2e-3),
        "a fully masked row adds -10000 in float32, which leaves about 1e-3 of each logit",
    ),
)
"""Checked in order; the first that fits wins."""


def tolerance_for(dtype: np.dtype, case: Case | None = None) -> Tolerance:
    """Tolerance for one output of `case`; dtypes outside the table must be exact."""
    if case is not None and case.op_type in EXACT:
        return Tolerance(0, 0)
    name = np.dtype(dtype).name
    for exception in EXCEPTIONS:
        if case is not None and exception.dtype == name and exception.features <= case.features:
            return exception.tolerance
    return DEFAULT.get(name, Tolerance(0, 0))


MODEL = {"float32": 1e-4, "float16": 5e-3}
"""Outputs of whole models: how far off, as a share of the output's largest element, by dtype."""


def model_tolerance(expected: np.ndarray, half: bool = False) -> Tolerance:
    """For an output of a whole model: errors of all its layers add up and carry the scale of the
    largest values, so that a bound relative to each element would ask too much of small ones.

    `half`: the model computes in float16, so that a float32 output is no more precise than that.
    """
    name = expected.dtype.name
    share = MODEL["float16"] if half and name in MODEL else MODEL.get(name, 0.0)
    return Tolerance(share * _largest(expected), 0.0)


def scaled(tolerance: Tolerance, expected: np.ndarray) -> Tolerance:
    """For a node of a real model, whose values may be far larger than the corpus's: an element near
    zero is a sum of terms of the scale of the largest ones."""
    return Tolerance(tolerance.absolute * max(1.0, _largest(expected)), tolerance.relative)


def _largest(values: np.ndarray) -> float:
    finite = np.abs(values[np.isfinite(values)]) if values.dtype.kind == "f" else np.zeros(0)
    return float(finite.max()) if finite.size else 0.0
