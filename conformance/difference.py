"""Difference: all that can be said about two arrays that ought to be equal."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ort_webgpu.conformance.case import Array
from ort_webgpu.conformance.checks import compare_arrays
from ort_webgpu.conformance.tolerances import Tolerance

__all__ = ["Difference", "Statistics", "difference"]

BINS = (0.0, *(10.0**e for e in range(-9, 3)))
"""Lower edges of the error histogram; the last bin is open, and NaN counts there."""


@dataclass(frozen=True)
class Statistics:
    """Distribution of one kind of error over the elements that count, and where the largest is."""

    max: float
    index: tuple[int, ...]
    mean: float
    median: float
    p99: float


@dataclass(frozen=True)
class Difference:
    """`problem` is None where `actual` is within `tolerance`, else what is wrong, in words.

    `required` is the smallest (absolute, relative) tolerance of which either alone would pass.
    `ulp` is the largest distance in units in the last place of the expected type. `top` maps k to
    the share of rows whose k largest elements are the same set. Counts of NaN and Inf are
    (actual, expected).
    """

    name: str
    problem: str | None
    tolerance: Tolerance
    actual: tuple[str, tuple[int, ...]]
    expected: tuple[str, tuple[int, ...]]
    absolute: Statistics | None = None
    relative: Statistics | None = None
    required: tuple[float, float] | None = None
    ulp: float | None = None
    cosine: float | None = None
    scale: float | None = None
    top: dict[int, float] = field(default_factory=dict)
    nan: tuple[int, int] = (0, 0)
    inf: tuple[int, int] = (0, 0)
    histogram: tuple[int, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the arrays agree."""
        return self.problem is None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"passed": self.passed, **asdict(self)}


def difference(
    name: str,
    actual: Array,
    expected: Array,
    tolerance: Tolerance,
    care: Array | None = None,
    top: tuple[int, ...] = (),
) -> Difference:
    """Compare `actual` with `expected` where `care` is True (None: everywhere).

    `top` are the k of top-k agreement along the last axis.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    kinds = (actual.dtype.name, actual.shape), (expected.dtype.name, expected.shape)
    if care is not None:
        care = np.broadcast_to(care, expected.shape)
    if expected.dtype.kind not in "biuf" or actual.dtype.kind not in "biuf":
        same = actual.shape == expected.shape and bool((actual == expected).all())
        return Difference(name, None if same else "values differ", tolerance, *kinds)
    problem = compare_arrays(actual, expected, tolerance, care)
    if actual.shape != expected.shape or expected.size == 0:
        return Difference(name, problem, tolerance, *kinds)
    counted = np.ones(expected.shape, bool) if care is None else care
    if not counted.any():
        return Difference(name, problem, tolerance, *kinds)
    with np.errstate(invalid="ignore"):  # Unspecified elements may hold any bits.
        a, e = actual.astype(np.float64), expected.astype(np.float64)
    error = _errors(a, e, counted)
    finite_e = np.where(np.isfinite(e), np.abs(e), 0.0)
    relative = np.where(error == 0, 0.0, error / np.maximum(finite_e, np.finfo(np.float32).tiny))
    return Difference(
        name,
        problem,
        tolerance,
        *kinds,
        absolute=_statistics(error, counted),
        relative=_statistics(relative, counted),
        required=(float(error[counted].max()), float(relative[counted].max())),
        ulp=_ulp(error, expected, counted),
        cosine=_cosine(a[counted], e[counted]),
        scale=float(finite_e[counted].max()),
        top={k: _top(a, e, counted, k) for k in top if e.ndim and e.shape[-1] > k},
        nan=_counts(np.isnan, a, e, counted),
        inf=_counts(np.isinf, a, e, counted),
        histogram=_histogram(error[counted]),
    )


def _errors(a: Array, e: Array, counted: Array) -> Array:
    """|a - e|; 0 where equal, both NaN or not counted; inf where only one side is finite."""
    same = (a == e) | (np.isnan(a) & np.isnan(e)) | ~counted
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(same, 0.0, np.abs(a - e))
    return np.where(~same & ~(np.isfinite(a) & np.isfinite(e)), np.inf, error)


def _statistics(error: Array, counted: Array) -> Statistics:
    flat = int(np.where(counted, error, -1.0).argmax())
    index = tuple(int(i) for i in np.unravel_index(flat, error.shape))
    values = error[counted]
    finite = values[np.isfinite(values)]
    rest = finite if finite.size else np.zeros(1)
    return Statistics(
        float(values.max()),
        index,
        float(rest.mean()),
        float(np.median(rest)),
        float(np.percentile(rest, 99)),
    )


def _ulp(error: Array, expected: Array, counted: Array) -> float | None:
    if expected.dtype.kind != "f":
        return None
    valid = counted & np.isfinite(expected)
    if not valid.any():
        return None
    # drivers leave threads that flush subnormal numbers to zero, the spacing at zero among them
    least = {2: 2.0**-24, 4: 2.0**-149}.get(expected.dtype.itemsize, 2.0**-1022)
    spacing = np.maximum(np.spacing(np.abs(expected[valid])).astype(np.float64), least)
    return float((error[valid] / spacing).max())


def _cosine(a: Array, e: Array) -> float | None:
    if not (np.isfinite(a).all() and np.isfinite(e).all()):
        return None
    norm = float(np.linalg.norm(a) * np.linalg.norm(e))
    return float(a @ e) / norm if norm else None


def _top(a: Array, e: Array, counted: Array, k: int) -> float:
    rows = counted.all(-1)
    if not rows.any():
        return 1.0
    largest = [np.sort(np.argpartition(-x[rows], k, axis=-1)[:, :k], axis=-1) for x in (a, e)]
    return float((largest[0] == largest[1]).all(-1).mean())


def _counts(test: Any, a: Array, e: Array, counted: Array) -> tuple[int, int]:
    return int((test(a) & counted).sum()), int((test(e) & counted).sum())


def _histogram(error: Array) -> tuple[int, ...]:
    bins = np.searchsorted(np.asarray(BINS), np.nan_to_num(error, nan=np.inf), "right") - 1
    return tuple(int(n) for n in np.bincount(bins, minlength=len(BINS)))
