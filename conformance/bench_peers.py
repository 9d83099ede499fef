"""Others on the same works in the same run: ORT's CPU EP, ORT's WebGPU EP, torch on CUDA.

Each runs in a process of its own, which may be another interpreter's, so that none can take the
bench down or share a device with it by accident.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ort_webgpu.conformance.bench_works import GqaWork, Work

__all__ = ["Peer", "PeerFigure", "comparable", "layers_of", "peers_here", "run_peer"]

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Peer:
    """A program that answers, see bench_peer_ort.py; `most_flops`: of a work given to it; `widely`:
    it is asked for every comparable work in a quick run too."""

    key: str
    script: str
    python: str
    request: dict[str, str] = field(default_factory=dict)
    most_flops: float = float("inf")
    widely: bool = False


@dataclass(frozen=True)
class PeerFigure:
    """What a peer says of a work: `seconds` of a layer, or why there is no figure."""

    peer: str
    work: str
    seconds: float | None
    error: str = ""
    detail: dict[str, Any] = field(default_factory=dict)


def peers_here(software: bool, webgpu_python: str | None) -> tuple[list[Peer], list[str]]:
    """The peers that can be asked, and a line for each that cannot."""
    here = sys.executable
    peers = [Peer("ort-cpu", "bench_peer_ort.py", here, {"ep": "cpu"}, 2e11)]
    missing = []
    plugin = find_spec("onnxruntime_ep_webgpu") is not None and not software
    if webgpu_python or plugin:
        python, request = webgpu_python or here, {"ep": "webgpu"}
        peers.append(Peer("ort-webgpu-ep", "bench_peer_ort.py", python, request, widely=True))
    else:
        missing.append(
            "ORT's WebGPU EP: not measured; install onnxruntime-ep-webgpu (GPUs), or name an"
            " interpreter that has onnxruntime-webgpu with --webgpu-python"
        )
    if software:
        missing.append("torch: not measured; it has no device of this kind")
    elif find_spec("torch") is None:
        missing.append("torch: not measured; it is not installed")
    else:
        peers.append(Peer("torch", "bench_peer_torch.py", here))
    return peers, missing


def comparable(work: Work) -> bool:
    """Whether peers are asked for the work: plain caches of GroupQueryAttention."""
    return isinstance(work, GqaWork) and not work.cache


def layers_of(work: GqaWork, software: bool) -> tuple[int, int]:
    """Two chain lengths whose difference is well measured and that take bearable time."""
    if software and work.q_len > 1:
        return (1, 2) if work.flops > 2e9 else (1, 4)
    return (1, 4) if work.flops > 1e11 else (1, 8)


def run_peer(
    peer: Peer,
    works: Sequence[GqaWork],
    software: bool,
    tick: Callable[[str], None],
    timeout: float = 900.0,
) -> list[PeerFigure]:
    """The peer's figure for each work; `tick` hears of each once all are there."""
    asked = [w for w in works if w.flops <= peer.most_flops]
    questions = [{**asdict(w), "layers": layers_of(w, software)} for w in asked]
    request = {**peer.request, "works": questions}
    process = subprocess.Popen(
        [peer.python, str(_HERE / peer.script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1"},  # modules beside the script are not for import
    )
    try:
        out, noise = process.communicate(json.dumps(request), timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, noise = process.communicate()
        noise += f"\nstopped after {timeout:.0f} seconds"
    answers = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    name = next((a["peer"] for a in answers if "peer" in a), peer.key)
    found = {a["name"]: a for a in answers if "name" in a}
    reason = noise.strip().splitlines()[-1][:300] if noise.strip() else "no answer"
    figures = []
    for work in asked:
        answer = found.get(work.name, {"error": reason})
        detail = {k: v for k, v in answer.items() if k in ("runs", "kernels")}
        figures.append(
            PeerFigure(name, work.name, answer.get("seconds"), answer.get("error", ""), detail)
        )
        tick(work.name)
    return figures
