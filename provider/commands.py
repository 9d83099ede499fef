"""Commands: what is submitted and read back, by wgpu's Python objects or by the C functions below.

wgpu-py checks and converts arguments in Python at each call, which takes several times as long as
the call: on one machine 42 us of the host for a submit of three launches against 13, and 84 us for
a readback against 25. `Direct` makes the same calls on the handles of the same objects. Handles and
libraries are private to the packages wgpu and wgpudawn, so where one has them not as expected,
`commands_of` gives `Wrapped`. Neither imports a package: a device knows its own.

Recording goes to the library itself: what is wrong in it comes out at the end of the pass or of the
recording. These, and all that does something, go through the package's checked functions, which
raise its errors; and `Gpu` has checked all of it before.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ort_webgpu.errors import DeviceError

__all__ = ["Commands", "commands_of", "record"]

Launches = Sequence[tuple[Any, Any, int, tuple[int, int, int]]]
"""Pipeline, bind group, offset of its uniforms, and workgroups of each."""
Copies = Sequence[tuple[Any, int, Any, int, int]]
"""Source, offset in it, target, offset in it, and bytes of each."""


class Commands(Protocol):
    """What a device is told; the caller holds its lock."""

    def submit(self, launches: Launches, copies: Copies) -> None:
        """The launches in one pass, then the copies, as one submit."""

    def write(self, buffer: Any, offset: int, data: np.ndarray) -> None:
        """Overwrite bytes of `buffer`, behind what was submitted; `data` is contiguous."""

    def read(self, buffer: Any, size: int, parts: Sequence[np.ndarray]) -> None:
        """Fill `parts`, vectors of bytes, with what lies in the first `size` bytes of `buffer` once
        all that was submitted is done. Each begins at the next multiple of 4."""


def commands_of(device: Any) -> Commands:
    """The fastest that the package of `device` allows."""
    try:
        return Direct(device)
    except AttributeError:
        return Wrapped(device)


def record(compute: Any, launches: Launches) -> None:
    """Put the launches into a pass of the package's own."""
    for pipeline, group, offset, grid in launches:
        compute.set_pipeline(pipeline)
        compute.set_bind_group(0, group, (offset,))
        compute.dispatch_workgroups(*grid)


class Wrapped:
    """By the package's objects."""

    def __init__(self, device: Any):
        self._device = device

    def submit(self, launches: Launches, copies: Copies) -> None:
        encoder = self._device.create_command_encoder()
        if launches:
            compute = encoder.begin_compute_pass()
            record(compute, launches)
            compute.end()
        for copy in copies:
            encoder.copy_buffer_to_buffer(*copy)
        self._device.queue.submit([encoder.finish()])

    def write(self, buffer: Any, offset: int, data: np.ndarray) -> None:
        self._device.queue.write_buffer(buffer, offset, data)

    def read(self, buffer: Any, size: int, parts: Sequence[np.ndarray]) -> None:
        buffer.map_sync("READ", 0, size)
        try:
            _fill(parts, buffer.read_mapped(0, size, copy=False))
        finally:
            buffer.unmap()


class Direct:
    """By the C functions of the package's library. AttributeError where something is missing."""

    def __init__(self, device: Any):
        package = sys.modules[type(device).__module__]
        self._ffi, lib = package.ffi, package.lib
        self._checked = package.libf
        self._device, self._queue = device._internal, device.queue._internal
        self._new_encoder = lib.wgpuDeviceCreateCommandEncoder
        self._new_pass = lib.wgpuCommandEncoderBeginComputePass
        self._copy = lib.wgpuCommandEncoderCopyBufferToBuffer
        self._set_pipeline = lib.wgpuComputePassEncoderSetPipeline
        self._set_bind_group = lib.wgpuComputePassEncoderSetBindGroup
        self._dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups
        self._end_of_pass = lib.wgpuComputePassEncoderRelease
        self._end_of_encoder = lib.wgpuCommandEncoderRelease
        self._end_of_buffer = lib.wgpuCommandBufferRelease
        self._unmap = lib.wgpuBufferUnmap  # not checked: after a failure it has nothing to undo
        self._offsets: dict[int, Any] = {}
        self._statuses: list[int] = []
        self._read, self._success = lib.WGPUMapMode_Read, lib.WGPUMapAsyncStatus_Success
        self._info = self._ffi.new("WGPUBufferMapCallbackInfo *")
        self._info.mode = lib.WGPUCallbackMode_AllowProcessEvents
        if hasattr(lib, "wgpuDevicePoll"):  # wgpu-native's own
            signature = "void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)"
            self._callback = self._ffi.callback(signature, self._answered)
            self._info.callback = self._callback
            self._wait: Callable[[Any], None] = self._poll
            self._range = self._checked.wgpuBufferGetMappedRange
        else:
            backend = sys.modules[f"{package.__package__}._ffi"]
            self._info.callback = backend.c_callback("WGPUBufferMapCallback")
            self._info.userdata1 = backend.callbacks.register(self._answered, once=False)
            self._instance = package.get_wgpu_instance()
            self._wait = self._wait_any
            self._range = self._checked.wgpuBufferGetConstMappedRange

    def submit(self, launches: Launches, copies: Copies) -> None:
        checked, null = self._checked, self._ffi.NULL
        encoder = self._new_encoder(self._device, null)
        try:
            if launches:
                self._pass(encoder, launches)
            for source, start, target, to, size in copies:
                self._copy(encoder, source._internal, start, target._internal, to, size)
            commands = checked.wgpuCommandEncoderFinish(encoder, null)
        finally:
            self._end_of_encoder(encoder)
        try:
            checked.wgpuQueueSubmit(
                self._queue, 1, self._ffi.new("WGPUCommandBuffer[1]", [commands])
            )
        finally:
            self._end_of_buffer(commands)

    def _pass(self, encoder: Any, launches: Launches) -> None:
        compute = self._new_pass(encoder, self._ffi.NULL)
        try:
            before = None
            for pipeline, group, offset, (x, y, z) in launches:
                if pipeline is not before:
                    self._set_pipeline(compute, pipeline._internal)
                    before = pipeline
                start = self._offsets.get(offset)
                if start is None:
                    start = self._offsets[offset] = self._ffi.new("uint32_t[1]", [offset])
                self._set_bind_group(compute, 0, group._internal, 1, start)
                self._dispatch(compute, x, y, z)
            self._checked.wgpuComputePassEncoderEnd(compute)
        finally:
            self._end_of_pass(compute)

    def write(self, buffer: Any, offset: int, data: np.ndarray) -> None:
        memory = self._ffi.from_buffer(data)
        self._checked.wgpuQueueWriteBuffer(
            self._queue, buffer._internal, offset, memory, data.nbytes
        )

    def read(self, buffer: Any, size: int, parts: Sequence[np.ndarray]) -> None:
        handle = buffer._internal
        self._statuses.clear()
        try:
            future = self._checked.wgpuBufferMapAsync(handle, self._read, 0, size, self._info[0])
            self._wait(future)
            if self._statuses != [self._success]:
                raise DeviceError(f"mapping a buffer ended with status {self._statuses}")
            _fill(parts, self._ffi.buffer(self._range(handle, 0, size), size))
        finally:
            self._unmap(handle)

    def _answered(self, status: int, *_: Any) -> None:
        self._statuses.append(status)

    def _poll(self, _: Any) -> None:
        while not self._statuses:
            self._checked.wgpuDevicePoll(self._device, True, self._ffi.NULL)

    def _wait_any(self, future: Any) -> None:
        wait = self._ffi.new("WGPUFutureWaitInfo *", {"future": future})
        while not self._statuses:
            # in pieces of 0.1 s, so that KeyboardInterrupt comes through
            self._checked.wgpuInstanceWaitAny(self._instance, 1, wait, 100_000_000)


def _fill(parts: Sequence[np.ndarray], memory: Any) -> None:
    found, offset = np.frombuffer(memory, np.uint8), 0
    for part in parts:
        part[:] = found[offset : offset + part.size]
        offset += -(-part.size // 4) * 4
