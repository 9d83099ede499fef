"""Routes of GroupQueryAttention forced for the cases of the ci corpus, below the session.

Each run is made twice over different garbage: the answer must be right, and the same bit for bit.
Compiling pipelines is what takes the time, so each adapter runs a cover of the corpus: every case
on one route at least, and every route with every feature that it takes. `-m slow` runs them all.
"""

from collections import Counter
from functools import cache

import pytest
from running import accepting, call_of, check_route, spec_of
from tint import tint

from ort_webgpu import NoAdapterError
from ort_webgpu.conformance.cases import corpus
from ort_webgpu.device import open_gpu
from ort_webgpu.ops.spec import Caps, Rejected
from ort_webgpu.wgsl.render import render

CASES = corpus("GroupQueryAttention")
BY_NAME = {case.name: case for case in CASES}


def turned(names: list[str], start: int) -> list[str]:
    """The list, beginning at `start`."""
    return names[start:] + names[:start]


@cache
def cover(adapter: str, turn: int) -> dict[str, set[str]]:
    """Route names by case name. `turn` changes which of equally good routes a case gets."""
    gpu = open_gpu(adapter, "wgpu")
    routes = {case.name: [route.name for route in accepting(case, gpu)] for case in CASES}
    used: Counter[str] = Counter()
    covered: set[tuple[str, str]] = set()
    picked: dict[str, set[str]] = {}
    for index, case in enumerate(CASES):
        names = routes[case.name]
        start = (index + turn) % len(names)
        news = {n: sum((n, word) not in covered for word in case.features) for n in names}
        ranked = [(news[n], -used[n], -place, n) for place, n in enumerate(turned(names, start))]
        best = max(ranked)[-1]
        picked[case.name] = {best}
        used[best] += 1
        covered |= {(best, word) for word in case.features}
    for case in CASES:
        for name in routes[case.name]:
            pairs = {(name, word) for word in case.features}
            if not pairs <= covered:
                picked[case.name].add(name)
                covered |= pairs
    return picked


@pytest.mark.parametrize("name", BY_NAME)
def test_cover_of_the_routes(name, adapter):
    case, gpu = BY_NAME[name], open_gpu(adapter, "wgpu")
    picked = cover(adapter, "SwiftShader" in adapter)[name]
    ran = [route.name for route in accepting(case, gpu) if route.name in picked]
    assert set(ran) == picked
    for route in accepting(case, gpu):
        if route.name in picked:
            check_route(case, gpu, route)


@pytest.mark.parametrize("name", list(BY_NAME)[::9])
def test_a_route_through_tint(name):
    """Every ninth case, on one route each in turn; Dawn compiles slowly for SwiftShader."""
    try:
        gpu = open_gpu("SwiftShader", "dawn")
    except NoAdapterError as missing:
        pytest.skip(str(missing))
    case = BY_NAME[name]
    routes = list(accepting(case, gpu))
    check_route(case, gpu, routes[list(BY_NAME)[::9].index(name) % len(routes)])


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_every_route(name, adapter):
    gpu = open_gpu(adapter, "wgpu")
    for route in accepting(BY_NAME[name], gpu):
        check_route(BY_NAME[name], gpu, route)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BY_NAME)[::3])
def test_every_route_through_tint(name):
    try:
        gpu = open_gpu("SwiftShader", "dawn")
    except NoAdapterError as missing:
        pytest.skip(str(missing))
    for route in accepting(BY_NAME[name], gpu):
        check_route(BY_NAME[name], gpu, route)


def test_tint_takes_every_kernel():
    """The kernels of all routes and all cases, as a device with every feature gets them."""
    caps = Caps(
        dialect="tint",
        workgroup_memory=49152,
        subgroup_min=32,
        subgroup_max=32,
        f16=True,
        storage_buffers=10,
        matrix_tiles=((16, 16, 16, "f16", "f32"), (8, 8, 8, "f32", "f32")),
    )
    kernels = {}
    for case in CASES:
        problem = call_of(case).problem
        for route in spec_of(case).routes:
            if not isinstance(route.check(problem, caps), Rejected):
                for launch in route.program(problem, caps).launches:
                    kernels[launch.kernel] = case.name
    assert len(kernels) > 1000
    errors = tint([render(kernel, "tint") for kernel in kernels])
    wrong = [(k.label, e) for k, e in zip(kernels, errors, strict=True) if e]
    assert wrong == []
