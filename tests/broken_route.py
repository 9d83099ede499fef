"""A route that is wrong on purpose: the serial one with scores half as large again."""

from dataclasses import replace
from typing import Any

import pytest

from ort_webgpu.ops import OPS
from ort_webgpu.ops.spec import Accepted, Caps, Rejected, Route
from ort_webgpu.wgsl.kernel import Launch, Program

SPEC = OPS["com.microsoft", "GroupQueryAttention"]


class BrokenRoute(Route):
    """Takes what serial takes, and only where `routes=` names it."""

    name = "broken"

    def __init__(self) -> None:
        self._right = next(route for route in SPEC.routes if route.name == "serial")

    def check(self, problem: Any, caps: Caps) -> Accepted | Rejected:
        return self._right.check(problem, caps)

    def program(self, problem: Any, caps: Caps) -> Program:
        right = self._right.program(problem, caps)
        return replace(right, launches=tuple(_spoiled(launch) for launch in right.launches))


def _spoiled(launch: Launch) -> Launch:
    uniforms = tuple((n, v * 1.5 if n == "scale" else v) for n, v in launch.uniforms)
    return replace(launch, uniforms=uniforms)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a broken GroupQueryAttention route, after all the others."""
    monkeypatch.setattr(type(SPEC), "routes", (*SPEC.routes, BrokenRoute()))
    return BrokenRoute.name
