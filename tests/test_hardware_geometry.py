"""Kernels in the geometry that a hardware adapter gets, run on a software one.

Tiles, shares of the keys, unrolled loops and loops without masks depend on `Caps.software`; a
device that only says it is hardware runs the same programs as a real one would.
"""

from dataclasses import replace

import numpy as np
import pytest
import running

from ort_webgpu.conformance.case import Case
from ort_webgpu.conformance.cases_gqa import GqaConfig
from ort_webgpu.conformance.checks import compare_outputs
from ort_webgpu.conformance.oracles import oracle
from ort_webgpu.device import open_gpu
from ort_webgpu.ops.spec import Rejected

CONFIGS = [
    GqaConfig(phase="decode_static", length=700, group=4, kv_heads=1, head_size=64),
    GqaConfig(phase="decode_static", length=700, group=2, head_size=128, dtype="f16"),
    GqaConfig(phase="decode", length=300, batch=2, ragged=True, group=8, kv_heads=1, head_size=32),
    GqaConfig(phase="decode_static", length=700, group=3, kv_heads=1, head_size=96, window=300),
    GqaConfig(phase="decode_static", length=500, group=4, kv_heads=1, head_size=64, cache="int8"),
    GqaConfig(phase="decode_static", length=500, group=4, head_size=64, cache="int4", dtype="f16"),
    GqaConfig(phase="decode_static", length=600, group=2, head_size=32, softcap=2.0, bias="BN"),
    GqaConfig(phase="decode_static", length=600, group=2, head_size=32, sink="sink"),
    # as many shares of the keys as there can be
    GqaConfig(phase="decode_static", length=8200, group=1, kv_heads=1, head_size=8),
    GqaConfig(phase="decode_static", length=8200, group=1, kv_heads=1, head_size=16),
    # rows whose windows begin at different keys
    GqaConfig(phase="chunk_static", length=701, group=2, kv_heads=1, head_size=64, window=300),
    # loops of attention_flash unrolled sixteen times, four and two
    GqaConfig(length=150, group=4, kv_heads=1, head_size=64, window=40),
    GqaConfig(length=77, batch=2, group=2, head_size=80, dtype="f16", softcap=2.0),
    GqaConfig(length=77, group=3, kv_heads=1, head_size=24, bias="BN"),
]


def hardware_cases() -> list[Case]:
    """Problems whose programs on hardware are others than on a software adapter."""
    return [config.case(7) for config in CONFIGS]


@pytest.mark.parametrize("case", hardware_cases(), ids=lambda case: case.name)
def test_hardware_programs_are_right(case, adapter):
    gpu = open_gpu(adapter)
    assert gpu is not None
    caps = replace(gpu.caps, software=False)
    ran = []
    core = "flash" if "prompt" in case.features else "splitk"
    expected = [core, f"{core}_nosg"]
    for route in running.spec_of(case).routes:
        if route.name not in expected:
            continue  # the others look at limits only, which are the adapter's own here
        if isinstance(route.check(running.call_of(case).problem, caps), Rejected):
            continue
        first = running.run_route(case, gpu, route, caps=caps)
        compare_outputs(first, oracle(case), case)
        again = running.run_route(case, gpu, route, poison=0x3C, caps=caps)
        for one, other, kept in zip(first, again, oracle(case).wanted(), strict=True):
            same = one.view(np.uint8) == other.view(np.uint8)
            assert kept[1] is not None or same.all(), f"{route.name} changes from run to run"
        ran.append(route.name)
    assert ran == expected
