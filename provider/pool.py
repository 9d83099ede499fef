"""Idle device memory that is kept for reuse: bookkeeping alone, no device."""

import functools
import heapq
from collections import defaultdict

__all__ = ["Pool", "capacity_of"]

POOL_LIMIT = 1 << 30  # idle bytes kept, per device


@functools.lru_cache(4096)
def capacity_of(nbytes: int) -> int:
    """The pool's size class: multiples of 256 up to 4 KiB, then eight steps to each doubling."""
    step = max(256, 1 << max(0, nbytes.bit_length() - 4))
    return max(step, -(-nbytes // step) * step)


class Pool:
    """Idle memory, by serial number. Of a capacity the lowest number is taken first, so that equal
    runs get equal memory, and with it the bind groups of the run before."""

    def __init__(self) -> None:
        self._free: dict[int, list[int]] = defaultdict(list)  # heaps, by capacity
        self._idle: dict[int, int] = {}  # capacities, in the order of return
        self.nbytes = 0

    def take(self, capacity: int) -> int | None:
        """Memory of this capacity, if there is some."""
        free = self._free.get(capacity)
        if not free:
            return None
        serial = heapq.heappop(free)
        self.nbytes -= self._idle.pop(serial)
        return serial

    def give(self, serial: int, capacity: int) -> list[tuple[int, int]]:
        """Keep the memory; what has to go for it, longest idle first, with its capacity."""
        heapq.heappush(self._free[capacity], serial)
        self._idle[serial] = capacity
        self.nbytes += capacity
        gone = []
        while self.nbytes > POOL_LIMIT:
            oldest = next(iter(self._idle))
            size = self._idle.pop(oldest)
            self._free[size].remove(oldest)
            heapq.heapify(self._free[size])
            self.nbytes -= size
            gone.append((oldest, size))
        return gone
