"""attention_splitk_matrix: steps, tails and shares by emulation, and what it does not take."""

from dataclasses import replace

import numpy as np
import pytest
import running
from tint import tint

from ort_webgpu.conformance.case import Case
from ort_webgpu.conformance.cases_gqa import GqaConfig
from ort_webgpu.conformance.oracles import numpy_oracle
from ort_webgpu.device import open_gpu
from ort_webgpu.ops.attention import CORE_ROUTES
from ort_webgpu.ops.attention_core import AttentionProblem
from ort_webgpu.ops.attention_splitk import SplitKMatrix
from ort_webgpu.ops.spec import Caps, Rejected
from ort_webgpu.wgsl.render import render

NAME = "splitk_matrix_emulated"
H200 = Caps(
    dialect="tint",
    workgroup_memory=49152,
    workgroup_invocations=1024,
    subgroup_min=32,
    subgroup_max=32,
    storage_buffers=10,
    matrix_tiles=((16, 16, 32, "i8", "i32"),),
)


def decode(**given) -> GqaConfig:
    """One token over a quantized cache."""
    plain = {"phase": "decode", "kv_heads": 1, "head_size": 32, "cache": "int8"}
    return GqaConfig(**{**plain, **given})


CONFIGS = [
    decode(length=300, group=4, cache="int4"),
    decode(length=127, group=4, dtype="f16", head_size=64, kv_heads=2),  # 128 keys: a whole step
    decode(length=128, group=1, quant="channel"),  # a whole step and a key
    decode(length=150, group=8, head_size=96, cache="int4", dtype="f16"),  # two groups of rows
    decode(length=150, group=5, head_size=128, quant="channel", bias="BN", sink="sink"),
    decode(length=70, group=2, head_size=96, cache="int4", quant="channel", softcap=2.0),
    decode(length=200, group=3, batch=3, ragged=True, cache="int4", sink="smooth"),
    decode(length=260, group=4, head_size=64, window=70),
    decode(length=200, group=2, cache="int4", window=33, rotary="half", dtype="f16"),
    decode(length=140, group=4, output_qk=1, cache="int4"),
    decode(length=140, group=3, phase="chunk", causal=0),  # several positions
    decode(length=170, group=2, phase="chunk_batched", batch=2, cache="int4", head_size=64),
    decode(length=170, group=4, phase="decode_static", in_place=True, batch=2),
    decode(length=150, group=4, loud=300.0),  # the last score towers over all others
    decode(length=5, group=4, cache="int4"),
    decode(length=150, group=2, phase="chunk_queries", batch=3, ragged=True),
]


def check_every_share(case: Case, adapter: str) -> None:
    """By rule, with one share of the keys and with seven; twice each, bit for bit."""
    gpu = open_gpu(adapter)
    assert gpu is not None
    problem = running.call_of(case).problem
    route = running.route_of(case, NAME)
    verdict = route.check(problem, gpu.caps)
    assert not isinstance(verdict, Rejected), verdict
    running.check_route(case, gpu, route)
    for shares in (1, 7):
        caps = running.tuned_to(problem.core, gpu.caps, NAME, (shares,))
        running.check_route(case, gpu, route, caps)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.case(0).name)
def test_every_number_of_shares_is_right(config, adapter):
    check_every_share(config.case(21), adapter)


def with_query(case: Case, change) -> Case:
    """The case with its query changed in place by `change`."""
    inputs = list(case.inputs)
    assert inputs[0] is not None
    inputs[0] = inputs[0].copy()
    change(inputs[0])
    return replace(case, inputs=tuple(inputs))


def spoilt(cache: str, bad: float) -> Case:
    """A case of four heads, the third of which has an element that is not finite."""
    case = decode(length=70, group=4, cache=cache).case(22)
    return with_query(case, lambda q: q.reshape(4, 32).__setitem__((2, 7), bad))


def scaled(factor: float) -> Case:
    """A case whose queries are so much larger or smaller than usual."""
    case = decode(length=70, group=4, quant="channel").case(23)
    return with_query(case, lambda q: q.__imul__(np.float32(factor)))


def towering(element: int) -> Case:
    """A case with one element far above the rest of its row, with which they share an exponent."""

    def tower(q: np.ndarray) -> None:
        q *= np.float32(1e-3)
        q.reshape(4, 32)[:, element] = 3.0

    return with_query(decode(length=70, group=4, cache="int4").case(24), tower)


def unusual_queries() -> list[Case]:
    """Cases of each of the above."""
    towers = map(towering, range(8, 16))
    return [spoilt("int8", np.nan), *towers, *map(scaled, (0.0, 1e-30, 1e-20, 1e3))]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("cache", ["int8", "int4"])
def test_query_that_is_not_finite_spoils_its_own_head_alone(bad, cache, adapter):
    case = spoilt(cache, bad)
    (head,) = np.argwhere(np.isnan(numpy_oracle(case).outputs[0].reshape(4, 32)).all(1))
    assert head == [2]
    check_every_share(case, adapter)


def test_row_that_sees_nothing_is_zero_whatever_its_query(adapter):
    """Rows behind an entry's last query; ORT leaves them as they are."""
    case = decode(length=150, group=2, phase="chunk_queries", batch=3, ragged=True).case(7)
    gpu = open_gpu(adapter)
    route = running.route_of(case, NAME)
    query, counts = case.require("query"), case.require("query_seqlens")
    behind = np.arange(query.shape[1])[None] >= counts[:, None]
    assert behind.any()
    spoilt_rows = with_query(case, lambda q: q.__setitem__(behind, np.nan))
    out, *_ = running.run_route(spoilt_rows, gpu, route)
    assert (out[behind] == 0).all()
    assert np.isfinite(out[~behind]).all()


@pytest.mark.parametrize("case", unusual_queries()[1:], ids=lambda c: c.name)
def test_queries_of_any_size_are_right(case, adapter):
    check_every_share(case, adapter)


def problem(**given) -> AttentionProblem:
    """The decode step of 4096 keys that the H200 is measured on."""
    plain = AttentionProblem(
        1, 1, 32, 8, 128, 128, "int8", "float16", 4097, 4097, v_scaled=True, appended=True
    )
    return replace(plain, **given)


@pytest.mark.parametrize(
    ("given", "caps", "words"),
    [
        ({}, {"matrix_tiles": ((16, 16, 16, "f16", "f32"),)}, "16x16x32 subgroup matrices of i8"),
        ({}, {"subgroup_min": 16}, "subgroups of 32"),
        ({"kv_dtype": "float16"}, {}, "int8 or int4"),
        ({"head_size": 80, "v_head_size": 80}, {}, "32, 64, 96 and 128"),
        ({"v_head_size": 64}, {}, "128 and 64"),
        ({"num_heads": 8, "kv_dtype": "int4"}, {}, "one query row"),
        ({"q_len": 17}, {}, "68 query rows"),
        ({"head_size": 256, "v_head_size": 256}, {}, "256 and 256"),
        ({}, {"workgroup_memory": 32768}, "head size 128 needs"),
        ({}, {"workgroup_invocations": 128}, "256 lanes"),
        ({"qk": 2}, {}, "probabilities"),
        ({}, {"storage_buffers": 4}, "storage buffers"),
    ],
)
def test_rejections_say_why(given, caps, words):
    verdict = SplitKMatrix(True).check(problem(**given), replace(H200, **caps))
    assert isinstance(verdict, Rejected)
    assert words in verdict.reason


def test_matrices_of_int8_come_first_for_quantized_decode_steps():
    taken = [r.name for r in CORE_ROUTES if not isinstance(r.check(problem(), H200), Rejected)]
    assert next(name for name in taken if "emulated" not in name) == "splitk_matrix"


@pytest.mark.parametrize(("batch", "kv_heads", "shares"), [(1, 8, 16), (4, 8, 4), (1, 5, 26)])
def test_no_processor_of_an_h200_gets_a_second_workgroup(batch, kv_heads, shares):
    core = problem(batch=batch, kv_heads=kv_heads, num_heads=4 * kv_heads)
    split, _ = SplitKMatrix(True).parts(core, H200).launches
    assert split.workgroups == shares * batch * kv_heads <= 132


def test_tint_takes_the_native_rendering():
    texts = []
    for head_size in (32, 64, 96, 128):
        for cache in ("int8", "int4"):
            for extra in ({}, {"softcap": 2.0, "qk": 1, "qk_width": 4097}, {"max_keys": 100}):
                core = problem(head_size=head_size, v_head_size=head_size, kv_dtype=cache, **extra)
                launches = SplitKMatrix(True).parts(core, H200).launches
                texts += [render(launch.kernel, "tint") for launch in launches]
    assert tint(texts) == [""] * len(texts)


def test_caches_are_bound_as_writable_only_where_nothing_shares_them():
    for appended in (True, False):
        split, _ = SplitKMatrix(True).parts(problem(appended=appended), H200).launches
        access = {b.access for b in split.kernel.bindings if b.name in ("k", "v")}
        assert access == {"read_write" if appended else "read"}
