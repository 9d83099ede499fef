"""The one tolerance table: |actual - expected| <= absolute + relative * |expected|, by dtype."""

from dataclasses import dataclass

import numpy as np

from ort_webgpu.conformance.case import Case

__all__ = ["DEFAULT", "EXCEPTIONS", "Tolerance", "ToleranceException", "tolerance_for"]


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
    name = np.dtype(dtype).name
    for exception in EXCEPTIONS:
        if case is not None and exception.dtype == name and exception.features <= case.features:
            return exception.tolerance
    return DEFAULT.get(name, Tolerance(0, 0))
