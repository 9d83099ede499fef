"""compare_model: a whole model on a candidate and on a reference, for one call or a decode loop."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import ort_webgpu
from ort_webgpu import NodeCall
from ort_webgpu.conformance.candidates import REFERENCE, Candidate
from ort_webgpu.conformance.case import Array
from ort_webgpu.conformance.difference import Difference, difference
from ort_webgpu.conformance.generate import InputOptions, Inputs
from ort_webgpu.conformance.golden import Step
from ort_webgpu.conformance.replay import NodeResult, replay
from ort_webgpu.conformance.tolerances import Tolerance, model_tolerance
from ort_webgpu.errors import InvalidInputError
from ort_webgpu.graph_tools import ModelFile

__all__ = ["Comparison", "Options", "StepResult", "compare_model", "compare_values", "recheck"]

TOP = (1, 5)
"""The k of the top-k agreement of logits."""


@dataclass(frozen=True)
class Options:
    """How to compare.

    `steps` is the length of a decode loop; each step gets the caches of the reference, or with
    `own_caches` those that the candidate itself gave. `iterations` repeat it all with other seeds.
    `repeat` runs the candidate's every call that often and reports outputs that change.
    `tolerances` are by output name, "" for all others; without one, `model_tolerance` holds.
    `nodes` judges every offloaded node on its own inputs.
    """

    steps: int = 1
    iterations: int = 1
    repeat: int = 1
    fail_fast: bool = False
    own_caches: bool = False
    nodes: bool = True
    inputs: InputOptions = field(default_factory=InputOptions)
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    """One call: every output's difference, and seconds that both sides took."""

    iteration: int
    step: int
    outputs: tuple[Difference, ...]
    seconds: tuple[float, float]
    changing: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether all outputs agree and none changed between repeated runs."""
        return not self.changing and all(output.passed for output in self.outputs)


@dataclass(frozen=True)
class Comparison:
    """What `compare_model` found. `golden` holds what was fed and what the candidate gave."""

    model: str
    candidate: str
    reference: str
    steps: tuple[StepResult, ...]
    nodes: tuple[NodeResult, ...] = ()
    placement: Mapping[str, Any] = field(default_factory=dict)
    golden: tuple[Step, ...] = field(default=(), repr=False)

    @property
    def passed(self) -> bool:
        """Whether every output and every node agrees."""
        return all(step.passed for step in self.steps) and all(n.passed for n in self.nodes)

    @property
    def first_bad_node(self) -> NodeResult | None:
        """The first offloaded node that differs from the oracle, in the order they ran."""
        return next((node for node in self.nodes if not node.passed), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        bad = self.first_bad_node
        return {
            "version": ort_webgpu.__version__,
            "model": self.model,
            "candidate": self.candidate,
            "reference": self.reference,
            "passed": self.passed,
            "first_bad_node": bad.node if bad else None,
            "steps": [
                {
                    "iteration": step.iteration,
                    "step": step.step,
                    "passed": step.passed,
                    "changing": list(step.changing),
                    "seconds": list(step.seconds),
                    "outputs": [output.to_dict() for output in step.outputs],
                }
                for step in self.steps
            ],
            "nodes": [node.to_dict() for node in self.nodes],
            "placement": dict(self.placement),
        }


def compare_model(
    model: str | os.PathLike | bytes,
    candidate: Candidate | None = None,
    reference: Candidate = REFERENCE,
    options: Options | None = None,
    given: Sequence[Step] = (),
) -> Comparison:
    """Run `model` on both and compare all outputs, then each offloaded node with an oracle.

    `given` are the steps to run instead of generated ones; outputs that they hold are the expected
    values instead of the reference's. Raises what making and running the sessions raises.
    """
    candidate, options = candidate or Candidate(), options or Options()
    file = ModelFile.open(model)
    sides = _Sides(candidate.open(model), reference, model)
    results: list[StepResult] = []
    nodes: list[NodeResult] = []
    golden: list[Step] = []
    for iteration in range(options.iterations):
        seed = options.inputs.seed + iteration
        inputs = Inputs(file, replace(options.inputs, seed=seed))
        for step in _loop(sides, inputs, options, given, iteration):
            results.append(step.result)
            nodes += step.nodes
            golden.append(Step(step.feeds, step.outputs))
            if options.fail_fast and not (step.result.passed and all(n.passed for n in step.nodes)):
                break
        if options.fail_fast and not results[-1].passed:
            break
    explanation = sides.candidate.explain() if hasattr(sides.candidate, "explain") else None
    return Comparison(
        "the model given" if isinstance(model, bytes) else os.fspath(model),
        candidate.label,
        "the given outputs" if given and given[0].outputs else reference.label,
        tuple(results),
        tuple(nodes),
        explanation.to_dict() if explanation else {},
        tuple(golden),
    )


def compare_values(
    model: str | os.PathLike, feeds: Mapping[str, Array], outputs: Mapping[str, Array]
) -> Comparison:
    """Compare what was computed elsewhere with the reference, on the same feeds."""
    inputs = Inputs(ModelFile.open(model))
    expected = _run(REFERENCE.open(model), feeds)
    found = _differences(inputs, feeds, outputs, expected, {})
    result = StepResult(0, 0, found, (0.0, 0.0))
    return Comparison(os.fspath(model), "given outputs", REFERENCE.label, (result,))


def recheck(
    model: str | os.PathLike,
    actual: Sequence[Step],
    expected: Sequence[Step],
    tolerances: Mapping[str, Tolerance],
) -> Comparison:
    """Compare two saved runs again, with other tolerances; nothing is run."""
    if len(actual) != len(expected):
        raise InvalidInputError(
            f"the runs have {len(actual)} and {len(expected)} steps; only equally long runs compare"
        )
    inputs = Inputs(ModelFile.open(model))
    results: list[StepResult] = []
    feeds: dict[str, Array] = {}
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        feeds = {**feeds, **one.inputs}
        found = _differences(inputs, feeds, one.outputs, other.outputs, tolerances)
        results.append(StepResult(0, number, found, (0.0, 0.0)))
    return Comparison(os.fspath(model), "saved run", "saved run", tuple(results))


@dataclass
class _Sides:
    """Both sessions; the reference is made when it is first asked, since golden runs need none."""

    candidate: Any
    _reference: Candidate
    _model: Any
    _session: Any = None

    def reference(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        if self._session is None:
            self._session = self._reference.open(self._model)
        return _run(self._session, feeds)


@dataclass(frozen=True)
class _Outcome:
    result: StepResult
    nodes: list[NodeResult]
    feeds: dict[str, Array]
    outputs: dict[str, Array]


def _loop(
    sides: _Sides, inputs: Inputs, options: Options, given: Sequence[Step], iteration: int
) -> Any:
    """Yields the outcome of each step."""
    feeds = own = inputs.first(given[0].inputs if given else None)
    count = len(given) or options.steps
    for number in range(count):
        calls: list[NodeCall] = []
        start = time.perf_counter()
        outputs = _run(sides.candidate, own, calls if options.nodes else None)
        middle = time.perf_counter()
        saved = given[number].outputs if given else {}
        expected = dict(saved) if saved else sides.reference(feeds)
        seconds = (middle - start, time.perf_counter() - middle)
        changing = _changing(sides.candidate, own, outputs, options.repeat)
        found = _differences(inputs, feeds, outputs, expected, options.tolerances)
        result = StepResult(iteration, number, found, seconds, changing)
        yield _Outcome(result, [replay(call, number) for call in calls], dict(own), outputs)
        if number + 1 < count:
            following = given[number + 1].inputs if given else {}
            # The reference's tokens lead on both sides, else a near tie would end the comparison.
            carried = {**outputs, **expected}
            logits = {k: v for k, v in carried.items() if k == inputs.roles.logits}
            own = inputs.next(own, {**outputs, **logits}, following)
            feeds = inputs.next(feeds, carried, following)
            if not options.own_caches:
                own = feeds


def _run(
    session: Any, feeds: Mapping[str, Array], calls: list[NodeCall] | None = None
) -> dict[str, Array]:
    names = [output.name for output in session.get_outputs()]
    if calls is not None and hasattr(session, "run_traced"):
        values = session.run_traced(None, dict(feeds), calls.append)
    else:
        values = session.run(None, dict(feeds))
    return dict(zip(names, values, strict=True))


def _changing(
    session: Any, feeds: Mapping[str, Array], outputs: Mapping[str, Array], repeat: int
) -> tuple[str, ...]:
    """Outputs whose bits are not the same in each of `repeat` runs."""
    changed = set()
    for _ in range(repeat - 1):
        for name, value in _run(session, feeds).items():
            if np.asarray(value).tobytes() != np.asarray(outputs[name]).tobytes():
                changed.add(name)
    return tuple(sorted(changed))


def _differences(
    inputs: Inputs,
    feeds: Mapping[str, Array],
    outputs: Mapping[str, Array],
    expected: Mapping[str, Array],
    tolerances: Mapping[str, Tolerance],
) -> tuple[Difference, ...]:
    missing = sorted(expected.keys() - outputs.keys())
    if missing:
        raise InvalidInputError(
            f"outputs {missing} are expected, and were not computed; there are {sorted(outputs)}"
        )
    found = []
    for name, values in expected.items():
        care = inputs.care(feeds, name, np.asarray(outputs[name]))
        seen = values
        if care is not None and values.shape == np.shape(outputs[name]):
            seen = values[np.broadcast_to(care, values.shape)]
        elif care is not None:
            care = None
        tolerance = tolerances.get(name) or tolerances.get("") or model_tolerance(seen, inputs.half)
        top = TOP if name == inputs.roles.logits else ()
        found.append(difference(name, outputs[name], values, tolerance, care, top))
    return tuple(found)
