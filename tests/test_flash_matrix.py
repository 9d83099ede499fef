"""attention_flash_matrix: its geometries by emulation, and the choice among them."""

from dataclasses import astuple, replace

import numpy as np
import pytest
import running

from ort_webgpu.conformance.case import Case
from ort_webgpu.conformance.cases_gqa import GqaConfig
from ort_webgpu.device import open_gpu
from ort_webgpu.ops.attention_core import AttentionProblem
from ort_webgpu.ops.attention_flash_matrix import FlashMatrix
from ort_webgpu.ops.spec import Caps, Rejected

NAME = "flash_matrix_emulated"
H200 = Caps(
    dialect="tint",
    workgroup_memory=49152,
    workgroup_invocations=1024,
    subgroup_min=32,
    subgroup_max=32,
    f16=True,
    matrix_tiles=((16, 16, 16, "f16", "f32"),),
)


def prompt(**given) -> GqaConfig:
    """A float16 prompt, a head size that the kernel takes."""
    return GqaConfig(**{"phase": "prompt", "dtype": "f16", "kv_heads": 1, "head_size": 32, **given})


CONFIGS = [
    prompt(length=150, group=4, head_size=64),
    prompt(length=130, group=2, kv_heads=2, head_size=96, window=40),
    prompt(length=150, group=3, batch=2, ragged=True),
    prompt(length=150, group=8, softcap=2.0, bias="BN"),
    prompt(length=100, group=1, kv_heads=2, head_size=64, sink="sink", softcap=3.0),
    prompt(length=148, group=4, bias="BN", window=37),  # wide loads of the bias
    prompt(length=64, group=2, bias="11", causal=0),
    prompt(length=170, group=4, head_size=64, phase="chunk"),  # shares of the keys, merged
    prompt(length=124, group=1, phase="chunk"),  # a key more than two whole shares, 129
]


def growing(case: Case) -> Case:
    """The case with keys that grow along the sequence, so that references move again and again."""
    inputs = list(case.inputs)
    key = inputs[1]
    assert key is not None
    growth = np.linspace(0.2, 6, key.shape[1], dtype=np.float32)[None, :, None]
    inputs[1] = (key * growth).astype(key.dtype)
    return replace(case, inputs=tuple(inputs))


def stale() -> Case:
    """A call on a buffer that holds NaN behind the last key."""
    case = prompt(length=90, group=2, phase="chunk_static").case(13)
    inputs = list(case.inputs)
    (total,) = inputs[6]  # type: ignore[misc]
    for i in (3, 4):
        inputs[i] = inputs[i].copy()  # type: ignore[union-attr]
        assert inputs[i].shape[2] > total
        inputs[i][:, :, total:] = np.nan
    return replace(case, inputs=tuple(inputs), in_place=True)


def check_every_tile(case: Case, adapter: str) -> None:
    gpu = open_gpu(adapter)
    assert gpu is not None
    problem = running.call_of(case).problem
    route = running.route_of(case, NAME)
    verdict = route.check(problem, gpu.caps)
    assert not isinstance(verdict, Rejected), verdict
    settings = FlashMatrix(False).settings(problem.core, gpu.caps)
    assert len(settings) >= 3
    for setting in settings:
        caps = running.tuned_to(problem.core, gpu.caps, NAME, setting)
        assert FlashMatrix(False).settings(problem.core, caps)[0] == setting
        running.check_route(case, gpu, route, caps)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.case(0).name)
def test_every_tile_that_fits_is_right(config, adapter):
    check_every_tile(config.case(11), adapter)


def test_references_that_move_are_right(adapter):
    check_every_tile(growing(prompt(length=150, group=4, head_size=64).case(12)), adapter)


def test_rows_behind_the_last_key_do_not_matter(adapter):
    check_every_tile(stale(), adapter)


def problem(**given) -> AttentionProblem:
    plain = AttentionProblem(
        batch=1,
        q_len=2048,
        num_heads=32,
        kv_heads=8,
        head_size=128,
        v_head_size=128,
        kv_dtype="float16",
        out_dtype="float16",
        kv_head_rows=2048,
        max_keys=2048,
        half_queries=True,
    )
    return replace(plain, **given)


@pytest.mark.parametrize(
    ("given", "tile"),
    [
        ({}, (128, 2, 2)),
        ({"head_size": 64, "v_head_size": 64}, (64, 2, 2)),
        ({"head_size": 256, "v_head_size": 256}, (64, 1, 2)),  # 128 rows need more memory
        ({"q_len": 512, "max_keys": 512}, (64, 1, 1)),  # 128 tiles of 128 rows, 132 processors
        ({"q_len": 128, "max_keys": 8320}, (128, 2, 2)),  # few tiles, but shares of the keys
    ],
)
def test_tile_by_rule(given, tile):
    chosen = FlashMatrix(True).tile(problem(**given), H200)
    assert chosen is not None
    assert astuple(chosen) == tile


@pytest.mark.parametrize(
    ("given", "caps", "words"),
    [
        ({}, {"matrix_tiles": ()}, "subgroup matrices"),
        ({}, {"f16": False}, "shader-f16"),
        ({}, {"subgroup_min": 16}, "subgroups of 32"),
        ({"half_queries": False}, {}, "float16 queries"),
        ({"kv_dtype": "int8"}, {}, "int8"),
        ({"head_size": 80, "v_head_size": 80}, {}, "multiples of 32"),
        ({"v_head_size": 64}, {}, "equal"),
        ({"qk": 1}, {}, "output_qk"),
        ({"q_len": 8}, {}, "8 query positions"),
        ({"head_size": 512, "v_head_size": 512}, {}, "head size 512"),
        ({"bias_dtype": "float16", "bias_width": 2048}, {"storage_buffers": 4}, "storage buffers"),
    ],
)
def test_rejections_say_why(given, caps, words):
    verdict = FlashMatrix(True).check(problem(**given), replace(H200, **caps))
    assert isinstance(verdict, Rejected)
    assert words in verdict.reason
