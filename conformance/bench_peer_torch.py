"""PyTorch's scaled_dot_product_attention on a CUDA device: a program, run as a file.

Requests and answers are those of bench_peer_ort.py. "seconds" is device time by events, around
calls that were queued while the device was kept busy, so that launching them is not measured; over
several data sets where the device's cache would hold one. The best of torch's kernels counts,
"kernels" tells all.
"""

import json
import sys
from importlib import import_module
from statistics import median
from typing import Any

__all__ = ["main"]

CALLS = 16  # in one measurement
CACHE_BYTES = 128 << 20
KERNELS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
BUSY_CYCLES = 20_000_000  # some 10 ms


def _tensors(torch: Any, work: dict[str, Any]) -> list[tuple[Any, Any, Any]]:
    kind = getattr(torch, work["dtype"])
    total = work["past"] + work["q_len"]
    shape = (work["batch"], work["kv_heads"], total, work["head_size"])
    rows = (work["batch"], work["heads"], work["q_len"], work["head_size"])

    def normal(size: tuple[int, ...]) -> Any:
        return torch.randn(size, device="cuda", dtype=kind)

    one = normal(shape)
    sets = 1 + CACHE_BYTES // (2 * one.numel() * one.element_size()) if work["q_len"] < 16 else 1
    return [(normal(rows), normal(shape), normal(shape)) for _ in range(min(sets, CALLS))]


def _seconds(torch: Any, work: dict[str, Any], kernel: Any) -> float:
    attend = torch.nn.functional.scaled_dot_product_attention
    sets = _tensors(torch, work)
    mask = None
    if work["past"] and work["q_len"] > 1:
        mask = import_module("torch.nn.attention.bias").causal_lower_right(
            work["q_len"], work["past"] + work["q_len"]
        )
    causal = work["q_len"] > 1 and mask is None

    def once(index: int) -> None:
        q, k, v = sets[index % len(sets)]
        attend(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)

    found = []
    with import_module("torch.nn.attention").sdpa_kernel(kernel):
        once(0)
        torch.cuda._sleep(15 * BUSY_CYCLES)  # an idle device runs at a fraction of its clock
        for _ in range(7):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(BUSY_CYCLES)
            begin.record()
            for index in range(CALLS):
                once(index)
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) / 1e3 / CALLS)
    return median(found)


def _measured(torch: Any, work: dict[str, Any]) -> dict[str, Any]:
    if work["softcap"] or work["window"] >= 0 or work["bias"] or work["sink"]:
        return {"name": work["name"], "error": "plain attention only"}
    kernels: dict[str, float] = {}
    errors = []
    for name in KERNELS:
        scores = work["batch"] * work["heads"] * work["q_len"] * (work["past"] + work["q_len"])
        if name == "MATH" and (kernels or scores > 2**29):
            continue
        try:
            backend = getattr(import_module("torch.nn.attention").SDPBackend, name)
            kernels[name] = _seconds(torch, work, backend)
        except Exception as error:  # a kernel that does not take this dtype or shape
            errors.append(f"{name}: {str(error)[:80]}")
    if not kernels:
        return {"name": work["name"], "error": "; ".join(errors)}
    return {"name": work["name"], "seconds": min(kernels.values()), "kernels": kernels}


def main() -> None:
    """Answer the request on standard input."""
    request = json.load(sys.stdin)
    torch = import_module("torch")
    if not torch.cuda.is_available():
        raise SystemExit("torch has no CUDA device")
    print(json.dumps({"peer": f"torch SDPA {torch.__version__}"}), flush=True)
    for work in request["works"]:
        print(json.dumps(_measured(torch, work)), flush=True)


if __name__ == "__main__":
    main()
