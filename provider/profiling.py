"""Profiles of a session that is several ORT sessions and a device, as the one file ORT writes.

ORT writes Chrome trace events with `ts` and `dur` in microseconds since the session was made.
Events of kind `cat="Node"` name their provider in `args`; tools count those.
"""

import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ort_webgpu.graph_tools import Node

__all__ = ["PROVIDER", "DeviceEvents", "merged_profile"]

PROVIDER = "WebGpuExecutionProvider"


class DeviceEvents:
    """What ran on the device, and for how long."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []

    def add(self, node: Node, route: str, start_ns: int, duration_ns: float) -> None:
        """Record one run of `node`: `start_ns` on the monotonic clock, device time if known."""
        self._events.append(
            {
                "cat": "Node",
                "pid": os.getpid(),
                "tid": threading.get_native_id(),
                "ts": start_ns,
                "dur": max(1, round(duration_ns / 1000)),
                "ph": "X",
                "name": f"{node.name}_kernel_time",
                "args": {
                    "op_name": node.op_type,
                    "provider": PROVIDER,
                    "node_index": str(node.index),
                    "route": route,
                },
            }
        )

    def since(self, origin_ns: int) -> list[dict[str, Any]]:
        """The events, their times counted from `origin_ns`."""
        return [{**event, "ts": (event["ts"] - origin_ns) // 1000} for event in self._events]


def merged_profile(sessions: Sequence[Any], events: DeviceEvents, prefix: str) -> str:
    """End profiling in all `sessions`, and write one file in place of theirs; returns its path."""
    origins = [session.get_profiling_start_time_ns for session in sessions]
    paths = [Path(session.end_profiling()) for session in sessions]
    origin = min(origins, default=time.monotonic_ns())
    merged = events.since(origin)
    for start, path in zip(origins, paths, strict=True):
        if not path.is_file():
            continue
        for event in json.loads(path.read_text("utf-8")):
            event["ts"] = event.get("ts", 0) + (start - origin) // 1000
            merged.append(event)
        path.unlink()
    merged.sort(key=lambda event: event["ts"])
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    target = Path(f"{prefix}_{stamp}_{time.monotonic_ns() % 1_000_000}.json")
    target.write_text(json.dumps(merged), "utf-8")
    return str(target)
