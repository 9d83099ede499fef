"""Gpu: one device, its buffers, pipelines and queue.

wgpu-native can end the process on a zero-sized binding, a destroyed buffer or an invalid submit, so
nothing reaches it unchecked: buffers are never empty, live as long as a DeviceBuffer refers to
them, and a Program is checked against its kernels and the limits before it is recorded.
"""

import itertools
import os
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ort_webgpu.adapters import PACKAGES, AdapterInfo, find, package, request
from ort_webgpu.commands import commands_of, record
from ort_webgpu.errors import (
    DeviceError,
    DeviceLostError,
    DeviceMemoryError,
)
from ort_webgpu.ops.spec import Caps, TensorSpec
from ort_webgpu.pool import Pool, capacity_of
from ort_webgpu.wgsl.kernel import Binding, Kernel, Launch, Program
from ort_webgpu.wgsl.render import render, uniform_layout

__all__ = ["Counters", "DeviceBuffer", "Gpu", "open_gpu"]

_UNIFORM_SLOT = 256  # the largest offset alignment that WebGPU allows
_VARYING_SUBGROUPS = {0x8086: 8, 0x1002: 32, 0x5143: 64, 0x13B5: 4}  # Intel, AMD, Qualcomm, Arm
_SIZE_BITS = 40  # of a DeviceBuffer's key


@dataclass
class Counters:
    """What a device has done since it was opened; bytes, and numbers of calls."""

    bytes_up: int = 0
    bytes_down: int = 0
    allocations: int = 0
    allocated_bytes: int = 0
    submits: int = 0
    dispatches: int = 0
    pipelines: int = 0
    bind_groups: int = 0


class DeviceBuffer:
    """`nbytes` of device memory; it goes back to its pool when the last reference dies.

    `binding_size` are the bytes that a binding covers: what the tensor needs, in whole groups of
    16. `key` stands for memory and binding size: equal keys make equal bindings.
    """

    __slots__ = ("__weakref__", "binding_size", "capacity", "gpu", "key", "nbytes", "raw", "serial")

    def __init__(self, gpu: "Gpu", serial: int, raw: Any, nbytes: int, capacity: int):
        self.gpu, self.serial, self.raw = gpu, serial, raw
        self.nbytes, self.capacity = nbytes, capacity
        self.binding_size = min(capacity, max(16, -(-nbytes // 16) * 16))
        self.key = serial << _SIZE_BITS | self.binding_size

    def __del__(self) -> None:
        # Called by the garbage collector, possibly while this thread holds a lock: append only.
        # The Gpu holds `raw` as well, or its own finalizer would run beside this one.
        self.gpu._returned.append((self.serial, self.capacity))


@dataclass
class _Pipeline:
    raw: Any
    layout: Any
    uniforms: dict[str, tuple[int, str]]
    size: int


@dataclass
class _Ring:
    """The uniform blocks on the device. Each keeps its place until the ring comes round, so blocks
    that were there in an earlier submit, as those of equal layers are, need no upload."""

    raw: Any
    places: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)
    end: int = 0


class Gpu:
    """A device. All methods may be called from several threads at once."""

    def __init__(self, info: AdapterInfo, adapter: Any, package: Any):
        self.info = info
        self.counters = Counters()
        self._package = package
        self._lock = threading.RLock()
        self._pool_lock = threading.Lock()
        self._memory: dict[int, Any] = {}
        self._returned: deque[tuple[int, int]] = deque()
        self._pool = Pool()
        self._serials = itertools.count(1)
        self._pipelines: dict[Kernel, _Pipeline] = {}
        self._bind_groups: dict[tuple, Any] = {}
        self._bound: dict[int, set[tuple]] = defaultdict(set)  # keys of bind groups, by memory
        self._programs: dict[int, tuple[Program, list[tuple]]] = {}
        self._waiting: list[tuple] = []  # launches for the next submit
        self._staging: Any = None
        self._lost: str | None = None
        self._vendor = int(adapter.info.get("vendor_id") or 0)
        self._device, self.caps = request(info, adapter)
        self._queue = self._device.queue
        self._commands = commands_of(self._device)
        self._ring = _Ring(self._raw_buffer(1 << 16, "UNIFORM | COPY_DST"))
        if self.caps.subgroup_max:
            self.caps = self._measured_subgroups()

    def __repr__(self) -> str:
        return f"<Gpu {self.info.name!r} ({self.info.backend}, {self.info.kind})>"

    # -- buffers ---------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """A buffer of at least `nbytes` with undefined contents."""
        most = self.caps.storage_binding
        if nbytes > most:
            raise DeviceMemoryError(
                f"a value of {nbytes:,} bytes exceeds the largest storage binding of adapter"
                f" {self.info.name!r} ({most:,} bytes). Use a smaller batch or"
                " context, or leave the node on the CPU with offload="
            )
        capacity = min(capacity_of(nbytes), -(-most // 4) * 4)
        with self._pool_lock:
            if self._returned:
                self._collect()
            serial = self._pool.take(capacity)
            if serial is not None:
                return DeviceBuffer(self, serial, self._memory[serial], nbytes, capacity)
        with self._lock:
            raw = self._raw_buffer(capacity, "STORAGE | COPY_SRC | COPY_DST")
        self.counters.allocations += 1
        self.counters.allocated_bytes += capacity
        serial = next(self._serials)
        self._memory[serial] = raw
        return DeviceBuffer(self, serial, raw, nbytes, capacity)

    def upload(self, array: np.ndarray) -> DeviceBuffer:
        """A new buffer holding `array`, row-major, padded to whole groups of four bytes."""
        buffer = self.allocate(array.nbytes)
        self.write(buffer, array)
        return buffer

    def write(self, buffer: DeviceBuffer, array: np.ndarray, offset: int = 0) -> None:
        """Overwrite bytes of `buffer` from `offset` (a multiple of 4) with `array`, row-major."""
        if array.nbytes == 0:
            return
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if offset % 4 or offset + flat.nbytes > buffer.capacity:
            raise DeviceError(
                f"a write of {flat.nbytes} bytes at {offset} does not fit a buffer of"
                f" {buffer.capacity}; the offset must be a multiple of 4"
            )
        if flat.nbytes % 4:
            flat = np.concatenate([flat, np.zeros(-flat.nbytes % 4, np.uint8)])
        with self._guarded("upload"):
            self._flush()
            self._commands.write(buffer.raw, offset, flat)
        self.counters.bytes_up += flat.nbytes

    def copy(self, source: DeviceBuffer, target: DeviceBuffer, nbytes: int) -> None:
        """Copy the first `nbytes` (rounded up to 4) of `source` to `target`, on the device."""
        nbytes = -(-nbytes // 4) * 4
        if nbytes == 0:
            return
        if nbytes > min(source.capacity, target.capacity) or source.raw is target.raw:
            raise DeviceError(
                f"cannot copy {nbytes} bytes from a buffer of {source.capacity} to one of"
                f" {target.capacity}; they must be different buffers with room for the range"
            )
        with self._guarded("copy"):
            self._submit([(source.raw, 0, target.raw, 0, nbytes)])

    def move(self, regions: Sequence[tuple[DeviceBuffer, DeviceBuffer, int, int, int]]) -> None:
        """Copy on the device: (source, target, offset in source, offset in target, bytes) each.

        Offsets and sizes are multiples of 4; source and target must be different buffers.
        """
        for source, target, start, to, nbytes in regions:
            fits = start + nbytes <= source.capacity and to + nbytes <= target.capacity
            if not fits or (start | to | nbytes) % 4 or source.raw is target.raw or not nbytes:
                raise DeviceError(
                    f"cannot copy {nbytes} bytes at {start} of a buffer of {source.capacity} to"
                    f" {to} of one of {target.capacity}; they must be different buffers with room"
                    " for the range, in whole groups of four bytes"
                )
        if not regions:
            return
        with self._guarded("copy"):
            self._submit([(s.raw, start, t.raw, to, n) for s, t, start, to, n in regions])

    def download(self, wanted: Sequence[tuple[DeviceBuffer, TensorSpec]]) -> list[np.ndarray]:
        """The values as fresh arrays that the caller owns; one map for all of them."""
        sizes = [-(-spec.nbytes // 4) * 4 for _, spec in wanted]
        total = sum(sizes)
        arrays = [np.empty(spec.shape, spec.dtype) for _, spec in wanted]
        if total == 0:
            return arrays
        for (buffer, spec), size in zip(wanted, sizes, strict=True):
            if size > buffer.capacity:
                raise DeviceError(f"{spec} does not fit the buffer of {buffer.capacity} bytes")
        ends = itertools.accumulate(sizes)
        with self._guarded("download"):
            staging = self._staging_buffer(total)
            copies = [
                (buffer.raw, 0, staging, end - size, size)
                for (buffer, _), size, end in zip(wanted, sizes, ends, strict=True)
                if size
            ]
            self._submit(copies)
            self._commands.read(staging, total, [a.reshape(-1).view(np.uint8) for a in arrays])
        self.counters.bytes_down += total
        return arrays

    # -- kernels ---------------------------------------------------------------------------------

    def warm(self, kernels: Iterable[Kernel]) -> None:
        """Compile the pipelines of `kernels`, those that are not compiled yet."""
        for kernel in kernels:
            self._pipeline(kernel)

    def run(
        self,
        programs: Sequence[tuple[Program, Mapping[str, DeviceBuffer]]],
        more: bool = False,
    ) -> None:
        """Record all launches in order and submit them once; returns before they have run.

        `more`: a readback of what they make follows at once, and is submitted with them.
        """
        with self._guarded("run"):
            prepared = self._prepared(programs)
            self.counters.dispatches += len(prepared)
            self._waiting += prepared
            if not more:
                self._flush()

    def time(
        self,
        programs: Sequence[tuple[Program, Mapping[str, DeviceBuffer]]],
        repeats: int = 1,
        lead: int = 0,
    ) -> list[float]:
        """Nanoseconds of device time of `programs`, by a pair of timestamps, `repeats` times.

        Each time they run `lead` times unmeasured in the same submit, so that the device has
        reached its clock.
        """
        if not self.caps.timestamps:
            raise DeviceError(f"adapter {self.info.name!r} has no timestamp queries")
        with self._guarded("time"):
            self._flush()
            recorded = self._prepared(programs)
            return [self._time_once(recorded, lead) for _ in range(repeats)]

    def _measured_subgroups(self) -> Caps:
        """Caps with the subgroup sizes that kernels meet; adapters report 4 to 128 for anything.

        Kernels take lane i of a workgroup to be lane i % size of its subgroup; a device that
        numbers them otherwise is treated as one without subgroups.
        """
        sizes = set()
        for lanes in (64, min(256, self.caps.workgroup_invocations)):
            kernel = Kernel(
                "subgroup_probe",
                (),
                (Binding("out", "vec2<u32>", "read_write"),),
                workgroup_size=lanes,
                features=frozenset({"subgroups"}),
            )
            out = self.allocate(8 * lanes)
            self.run([(Program((Launch(kernel, (("out", "out"),), 1),)), {"out": out})])
            (seen,) = self.download([(out, TensorSpec("uint32", (lanes, 2)))])
            if (seen[:, 1] != np.arange(lanes) % seen[:, 0]).any():
                return replace(self.caps, subgroup_min=0, subgroup_max=0)
            sizes |= set(seen[:, 0].tolist())
        # drivers that compile each shader for the width they like: take the narrowest they have
        floor = _VARYING_SUBGROUPS.get(self._vendor, max(sizes))
        return replace(self.caps, subgroup_min=min(*sizes, floor), subgroup_max=max(sizes))

    # -- inside ----------------------------------------------------------------------------------

    def _submit(self, copies: Sequence[tuple]) -> None:
        """Submit the launches that wait, and after them the copies."""
        launches, self._waiting = self._waiting, []
        self._commands.submit(launches, copies)
        self.counters.submits += 1

    def _flush(self) -> None:
        if self._waiting:
            self._submit(())

    def _time_once(self, recorded: list[tuple], lead: int) -> float:
        queries = self._device.create_query_set(type="timestamp", count=2)
        resolved = self._raw_buffer(256, "QUERY_RESOLVE | COPY_SRC")
        encoder = self._device.create_command_encoder()
        if lead:
            compute = encoder.begin_compute_pass()
            for _ in range(lead):
                record(compute, recorded)
            compute.end()
        compute = encoder.begin_compute_pass(
            timestamp_writes={
                "query_set": queries,
                "beginning_of_pass_write_index": 0,
                "end_of_pass_write_index": 1,
            }
        )
        record(compute, recorded)
        compute.end()
        encoder.resolve_query_set(queries, 0, 2, resolved, 0)
        staging = self._staging_buffer(256)
        encoder.copy_buffer_to_buffer(resolved, 0, staging, 0, 16)
        self._queue.submit([encoder.finish()])
        stamps = np.empty(2, np.uint64)
        self._commands.read(staging, 16, [stamps.view(np.uint8)])
        return float(int(stamps[1]) - int(stamps[0]))

    def _prepared(
        self, programs: Sequence[tuple[Program, Mapping[str, DeviceBuffer]]]
    ) -> list[tuple]:
        """Pipeline, bind group, uniform offset and grid of each launch, uniforms uploaded."""
        encoded = [self._encoded(program) for program, _ in programs]
        self._place([block for launches in encoded for _, block, _, _ in launches])
        places = self._ring.places
        prepared = []
        # One set of scratch for equal programs: each has run before the next begins
        made: dict[tuple, dict[str, DeviceBuffer]] = {}
        for launches, (program, given) in zip(encoded, programs, strict=True):
            scratch = made.get(program.scratch)
            if scratch is None:
                scratch = {name: self.allocate(size) for name, size in program.scratch}
                made[program.scratch] = scratch
            operands = {**given, **scratch}
            for pipeline, block, names, grid in launches:
                key = (id(pipeline), *[operands[name].key for name in names])
                group = self._bind_groups.get(key)
                if group is None:
                    group = self._bind_group(key, pipeline, [operands[name] for name in names])
                prepared.append((pipeline.raw, group, places[id(block)][0], grid))
        return prepared

    def _guarded(self, doing: str) -> "_Guard":
        return _Guard(self, doing)

    def _raw_buffer(self, size: int, usage: str) -> Any:
        try:
            return self._device.create_buffer(size=size, usage=usage)
        except Exception as error:  # wgpu raises its own classes per failure
            raise DeviceMemoryError(
                f"adapter {self.info.name!r} could not allocate {size:,} bytes: {error}"
            ) from error

    def _collect(self) -> None:
        while self._returned:
            for serial, capacity in self._pool.give(*self._returned.popleft()):
                self._forget(serial)
                del self._memory[serial]
                self.counters.allocated_bytes -= capacity

    def _forget(self, serial: int) -> None:
        """Drop the bind groups of memory that goes; what stays must not collect their keys."""
        for key in self._bound.pop(serial, ()):
            self._bind_groups.pop(key, None)
            for part in key[1:]:
                if others := self._bound.get(part >> _SIZE_BITS):
                    others.discard(key)

    def _staging_buffer(self, size: int) -> Any:
        if self._staging is None or self._staging.size < size:
            self._staging = self._raw_buffer(capacity_of(size), "MAP_READ | COPY_DST")
        return self._staging

    def _encoded(self, program: Program) -> list[tuple]:
        """Pipeline, uniform block, operand names and grid of each launch that does anything."""
        # By identity: routes give one object for equal problems, and to hash it is not cheap
        known = self._programs.get(id(program))
        if known is None:
            encoded = [self._encode(launch) for launch in program.launches if launch.workgroups]
            if len(self._programs) >= 1024:
                self._programs.clear()
            known = self._programs[id(program)] = (program, encoded)
        return known[1]

    def _encode(self, launch: Launch) -> tuple:
        pipeline = self._pipeline(launch.kernel)
        block = np.zeros(pipeline.size // 4, np.uint32)
        for name, value in (("workgroups", launch.workgroups), *launch.uniforms):
            index, kind = pipeline.uniforms[name]
            if kind == "f32":
                block[index : index + 1].view(np.float32)[0] = value
            elif kind == "i32":
                block[index : index + 1].view(np.int32)[0] = value
            else:
                block[index] = value
        bound = dict(launch.operands)
        names = [bound[binding.name] for binding in launch.kernel.bindings]
        return pipeline, block, names, self._grid(launch.workgroups)

    def _grid(self, workgroups: int) -> tuple[int, int, int]:
        limit = self.caps.workgroups_per_dimension
        x = min(workgroups, limit)
        y = min(-(-workgroups // x), limit)
        z = -(-workgroups // (x * y))
        if z > limit:
            raise DeviceError(f"{workgroups} workgroups exceed three dimensions of {limit}")
        return x, y, z

    def _place(self, blocks: list[np.ndarray]) -> None:
        """Give each of `blocks` a place in the ring, and upload those that had none."""
        ring = self._ring
        new = {id(block): block for block in blocks if id(block) not in ring.places}
        if not new:
            return
        total = sum(_slots(block.nbytes) for block in new.values())
        if ring.end + total > ring.raw.size:
            new = {id(block): block for block in blocks}
            total = sum(_slots(block.nbytes) for block in new.values())
            self._flush()  # before what its launches read is overwritten
            ring.places, ring.end = {}, 0
            if total > ring.raw.size:
                ring.raw = self._raw_buffer(capacity_of(2 * total), "UNIFORM | COPY_DST")
                self._clear_bind_groups()
        arena = np.zeros(total // 4, np.uint32)
        offset = 0
        for block in new.values():
            arena[offset // 4 : offset // 4 + block.size] = block
            offset += _slots(block.nbytes)
        self._commands.write(ring.raw, ring.end, arena)
        for key, block in new.items():
            ring.places[key] = ring.end, block
            ring.end += _slots(block.nbytes)

    def _bind_group(self, key: tuple, pipeline: _Pipeline, buffers: list[DeviceBuffer]) -> Any:
        entries = [
            {"binding": 0, "resource": {"buffer": self._ring.raw, "size": pipeline.size}},
        ]
        entries += [
            {
                "binding": index,
                "resource": {"buffer": b.raw, "offset": 0, "size": b.binding_size},
            }
            for index, b in enumerate(buffers, start=1)
        ]
        group = self._device.create_bind_group(layout=pipeline.layout, entries=entries)
        if len(self._bind_groups) >= 4096:
            self._clear_bind_groups()
        self._bind_groups[key] = group
        for buffer in buffers:
            self._bound[buffer.serial].add(key)
        self.counters.bind_groups += 1
        return group

    def _clear_bind_groups(self) -> None:
        self._bind_groups.clear()
        self._bound.clear()

    def _pipeline(self, kernel: Kernel) -> _Pipeline:
        found = self._pipelines.get(kernel)
        if found is not None:
            return found
        with self._guarded(f"compile {kernel.label}"):
            if kernel not in self._pipelines:
                self._pipelines[kernel] = self._compile(kernel)
                self.counters.pipelines += 1
            return self._pipelines[kernel]

    def _compile(self, kernel: Kernel) -> _Pipeline:
        if len(kernel.bindings) > self.caps.storage_buffers:
            raise DeviceError(
                f"{kernel.label} binds {len(kernel.bindings)} buffers; adapter {self.info.name!r}"
                f" allows {self.caps.storage_buffers}"
            )
        if kernel.workgroup_size > self.caps.workgroup_invocations:
            raise DeviceError(
                f"{kernel.label} has {kernel.workgroup_size} invocations; adapter"
                f" {self.info.name!r} allows {self.caps.workgroup_invocations}"
            )
        kinds = {"read": "read-only-storage", "read_write": "storage"}
        moving = {"type": "uniform", "has_dynamic_offset": True}
        entries = [{"binding": 0, "visibility": "COMPUTE", "buffer": moving}]
        entries += [
            {"binding": i, "visibility": "COMPUTE", "buffer": {"type": kinds[b.access]}}
            for i, b in enumerate(kernel.bindings, start=1)
        ]
        layout = self._device.create_bind_group_layout(entries=entries)
        module = self._device.create_shader_module(
            label=kernel.label, code=render(kernel, self.caps.dialect)
        )
        raw = self._device.create_compute_pipeline(
            label=kernel.label,
            layout=self._device.create_pipeline_layout(bind_group_layouts=[layout]),
            compute={"module": module, "entry_point": "main"},
        )
        fields = uniform_layout(kernel)
        uniforms = {name: (index, kind) for index, (name, kind) in enumerate(fields)}
        return _Pipeline(raw, layout, uniforms, max(16, -(-4 * len(fields) // 16) * 16))


class _Guard:
    """Holds the device's lock and turns what wgpu raises into our exceptions."""

    def __init__(self, gpu: Gpu, doing: str):
        self._gpu, self._doing = gpu, doing

    def __enter__(self) -> None:
        self._gpu._lock.acquire()
        if self._gpu._lost is not None:
            self._gpu._lock.release()
            raise DeviceLostError(
                f"device {self._gpu.info.name!r} is lost ({self._gpu._lost}); make a new session"
            )

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._gpu._lock.release()
        if error is None or isinstance(error, DeviceError) or not isinstance(error, Exception):
            return
        if not type(error).__module__.startswith(tuple(PACKAGES.values())):
            return
        if "lost" in str(error).lower():
            self._gpu._lost = str(error)
            raise DeviceLostError(
                f"device {self._gpu.info.name!r} was lost during {self._doing}: {error}"
            ) from error
        raise DeviceError(
            f"device {self._gpu.info.name!r} refused to {self._doing}: {error}"
        ) from error


def _slots(nbytes: int) -> int:
    return -(-nbytes // _UNIFORM_SLOT) * _UNIFORM_SLOT


_open_lock = threading.Lock()
_open: dict[tuple[int, str, int], Gpu] = {}


def open_gpu(adapter: str | int = "auto", backend: str = "auto") -> Gpu | None:
    """The device for `adapter`, one per process and adapter; None for "none" or if "auto" has none.

    `adapter`: "auto" (a hardware GPU, else a software one), "hardware", "software", "none", an
    index of `adapters(backend)`, or part of an adapter's name, in any case. The environment
    variable ORT_WEBGPU_ADAPTER stands in for "auto". Raises NoAdapterError where one was asked for.
    """
    chosen = find(adapter, backend)
    if chosen is None:
        return None
    info, raw = chosen
    with _open_lock:
        key = (os.getpid(), info.backend, info.index)
        if key not in _open:
            _open[key] = Gpu(info, raw, package(info.backend))
        return _open[key]
