"""ORT's own execution providers on chained GroupQueryAttention layers: a program, run as a file.

It needs onnx, numpy and onnxruntime (or onnxruntime-webgpu) but not this package, so that it runs
in any interpreter. Standard input is one JSON object {"ep": "cpu" or "webgpu", "works": [...]}, a
work being the fields of bench_works.GqaWork and "layers": two numbers. Standard output is one JSON
object for each work: {"name", "seconds": of a layer, "runs": [[layers, seconds], ...]} or
{"name", "error"}, after one {"peer": name and version}.

A layer's time is the difference of two chain lengths: what a run costs once cancels out.
"""

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from statistics import median
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

__all__ = ["feeds_of", "gqa_chain", "main", "median_seconds"]

BUDGET = 1.0  # seconds for the repetitions of one chain
MOST_RUNS = 25

Work = dict[str, Any]


def gqa_chain(work: Work, layers: int) -> bytes:
    """A model of `layers` GroupQueryAttention nodes, each fed the output of the one before.

    Inputs: q (B,S,N*H), k and v (B,S,KV*H), seqlens, total, by need bias and sink, and pk<i>,
    pv<i> (B,KV,P,H) if the work has a past. Outputs: out, then nk<i>, nv<i>.
    """
    real = TensorProto.FLOAT16 if work["dtype"] == "float16" else TensorProto.FLOAT
    heads, kv, size = work["heads"], work["kv_heads"], work["head_size"]
    shapes: dict[str, tuple[int, list[Any]]] = {
        "q": (real, ["B", "S", heads * size]),
        "k": (real, ["B", "S", kv * size]),
        "v": (real, ["B", "S", kv * size]),
        "seqlens": (TensorProto.INT32, ["B"]),
        "total": (TensorProto.INT32, [1]),
    }
    if work["bias"]:
        shapes["bias"] = (real, [1, heads, "S", "T"])
    if work["sink"]:
        shapes["sink"] = (real, [heads])
    nodes, presents, query = [], [], "q"
    for i in range(layers):
        past = [f"pk{i}", f"pv{i}"] if work["past"] else ["", ""]
        shapes |= {name: (real, ["B", kv, "P", size]) for name in past if name}
        names = [query, "k", "v", *past, "seqlens", "total", "", "", ""]
        names += ["bias" if work["bias"] else "", "sink" if work["sink"] else ""]
        query = "out" if i == layers - 1 else f"o{i}"
        presents += [f"nk{i}", f"nv{i}"]
        nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                names if work["bias"] or work["sink"] else names[:7],
                [query, f"nk{i}", f"nv{i}"],
                name=f"gqa{i}",
                domain="com.microsoft",
                num_heads=heads,
                kv_num_heads=kv,
                local_window_size=work["window"],
                softcap=work["softcap"],
            )
        )
    results = [helper.make_tensor_value_info("out", real, ["B", "S", heads * size])]
    results += [helper.make_tensor_value_info(n, real, ["B", kv, "T", size]) for n in presents]
    inputs = [helper.make_tensor_value_info(n, *about) for n, about in shapes.items()]
    graph = helper.make_graph(nodes, "chain", inputs, results)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


def feeds_of(work: Work, layers: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs of the chain, the past of every layer included."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(work["dtype"])
    batch, length, past = work["batch"], work["q_len"], work["past"]
    heads, kv, size = work["heads"], work["kv_heads"], work["head_size"]

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(kind)

    feeds = {
        "q": normal(batch, length, heads * size),
        "k": normal(batch, length, kv * size),
        "v": normal(batch, length, kv * size),
        "seqlens": np.full(batch, past + length - 1, np.int32),
        "total": np.array([past + length], np.int32),
    }
    if work["bias"]:
        feeds["bias"] = normal(1, heads, length, past + length)
    if work["sink"]:
        feeds["sink"] = normal(heads)
    if past:
        rows = normal(batch, kv, past, size), normal(batch, kv, past, size)
        for i in range(layers):
            feeds[f"pk{i}"], feeds[f"pv{i}"] = rows  # each layer has a copy on the device
    return feeds


def median_seconds(call: Callable[[], Any], budget: float = BUDGET) -> float:
    """The median of up to MOST_RUNS calls, after one that does not count."""
    start = time.perf_counter()
    call()
    first = time.perf_counter() - start
    found: list[float] = []
    while len(found) < MOST_RUNS and (len(found) < 2 or sum(found) + first < budget):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
        first = min(first, found[-1])
    return median(found)


class Provider:
    """How sessions of one execution provider are made."""

    def __init__(self, ep: str):
        self.webgpu = ep == "webgpu"
        self._device: Any = None
        self.name = f"ORT CPU EP {onnxruntime.__version__}"
        if not self.webgpu:
            return
        if "WebGpuExecutionProvider" in onnxruntime.get_available_providers():
            self.name = f"ORT WebGPU EP, wheel {onnxruntime.__version__}"
            return
        plugin = import_module("onnxruntime_ep_webgpu")
        onnxruntime.register_execution_provider_library("webgpu", plugin.get_library_path())
        wanted = plugin.get_ep_name()
        fitting = [d for d in onnxruntime.get_ep_devices() if d.ep_name == wanted]
        if not fitting:
            raise RuntimeError("the plug-in finds no device")
        self._device = fitting[0]
        version = getattr(plugin, "__version__", "") or "of unknown version"
        self.name = f"ORT WebGPU EP, plug-in {version}"

    def session(self, model: bytes) -> Any:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if self.webgpu:  # what it does not take is refused, not timed on the CPU
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        if self._device is not None:
            options.add_provider_for_devices([self._device], {})
            return onnxruntime.InferenceSession(model, options)
        name = "WebGpuExecutionProvider" if self.webgpu else "CPUExecutionProvider"
        return onnxruntime.InferenceSession(model, options, providers=[name])

    def seconds(self, work: Work, layers: int) -> float:
        """Wall time of one run of a chain; the output of its last layer is fetched."""
        session = self.session(gqa_chain(work, layers))
        feeds = feeds_of(work, layers)
        if self.webgpu and work["past"]:
            return _resident_seconds(session, feeds, layers)
        return median_seconds(lambda: session.run(["out"], feeds))


def _resident_seconds(session: Any, feeds: dict[str, np.ndarray], layers: int) -> float:
    """As `seconds`, with the caches on the device already: the presents of a first run.

    Values on the device must not outlive their session; here they die with the frame.
    """
    caches = [f"{c}{i}" for i in range(layers) for c in "kv"]
    first = session.io_binding()
    for name, array in feeds.items():
        first.bind_cpu_input(name, array)
    for output in session.get_outputs():
        first.bind_output(output.name, "webgpu", 0)
    session.run_with_iobinding(first)
    names = [output.name for output in session.get_outputs()]
    values = dict(zip(names, first.get_outputs(), strict=True))
    second = session.io_binding()
    grown = feeds["q"].shape[1]
    for name, array in feeds.items():
        if name[:2] not in ("pk", "pv"):
            later = name in ("seqlens", "total")
            second.bind_cpu_input(name, array + np.int32(grown) if later else array)
    for cache in caches:
        second.bind_ortvalue_input(f"p{cache}", values[f"n{cache}"])
        second.bind_output(f"n{cache}", "webgpu", 0)
    second.bind_output("out", "cpu")
    return median_seconds(lambda: session.run_with_iobinding(second))


def _measured(provider: Provider, work: Work) -> dict[str, Any]:
    few, many = work["layers"]
    runs = [[n, provider.seconds(work, n)] for n in (few, many)]
    slope = (runs[1][1] - runs[0][1]) / (many - few)
    if slope <= 0:
        return {"name": work["name"], "error": f"too noisy: {runs}", "runs": runs}
    return {"name": work["name"], "seconds": slope, "runs": runs}


def main() -> None:
    """Answer the request on standard input."""
    request = json.load(sys.stdin)
    provider = Provider(request["ep"])
    print(json.dumps({"peer": provider.name, "onnx": onnx.__version__}), flush=True)
    for work in request["works"]:
        try:
            answer = _measured(provider, work)
        except Exception as error:  # whatever a provider raises is its answer to this work
            answer = {"name": work["name"], "error": str(error)[:300]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
