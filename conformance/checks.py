"""Comparison of a candidate's outputs with what an oracle expects."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from ort_webgpu.conformance.case import Array, Case, Expected, RejectCase
from ort_webgpu.conformance.tolerances import Tolerance, tolerance_for
from ort_webgpu.errors import OrtWebGpuError

__all__ = [
    "MismatchError",
    "check_rejected",
    "compare_arrays",
    "compare_outputs",
    "compare_saved",
    "problems",
]

REFUSALS = (
    OrtWebGpuError,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)
"""What a refusal may raise: our exceptions, or ORT's where ORT itself finds the fault."""


class MismatchError(AssertionError):
    """Outputs differ from the expected ones; the message holds every difference found."""


@dataclass(frozen=True)
class _Worst:
    """The largest difference and where it is."""

    absolute: float
    relative: float
    index: tuple[int, ...]
    outside: int


def compare_outputs(actual: Sequence[Array], expected: Expected, case: Case) -> None:
    """Raise MismatchError unless `actual` (the wanted outputs, in order) matches `expected`.

    Checks count, then shape, dtype and values of every output where the contract specifies them.
    """
    found = problems(actual, expected, case)
    if found:
        head = f"{case.name} (oracle: {expected.oracle}, source: {case.source})"
        raise MismatchError("\n  ".join([head, *found]))


def problems(actual: Sequence[Array], expected: Expected, case: Case) -> list[str]:
    """Every difference as one line; empty when all is well."""
    wanted = expected.wanted()
    if len(actual) != len(wanted):
        return [f"{len(actual)} outputs, expected {len(wanted)}"]
    found = []
    for name, got, (values, care) in zip(case.output_names(), actual, wanted, strict=True):
        problem = compare_arrays(got, values, tolerance_for(values.dtype, case), care)
        if problem is not None:
            found.append(f"{name}: {problem}")
    return found


def compare_saved(actual: Sequence[Array], path: str | os.PathLike) -> list[str]:
    """`problems` against the values that a repro folder's expected.npz holds, in their order.

    Beside each output's values the file has `<output>.care` and `<output>.tolerance`.
    """
    with np.load(path) as file:
        saved = dict(file)
    names = [name for name in saved if f"{name}.care" in saved]
    if len(actual) != len(names):
        return [f"{len(actual)} outputs, expected {len(names)}"]
    found = []
    for name, got in zip(names, actual, strict=True):
        tolerance = Tolerance(*saved[f"{name}.tolerance"].tolist())
        problem = compare_arrays(got, saved[name], tolerance, saved[f"{name}.care"])
        if problem is not None:
            found.append(f"{name}: {problem}")
    return found


def check_rejected(make_session: Callable[[bytes], Any], case: RejectCase) -> Exception:
    """Return the refusal of `case`, or raise MismatchError.

    `make_session` takes the serialized model. A "model" case must fail there, an "input" case
    only at run. Our own exceptions must mention one of the case's culprits.
    """
    try:
        session = make_session(case.model().SerializeToString())
    except REFUSALS as error:
        if case.kind == "input":
            raise MismatchError(f"{case.name}: refused at creation, not at run: {error}") from error
        return _mentioning(error, case)
    if case.kind == "model":
        raise MismatchError(f"{case.name}: the session was created, expected a refusal")
    try:
        session.run(None, case.feeds())
    except REFUSALS as error:
        return _mentioning(error, case)
    raise MismatchError(f"{case.name}: ran, expected a refusal ({case.source})")


def _mentioning(error: Exception, case: RejectCase) -> Exception:
    if isinstance(error, OrtWebGpuError) and not any(word in str(error) for word in case.mentions):
        wanted = " or ".join(case.mentions)
        raise MismatchError(f"{case.name}: the error does not mention {wanted}: {error}") from error
    return error


def compare_arrays(
    actual: Array, expected: Array, tolerance: Tolerance, care: Array | None = None
) -> str | None:
    """None if `actual` matches, else what differs. NaN matches NaN, an infinity its own sign.

    `care` is True where elements count (None: everywhere).
    """
    if actual.shape != expected.shape:
        return f"shape {actual.shape}, expected {expected.shape}"
    if actual.dtype != expected.dtype:
        return f"dtype {actual.dtype}, expected {expected.dtype}"
    if expected.size == 0:
        return None
    counted = np.ones(expected.shape, bool) if care is None else care
    with np.errstate(invalid="ignore"):  # Unspecified elements may hold any bits.
        a, e = actual.astype(np.float64), expected.astype(np.float64)
    worst = _worst(a, e, tolerance, counted)
    if worst.outside == 0:
        return None
    nans = tuple(int((np.isnan(x) & counted).sum()) for x in (a, e))
    infinities = tuple(int((np.isinf(x) & counted).sum()) for x in (a, e))
    got, right = actual[worst.index], expected[worst.index]
    return (
        f"{worst.outside} of {int(counted.sum())} elements differ; max abs {worst.absolute:.3g}, "
        f"max rel {worst.relative:.3g}, worst at {worst.index}: {got} instead of {right}; "
        f"NaN {nans[0]} (expected {nans[1]}), Inf {infinities[0]} (expected {infinities[1]}); "
        f"allowed {tolerance.absolute:g} + {tolerance.relative:g} * |expected|"
    )


def _worst(a: Array, e: Array, tolerance: Tolerance, counted: Array) -> _Worst:
    same = (a == e) | (np.isnan(a) & np.isnan(e)) | ~counted
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.where(same, 0.0, np.abs(a - e))
        excess = difference - (tolerance.absolute + tolerance.relative * np.abs(e))
    # A NaN or infinity on one side only has no finite difference: it is the worst there is.
    broken = ~same & ~(np.isfinite(a) & np.isfinite(e))
    difference = np.where(broken, np.inf, difference)
    outside = broken | (~same & (excess > 0))
    ranked = np.where(outside, difference, -1.0)
    index = np.unravel_index(int(ranked.argmax()), ranked.shape)
    scale = np.abs(np.where(np.isfinite(e), e, 0.0))
    relative = difference / np.maximum(scale, np.finfo(np.float32).tiny)
    return _Worst(
        float(difference.max()),
        float(relative.max()),
        tuple(int(i) for i in index),
        int(outside.sum()),
    )
