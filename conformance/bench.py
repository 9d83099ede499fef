"""Times operators on a device: kernel time by timestamps, checked against float64 first.

A Work is one call of one operator. Every route that takes it is checked on fresh random data (rows
drawn at random, recomputed by numpy in float64), then timed: the median of `REPEATS` pairs of
timestamps, each around one pass over enough data sets to outgrow the device's cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from ort_webgpu.device import DeviceBuffer, Gpu
from ort_webgpu.graph_tools.nodes import Node
from ort_webgpu.ops import OPS
from ort_webgpu.ops.spec import Call, Rejected, Route, TensorSpec, Value
from ort_webgpu.wgsl.kernel import Program

__all__ = ["GqaWork", "Timing", "time_work"]

REPEATS = 7
LEAD = 15e6  # nanoseconds of unmeasured work before each measurement
CACHE_BYTES = 128 << 20  # data sets of a timing together exceed this


@dataclass(frozen=True)
class GqaWork:
    """One GroupQueryAttention call: `q_len` new tokens behind `past` ones, the cache in place.

    `cache`: "" for the dtype of the inputs, else "int8" or "int4" (one scale per channel).
    """

    name: str
    q_len: int
    past: int = 0
    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    dtype: str = "float16"
    cache: str = ""
    window: int = -1
    softcap: float = 0.0
    bias: bool = False
    sink: bool = False

    @property
    def visible(self) -> float:
        """Keys that all query rows of one head see together."""
        rows = np.arange(self.q_len) + self.past + 1
        return float(np.minimum(rows, self.window).sum() if self.window >= 0 else rows.sum())

    @property
    def flops(self) -> float:
        """Floating-point operations of the attention: two products of two operations each."""
        return 4.0 * self.batch * self.heads * self.head_size * self.visible

    @property
    def cache_bytes(self) -> float:
        """Bytes of keys and values that must be read once."""
        element = {"": np.dtype(self.dtype).itemsize, "int8": 1, "int4": 0.5}[self.cache]
        return (
            2.0 * self.batch * self.kv_heads * (self.past + self.q_len) * self.head_size * element
        )

    def node(self) -> Node:
        """The node, with all inputs this work uses wired."""
        attributes: dict[str, object] = {
            "num_heads": self.heads,
            "kv_num_heads": self.kv_heads,
            "local_window_size": self.window,
            "softcap": self.softcap,
        }
        if self.cache:
            attributes |= {
                "k_quant_type": "PER_CHANNEL",
                "v_quant_type": "PER_CHANNEL",
                "kv_cache_bit_width": 8 if self.cache == "int8" else 4,
            }
        inputs = ["q", "k", "v", "past_k", "past_v", "seqlens", "total", "", "", ""]
        inputs += ["bias" if self.bias else "", "sink" if self.sink else ""]
        inputs += ["k_scale", "v_scale"] if self.cache else []
        return Node(
            0,
            self.name,
            "GroupQueryAttention",
            "com.microsoft",
            tuple(inputs),
            ("out", "present_k", "present_v"),
            attributes,
        )

    def inputs(self, rng: np.random.Generator) -> list[np.ndarray | None]:
        """Fresh random inputs by position; caches hold random rows up to the past."""
        kind = np.dtype(self.dtype)
        total = self.past + self.q_len
        cache_shape = [self.batch, self.kv_heads, total, self.head_size]

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, np.float32).astype(kind)

        def cache() -> np.ndarray:
            if self.cache == "int8":
                return rng.integers(-127, 128, cache_shape, np.int8)
            if self.cache == "int4":
                return rng.integers(0, 256, [*cache_shape[:3], self.head_size // 2], np.uint8)
            return normal(*cache_shape)

        width = self.kv_heads * self.head_size
        scale = np.full(width, 1 / (4 if self.cache == "int4" else 60), np.float32)
        values: list[np.ndarray | None] = [
            normal(self.batch, self.q_len, self.heads * self.head_size),
            normal(self.batch, self.q_len, width),
            normal(self.batch, self.q_len, width),
            cache(),
            cache(),
            np.full(self.batch, total - 1, np.int32),
            np.array([total], np.int32),
            None,
            None,
            None,
            normal(1, self.heads, self.q_len, total) if self.bias else None,
            normal(self.heads) if self.sink else None,
        ]
        return values + ([scale, scale] if self.cache else [])


@dataclass(frozen=True)
class Timing:
    """One route of one work. Times in seconds: of all launches, and of attention's own."""

    work: GqaWork
    route: str
    node: float
    attention: float
    spread: float
    error: float
    launches: int
    tags: dict[str, float] = field(default_factory=dict)

    @property
    def tflops(self) -> float:
        return self.work.flops / self.attention / 1e12

    @property
    def terabytes(self) -> float:
        return self.work.cache_bytes / self.attention / 1e12


def time_work(
    gpu: Gpu, work: GqaWork, seed: int, routes: frozenset[str] | None = None
) -> Iterator[Timing | str]:
    """A Timing for each accepting route; a line of text for a route that is wrong or refused."""
    rng = np.random.default_rng(seed)
    spec = OPS["com.microsoft", "GroupQueryAttention"]
    values = work.inputs(rng)
    known = [None if v is None else Value(TensorSpec(v.dtype.name, v.shape), v) for v in values]
    call = spec.call(work.node(), known, frozenset({1, 2}))
    one_set = sum(v.nbytes for v in values if v is not None)
    sets = [
        _upload(gpu, call, values)
        for _ in range(1 + int(CACHE_BYTES // max(one_set, 1)) if work.q_len < 16 else 1)
    ]
    for route in spec.routes:
        if routes is not None and route.name not in routes:
            continue
        verdict = route.check(call.problem, gpu.caps)
        if isinstance(verdict, Rejected):
            if routes is not None:
                yield f"{work.name} {route.name}: {verdict.reason}"
            continue
        yield _time_route(gpu, work, call, values, sets, route, rng)


def _upload(gpu: Gpu, call: Call, values: list[np.ndarray | None]) -> dict[str, DeviceBuffer]:
    buffers = {name: gpu.upload(values[i]) for name, i in call.inputs.items()}  # type: ignore[arg-type]
    buffers |= {name: gpu.upload(array) for name, array in call.arrays.items()}
    for output in call.outputs.values():
        if output.alias is not None:
            buffers[output.operand] = gpu.upload(values[output.alias])  # type: ignore[arg-type]
        else:
            buffers[output.operand] = gpu.upload(np.full(output.spec.nbytes, 0xC5, np.uint8))
    return buffers


def _time_route(
    gpu: Gpu,
    work: GqaWork,
    call: Call,
    values: list[np.ndarray | None],
    sets: list[dict[str, DeviceBuffer]],
    route: Route,
    rng: np.random.Generator,
) -> Timing | str:
    program = route.program(call.problem, gpu.caps)
    gpu.write(sets[0]["output"], np.full(call.outputs[0].spec.nbytes, 0xC5, np.uint8))
    gpu.run([(program, sets[0])])
    (out,) = gpu.download([(sets[0]["output"], call.outputs[0].spec)])
    error = _error(work, values, out, rng)
    if not error < 2e-3:
        return f"{work.name} {route.name}: WRONG, relative error {error}"
    own = tuple(x for x in program.launches if x.kernel.template.startswith("attention"))
    attention = Program(own, program.scratch)
    q = dict(program.scratch)["q"]
    prepared = [
        {**s, "q": gpu.upload(rng.standard_normal(q // 2, np.float32).astype(np.float16))}
        for s in sets[:1]
    ]
    prepared = [{**s, "q": prepared[0]["q"]} for s in sets]
    attention = Program(own, tuple(x for x in program.scratch if x[0] != "q"))
    passes = max(1, 8 // len(sets))
    node_times = _times(gpu, [(program, s) for s in sets] * passes)
    own_times = _times(gpu, [(attention, s) for s in prepared] * passes)
    count = len(sets) * passes * 1e9
    return Timing(
        work,
        route.name,
        median(node_times) / count,
        median(own_times) / count,
        (max(own_times) - min(own_times)) / median(own_times),
        error,
        len(program.launches),
    )


def _times(gpu: Gpu, programs: list[tuple[Program, dict[str, DeviceBuffer]]]) -> list[float]:
    """Nanoseconds of `programs`, REPEATS times, after LEAD of the same: idle devices are slow."""
    once = min(gpu.time(programs, 3))
    return gpu.time(programs, REPEATS, lead=min(100, 1 + int(LEAD / once)))


def _error(
    work: GqaWork, values: list[np.ndarray | None], out: np.ndarray, rng: np.random.Generator
) -> float:
    """|out - reference| / |reference| over rows drawn at random, reference in float64."""
    d, group, total = work.head_size, work.heads // work.kv_heads, work.past + work.q_len
    q = values[0].reshape(work.batch, work.q_len, work.heads, d)  # type: ignore[union-attr]
    got = out.reshape(q.shape)
    difference = norm = 0.0
    for _ in range(24):
        b, s, h = rng.integers(work.batch), rng.integers(work.q_len), rng.integers(work.heads)
        keys, rows = (_rows(work, values, i, b, h // group) for i in (3, 4))
        end = work.past + s + 1
        start = max(0, end - work.window) if work.window >= 0 else 0
        x = keys[start:end] @ q[b, s, h].astype(np.float64) / np.sqrt(d)
        if work.softcap:
            x = work.softcap * np.tanh(x / work.softcap)
        if work.bias:
            x += values[10][0, h, s, start:end].astype(np.float64)  # type: ignore[index]
        weights = np.exp(x - x.max())
        denominator = weights.sum()
        if work.sink:
            denominator += np.exp(float(values[11][h]) - x.max())  # type: ignore[index]
        expected = weights @ rows[start:end] / denominator
        actual = got[b, s, h].astype(np.float64)
        difference += float(((actual - expected) ** 2).sum())
        norm += float((expected**2).sum())
    assert total >= work.q_len
    return float(np.sqrt(difference / norm)) if np.isfinite(difference) else float("nan")


def _rows(
    work: GqaWork, values: list[np.ndarray | None], index: int, b: int, head: int
) -> np.ndarray:
    """Keys (index 3) or values (4) of one KV head after the call, float64 (total, head_size)."""
    cache = values[index][b, head]  # type: ignore[index]
    new = values[index - 2][b].reshape(work.q_len, work.kv_heads, -1)[:, head]  # type: ignore[index]
    if not work.cache:
        return np.concatenate([cache[: work.past], new]).astype(np.float64)
    scale = values[index + 9].reshape(work.kv_heads, -1)[head].astype(np.float64)  # type: ignore[union-attr]
    if work.cache == "int8":
        old, low, high = cache[: work.past].astype(np.float64), -128, 127
    else:
        nibbles = np.stack([cache & 15, cache >> 4], -1).reshape(cache.shape[0], -1)
        old, low, high = nibbles[: work.past].astype(np.float64) - 8, -8, 7
    fresh = np.clip(np.rint(new.astype(np.float64) / scale), low, high)
    return np.concatenate([old, fresh]) * scale
