"""Every variant name of the kernel cards is some route's for some case, which comes out right.

The matrix variants run with emulated tiles here, as software adapters have no subgroup matrices.
"""

import json
from importlib import resources

import pytest
from running import accepting, call_of, run_route

from ort_webgpu.conformance.case import Case
from ort_webgpu.conformance.cases import corpus
from ort_webgpu.conformance.checks import compare_outputs
from ort_webgpu.conformance.oracles import oracle
from ort_webgpu.device import Gpu, open_gpu
from ort_webgpu.ops.spec import Route

OPERATORS = ("GroupQueryAttention", "DecoderMaskedMultiHeadAttention")


def names_of(op_type: str) -> list[str]:
    """The card's variant names."""
    text = resources.files("ort_webgpu.conformance").joinpath("variants.json").read_text()
    return json.loads(text)[op_type]


def variants(op_type: str, gpu: Gpu) -> dict[str, tuple[Case, Route]]:
    """A case and a route for each name that the ci corpus reaches; the last, plainest ones."""
    found = {}
    for case in corpus(op_type):
        problem = call_of(case).problem
        for route in accepting(case, gpu):
            name = route.card_variant(problem, gpu.caps)
            if name is not None:
                found[name] = case, route
    return found


@pytest.fixture(scope="module")
def gpu(adapter_names) -> Gpu:
    if not any("llvmpipe" in name for name in adapter_names):
        pytest.skip("lavapipe is missing; `sh tests/run.sh` sets it up")
    return open_gpu("llvmpipe", "wgpu")


@pytest.mark.parametrize("op_type", OPERATORS)
def test_every_variant_runs_and_no_other_is_named(op_type, gpu):
    found = variants(op_type, gpu)
    assert sorted(found) == sorted(names_of(op_type))
    for case, route in found.values():
        compare_outputs(run_route(case, gpu, route), oracle(case), case)


def test_names_say_what_the_kernels_do(gpu):
    """Names and launches agree, on every case that has a name."""
    checked = set()
    for case in corpus("GroupQueryAttention"):
        problem = call_of(case).problem
        for route in accepting(case, gpu):
            name = route.card_variant(problem, gpu.caps)
            if name is None:
                continue
            launches = route.program(problem, gpu.caps).launches
            kernels = [launch.kernel for launch in launches]
            templates = {kernel.template for kernel in kernels}
            subgroups = any("subgroups" in kernel.features for kernel in kernels)
            assert subgroups == (not name.endswith("_nosg") and route.name in ("flash", "splitk"))
            assert ("attention_scores_matrix" in templates) == ("materialized_sgmat" in name)
            assert ("splitk" in name) == any("splitk" in t for t in templates)
            in_place = "share_append" in name
            assert not in_place or "cache_copy" not in templates
            assert name.startswith("qkv_present") == (case.input("past_key") is None)
            checked.add(name)
    assert sorted(checked) == sorted(names_of("GroupQueryAttention"))
