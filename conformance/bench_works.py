"""What `ort-webgpu bench` measures: calls of operators, each with its random data and its judge.

A Work is a call described by numbers. `sample(rng)` draws its data and gives a judge that knows the
right answer in float64, so that no wrong kernel is ever timed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import numpy as np

from ort_webgpu.conformance.cases_dmmha import DmmhaConfig
from ort_webgpu.conformance.cases_packed import PackedConfig
from ort_webgpu.conformance.oracles import NUMPY_ORACLES
from ort_webgpu.graph_tools.nodes import Node

__all__ = [
    "CaseWork",
    "GqaWork",
    "Part",
    "Sample",
    "Work",
    "gqa_error",
    "hardware_works",
    "software_works",
]


@dataclass(frozen=True)
class Part:
    """Launches that are also timed by themselves: those whose template begins with one of
    `templates`; with the floating-point operations and the least bytes that they need."""

    name: str
    templates: tuple[str, ...]
    flops: float
    bytes: float


@dataclass(frozen=True)
class Sample:
    """One draw of a work: the node, its inputs by position, the outputs that continue an input.

    `error(out, rng)` is |out - right| / |right| of output 0, right in float64, NaN where out has
    numbers that are not finite.
    """

    node: Node
    values: list[np.ndarray | None]
    in_place: frozenset[int]
    error: Callable[[np.ndarray, np.random.Generator], float]


class Work(Protocol):
    """One call of one operator."""

    @property
    def name(self) -> str: ...

    @property
    def op_type(self) -> str: ...

    @property
    def repeated_data(self) -> bool:
        """Whether it is timed over several data sets, so that a cache cannot hold what it reads."""

    @property
    def parts(self) -> tuple[Part, ...]: ...

    def sample(self, rng: np.random.Generator) -> Sample: ...


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

    op_type = "GroupQueryAttention"

    @property
    def repeated_data(self) -> bool:
        return self.q_len < 16

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
        rows = self.past + self.q_len
        if self.window >= 0:
            rows = min(rows, self.window + self.q_len - 1)
        return 2.0 * self.batch * self.kv_heads * rows * self.head_size * element

    @property
    def parts(self) -> tuple[Part, ...]:
        rows = self.batch * self.q_len * self.heads * self.head_size
        ends = 2.0 * rows * np.dtype(self.dtype).itemsize
        return (Part("attention", ("attention",), self.flops, self.cache_bytes + ends),)

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
            self.op_type,
            "com.microsoft",
            tuple(inputs),
            ("out", "present_k", "present_v"),
            attributes,
        )

    def sample(self, rng: np.random.Generator) -> Sample:
        """Fresh random data; the judge recomputes rows drawn at random."""
        values = self.inputs(rng)
        return Sample(self.node(), values, frozenset({1, 2}), partial(gqa_error, self, values))

    def inputs(self, rng: np.random.Generator) -> list[np.ndarray | None]:
        """Fresh random inputs by position; caches hold random rows up to the past."""
        kind = np.dtype(self.dtype)
        total = self.past + self.q_len
        cache_shape = [self.batch, self.kv_heads, total, self.head_size]

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, np.float32).astype(kind)

        def rows() -> np.ndarray:
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
            rows(),
            rows(),
            np.full(self.batch, total - 1, np.int32),
            np.array([total], np.int32),
            None,
            None,
            None,
            normal(1, self.heads, self.q_len, total) if self.bias else None,
            normal(self.heads) if self.sink else None,
        ]
        return values + ([scale, scale] if self.cache else [])


def gqa_error(
    work: GqaWork, values: list[np.ndarray | None], out: np.ndarray, rng: np.random.Generator
) -> float:
    """|out - right| / |right| over 24 rows drawn at random; `values` are the node's inputs."""
    d, group = work.head_size, work.heads // work.kv_heads
    q = values[0].reshape(work.batch, work.q_len, work.heads, d)  # type: ignore[union-attr]
    got = out.reshape(q.shape)
    rows_of = cache(partial(_rows, work, values))
    difference = norm = 0.0
    for _ in range(24):
        b, s, h = rng.integers(work.batch), rng.integers(work.q_len), rng.integers(work.heads)
        keys, rows = (rows_of(i, int(b), int(h) // group) for i in (3, 4))
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


@dataclass(frozen=True)
class CaseWork:
    """A call made by the corpus' generator and judged whole by its float64 reference."""

    name: str
    config: PackedConfig | DmmhaConfig

    @property
    def op_type(self) -> str:
        if isinstance(self.config, DmmhaConfig):
            return "DecoderMaskedMultiHeadAttention"
        return "PackedAttention" if self.config.op == "attention" else "PackedMultiHeadAttention"

    @property
    def repeated_data(self) -> bool:
        return isinstance(self.config, DmmhaConfig)

    @property
    def parts(self) -> tuple[Part, ...]:
        c = self.config
        element = 2 if c.dtype == "f16" else 4
        hidden = c.heads * c.head_size
        if isinstance(c, DmmhaConfig):
            keys = c.batch * (c.length + 1) * hidden
            return (Part("attention", ("attention",), 4.0 * keys, 2.0 * keys * element),)
        tokens, squares = sum(c.lengths), sum(n * n for n in c.lengths)
        width = 2 * hidden + c.values
        moved = element * (tokens * (c.input_size + width) + c.input_size * width)
        return (
            Part("projection", ("gemm",), 2.0 * tokens * c.input_size * width, float(moved)),
            Part(
                "attention",
                ("attention",),
                2.0 * squares * (hidden + c.values),
                float(element * tokens * (width + c.values)),
            ),
        )

    def sample(self, rng: np.random.Generator) -> Sample:
        """The case of a fresh seed."""
        case = self.config.case(int(rng.integers(1 << 30)) * 2)
        node = Node.from_proto(case.model().graph.node[0], 0)
        right = NUMPY_ORACLES[case.op_type](case).outputs[0]
        assert right is not None

        def error(out: np.ndarray, _: np.random.Generator) -> float:
            expected = right.astype(np.float64)
            difference = np.linalg.norm(out.astype(np.float64) - expected)
            found = float(difference / np.linalg.norm(expected))
            return found if np.isfinite(found) else float("nan")

        in_place = frozenset({1, 2}) if case.in_place else frozenset[int]()
        return Sample(node, list(case.inputs), in_place, error)


def hardware_works(quick: bool) -> list[Work]:
    """What a GPU is measured on. Shapes: 32 query heads, 8 KV heads, head size 128, batch 1,
    where the name says nothing else."""
    f32 = "float32"
    works: list[Work] = [
        GqaWork("prefill-512-f16", 512),
        GqaWork("prefill-2048-f16", 2048),
        GqaWork("prefill-8192-f16", 8192),
        GqaWork("prefill-2048-f32", 2048, dtype=f32),
        GqaWork("chunk-128-past-8192-f16", 128, 8192),
        GqaWork("prefill-8192-window-1024-f16", 8192, window=1024),
        GqaWork("prefill-2048-softcap-f16", 2048, softcap=30.0),
        GqaWork("prefill-2048-bias-f16", 2048, bias=True),
        GqaWork("prefill-2048-sink-f16", 2048, sink=True),
        *(GqaWork(f"prefill-2048-h{d}-f16", 2048, head_size=d) for d in (64, 96, 256)),
    ]
    for past in (4096, 32768):
        works += [
            GqaWork(f"decode-{past}-f16", 1, past),
            GqaWork(f"decode-{past}-f32", 1, past, dtype=f32),
            GqaWork(f"decode-{past}-int8", 1, past, cache="int8"),
            GqaWork(f"decode-{past}-int4", 1, past, cache="int4"),
        ]
    works += [
        GqaWork(f"decode-4096-batch-{n}-f16", 1, 4096, n)
        for n in ((4, 16) if quick else (2, 4, 8, 16))
    ]
    works += [GqaWork(f"prefill-{n}-f16", n) for n in (1024, 4096)]
    works += [GqaWork(f"decode-{n}-f16", 1, n) for n in (2048, 8192, 16384)]
    packed = PackedConfig(
        dtype="f16", heads=12, head_size=64, input_size=768, lengths=(128,) * 32, slack=0
    )
    works += [
        CaseWork("packed-32x128-f16", packed),
        CaseWork(
            "dmmha-2047-f16",
            DmmhaConfig(dtype="f16", heads=32, head_size=128, length=2047, room=1, in_place=True),
        ),
    ]
    return works


def software_works(quick: bool) -> list[Work]:
    """What a CPU's WebGPU adapter is measured on, float32: small enough to wait for."""
    small = {"heads": 8, "kv_heads": 2, "head_size": 64, "dtype": "float32"}
    works: list[Work] = [
        GqaWork("prefill-256-small-f32", 256, **small),  # type: ignore[arg-type]
        GqaWork("decode-1024-small-f32", 1, 1024, **small),  # type: ignore[arg-type]
        GqaWork("prefill-512-f32", 512, dtype="float32"),
        GqaWork("decode-2048-f32", 1, 2048, dtype="float32"),
    ]
    if not quick:
        works += [
            *(GqaWork(f"prefill-{n}-small-f32", n, **small) for n in (128, 512, 1024)),  # type: ignore[arg-type]
            *(GqaWork(f"decode-{n}-small-f32", 1, n, **small) for n in (2048, 4096, 16384)),  # type: ignore[arg-type]
            *(
                GqaWork(f"decode-1024-small-batch-{n}-f32", 1, 1024, n, **small)  # type: ignore[arg-type]
                for n in (4, 16)
            ),
        ]
    works += [
        CaseWork(
            "packed-4x64-f32",
            PackedConfig(heads=4, head_size=64, input_size=256, lengths=(64,) * 4),
        ),
        CaseWork(
            "dmmha-511-f32",
            DmmhaConfig(heads=8, head_size=64, length=511, room=1, in_place=True),
        ),
    ]
    return works
