"""Device time of programs and of works: timestamps around one pass, checked before it counts.

An idle GPU runs at a fraction of its clock and takes a tenth of a second to speed up, so each
measurement follows unmeasured work of the same kind in the same submit.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from ort_webgpu.conformance.bench_works import Part, Sample, Work
from ort_webgpu.device import DeviceBuffer, Gpu
from ort_webgpu.ops import OPS
from ort_webgpu.ops.spec import Call, Rejected, TensorSpec, Value, pick
from ort_webgpu.wgsl.kernel import Program

__all__ = [
    "MOST_ERROR",
    "PartTime",
    "Times",
    "Timing",
    "call_of",
    "checked",
    "data_sets",
    "seconds_of",
    "time_work",
    "wall_seconds",
]

Recorded = Sequence[tuple[Program, Mapping[str, DeviceBuffer]]]

REPEATS = 9
WARM_UP = 250e6  # nanoseconds of unmeasured work, at least, before the first measurement
WARM_ROUND = 30e6  # in rounds of so much,
MOST_ROUNDS = 60  # and no more of them than this
LEAD = 10e6  # before each later one
MOST_DISPATCHES = 3000  # of one submit
SOFTWARE_BUDGET = 1.5e9  # nanoseconds of measuring on an adapter that is the CPU
LONG = 0.3  # seconds of a node from which its parts are not timed apart
CACHE_BYTES = 128 << 20  # data sets of a timing together exceed this
SOFTWARE_CACHE_BYTES = 32 << 20
MOST_SETS = 32  # tiny works stay in the cache: more sets would cost more than they tell
MOST_ERROR = 2e-3  # relative, of an output that may be timed


@dataclass(frozen=True)
class Times:
    """Seconds of one pass, over several measurements."""

    median: float
    low: float
    high: float
    count: int

    def over(self, passes: int) -> "Times":
        """The same for one of `passes` passes."""
        return Times(self.median / passes, self.low / passes, self.high / passes, self.count)


@dataclass(frozen=True)
class PartTime:
    """A part of a work timed alone."""

    part: Part
    times: Times


@dataclass(frozen=True)
class Timing:
    """One route of one work: `whole` is all launches, `parts` some of them alone."""

    work: Work
    route: str
    chosen: bool
    whole: Times
    parts: tuple[PartTime, ...]
    error: float
    launches: int

    @property
    def main(self) -> PartTime:
        """The part that the work is about."""
        return self.parts[0]

    @property
    def node(self) -> float:
        """Median seconds of all launches."""
        return self.whole.median

    @property
    def attention(self) -> float:
        """Median seconds of the main part."""
        return self.main.times.median

    @property
    def spread(self) -> float:
        """(Slowest - fastest) / median of the main part."""
        times = self.main.times
        return (times.high - times.low) / times.median


def seconds_of(gpu: Gpu, programs: Recorded) -> Times:
    """Seconds of device time of `programs`, once through."""
    if not gpu.caps.timestamps:
        return _by_wall_clock(gpu, programs)
    if gpu.caps.software:
        once = max(1.0, gpu.time(programs, 1)[0])
        repeats = int(min(REPEATS, max(2, SOFTWARE_BUDGET / once)))
        return _times([x / 1e9 for x in gpu.time(programs, repeats)])
    dispatches = sum(len(program.launches) for program, _ in programs)
    most = max(1, MOST_DISPATCHES // dispatches - 1)
    once = _at_full_clock(gpu, programs, most)
    found = gpu.time(programs, REPEATS, lead=min(most, 1 + int(LEAD / once)))
    return _times([x / 1e9 for x in found])


def _at_full_clock(gpu: Gpu, programs: Recorded, most: int) -> float:
    """Nanoseconds of `programs` once through, when they have run until they got no faster."""
    once = max(1.0, gpu.time(programs, 1)[0])
    worked = steady = 0.0
    for _ in range(MOST_ROUNDS):
        lead = min(most, 1 + int(WARM_ROUND / once))
        now = max(1.0, gpu.time(programs, 1, lead=lead)[0])
        worked += now * (lead + 1)
        steady = steady + 1 if now > 0.97 * once else 0
        once = min(once, now)
        if steady >= 4 and worked >= WARM_UP:
            break
    return once


def _by_wall_clock(gpu: Gpu, programs: Recorded) -> Times:
    """For adapters without timestamps."""
    found = [wall_seconds(gpu, programs) for _ in range(REPEATS + 1)]
    return _times(found[1:])


def wall_seconds(gpu: Gpu, programs: Recorded) -> float:
    """Seconds by the wall clock from a submit of `programs` until four bytes behind it are here."""
    buffer = next(iter(programs[0][1].values()))
    start = time.perf_counter()
    gpu.run(programs)
    gpu.download([(buffer, TensorSpec("uint8", (4,)))])
    return time.perf_counter() - start


def call_of(work: Work, sample: Sample) -> Call:
    """The validated call of a sample, as its operator's contract makes it."""
    known = [
        None if v is None else Value(TensorSpec(v.dtype.name, v.shape), v) for v in sample.values
    ]
    return OPS["com.microsoft", work.op_type].call(sample.node, known, sample.in_place)


def _times(seconds: Sequence[float]) -> Times:
    return Times(median(seconds), min(seconds), max(seconds), len(seconds))


def time_work(
    gpu: Gpu, work: Work, seed: int, routes: frozenset[str] | None = None
) -> Iterator[Timing | str]:
    """A Timing for each of `routes` (None: all) that takes `work`; a line of text for one that is
    wrong, or, if it was named, rejects."""
    rng = np.random.default_rng(seed)
    spec = OPS["com.microsoft", work.op_type]
    sample = work.sample(rng)
    call = call_of(work, sample)
    verdicts = {route.name: route.check(call.problem, gpu.caps) for route in spec.routes}
    first = pick(spec.routes, call.problem, gpu.caps).route
    chosen = first.name if first else ""
    if routes == frozenset({"chosen"}):
        routes = frozenset({chosen})
    sets = data_sets(gpu, work, call, sample)
    for route in spec.routes:
        if routes is not None and route.name not in routes:
            continue
        verdict = verdicts[route.name]
        if isinstance(verdict, Rejected):
            if routes is not None:
                yield f"{work.name} {route.name}: {verdict.reason}"
            continue
        program = route.program(call.problem, gpu.caps)
        error = checked(gpu, call, sample, program, sets[0], rng)
        if not error < MOST_ERROR:
            yield f"{work.name} {route.name}: WRONG, relative error {error:.3g}"
            continue
        yield _time_route(gpu, work, program, sets, route.name, route.name == chosen, error)


def data_sets(gpu: Gpu, work: Work, call: Call, sample: Sample) -> list[dict[str, DeviceBuffer]]:
    """Operands of the call, several times where its data would stay in the device's cache.

    Only inputs are doubled. Outputs and scratch are shared, so that calls wait for each other as
    the layers of a model do.
    """
    values = sample.values
    one_set = sum(v.nbytes for v in values if v is not None)
    beyond = SOFTWARE_CACHE_BYTES if gpu.caps.software else CACHE_BYTES
    count = min(MOST_SETS, 1 + beyond // max(one_set, 1)) if work.repeated_data else 1
    shared = {name: gpu.upload(array) for name, array in call.arrays.items()}
    shared |= {
        output.operand: gpu.allocate(output.spec.nbytes)
        for output in call.outputs.values()
        if output.alias is None
    }
    sets = []
    for _ in range(count):
        own = {name: gpu.upload(values[i]) for name, i in call.inputs.items()}  # type: ignore[arg-type]
        for output in call.outputs.values():
            if output.alias is not None:
                own[output.operand] = gpu.upload(values[output.alias])  # type: ignore[arg-type]
        sets.append({**own, **shared})
    return sets


def checked(
    gpu: Gpu,
    call: Call,
    sample: Sample,
    program: Program,
    operands: dict[str, DeviceBuffer],
    rng: np.random.Generator,
) -> float:
    """The relative error of output 0, whose memory is poisoned first."""
    output = call.outputs[0]
    gpu.write(operands[output.operand], np.full(output.spec.nbytes, 0xC5, np.uint8))
    gpu.run([(program, operands)])
    (out,) = gpu.download([(operands[output.operand], output.spec)])
    return sample.error(out, rng)


def _time_route(
    gpu: Gpu,
    work: Work,
    program: Program,
    sets: list[dict[str, DeviceBuffer]],
    route: str,
    chosen: bool,
    error: float,
) -> Timing:
    # Scratch is given as operands: parts then read what the launches before them left there
    scratch = {name: gpu.allocate(size) for name, size in program.scratch}
    filled = [{**operands, **scratch} for operands in sets]
    gpu.run([(program, operands) for operands in filled])
    passes = 1 if gpu.caps.software else max(1, 8 // len(sets))

    def timed(launches: tuple) -> Times:
        one = Program(launches)
        times = seconds_of(gpu, [(one, operands) for operands in filled] * passes)
        return times.over(len(filled) * passes)

    node = timed(program.launches)
    parts = []
    for part in work.parts:
        own = tuple(x for x in program.launches if x.kernel.template.startswith(part.templates))
        if own:
            # Where a pass takes long, the rest of the node is small next to its attention
            whole = len(own) == len(program.launches) or node.median > LONG
            parts.append(PartTime(part, node if whole else timed(own)))
    return Timing(work, route, chosen, node, tuple(parts), error, len(program.launches))
