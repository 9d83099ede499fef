"""Submits and readbacks by wgpu's objects and by its C functions: the same results and errors."""

from dataclasses import replace

import numpy as np
import pytest

from ort_webgpu.commands import Direct, Wrapped, commands_of
from ort_webgpu.device import open_gpu
from ort_webgpu.errors import DeviceError
from ort_webgpu.ops.spec import TensorSpec
from ort_webgpu.wgsl.kernel import Binding, Kernel, Launch, Program

WORDS = TensorSpec("uint32", (64, 2))
PROBE = Kernel(
    "subgroup_probe",
    (),
    (Binding("out", "vec2<u32>", "read_write"),),
    features=frozenset({"subgroups"}),
)


@pytest.fixture(params=["llvmpipe wgpu", "SwiftShader wgpu", "SwiftShader dawn"])
def gpu(request, adapter_names):
    name, backend = request.param.split()
    if not any(name in one for one in adapter_names):
        pytest.skip(f"no adapter {name}")
    if backend == "dawn":
        pytest.importorskip("wgpudawn")
    return open_gpu(name, backend)


@pytest.fixture(params=[Wrapped, Direct])
def commands(request, gpu, monkeypatch):
    made = request.param(gpu._device)
    monkeypatch.setattr(gpu, "_commands", made)
    return made


def test_the_packages_here_allow_direct_calls(gpu):
    assert isinstance(gpu._commands, Direct)


def test_an_unknown_package_is_used_by_its_objects():
    assert isinstance(commands_of(object()), Wrapped)


def test_launches_copies_and_readback(gpu, commands, rng):
    """A launch over a buffer of garbage, an odd number of bytes, an empty value, two at once."""
    out, other = gpu.upload(np.full((64, 2), 77, np.uint32)), gpu.allocate(WORDS.nbytes)
    bytes_ = rng.integers(0, 256, 1001).astype(np.uint8)
    odd = gpu.upload(bytes_)
    gpu.run([(Program((Launch(PROBE, (("out", "out"),), 1),)), {"out": out})])
    gpu.copy(out, other, WORDS.nbytes)
    empty = TensorSpec("float32", (0, 3))
    wanted = [(odd, TensorSpec("uint8", (1001,))), (out, empty), (other, WORDS)]
    found, nothing, seen = gpu.download(wanted)
    np.testing.assert_array_equal(found, bytes_)
    assert nothing.shape == (0, 3)
    np.testing.assert_array_equal(seen[:, 1], np.arange(64) % seen[:, 0])


def test_what_wgpu_refuses_is_an_error_and_the_device_goes_on(gpu, commands):
    """Nothing of the kind gets past Gpu's checks; were it to, it must not end the process."""
    out = gpu.allocate(WORDS.nbytes)
    two = replace(PROBE, bindings=(*PROBE.bindings, Binding("more", "u32")))
    other = Program((Launch(two, (("out", "out"), ("more", "more")), 1),))
    with pytest.raises(DeviceError, match="refused to run"), gpu._guarded("run"):
        ((_, group, offset, grid),) = gpu._prepared(
            [(other, {"out": out, "more": gpu.allocate(16)})]
        )
        commands.submit([(gpu._pipeline(PROBE).raw, group, offset, grid)], ())
    with pytest.raises(DeviceError, match="refused to copy"), gpu._guarded("copy"):
        commands.submit((), [(out.raw, 0, gpu.allocate(16).raw, 0, 1 << 20)])
    with pytest.raises(DeviceError), gpu._guarded("download"):
        commands.read(out.raw, 16, [np.empty(16, np.uint8)])  # not memory that can be mapped
    data = np.arange(5, dtype=np.int32)
    (again,) = gpu.download([(gpu.upload(data), TensorSpec("int32", (5,)))])
    np.testing.assert_array_equal(again, data)


def first_elements(count: int) -> Program:
    """Copies the first `count` of up to 16 numbers; `count` is a uniform."""
    kernel = Kernel(
        "repack",
        (("width", 16), ("padded", 16), ("out", "float32")),
        (Binding("source", "f32"), Binding("out", "f32", "read_write")),
        (("elements", "u32"),),
    )
    return Program((Launch(kernel, (("source", "x"), ("out", "y")), 1, (("elements", count),)),))


def test_launches_that_wait_keep_their_uniforms_and_their_place(gpu, commands, rng):
    """More launches than the ring has places for uniforms; a write behind them comes after them."""
    data = rng.standard_normal(16, dtype=np.float32)
    x, spec = gpu.upload(data), TensorSpec("float32", (16,))
    outs = [gpu.upload(np.zeros(16, np.float32)) for _ in range(400)]
    for k, out in enumerate(outs):
        gpu.run([(first_elements(1 + k % 13), {"x": x, "y": out})], more=True)
    before = gpu.counters.submits
    gpu.write(x, np.zeros(16, np.float32))
    assert gpu.counters.submits == before + 1
    for k, found in enumerate(gpu.download([(out, spec) for out in outs])):
        count = 1 + k % 13
        np.testing.assert_array_equal(found, np.where(np.arange(16) < count, data, 0))
    gpu.run([(first_elements(16), {"x": x, "y": outs[0]})], more=True)
    np.testing.assert_array_equal(gpu.download([(outs[0], spec)])[0], np.zeros(16))
    assert gpu.counters.submits == before + 3  # the last readback went with the last launch
