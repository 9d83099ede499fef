"""Caches of GroupQueryAttention: rings, shared buffers, quantized bytes, what a step costs."""

import numpy as np
import onnxruntime
import pytest
from running import accepting, call_of, node_of, run_route, spec_of

from ort_webgpu import InvalidModelError, WebGPUSession
from ort_webgpu.conformance.case import Case
from ort_webgpu.conformance.cases import corpus, rejections
from ort_webgpu.conformance.cases_gqa import GqaConfig, rotary_tables
from ort_webgpu.conformance.checks import check_rejected
from ort_webgpu.conformance.oracle_ort import run_on_ort
from ort_webgpu.device import Gpu, open_gpu
from ort_webgpu.ops.gqa_problem import GqaProblem
from ort_webgpu.ops.spec import Accepted, Caps, Rejected, Route
from ort_webgpu.wgsl.kernel import Program

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 32


# -- the window cache against a full cache with a window -------------------------------------------


def kept(total: int, capacity: int, window: int) -> int:
    """Rows that a window cache holds after `total` tokens: it drops capacity-window+1 at a time."""
    if total <= capacity:
        return total
    step = capacity - window + 1
    return total - step * -(-(total - capacity) // step)


class Stream:
    """Tokens of some batch entries, step by step, and what a full cache with a window makes of it.

    ORT's CPU EP runs each entry alone (it takes no chunk with batch > 1), its cache growing.
    """

    def __init__(self, kind: str, window: int, history: tuple[int, ...]):
        self.window, self.batch = window, len(history)
        self.rng = np.random.default_rng([window, *history])
        self.dtype = np.dtype(np.float16 if kind == "float16" else np.float32)
        self.bits = {"int8": 8, "int4": 4}.get(kind, 0)
        self.storage = np.dtype({"int8": np.int8, "int4": np.uint8}.get(kind, self.dtype))
        self.width = HEAD_SIZE // 2 if kind == "int4" else HEAD_SIZE
        self.tables = rotary_tables(1500, HEAD_SIZE // 2, self.dtype)
        base = 0.03 if kind == "int8" else 0.45
        channels = KV_HEADS * HEAD_SIZE
        self.scales = [
            (base * self.rng.uniform(0.7, 1.3, channels)).astype(np.float32) for _ in range(2)
        ]
        self.total = list(history)
        self.full = [[self._rows(n), self._rows(n)] for n in history]
        self.ort: onnxruntime.InferenceSession | None = None

    def _rows(self, count: int) -> np.ndarray:
        shape = (1, KV_HEADS, count, self.width)
        if self.bits:
            return self.rng.integers(0, 256, shape).astype(np.uint8).view(self.storage)
        return self.rng.standard_normal(shape).astype(self.dtype)

    def ring(self, capacity: int) -> list[np.ndarray]:
        """Window caches that hold the newest rows, and bytes of no value beyond them."""
        shape = (self.batch, KV_HEADS, capacity, self.width)
        caches = [np.full(shape, np.nan if not self.bits else 99, self.storage) for _ in range(2)]
        for b, rows in enumerate(self.newest(capacity)):
            for cache, part in zip(caches, rows, strict=True):
                cache[b, :, : part.shape[1]] = part
        return caches

    def newest(self, capacity: int) -> list[list[np.ndarray]]:
        """For each entry, the key and value rows that a window cache must hold now."""
        counts = [kept(n, capacity, self.window) for n in self.total]
        return [
            [part[0, :, n - count :] for part in parts]
            for parts, n, count in zip(self.full, self.total, counts, strict=True)
        ]

    def step(self, new: int) -> tuple[list[np.ndarray], np.ndarray]:
        """Fresh query, key and value rows, and the output of the full cache, which grows."""
        rows = [
            self.rng.standard_normal((self.batch, new, n * HEAD_SIZE)).astype(self.dtype)
            for n in (HEADS, KV_HEADS, KV_HEADS)
        ]
        self.total = [n + new for n in self.total]
        outputs = []
        for b in range(self.batch):
            one = [part[b : b + 1] for part in rows]
            case = self.case(False, one, self.full[b], self.total[b : b + 1])
            if self.ort is None:
                self.ort = cpu_session(case)
            output, *self.full[b] = self.ort.run(None, case.feeds())
            outputs.append(output)
        return rows, np.concatenate(outputs)

    def case(self, ring, rows, past, total, in_place=False) -> Case:
        """One step of `rows` over `past`, after which entry b has total[b] tokens."""
        inputs: list = [None] * 14
        inputs[:5] = [*rows, *past]
        inputs[5] = np.array(total, np.int32) - 1
        inputs[6] = np.array(max(total), np.int32)
        attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}
        attributes["local_window_size"] = self.window
        if self.bits:
            # no rotation, whose last bit would decide bytes
            inputs[12], inputs[13] = self.scales
            attributes |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL"}
            attributes["kv_cache_bit_width"] = self.bits
        else:
            inputs[7], inputs[8] = self.tables
            attributes["do_rotary"] = 1
        if ring:
            attributes["sliding_window_cache"] = 1
        return Case(
            name="ring" if ring else "full",
            op_type="GroupQueryAttention",
            attributes=attributes,
            inputs=tuple(inputs),
            wanted=(True, True, True),
            in_place=in_place,
            symbolic=True,
        )


def cpu_session(case: Case) -> onnxruntime.InferenceSession:
    """ORT's CPU EP, deterministic."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    model = case.model().SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("kind", ["float32", "float16", "int8", "int4"])
@pytest.mark.parametrize(("window", "capacity"), [(7, 10), (8, 8), (4, 16)])
def test_ring_equals_a_full_cache_with_a_window(kind, window, capacity, adapter):
    if "SwiftShader" in adapter and capacity != 10:
        pytest.skip("one ring is enough for the second adapter")
    gpu = open_gpu(adapter, "wgpu")
    stream = Stream(kind, window, (9, 2))
    lengths = np.random.default_rng(window).choice(
        [1, 2, 3, 5, capacity, 2 * capacity + 1], 200, p=[0.5, 0.2, 0.15, 0.1, 0.03, 0.02]
    )
    evictions, dropped = 0, [0, 0]
    for turn, new in enumerate(lengths):
        past = stream.ring(capacity)
        rows, expected = stream.step(int(new))
        gone = [n - kept(n, capacity, window) for n in stream.total]
        evictions += sum(now > then for now, then in zip(gone, dropped, strict=True))
        dropped = gone
        for in_place in (False, True):
            case = stream.case(True, rows, past, stream.total, in_place)
            routes = list(accepting(case, gpu))
            route = routes[(turn + in_place) % len(routes)]
            output, *caches = run_route(case, gpu, route)
            place = f"step {turn} of {new} on {route.name}, in place {in_place}"
            bounds = (1e-3, 2.5e-3) if kind == "float16" else (1e-4, 1e-5)
            np.testing.assert_allclose(output, expected, *bounds, err_msg=place)
            for b, newest in enumerate(stream.newest(capacity)):
                for cache, part in zip(caches, newest, strict=True):
                    held = cache[b, :, : part.shape[1]]
                    assert same_rows(held, part), place
    assert evictions > 80


def same_rows(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Bit for bit where quantized; rotated float32 rows may differ in the last bits."""
    if theirs.dtype == np.float32:
        return np.allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    if theirs.dtype == np.float16:
        return np.allclose(ours, theirs, rtol=1e-3, atol=1e-5)
    return np.array_equal(ours, theirs)


# -- rows that a step must not touch ---------------------------------------------------------------


def written_rows(case: Case) -> list[slice]:
    """The rows of each batch entry that a step with new keys writes, by the case's inputs alone."""
    new = case.first.shape[1]
    total = case.require("seqlens_k").reshape(-1).astype(int) + 1
    first_prompt = new == int(case.require("total_sequence_length").reshape(()))
    queries = case.input("query_seqlens")
    if queries is not None:
        return [slice(t - q, t) for t, q in zip(total, queries, strict=True)]
    starts = [0 if first_prompt else t - new for t in total]
    return [slice(start, start + new) for start in starts]


def appending(in_place: bool) -> list[Case]:
    """ci cases that write new rows behind a past that is no window cache, and give it out."""
    return [
        case
        for case in corpus("GroupQueryAttention")
        if case.in_place == in_place
        and case.wanted[1:3] == (True, True)
        and not case.attributes.get("sliding_window_cache")
        and case.input("past_key") is not None
        and (case.input("key") is None or case.require("key").shape[1])
    ]


class CacheAlone(Route):
    """The launches of a call but for its attention, which writes no cache and takes the longest
    to compile; the output stays what it was."""

    name = "cache_alone"

    def check(self, problem: GqaProblem, caps: Caps) -> Accepted | Rejected:
        return problem.check(caps)

    def program(self, problem: GqaProblem, caps: Caps) -> Program:
        before, after = problem.prologue(caps), problem.epilogue(caps)
        return Program(before.launches + after.launches, before.scratch + after.scratch)


def presents(case: Case, gpu: Gpu) -> list[np.ndarray]:
    """The caches that the call gives."""
    return run_route(case, gpu, CacheAlone())[1:3]


def test_shared_buffers_keep_all_other_rows_bit_for_bit(adapter):
    gpu = open_gpu(adapter, "wgpu")
    cases = appending(in_place=True)
    kinds = {case.require("past_key").dtype.name for case in cases}
    assert kinds == {"float32", "float16", "int8", "uint8"}
    for case in cases:
        pasts = case.require("past_key"), case.require("past_value")
        for past, present in zip(pasts, presents(case, gpu), strict=True):
            for b, rows in enumerate(written_rows(case)):
                untouched = np.ones(past.shape[2], bool)
                untouched[rows] = False
                assert present[b][:, untouched].tobytes() == past[b][:, untouched].tobytes(), case


def test_separate_buffers_are_zero_beyond_the_keys(adapter):
    gpu = open_gpu(adapter, "wgpu")
    cases = appending(in_place=False)
    assert len(cases) > 60
    for case in cases:
        pasts = case.require("past_key"), case.require("past_value")
        for past, present in zip(pasts, presents(case, gpu), strict=True):
            for b, rows in enumerate(written_rows(case)):
                assert not present[b, :, rows.stop :].tobytes().strip(b"\0"), case
                assert present[b, :, : rows.start].tobytes() == past[b, :, : rows.start].tobytes()


# -- quantized bytes -------------------------------------------------------------------------------


ODD = (0.0, -0.0, np.nan, np.inf, -np.inf, 6e4, -6e4, 1e-7)


def edgy(shape: tuple[int, ...], rng: np.random.Generator, dtype: np.dtype) -> np.ndarray:
    """Multiples of 1/64 up to and beyond the bounds of int8 in steps of 1/32, and ODD values."""
    values = (rng.integers(-300, 300, shape) / 64).astype(dtype)
    flat = values.reshape(-1)
    places = np.arange(0, flat.size, 17)
    flat[places] = np.array(ODD, dtype)[np.arange(places.size) % len(ODD)]
    return values


def quantized_case(bits: int, quant: str, dtype: np.dtype, past: int, new: int) -> Case:
    """A step without rotation over a past of full range; scales are powers of two, or 0."""
    rng = np.random.default_rng([bits, past, new])
    channels = KV_HEADS * HEAD_SIZE
    storage, width = (np.int8, HEAD_SIZE) if bits == 8 else (np.uint8, HEAD_SIZE // 2)
    count = 1 if quant == "PER_TENSOR" else channels
    scales = [2.0 ** rng.integers(-6, -3, count).astype(np.float32) for _ in range(2)]
    if count > 1:
        scales[0][3] = scales[1][5] = 0.0
    inputs: list = [None] * 14
    inputs[0] = rng.standard_normal((1, new, HEADS * HEAD_SIZE)).astype(dtype)
    inputs[1:3] = [edgy((1, new, channels), rng, dtype) for _ in range(2)]
    inputs[3:5] = [
        rng.integers(0, 256, (1, KV_HEADS, past, width)).astype(np.uint8).view(storage)
        for _ in range(2)
    ]
    inputs[5] = np.array([past + new - 1], np.int32)
    inputs[6] = np.array(past + new, np.int32)
    inputs[12:14] = scales
    return Case(
        name=f"quantized-{bits}-{quant}-{past}+{new}",
        op_type="GroupQueryAttention",
        attributes={
            "num_heads": HEADS,
            "kv_num_heads": KV_HEADS,
            "k_quant_type": quant,
            "v_quant_type": quant,
            "kv_cache_bit_width": bits,
        },
        inputs=tuple(inputs),
        wanted=(True, True, True),
    )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("quant", ["PER_TENSOR", "PER_CHANNEL"])
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_bytes_are_those_of_ort(bits, quant, dtype, adapter):
    gpu = open_gpu(adapter, "wgpu")
    for past, new in ((0, 19), (11, 6), (23, 1)):
        case = quantized_case(bits, quant, np.dtype(dtype), past, new)
        for ours, theirs in zip(presents(case, gpu), run_on_ort(case)[1:], strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=case.name)


@pytest.mark.parametrize(
    "case",
    [
        c
        for c in rejections("GroupQueryAttention")
        if c.name in ("gqa-float8-cache", "gqa-bfloat16")
    ],
    ids=str,
)
def test_other_narrow_types_are_refused_by_name(case, adapter):
    """ORT's CPU EP has no kernel for them either, so nothing is left to fall back on."""
    dtypes = [None if a is None else a.dtype.name for a in case.inputs]
    with pytest.raises(InvalidModelError, match=case.mentions[0]):
        spec_of(case).check_node(node_of(case), dtypes)
    error = check_rejected(lambda model: WebGPUSession(model, adapter=adapter), case)
    assert isinstance(error, InvalidModelError)
    assert "Export the model" in str(error)


# -- what a decode step costs ----------------------------------------------------------------------


def decode(cache: str, dtype: str = "f16") -> Case:
    """One token for each of two entries in a cache of fixed size, updated in place."""
    config = GqaConfig(
        phase="decode_static", length=200, head_size=64, batch=2, dtype=dtype, cache=cache,
        in_place=True,
    )  # fmt: skip
    return config.case(3)


def cache_bytes_read(case: Case, route) -> int:
    """Bytes of keys and values that the launches of one call have bound to read."""
    call = call_of(case)
    sizes = {name: case.inputs[index].nbytes for name, index in call.inputs.items()}
    sizes |= {output.operand: output.spec.nbytes for output in call.outputs.values()}
    program = route.program(call.problem, DECODE_CAPS)
    read = 0
    for launch in program.launches:
        names = dict(launch.operands)
        for binding in launch.kernel.bindings:
            if binding.name in ("k", "v") and names[binding.name] in call.problem.keys:
                read += sizes[names[binding.name]]
    return read


DECODE_CAPS = Caps(subgroup_min=32, subgroup_max=32, workgroup_memory=49152, storage_buffers=10)


@pytest.mark.parametrize("name", ["splitk", "splitk_nosg", "flash", "flash_nosg", "serial"])
def test_quantized_decode_reads_half_and_a_quarter_of_the_bytes(name):
    (route,) = (r for r in spec_of(decode("same")).routes if r.name == name)
    half, eighth, quarter = (cache_bytes_read(decode(c), route) for c in ("same", "int8", "int4"))
    rows = 2 * 2 * decode("same").require("past_key").shape[2]
    assert half == 2 * rows * 64 * 2  # keys and values, once
    assert (eighth, quarter) == (half // 2, half // 4)


def test_a_decode_step_in_place_reads_the_cache_once_and_writes_only_its_rows():
    """No launch but the attention reads the cache, and nothing of its size is scratch."""
    for cache in ("same", "int8", "int4"):
        case = decode(cache)
        call = call_of(case)
        for route in spec_of(case).routes:
            verdict = route.check(call.problem, DECODE_CAPS)
            if not route.forced_only and not isinstance(verdict, Rejected):
                program = route.program(call.problem, DECODE_CAPS)
                templates = [launch.kernel.template for launch in program.launches]
                assert "cache_copy" not in templates
                past = case.require("past_key").nbytes
                assert all(size < past for name, size in program.scratch), route.name


@pytest.mark.parametrize("cache", ["same", "int8", "int4"])
def test_decode_steps_allocate_nothing_after_the_second(cache, adapter):
    case = decode(cache)
    session = WebGPUSession(case.model().SerializeToString(), adapter=adapter, backend="wgpu")
    gpu = open_gpu(adapter, "wgpu")
    feeds = case.feeds()
    seen = []
    for step in range(12):
        total = 150 + step
        feeds["seqlens_k"] = np.full_like(feeds["seqlens_k"], total - 1)
        _, feeds["past_key"], feeds["past_value"] = session.run(None, feeds)
        seen.append(gpu.counters.allocations)
    assert seen[1:] == [seen[1]] * 11
