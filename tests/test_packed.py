"""PackedAttention, PackedMultiHeadAttention, RemovePadding, RestorePadding: every route, below the session."""

import pytest

from ort_webgpu.conformance.cases import corpus
from ort_webgpu.conformance.checks import compare_outputs
from ort_webgpu.conformance.oracles import numpy_oracle
from ort_webgpu.device import open_gpu
from running import accepting, run_route


@pytest.mark.parametrize("op_type", ["RemovePadding", "RestorePadding"])
def test_padding(op_type, adapter):
    gpu = open_gpu(adapter, "wgpu")
    for case in corpus(op_type):
        for route in accepting(case, gpu):
            compare_outputs(run_route(case, gpu, route), numpy_oracle(case), case)
