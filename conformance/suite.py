"""The corpus of single-node cases on any candidate, and what of it was covered."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from ort_webgpu import NodeCall, NotOffloadedError, WebGPUSession
from ort_webgpu.conformance.candidates import Candidate, CandidateError
from ort_webgpu.conformance.case import Array, Case, RejectCase
from ort_webgpu.conformance.cases import corpus, rejections
from ort_webgpu.conformance.checks import MismatchError, check_rejected, problems
from ort_webgpu.conformance.oracle_ort import run_case
from ort_webgpu.conformance.oracles import numpy_oracle, oracle, why_not_on_ort
from ort_webgpu.conformance.remote import Host, RemoteError, RemoteSession
from ort_webgpu.errors import DeviceError, OrtWebGpuError

__all__ = ["STATUSES", "CaseResult", "Suite", "run_suite", "select"]

STATUSES = ("passed", "failed", "unsupported", "skipped")
"""unsupported: the candidate refused the case; skipped: the candidate is known not to take it, and
ORT might crash on it."""

_REFUSALS = (
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
    RemoteError,
    OrtWebGpuError,
)


@dataclass(frozen=True)
class CaseResult:
    """One case on one route. `detail` says what is wrong, or why it was not run."""

    case: str
    op_type: str
    source: str
    features: tuple[str, ...]
    status: str
    detail: str | None = None
    route: str | None = None
    card: str | None = None
    oracle: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Suite:
    """All results of a run."""

    candidate: str
    level: str
    results: tuple[CaseResult, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing failed and something passed."""
        counts = self.counts()
        return not counts["failed"] and bool(counts["passed"])

    def counts(self) -> Counter[str]:
        """Number of results by status."""
        return Counter(result.status for result in self.results)

    def by_operator(self) -> dict[str, Counter[str]]:
        """Operator to number of results by status."""
        return _counted((r.op_type, r.status) for r in self.results)

    def features(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Feature to operator to (passed, all) results."""
        good: Counter[tuple[str, str]] = Counter()
        every: Counter[tuple[str, str]] = Counter()
        for result in self.results:
            for feature in result.features:
                every[feature, result.op_type] += 1
                good[feature, result.op_type] += result.status == "passed"
        table: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
        for (feature, op_type), count in sorted(every.items()):
            table[feature][op_type] = (good[feature, op_type], count)
        return dict(table)

    def routes(self) -> dict[str, Counter[str]]:
        """Operator to number of passed results by route."""
        return _counted((r.op_type, r.route) for r in self._good() if r.route)

    def cards(self) -> dict[str, Counter[str]]:
        """Operator to number of passed results by variant of the kernel cards."""
        return _counted((r.op_type, r.card) for r in self._good() if r.card)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "candidate": self.candidate,
            "level": self.level,
            "passed": self.passed,
            "counts": dict(self.counts()),
            "operators": {op: dict(found) for op, found in self.by_operator().items()},
            "features": self.features(),
            "routes": {op: dict(found) for op, found in self.routes().items()},
            "variants": {op: dict(found) for op, found in self.cards().items()},
            "results": [asdict(result) for result in self.results],
        }

    def _good(self) -> Iterator[CaseResult]:
        return (result for result in self.results if result.status == "passed")


def select(
    operators: Sequence[str] = (), level: str = "ci", words: Sequence[str] = ()
) -> list[Case]:
    """Cases of the corpus: of `operators` (none: all), whose name or features hold all `words`.

    Raises ValueError for an unknown operator or level.
    """
    cases = [case for op in operators or (None,) for case in corpus(op, level)]
    return [c for c in cases if all(word in c.name or word in c.features for word in words)]


def run_suite(
    candidate: Candidate,
    cases: Sequence[Case],
    level: str = "ci",
    every_route: bool = False,
    refused: bool = False,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Suite:
    """Run `cases` on `candidate`.

    `every_route` runs each case on every route of ours that takes it, not only on the first.
    `refused` adds the nodes that must be refused. `progress` wraps the list of cases.
    Raises CandidateError where the candidate is not on this machine.
    """
    runner = _Runner(replace(candidate, strict=True, threads=1))
    results: list[CaseResult] = []
    try:
        for case in progress(cases):
            results += runner.run(case, every_route)
        if refused:
            operators = {case.op_type for case in cases}
            for case in progress([c for c in rejections() if c.op_type in operators]):
                results += runner.refuse(case)
    finally:
        runner.close()
    return Suite(candidate.label, level, tuple(results))


class _Runner:
    """Runs single cases; keeps the process of a remote candidate from case to case."""

    def __init__(self, candidate: Candidate):
        self._candidate = candidate
        self._host: Host | None = None

    def run(self, case: Case, every_route: bool) -> Iterator[CaseResult]:
        """The results of one case: one, or one for each route that takes it."""
        reason = self._why_not(case)
        if reason is not None:
            yield _result(case, "skipped", reason)
            return
        session, first = self._one(case, self._candidate)
        yield first
        if not every_route or not isinstance(session, WebGPUSession):
            return
        for row in session.explain().rows:
            for route in row.rejected:
                forced = replace(self._candidate, routes={case.op_type: route})
                _, result = self._one(case, forced)
                if result.status != "unsupported":
                    yield replace(result, route=route)

    def refuse(self, case: RejectCase) -> Iterator[CaseResult]:
        """The result of a node that must be refused; what ORT does not refuse it is not given."""
        ours = self._candidate.name == "ort-webgpu"
        if self._candidate.remote or not (ours or case.ort == "rejects"):
            return
        start = time.perf_counter()
        # The contract is what is asked, not the device: a node on the CPU may refuse too.
        candidate = replace(self._candidate, strict=False)
        status, detail = "passed", None
        try:
            check_rejected(candidate.open, case)
        except MismatchError as error:
            status, detail = "failed", str(error)
        seconds = time.perf_counter() - start
        yield CaseResult(
            case.name, case.op_type, case.source, ("refused",), status, detail, seconds=seconds
        )

    def close(self) -> None:
        """End the remote process, if there is one."""
        if self._host is not None:
            self._host.close()

    def _why_not(self, case: Case) -> str | None:
        if self._candidate.remote and case.in_place:
            return "in place needs a session in this process"
        if self._candidate.name in ("ort-cpu", "CPUExecutionProvider"):
            return why_not_on_ort(case)
        return None

    def _one(self, case: Case, candidate: Candidate) -> tuple[Any, CaseResult]:
        expected = numpy_oracle(case) if candidate.name == "ort-cpu" else oracle(case)
        start = time.perf_counter()
        session: Any = None
        calls: list[NodeCall] = []
        try:
            session = self._open(case, candidate)
            actual = _outputs(session, case, calls)
        except CandidateError:
            raise
        except NotOffloadedError as error:
            return session, _result(case, "unsupported", _first_line(error))
        except DeviceError as error:
            return session, _result(case, "failed", str(error))
        except _REFUSALS as error:
            ours = candidate.name == "ort-webgpu"
            status = "failed" if ours else "unsupported"
            return session, _result(case, status, _first_line(error))
        seconds = time.perf_counter() - start
        detail = "; ".join(problems(actual, expected, case)) or None
        result = _result(case, "failed" if detail else "passed", detail)
        call = calls[0] if calls else None
        return session, replace(
            result,
            oracle=expected.oracle,
            seconds=seconds,
            route=call.route if call else _route(session),
            card=call.card if call else None,
        )

    def _open(self, case: Case, candidate: Candidate) -> Any:
        model = case.model().SerializeToString()
        if not candidate.remote:
            return candidate.open(model)
        if self._host is None or not self._host.alive:
            self._host = Host(candidate.python)
        return RemoteSession(candidate.here, model, self._host)


def _outputs(session: Any, case: Case, calls: list[NodeCall]) -> list[Array]:
    if isinstance(session, WebGPUSession) and not case.in_place:
        return session.run_traced(None, case.feeds(), calls.append)
    return run_case(session, case)


def _route(session: Any) -> str | None:
    if not isinstance(session, WebGPUSession):
        return None
    return next((row.route for row in session.explain().rows), None)


def _result(case: Case, status: str, detail: str | None) -> CaseResult:
    features = tuple(sorted(case.features))
    return CaseResult(case.name, case.op_type, case.source, features, status, detail)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _counted(pairs: Iterable[tuple[str, Any]]) -> dict[str, Counter[str]]:
    found: Mapping[str, Counter[str]] = defaultdict(Counter)
    for key, value in pairs:
        found[key][value] += 1
    return dict(found)
