"""The materialized routes: what Tint says of their native text, tiles, scratch, who picks them."""

import re

import numpy as np
import pytest
from running import POISON, call_of, node_of, run_route, spec_of
from tint import tint

from ort_webgpu import WebGPUSession
from ort_webgpu.conformance.cases import corpus
from ort_webgpu.conformance.cases_gqa import GqaConfig
from ort_webgpu.conformance.checks import compare_outputs
from ort_webgpu.conformance.oracles import oracle
from ort_webgpu.device import open_gpu
from ort_webgpu.ops.attention import CORE_ROUTES
from ort_webgpu.ops.attention_matrix import TILES, Materialized, operand_of
from ort_webgpu.ops.spec import Caps, Rejected, TensorSpec
from ort_webgpu.steps import Chooser
from ort_webgpu.wgsl.kernel import Kernel, Program
from ort_webgpu.wgsl.render import render

SHAPES = ((16, 16, 16, "f16", "f32"), (8, 8, 8, "f32", "f32"))
MATRIX_CAPS = Caps(
    dialect="tint",
    workgroup_memory=49152,
    subgroup_min=32,
    subgroup_max=32,
    f16=True,
    storage_buffers=10,
    matrix_tiles=SHAPES,
)
SMALL_CAPS = Caps(
    dialect="tint", subgroup_min=32, subgroup_max=32, f16=True, storage_buffers=10,
    matrix_tiles=SHAPES,
)  # fmt: skip


def native_kernels(op_type: str = "GroupQueryAttention") -> dict[Kernel, str]:
    """Every kernel of the native route for the ci corpus, on a large and on a small device."""
    kernels = {}
    for case in corpus(op_type):
        problem = call_of(case).problem
        for caps in (MATRIX_CAPS, SMALL_CAPS):
            for route in spec_of(case).routes:
                accepted = not isinstance(route.check(problem, caps), Rejected)
                if route.name == "matrix" and accepted:
                    for launch in route.program(problem, caps).launches:
                        kernels[launch.kernel] = case.name
    return {k: name for k, name in kernels.items() if "matrix" in k.template}


def test_tint_takes_every_native_kernel():
    kernels = native_kernels()
    operands = {dict(kernel.constants)["operand"] for kernel in kernels}
    assert operands == {"f16", "f32"}
    texts = [render(kernel, "tint") for kernel in kernels]
    errors = tint(texts)
    assert [(k.label, e) for k, e in zip(kernels, errors, strict=True) if e] == []


def test_tint_finds_a_wrong_operand():
    kernel = next(iter(native_kernels()))
    text = render(kernel, "tint")
    wrong = text.replace("subgroup_matrix_left<", "subgroup_matrix_right<")
    assert wrong != text
    first, second = tint([text, wrong])
    assert first == ""
    assert "subgroupMatrixMultiplyAccumulate" in second


SIZES = {"f32": 4, "vec2<u32>": 8, "vec4<u32>": 16, "vec4<f32>": 16}


def test_workgroup_variables_keep_matrix_loads_aligned():
    """Sizes are multiples of 16 bytes, and what MatrixTile.workgroup_memory says is enough."""
    for kernel in native_kernels():
        constants = dict(kernel.constants)
        declared = re.findall(
            r"var<workgroup> \w+: array<([\w<>]+), (\d+)>", render(kernel, "tint")
        )
        sizes = [SIZES[element] * int(count) for element, count in declared]
        assert len(sizes) >= 3
        assert all(size % 16 == 0 for size in sizes)
        size = tuple(constants[name] for name in ("BM", "BN", "BK"))
        (tile,) = (t for t in TILES if (t.bm, t.bn, t.bk) == size)
        assert sum(sizes) <= tile.workgroup_memory(constants["operand"])


PREFILL = GqaConfig(phase="prompt", length=130, head_size=64, group=1).case(7)
HALF_PREFILL = GqaConfig(phase="prompt", length=130, head_size=64, group=4, dtype="f16").case(8)
WIDENED = GqaConfig(
    phase="prompt_static", length=130, head_size=64, dtype="f16", cache="other"
).case(9)
QUANTIZED = GqaConfig(phase="prompt_static", length=70, head_size=64, dtype="f16", cache="int8")


def chosen(case, caps: Caps, forced=None) -> str:
    class Device:
        pass

    device = Device()
    device.caps = caps
    chooser = Chooser(device, forced or {})
    return chooser.choose(node_of(case), spec_of(case), call_of(case).problem).route.name


def test_emulated_tiles_run_only_where_they_are_named():
    for case in (PREFILL, HALF_PREFILL):
        assert chosen(case, Caps()) == "flash_nosg"
        forced = {"GroupQueryAttention": "matrix_emulated"}
        assert chosen(case, Caps(), forced) == "matrix_emulated"


def test_native_tiles_need_the_right_shape():
    core = call_of(HALF_PREFILL).problem.core
    route = Materialized(True)
    assert not isinstance(route.check(core, MATRIX_CAPS), Rejected)
    other = Caps(subgroup_min=32, subgroup_max=32, f16=True, matrix_tiles=SHAPES[1:])
    verdict = route.check(core, other)
    assert isinstance(verdict, Rejected)
    assert "16x16x16 subgroup matrices of f16" in verdict.reason
    varied = Caps(subgroup_min=8, subgroup_max=32, f16=True, matrix_tiles=SHAPES)
    verdict = route.check(core, varied)
    assert isinstance(verdict, Rejected)
    assert "8 to 32 lanes" in verdict.reason


def test_scores_that_no_binding_holds_are_refused():
    core = call_of(PREFILL).problem.core
    verdict = Materialized(False).check(core, Caps(storage_binding=1 << 16))
    assert isinstance(verdict, Rejected)
    assert "the scores need" in verdict.reason


def test_operands_are_half_only_where_nothing_is_wider():
    kinds = {c.name: operand_of(call_of(c).problem.core) for c in (PREFILL, HALF_PREFILL, WIDENED)}
    assert list(kinds.values()) == ["f32", "f16", "f32"]
    assert operand_of(call_of(QUANTIZED.case(10)).problem.core) == "f32"


@pytest.mark.parametrize("case", [PREFILL, HALF_PREFILL], ids=str)
def test_both_tile_sizes_give_the_same_answer(case, adapter):
    """The geometry is picked by memory: a device with little of it takes the small tiles."""
    gpu = open_gpu(adapter, "wgpu")
    core = call_of(case).problem.core
    (route,) = (r for r in spec_of(case).routes if r.name == "matrix_emulated")
    small = Caps(storage_buffers=gpu.caps.storage_buffers)
    assert route.core_route.tile(core, small).bm < route.core_route.tile(core, gpu.caps).bm

    class Small:
        name = "small"

        @staticmethod
        def program(problem, caps):
            return route.program(problem, small)

    for one in (route, Small()):
        compare_outputs(run_route(case, gpu, one), oracle(case), case)


def test_score_tiles_beyond_the_causal_bound_are_never_written(adapter):
    """A causal prompt of one head per KV head writes the tiles at or below the diagonal alone."""
    gpu = open_gpu(adapter, "wgpu")
    call = call_of(PREFILL)
    (route,) = (r for r in CORE_ROUTES if r.name == "matrix_emulated")
    (composed,) = (r for r in spec_of(PREFILL).routes if r.name == "matrix_emulated")
    program = composed.program(call.problem, gpu.caps)
    core = call.problem.core
    tile = route.tile(core, gpu.caps)
    buffers = {name: gpu.upload(PREFILL.inputs[index]) for name, index in call.inputs.items()}
    buffers |= {name: gpu.upload(array) for name, array in call.arrays.items()}
    for output in call.outputs.values():
        buffers[output.operand] = gpu.allocate(output.spec.nbytes)
    for name, size in program.scratch:
        buffers[name] = gpu.upload(np.full(size, POISON, np.uint8))
    gpu.run([(Program(program.launches), buffers)])
    heads, rows, keys = core.kv_heads, tile.row_tiles(core), tile.key_tiles(core)
    shape = (heads, rows, tile.bm, keys, tile.bn)
    (scores,) = gpu.download([(buffers["scores"], TensorSpec("float32", shape))])
    poisoned = scores.view(np.uint32) == int.from_bytes(bytes([POISON] * 4))
    assert rows > 1
    for row in range(rows):
        assert not poisoned[:, row, :, : row + 1].any()
        assert poisoned[:, row, :, row + 1 :].all()


def test_a_session_runs_the_emulated_tiles_where_told(adapter):
    session = WebGPUSession(
        PREFILL.model().SerializeToString(),
        adapter=adapter,
        backend="wgpu",
        routes={"GroupQueryAttention": "matrix_emulated"},
    )
    compare_outputs(session.run(None, PREFILL.feeds()), oracle(PREFILL), PREFILL)
    assert "matrix_emulated" in str(session.explain())
