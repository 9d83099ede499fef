"""attention_flash with the tile that software adapters take for large problems."""

from dataclasses import astuple

import pytest
import running
from tint import tint

from ort_webgpu.conformance.case import Case
from ort_webgpu.conformance.cases_gqa import GqaConfig
from ort_webgpu.conformance.cases_packed import PackedConfig
from ort_webgpu.device import open_gpu
from ort_webgpu.ops.attention import Flash
from ort_webgpu.ops.attention_core import AttentionProblem
from ort_webgpu.ops.spec import Caps
from ort_webgpu.wgsl.render import render

TILE = (8, 4, 16, 4)


def prompt(**given) -> GqaConfig:
    """512 query rows or more for one KV head."""
    return GqaConfig(**{"phase": "prompt", "kv_heads": 1, "head_size": 16, **given})


CASES = [
    prompt(length=131, group=4, head_size=64),
    prompt(length=65, group=8, head_size=40, dtype="f16", window=21),
    prompt(length=173, group=3, batch=2, ragged=True, head_size=24, softcap=2.0),
    prompt(length=103, group=5, bias="BN", sink="sink", dtype="f16"),
    prompt(length=129, group=4, causal=0, bias="11"),
    prompt(length=150, group=4, phase="prompt_empty", cache="int4", head_size=32),
    prompt(length=140, group=4, head_size=128, rotary="half", packed=True),
    PackedConfig(dtype="f32", heads=1, head_size=20, input_size=16, lengths=(530, 37)),
]


@pytest.mark.parametrize("route", ["flash", "flash_nosg"])
@pytest.mark.parametrize("config", CASES, ids=lambda c: c.case(0).name)
def test_large_problems_are_right(config, route, adapter):
    case: Case = config.case(31)
    gpu = open_gpu(adapter)
    assert gpu is not None
    found = [r for r in running.accepting(case, gpu) if r.name == route]
    assert len(found) == 1, "the route is not there"
    launches = found[0].program(running.call_of(case).problem, gpu.caps).launches
    (constants,) = [
        dict(launch.kernel.constants)
        for launch in launches
        if launch.kernel.template == "attention_flash"
    ]
    assert tuple(constants[name] for name in ("RL", "CL", "RPT", "KPT")) == TILE
    assert constants["quads"] == (route == "flash")
    running.check_route(case, gpu, found[0])


CAPS = Caps(
    dialect="tint", software=True, workgroup_memory=32768, workgroup_invocations=256,
    subgroup_min=4, subgroup_max=4, storage_buffers=10,
)  # fmt: skip


@pytest.mark.parametrize(("length", "taken"), [(128, True), (127, False)])
def test_tile_is_for_large_problems_on_software_adapters(length, taken):
    problem = AttentionProblem(
        1, length, 8, 2, 64, 64, "float32", "float32", length, length, causal=True
    )
    tile = Flash(True).tile(problem, CAPS)
    assert (astuple(tile) == TILE) == taken


def test_tint_takes_it():
    problem = AttentionProblem(1, 200, 8, 2, 64, 64, "float16", "float16", 200, 200, softcap=2.0)
    (launch,) = Flash(True).parts(problem, CAPS).launches
    assert dict(launch.kernel.constants)["quads"]
    assert tint([render(launch.kernel, "tint")]) == [""]
