"""What the adapter itself can do, measured on the spot: a copy, and multiply-adds in registers."""

import numpy as np

from ort_webgpu.conformance.bench_time import seconds_of
from ort_webgpu.device import Gpu
from ort_webgpu.ops.attention_core import missing_matrices, other_subgroups
from ort_webgpu.wgsl.kernel import Binding, Kernel, Launch, Program

__all__ = ["ceilings", "copy_program", "fma_program", "matrix_program"]

_LANES = 256
_CHAINS = 8
_MATRIX_ROWS, _MATRIX_COLUMNS = 2, 4


def ceilings(gpu: Gpu) -> dict[str, float]:
    """By name, per second: "copy" (bytes read and written), "fma_f32", "fma_f16" and "matrix_f16"
    (floating-point operations); what the adapter lacks is absent."""
    caps = gpu.caps
    nbytes = min(caps.storage_binding, (32 if caps.software else 1024) << 20) & ~255
    source, target = gpu.allocate(nbytes), gpu.allocate(nbytes)
    copy = copy_program(nbytes)
    found = {
        "copy": 2.0 * nbytes / seconds_of(gpu, [(copy, {"source": source, "out": target})]).median
    }
    factors = gpu.upload(np.array([0.999, 0.001], np.float32))
    kinds = ["f32", "f16"] if caps.f16 else ["f32"]
    groups, steps = (8, 256) if caps.software else (8192, 4096)
    out = gpu.allocate(4 * _LANES * groups)
    for kind in kinds:
        program = fma_program(kind, groups, steps)
        seconds = seconds_of(gpu, [(program, {"source": factors, "out": out})]).median
        found[f"fma_{kind}"] = 8.0 * groups * _LANES * steps * _CHAINS / seconds
    if not (missing_matrices(caps, 16, 16, "f16") or other_subgroups(caps, 32)):
        groups //= 4  # every subgroup keeps 8 KiB of results
        tiles = groups * _LANES // 32 * _MATRIX_ROWS * _MATRIX_COLUMNS
        operands = {"out": gpu.allocate(1024 * tiles)}
        seconds = seconds_of(gpu, [(matrix_program(groups, steps), operands)]).median
        found["matrix_f16"] = 2.0 * 16**3 * tiles * steps / seconds
    return found


def copy_program(nbytes: int) -> Program:
    """A copy of `nbytes`, a multiple of 16, from operand source to operand out."""
    kernel = Kernel(
        "bench_copy",
        (),
        (Binding("source", "vec4<f32>"), Binding("out", "vec4<f32>", "read_write")),
        (("groups", "u32"),),
        _LANES,
    )
    groups = nbytes // 16
    operands = (("source", "source"), ("out", "out"))
    return Program((Launch(kernel, operands, -(-groups // _LANES), (("groups", groups),)),))


def fma_program(element: str, groups: int, steps: int) -> Program:
    """`groups` workgroups of 256 lanes, 64 floating-point operations a step in each lane."""
    kernel = Kernel(
        "bench_fma",
        (("element", element), ("CHAINS", _CHAINS)),
        (Binding("source", "f32"), Binding("out", "f32", "read_write")),
        (("steps", "u32"),),
        _LANES,
        frozenset({"f16"}) if element == "f16" else frozenset(),
    )
    operands = (("source", "source"), ("out", "out"))
    return Program((Launch(kernel, operands, groups, (("steps", steps),)),))


def matrix_program(groups: int, steps: int) -> Program:
    """`groups` workgroups of 8 subgroups, 8 products of 16x16x16 a step in each subgroup."""
    kernel = Kernel(
        "bench_matrix",
        (("ROWS", _MATRIX_ROWS), ("COLUMNS", _MATRIX_COLUMNS)),
        (Binding("out", "f32", "read_write"),),
        (("steps", "u32"),),
        _LANES,
        frozenset({"f16", "subgroups", "subgroup_matrix"}),
    )
    return Program((Launch(kernel, (("out", "out"),), groups, (("steps", steps),)),))
