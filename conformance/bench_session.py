"""Whole steps by the wall clock: a WebGPUSession on the very chains that peers are given.

Its figure for a layer is a slope over chain lengths, as theirs is: recording, submitting, waiting
and fetching the result once are in it as far as they grow with the layers.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np

from ort_webgpu import AdapterInfo, OrtWebGpuError, WebGPUSession
from ort_webgpu.conformance.bench_peer_ort import feeds_of, gqa_chain, median_seconds
from ort_webgpu.conformance.bench_peers import layers_of
from ort_webgpu.conformance.bench_time import MOST_ERROR
from ort_webgpu.conformance.bench_works import GqaWork, gqa_error
from ort_webgpu.conformance.checks import MismatchError

__all__ = ["StepFigure", "time_step"]


@dataclass(frozen=True)
class StepFigure:
    """Wall time of a layer, and of the whole run of each chain length. `host` is what a layer takes
    of the calling thread's processor time."""

    work: str
    seconds: float
    host: float
    runs: tuple[tuple[int, float], ...]


def time_step(work: GqaWork, info: AdapterInfo) -> StepFigure | str:
    """The figure, or why there is none."""
    few, many = layers_of(work, info.software)
    try:
        (first, first_host), (last, last_host) = (_seconds(work, n, info) for n in (few, many))
    except (MismatchError, OrtWebGpuError) as error:
        return f"{work.name}, whole step: {error}"
    runs = ((few, first), (many, last))
    slope = (last - first) / (many - few)
    if slope <= 0:
        return f"{work.name}: the whole step was too noisy: {runs}"
    return StepFigure(work.name, slope, (last_host - first_host) / (many - few), runs)


def _seconds(work: GqaWork, layers: int, info: AdapterInfo) -> tuple[float, float]:
    """Medians of a run: wall time, and processor time of this thread."""
    session = WebGPUSession(
        gqa_chain(asdict(work), layers),
        adapter=info.index,
        backend=info.backend,
        fallback="error",
        tuned=False,
    )
    feeds = feeds_of(asdict(work), layers)
    step = Decoding(session, work, feeds) if work.past else Prefill(session, feeds)
    if layers == 1:
        _check(work, feeds, step())
    host: list[float] = []
    return median_seconds(lambda: _timed(step, host)), median(host[1:])


def _timed(step: Callable[[], np.ndarray], host: list[float]) -> None:
    start = time.thread_time()
    step()
    host.append(time.thread_time() - start)


def _check(work: GqaWork, feeds: Mapping[str, np.ndarray], out: np.ndarray) -> None:
    """MismatchError where the chain of one layer is wrong: nothing wrong is timed."""
    empty = np.zeros((work.batch, work.kv_heads, 0, work.head_size), work.dtype)
    values = [feeds["q"], feeds["k"], feeds["v"], feeds.get("pk0", empty), feeds.get("pv0", empty)]
    others = [feeds.get("bias"), feeds.get("sink")]
    error = gqa_error(work, [*values, *[None] * 5, *others], out, np.random.default_rng(0))
    if not error < MOST_ERROR:
        raise MismatchError(f"WRONG, relative error {error:.3g}")


@dataclass(frozen=True)
class Prefill:
    """Each call is a run without a past."""

    session: WebGPUSession
    feeds: Mapping[str, np.ndarray]

    def __call__(self) -> np.ndarray:
        return self.session.run(["out"], self.feeds)[0]


class Decoding:
    """A decode loop: each call is a step on a cache that stays on the device."""

    def __init__(self, session: WebGPUSession, work: GqaWork, feeds: Mapping[str, np.ndarray]):
        self._session = session
        self._cache = session.new_cache(work.batch, capacity=work.past + 64 * work.q_len)
        session.run(["out"], dict(feeds), cache=self._cache)
        self._feeds = {n: a for n, a in feeds.items() if n[:2] not in ("pk", "pv")}
        self._start = work.past

    def __call__(self) -> np.ndarray:
        # The loop goes back after each step, so that all steps see as many keys
        self._cache.truncate(self._start)
        return self._session.run(["out"], self._feeds, cache=self._cache)[0]
