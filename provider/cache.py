"""Cache: the key/value caches of one decode loop, resident on the device between runs.

    cache = session.new_cache(batch_size=2)
    (logits,) = session.run(["logits"], {"input_ids": prompt, "attention_mask": mask}, cache=cache)

A cache belongs to the session that made it. Appending rows costs what the new rows cost; storage is
doubled when it is full. A run that raises leaves the cache as it was before.
"""

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from ort_webgpu.cache_pairs import Pair
from ort_webgpu.device import DeviceBuffer, Gpu
from ort_webgpu.errors import InvalidInputError
from ort_webgpu.ops.spec import TensorSpec
from ort_webgpu.values import DeviceValue, Rows

__all__ = ["Cache", "matching"]

Move = tuple[DeviceBuffer, DeviceBuffer, int, int, int]


def matching(patterns: Sequence[str], names: Sequence[str]) -> frozenset[str]:
    """Those of `names` that are in `patterns`, or match one; InvalidInputError for one in vain."""
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        fitting = {n for n in names if n == pattern or fnmatchcase(n, pattern)}
        if not fitting:
            raise InvalidInputError(
                f"device_outputs names {pattern!r}, which fits none of the outputs: {list(names)}"
            )
        found |= fitting
    return frozenset(found)


class Cache:
    """Pasts of a model by input name; made by `WebGPUSession.new_cache`.

    Kinds of pasts: those that grow by the new rows of each run; those of a window, which drop old
    rows; those of fixed size, whose number of valid rows the caller feeds (past_sequence_length);
    and constant ones (cross attention), which are kept from the run that first fed them. What a
    run is fed under the name of a past replaces what the cache holds. Threads that use one cache
    wait for each other.
    """

    def __init__(
        self,
        session: Any,
        pairs: Sequence[Pair],
        gpu: Gpu | None,
        batch_size: int,
        capacity: int | None = None,
        head_size: int | None = None,
    ):
        if not pairs:
            raise InvalidInputError(
                "this model has no key/value cache: no graph input is the past of an attention node"
                " whose present is a graph output. Run it without cache="
            )
        if batch_size < 1 or (capacity is not None and capacity < 1):
            raise InvalidInputError(
                f"batch_size={batch_size} and capacity={capacity} must be positive"
            )
        self._session = weakref.ref(session)
        self._gpu = gpu
        self._pairs = {pair.past: pair for pair in pairs}
        self._capacity = capacity
        self._batch_size = batch_size
        self._lock = threading.RLock()
        self._shared: set[str] = set()
        self._values = {
            pair.past: self._empty(pair, head_size) for pair in pairs if pair.kind != "constant"
        }

    # -- looking ---------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return self._batch_size

    @property
    def capacity(self) -> int | None:
        """The number of rows that was asked for, None for a cache that grows."""
        return self._capacity

    @property
    def length(self) -> int:
        """Rows that growing pasts have now; 0 where the model has none of that kind."""
        growing = self._of_kind("growing")
        return max((self._values[name].shape[2] for name in growing), default=0)

    @property
    def names(self) -> tuple[str, ...]:
        """The graph inputs that the cache feeds."""
        return tuple(self._pairs)

    def __getitem__(self, name: str) -> DeviceValue:
        """The past `name` as it is now. It stays so: the cache no longer overwrites its rows."""
        with self._lock:
            value = self._values[name]
            self._share(name)
            return value

    def __repr__(self) -> str:
        room = "growing" if self._capacity is None else f"capacity {self._capacity}"
        return f"<Cache of {len(self._pairs)} values, batch {self.batch_size}, {room}>"

    # -- changing --------------------------------------------------------------------------------

    def reorder(self, indices: Iterable[int]) -> None:
        """Make row i of the batch what row `indices[i]` was, as beam search does after each step.

        There may be more or fewer indices than rows: the batch gets as many rows as indices.
        """
        order = [int(i) for i in np.asarray(list(indices), np.int64).reshape(-1)]
        if not order or min(order) < 0 or max(order) >= self._batch_size:
            raise InvalidInputError(
                f"reorder({order}): indices of a batch of {self._batch_size} lie in"
                f" [0, {self._batch_size}) and are at least one"
            )
        with self._lock:
            if order == list(range(self._batch_size)):
                return
            moves: list[Move] = []
            values = {n: _gathered(v, order, moves) for n, v in self._values.items()}
            if self._gpu is not None:
                self._gpu.move(moves)
            self._values = values
            self._shared.clear()
            self._batch_size = len(order)

    def truncate(self, length: int) -> None:
        """Forget the rows from `length` on, as speculative decoding does with rejected tokens.

        Pasts of fixed size stay as they are: the next run is fed a smaller past_sequence_length.
        Raises InvalidInputError where rows have dropped out of a window and cannot come back.
        """
        with self._lock:
            if windows := self._of_kind("window"):
                raise InvalidInputError(
                    f"{windows[0]!r} is a window cache: rows that dropped out of it cannot come"
                    " back. Fork the cache before the tokens that may be rejected"
                )
            if not 0 <= length <= max(self.length, 0) and self._of_kind("growing"):
                raise InvalidInputError(
                    f"truncate({length}): the cache has {self.length} rows; it can only get shorter"
                )
            for name in self._of_kind("growing"):
                if self._values[name].shape[2] > length:
                    self._values[name] = _cut(self._values[name], length, name in self._shared)

    def fork(self) -> "Cache":
        """A second cache with the same contents, which goes its own way from here.

        Storage is shared until one of the two is written to.
        """
        with self._lock:
            for name in self._values:
                self._share(name)
            other: Cache = object.__new__(Cache)
            other.__dict__.update(self.__dict__)
            other._lock = threading.RLock()
            other._shared = set(self._shared)
            other._values = dict(self._values)
            return other

    # -- running ---------------------------------------------------------------------------------

    def step(self, session: Any, feed: Mapping[str, Any]) -> "Step":
        """One run of `session`, which holds the cache's lock; for WebGPUSession.run."""
        if self._session() is not session:
            raise InvalidInputError(
                "this cache was made by another session; use new_cache() of the session that runs"
            )
        return Step(self, feed)

    def others(self, outputs: Sequence[str]) -> list[str]:
        """Those of `outputs` that the cache does not keep."""
        kept = {pair.present for pair in self._pairs.values()}
        return [name for name in outputs if name not in kept]

    # -- inside ----------------------------------------------------------------------------------

    def _of_kind(self, kind: str) -> list[str]:
        return [name for name in self._values if self._pairs[name].kind == kind]

    def _share(self, name: str) -> None:
        self._shared.add(name)
        rows = self._values[name].rows
        if rows is not None:
            with rows.lock:
                rows.shared = True

    def _empty(self, pair: Pair, head_size: int | None) -> DeviceValue:
        """The past before the first token."""
        heads, width = pair.heads, pair.width or head_size
        if heads is None or width is None:
            raise InvalidInputError(
                f"input {pair.past!r}: the model does not say how many elements a row of the cache"
                " has; give new_cache(head_size=...)"
            )
        rows = {"growing": 0, "window": pair.rows, "static": pair.rows or self._capacity}[pair.kind]
        if rows is None:
            raise InvalidInputError(
                f"input {pair.past!r} is a buffer of fixed size that the model leaves open; give"
                " new_cache(capacity=...), the most tokens that the loop will come to"
            )
        shape = (self._batch_size, heads, rows, width)
        if pair.kind == "growing" and self._capacity is not None and self._gpu is not None:
            spec = TensorSpec(pair.dtype, (self._batch_size, heads, self._capacity, width))
            room = Rows(self._capacity, 0, self._capacity, fixed=True)
            buffer = self._gpu.allocate(spec.nbytes)
            return DeviceValue(self._gpu, buffer, TensorSpec(pair.dtype, shape), room)
        zeros = np.zeros(shape, pair.dtype)
        return DeviceValue.of_array(zeros, self._gpu if zeros.size else None)


class Step:
    """One run on a cache: what it feeds, and what becomes of its results."""

    def __init__(self, cache: Cache, feed: Mapping[str, Any]):
        self._cache, self._given = cache, feed

    def __enter__(self) -> "Step":
        cache = self._cache
        cache._lock.acquire()
        self._before = dict(cache._values)
        self.feeds = {**cache._values, **self._given}
        self.presents = frozenset(p.present for p in cache._pairs.values() if p.present is not None)
        #: Inputs that the run may overwrite.
        self.own = frozenset(
            name
            for name in cache._values
            if cache._pairs[name].present is not None
            and name not in cache._shared
            and not isinstance(self._given.get(name), DeviceValue)
        )
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        cache = self._cache
        if error is not None:
            cache._values = self._before
            for value in self._before.values():
                if value.rows is not None:
                    value.rows.give_up(value.shape[2])
        cache._lock.release()

    def keep(self, results: Mapping[str, Any]) -> None:
        """Make the presents among `results`, all DeviceValues, the next pasts."""
        cache = self._cache
        values = dict(cache._values)
        for name, pair in cache._pairs.items():
            if pair.present is None:
                if name in self._given:
                    values[name] = _kept(self._given[name], cache._gpu)
                continue
            value: DeviceValue = results[pair.present]
            self._check(name, pair, value)
            old = values[name]
            if value.buffer is None or value.buffer is not old.buffer:
                cache._shared.discard(name)
            values[name] = value
        cache._values = values

    def result(self, name: str, value: Any, resident: bool) -> Any:
        """What the caller gets of output `name`."""
        for past, pair in self._cache._pairs.items():
            if pair.present == name:
                return self._cache[past] if resident else value.numpy()
        return value

    def _check(self, name: str, pair: Pair, value: DeviceValue) -> None:
        cache = self._cache
        limit = cache._capacity
        if limit is not None and pair.kind == "growing" and value.shape[2] > limit:
            raise InvalidInputError(
                f"input {name!r}: the cache has room for {limit} rows and this run makes"
                f" {value.shape[2]}. Make it with a larger capacity=, or without one"
            )
        if value.shape[0] != cache._batch_size:
            raise InvalidInputError(
                f"the cache has a batch of {cache._batch_size}, the run one of {value.shape[0]};"
                " make the cache with new_cache(batch_size=...) to fit, or reorder() it"
            )


def _kept(value: Any, gpu: Gpu | None) -> DeviceValue:
    if isinstance(value, DeviceValue):
        return value
    array = value.numpy() if hasattr(value, "numpy") else np.asarray(value)
    return DeviceValue.of_array(array, gpu)


def _gathered(value: DeviceValue, order: Sequence[int], moves: list[Move]) -> DeviceValue:
    """`value` with its batch entries in `order`; the copies that fill it are added to `moves`."""
    spec = TensorSpec(value.spec.dtype, (len(order), *value.shape[1:]))
    if value.gpu is None or value.buffer is None or not value.shape[0]:
        return DeviceValue(None, None, spec, array=value.numpy()[list(order)])
    rows = value.rows
    entry = value.spec.nbytes // value.shape[0]
    if rows is not None:
        _, heads, _, width = value.shape
        entry = TensorSpec(spec.dtype, (heads, rows.capacity, width)).nbytes
    if entry % 4:
        return DeviceValue.of_array(value.numpy()[list(order)], value.gpu)
    buffer = value.gpu.allocate(entry * len(order))
    if entry:
        moves += [(value.buffer, buffer, j * entry, i * entry, entry) for i, j in enumerate(order)]
    if rows is None:
        return DeviceValue(value.gpu, buffer, spec)
    room = Rows(rows.capacity, value.shape[2], rows.written, rows.fixed)
    return DeviceValue(value.gpu, buffer, spec, room)


def _cut(value: DeviceValue, length: int, shared: bool) -> DeviceValue:
    batch, heads, used, width = value.shape
    spec = TensorSpec(value.spec.dtype, (batch, heads, length, width))
    if value.gpu is None:
        return DeviceValue(None, None, spec, array=value.numpy()[:, :, :length])
    rows = value.rows
    if rows is None:
        rows = Rows(used, used, used, shared=shared)
    rows.give_up(length)
    return DeviceValue(value.gpu, value.buffer, spec, rows)
