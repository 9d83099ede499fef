"""Pieces of WGSL that every kernel is made of."""

import numpy as np
import pytest

from ort_webgpu.wgsl.render import _HALF2


def test_float16_is_rounded_as_numpy_does():
    """The kernels' conversion, on every float16, the ties between them, and bits at random."""
    wgpu = pytest.importorskip("wgpu")
    compute = pytest.importorskip("wgpu.utils.compute")
    if not wgpu.gpu.enumerate_adapters_sync():
        pytest.skip("no adapter; `sh tests/run.sh` sets one up")
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = every.view(np.uint32) + np.uint32(0x1000)
    near = np.concatenate([ties - np.uint32(1), ties, ties + np.uint32(1)]).view(np.float32)
    small = (np.arange(1025) + np.float32(0.5)).astype(np.float32) * np.float32(2.0**-24)
    drawn = np.random.default_rng(5).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    values = np.concatenate([every, near, drawn.view(np.float32), small, -small])
    text = f"""
{_HALF2}
@group(0) @binding(0) var<storage, read> source: array<vec2<f32>>;
@group(0) @binding(1) var<storage, read_write> out: array<u32>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) at: vec3<u32>) {{ out[at.x] = half2(source[at.x]); }}
"""
    values = np.pad(values, (0, -values.size % 128))
    groups = values.size // 128
    found = compute.compute_with_buffers({0: values}, {1: (values.size // 2, "I")}, text, n=groups)
    halves = np.frombuffer(found[1], np.float16)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    assert np.array_equal(np.isnan(halves), np.isnan(expected))
    number = ~np.isnan(expected)
    assert np.array_equal(halves[number].view(np.uint16), expected[number].view(np.uint16))
