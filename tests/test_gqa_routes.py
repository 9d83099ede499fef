"""Every route of GroupQueryAttention that takes a case of the ci corpus, below the session.

Each runs twice over different garbage: the answers must be right, and the same bit for bit.
"""

import pytest
from running import POISON, accepting, run_route

from ort_webgpu import NoAdapterError
from ort_webgpu.conformance.cases import corpus
from ort_webgpu.conformance.checks import compare_outputs
from ort_webgpu.conformance.oracles import oracle
from ort_webgpu.device import open_gpu

CASES = corpus("GroupQueryAttention")
ROUTES = {"splitk", "splitk_nosg", "matrix_emulated", "flash", "flash_nosg", "serial"}


def check_routes(case, adapter: str, backend: str) -> set[str]:
    """The routes that ran the case; fails where one is wrong or depends on what memory held."""
    gpu = open_gpu(adapter, backend)
    names = set()
    for route in accepting(case, gpu):
        outputs = run_route(case, gpu, route)
        compare_outputs(outputs, oracle(case), case)
        again = run_route(case, gpu, route, poison=POISON ^ 0xFF)
        for first, second in zip(outputs, again, strict=True):
            assert first.tobytes() == second.tobytes(), route.name
        names.add(route.name)
    return names


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_route(case, adapter):
    assert "serial" in check_routes(case, adapter, "wgpu")


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_every_route_through_tint(case):
    try:
        names = check_routes(case, "SwiftShader", "dawn")
    except NoAdapterError as missing:
        pytest.skip(str(missing))
    assert "serial" in names
