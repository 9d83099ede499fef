"""`ort-webgpu tune`: which core route, and which of its settings, is the fastest on an adapter.

Every candidate is judged against float64 before it is timed, as `bench` does; a wrong one is left
out and reported. What the rule takes is replaced only by what is clearly faster, three times.
"""

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from ort_webgpu import NodeCall, OrtWebGpuError, WebGPUSession
from ort_webgpu.conformance.bench_time import (
    MOST_ERROR,
    call_of,
    checked,
    data_sets,
    seconds_of,
    wall_seconds,
)
from ort_webgpu.conformance.bench_works import GqaWork, Sample, Work
from ort_webgpu.conformance.generate import InputOptions, Inputs
from ort_webgpu.device import DeviceBuffer, Gpu
from ort_webgpu.graph_tools import ModelFile
from ort_webgpu.ops import OPS
from ort_webgpu.ops.attention_core import ComposedRoute
from ort_webgpu.ops.spec import Call, Caps, Rejected, pick
from ort_webgpu.ops.tuned import Finding, Tuned
from ort_webgpu.wgsl.kernel import Program

__all__ = ["default_works", "model_works", "tune_work"]

_GAIN = 0.95  # of the rule's time, that a candidate must stay below to replace it
_ROUNDS = 2  # further measurements of both, in turns, that must say the same
_WAIT = 0.02  # seconds from which a first run decides whether a candidate is timed at all
_HOPELESS = {True: 3.0, False: 10.0}  # times the best so far; an idle GPU starts at a slow clock
_WORTH = 2.0  # times the best so far, up to which other settings of a route are tried

_GQA = "GroupQueryAttention"


@dataclass(frozen=True)
class _Candidate:
    route: ComposedRoute
    setting: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.route.measured_as


@dataclass
class _Job:
    """One call on the device, to be run by any candidate."""

    gpu: Gpu
    work: Work
    call: Call
    sample: Sample
    sets: list[dict[str, DeviceBuffer]]
    rng: np.random.Generator

    @classmethod
    def of(cls, gpu: Gpu, work: Work, seed: int) -> "_Job":
        rng = np.random.default_rng(seed)
        sample = work.sample(rng)
        call = call_of(work, sample)
        return cls(gpu, work, call, sample, data_sets(gpu, work, call, sample), rng)

    def caps(self, candidate: _Candidate) -> Caps:
        """Caps by which the candidate's route takes the candidate's setting."""
        figure = (candidate.name, 1.0)
        settings = ((candidate.name, candidate.setting),)
        finding = Finding(self.call.problem.core.call_class, (figure,), figure, settings)
        return replace(self.gpu.caps, tuned=Tuned((finding,)))

    def program(self, candidate: _Candidate) -> Program:
        return candidate.route.program(self.call.problem, self.caps(candidate))

    def error(self, candidate: _Candidate) -> float:
        """The relative error of the output."""
        program = self.program(candidate)
        return checked(self.gpu, self.call, self.sample, program, self.sets[0], self.rng)

    def seconds(self, candidate: _Candidate, best: float = np.inf) -> float:
        """Of one call, the fastest of several: what else the machine does only adds to it.

        Less exact where that is far from `best`.
        """
        program = self.program(candidate)
        scratch = {name: self.gpu.allocate(size) for name, size in program.scratch}
        programs = [(program, {**operands, **scratch}) for operands in self.sets]
        first = wall_seconds(self.gpu, programs) / len(programs)
        hopeless = first > best * _HOPELESS[self.gpu.caps.software]
        if hopeless and first * len(programs) > _WAIT:
            return first
        return max(1e-9, seconds_of(self.gpu, programs).low / len(programs))


def tune_work(
    gpu: Gpu, work: Work, quick: bool = False, seed: int = 0
) -> tuple[Finding, list[str]]:
    """What was found for the class of `work`, and a line for each candidate that was wrong.

    `quick`: no settings that need a kernel of their own. Raises OrtWebGpuError where the call does
    not fit the device, or no candidate is right.
    """
    job = _Job.of(gpu, work, seed)
    measured: dict[_Candidate, float] = {}
    wrong: list[str] = []
    by_rule: _Candidate | None = None
    for route in _routes(job):
        for candidate in _settings(job, route, quick):
            best = min(measured.values(), default=np.inf)
            same = [s for c, s in measured.items() if c.route is route]
            if same and min(same) > best * _WORTH:
                break
            if not (error := job.error(candidate)) < MOST_ERROR:
                text = f"{work.name} {candidate.name} {candidate.setting or ''}".rstrip()
                wrong.append(f"{text}: WRONG, relative error {error:.3g}")
                continue
            measured[candidate] = job.seconds(candidate, best)
            by_rule = by_rule or candidate
    if by_rule is None:
        raise OrtWebGpuError(f"{work.name}: no route is right on this adapter. {'; '.join(wrong)}")
    return _finding(job, measured, by_rule), wrong


def _routes(job: _Job) -> list[ComposedRoute]:
    """Those that take the call behind one prologue, the rule's first."""
    problem, caps = job.call.problem, job.gpu.caps
    routes = OPS["com.microsoft", job.work.op_type].routes
    first = pick(routes, problem, caps).route
    return [
        route
        for route in sorted(routes, key=lambda r: r is not first)
        if isinstance(route, ComposedRoute)
        and not route.forced_only
        and first is not None
        and route.stage == first.stage
        and not isinstance(route.check(problem, caps), Rejected)
    ]


def _settings(job: _Job, route: ComposedRoute, quick: bool) -> Iterator[_Candidate]:
    """The route as it is, then with each other setting."""
    core = route.core_route
    settings = core.settings(job.call.problem.core, job.gpu.caps)
    for setting in settings[:1] if quick and core.setting_compiles else settings:
        yield _Candidate(route, setting)


def _finding(job: _Job, measured: dict[_Candidate, float], by_rule: _Candidate) -> Finding:
    """The best of `measured`, if it is clearly better than the rule's again and again."""
    chosen = min(measured, key=measured.__getitem__)
    for further in range(_ROUNDS + 1):
        if further:
            measured |= {one: job.seconds(one) for one in (by_rule, chosen)}
        if measured[chosen] > measured[by_rule] * _GAIN:
            chosen = by_rule
            break
    by_route: dict[str, float] = {}
    for candidate, seconds in measured.items():
        by_route[candidate.name] = min(seconds, by_route.get(candidate.name, np.inf))
    by_route[chosen.name] = measured[chosen]
    times = sorted(by_route.items(), key=lambda item: (item[0] != chosen.name, item[1]))
    kept = chosen is not by_rule and chosen.setting
    return Finding(
        job.call.problem.core.call_class,
        tuple(times),
        (by_rule.name, measured[by_rule]),
        ((chosen.name, chosen.setting),) if kept else (),
        datetime.date.today().isoformat(),
    )


# -- what is measured ------------------------------------------------------------------------------


def default_works(gpu: Gpu, quick: bool) -> list[Work]:
    """Calls whose classes cover common models: a finding holds for half to twice each size."""
    if gpu.caps.software:
        small = GqaWork("", 1, heads=8, kv_heads=2, head_size=64, dtype="float32")
        large = GqaWork("", 1, dtype="float32")
        return [
            *_steps(small, (1024,) if quick else (256, 1024, 4096), (256,) if quick else (64, 256)),
            *(() if quick else _steps(large, (512, 2048), (128,))),
        ]
    pasts, prompts = (512, 2048, 8192, 32768), (128, 512, 2048)
    if quick:
        return list(_steps(GqaWork("", 1), pasts, prompts[1:]))
    works: list[Work] = []
    for head_size, dtype in product((128, 64), ("float16", "float32")):
        base = GqaWork("", 1, head_size=head_size, dtype=dtype)
        works += _steps(base, pasts, prompts)
        works += _steps(replace(base, batch=4), pasts[1:3], prompts[1:2])
        works += _steps(replace(base, kv_heads=32), pasts[1:3], prompts[1:2])
    for cache in ("int8", "int4"):
        works += _steps(GqaWork("", 1, cache=cache), pasts, prompts[1:2])
    return works


#: Pasts of decode steps and lengths of prompts, by (software adapter, quick).
_MODEL_SIZES: dict[tuple[bool, bool], tuple[Sequence[int], Sequence[int]]] = {
    (True, True): ((1024,), (64,)),
    (True, False): ((256, 1024), (64, 256)),
    (False, True): ((2048,), (512,)),
    (False, False): ((512, 2048, 8192), (128, 512, 2048)),
}


def model_works(gpu: Gpu, model: Path, quick: bool) -> list[Work]:
    """Prompts and decode steps of each kind of GroupQueryAttention node that the model has.

    The model is run once, on four random tokens. Raises OrtWebGpuError where it has no such node.
    """
    session = WebGPUSession(
        model, adapter=gpu.info.index, backend=gpu.info.backend, tuned=False, fallback="cpu"
    )
    feeds = Inputs(ModelFile.open(model), InputOptions(batch=1, length=4)).first()
    calls: list[NodeCall] = []
    session.run_traced(None, feeds, calls.append)
    kinds = {_work_of(call): None for call in calls if call.node.op_type == _GQA and call.route}
    if not kinds:
        raise OrtWebGpuError(
            f"{str(model)!r} has no {_GQA} node on the device, and `tune` knows no other operator's"
            " shapes. Leave MODEL out to measure common shapes"
        )
    pasts, prompts = _MODEL_SIZES[gpu.caps.software, quick]
    return [work for kind in kinds for work in _steps(kind, pasts, prompts)]


def _work_of(call: NodeCall) -> GqaWork:
    """The node's kind of call, of one token and without a past."""
    attributes, query = call.node.attributes, call.inputs[0]
    assert query is not None
    heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
    packed = 0 if call.node.has_input(1) else 2 * kv_heads
    quantized = attributes.get("k_quant_type", "NONE") != "NONE"
    return GqaWork(
        "",
        1,
        heads=heads,
        kv_heads=kv_heads,
        head_size=query.shape[-1] // (heads + packed),
        dtype=query.dtype.name,
        cache=f"int{attributes.get('kv_cache_bit_width', 8)}" if quantized else "",
        window=attributes.get("local_window_size", -1),
        softcap=attributes.get("softcap", 0.0),
        bias=call.node.has_input(10),
        sink=call.node.has_input(11),
    )


def _steps(base: GqaWork, pasts: Sequence[int], prompts: Sequence[int]) -> Iterator[GqaWork]:
    kind = f"{base.heads}/{base.kv_heads} heads of {base.head_size}, {base.cache or base.dtype}"
    kind += f", batch {base.batch}" if base.batch > 1 else ""
    for past in pasts:
        yield replace(base, name=f"decode at {past}, {kind}", past=past)
    for length in prompts:
        yield replace(base, name=f"prompt of {length}, {kind}", q_len=length)
