"""A failing node as a folder that anybody can run, and a smaller case that still fails."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ort_webgpu.conformance.candidates import Candidate
from ort_webgpu.conformance.case import OPERATORS, Array, Case
from ort_webgpu.conformance.checks import problems
from ort_webgpu.conformance.oracle_ort import run_case
from ort_webgpu.conformance.oracles import answer
from ort_webgpu.conformance.replay import NodeResult
from ort_webgpu.conformance.tolerances import scaled, tolerance_for
from ort_webgpu.errors import OrtWebGpuError

__all__ = ["failure", "repro_of_node", "shrink", "write_repro"]

_SCRIPT = '''"""{title}"""
from pathlib import Path
import numpy as np
from ort_webgpu import WebGPUSession
from ort_webgpu.conformance.checks import compare_saved
here = Path(__file__).parent
session = WebGPUSession(here / "model.onnx", {arguments})
outputs = session.run(None, dict(np.load(here / "inputs.npz")))
found = compare_saved(outputs, here / "expected.npz")
print("\\n".join(found) or "all outputs are as expected")
raise SystemExit(bool(found))
'''


def failure(case: Case, candidate: Candidate) -> str | None:
    """What is wrong with `candidate` on `case`, None where it agrees with the oracle.

    A refusal by candidate or oracle is no failure: such a case shows nothing.
    """
    try:
        expected = answer(case)
        actual = run_case(candidate.open(case.model().SerializeToString()), case)
    except (OrtWebGpuError, ValueError, KeyError, IndexError, RuntimeError):
        return None
    return "; ".join(problems(actual, expected, case)) or None


def shrink(case: Case, fails: Callable[[Case], Any], limit: int = 200) -> tuple[Case, list[str]]:
    """The smallest case found by dropping features, rows and heads while `fails` stays true.

    Returns it with the list of what was dropped. `limit` bounds the calls of `fails`.
    """
    dropped: list[str] = []
    progress = True
    while progress and limit > 0:
        progress = False
        for what, smaller in _reductions(case):
            limit -= 1
            if limit < 0:
                break
            if _holds(fails, smaller):
                case, progress = smaller, True
                dropped.append(what)
                break
    return replace(case, source=f"{case.source}, shrunk"), dropped


def write_repro(
    folder: Path,
    case: Case,
    candidate: Candidate,
    problem: str,
    route: str | None = None,
    shaders: Mapping[str, str] | None = None,
) -> Path:
    """Write model, inputs, expected values, shaders and a script; returns the script's path."""
    folder.mkdir(parents=True, exist_ok=True)
    expected = answer(case)
    (folder / "model.onnx").write_bytes(case.model().SerializeToString())
    inputs: dict[str, Any] = dict(case.feeds())
    np.savez(folder / "inputs.npz", **inputs)
    np.savez(folder / "expected.npz", **_saved(case, expected.wanted()))
    wgsl = folder / "shaders"
    for number, (label, text) in enumerate((shaders or {}).items()):
        wgsl.mkdir(exist_ok=True)
        name = label.partition("(")[0]
        (wgsl / f"{number}_{name}.wgsl").write_text(f"// {label}\n{text}", encoding="utf-8")
    facts = {
        "case": case.name,
        "operator": case.op_type,
        "attributes": {
            k: v for k, v in case.attributes.items() if isinstance(v, int | float | str)
        },
        "features": sorted(case.features),
        "candidate": candidate.label,
        "route": route,
        "oracle": expected.oracle,
        "problem": problem,
        "inputs": {name: [a.dtype.name, list(a.shape)] for name, a in case.feeds().items()},
    }
    (folder / "repro.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
    script = folder / "repro.py"
    arguments = f"adapter={candidate.adapter!r}, backend={candidate.backend!r}"
    if route is not None:
        arguments += f", routes={{{case.op_type!r}: {route!r}}}"
    title = f"{case.op_type} on route {route}: differs from {expected.oracle}."
    script.write_text(_SCRIPT.format(title=title, arguments=arguments), encoding="utf-8")
    return script


def repro_of_node(result: NodeResult, candidate: Candidate, folder: Path) -> list[Path]:
    """Scripts for a node that failed: as it was called, and in `shrunk` as small as it gets.

    The second is missing where the node does not fail outside its model.
    """
    if result.case is None or result.problem is None:
        raise ValueError(f"{result.node}: there is no failure to write down")
    routes = {result.op_type: result.route} if result.route else {}
    alone = replace(candidate, routes=routes, offload="all")
    scripts = [
        write_repro(folder, result.case, alone, result.problem, result.route, result.shaders)
    ]
    if failure(result.case, alone) is None:
        return scripts
    small, dropped = shrink(result.case, lambda case: failure(case, alone))
    if dropped:
        problem = failure(small, alone) or result.problem
        scripts.append(write_repro(folder / "shrunk", small, alone, problem, result.route))
    return scripts


def _saved(case: Case, wanted: list[tuple[Array, Array | None]]) -> dict[str, Any]:
    """Values, masks of what counts, and tolerances, as `compare_saved` reads them."""
    arrays: dict[str, Any] = {}
    for name, (values, care) in zip(case.output_names(), wanted, strict=True):
        tolerance = scaled(tolerance_for(values.dtype, case), values)
        arrays[name] = values
        arrays[f"{name}.care"] = np.ones(values.shape, bool) if care is None else care
        arrays[f"{name}.tolerance"] = np.array([tolerance.absolute, tolerance.relative])
    return arrays


def _holds(fails: Callable[[Case], Any], case: Case) -> bool:
    try:
        return bool(fails(case))
    except (ValueError, KeyError, IndexError, RuntimeError, OrtWebGpuError):
        return False  # the smaller node breaks the contract: no case at all


# -- reductions ------------------------------------------------------------------------------------


def _reductions(case: Case) -> Iterator[tuple[str, Case]]:
    """Smaller cases, the greatest steps first; some break the contract."""
    yield from _batches(case)
    yield from _features(case)
    if case.op_type == "GroupQueryAttention":
        yield from _gqa_rows(case)
        yield from _gqa_heads(case)


_BATCHED = {
    "GroupQueryAttention": frozenset(
        {
            "query",
            "key",
            "value",
            "past_key",
            "past_value",
            "seqlens_k",
            "position_ids",
            "attention_bias",
            "query_seqlens",
        }
    ),
    "DecoderMaskedMultiHeadAttention": frozenset(
        {
            "query",
            "key",
            "value",
            "mask_index",
            "attention_bias",
            "past_key",
            "past_value",
            "cache_indirection",
        }
    ),
}
"""Inputs whose first axis may be the batch."""


def _batches(case: Case) -> Iterator[tuple[str, Case]]:
    names = OPERATORS[case.op_type][0]
    batched = _BATCHED.get(case.op_type, frozenset())
    batch = case.first.shape[0]
    if not batched or batch == 1:
        return
    for row in range(batch):
        taken = [
            array[row : row + 1]
            if array is not None and name in batched and array.ndim and array.shape[0] == batch
            else array
            for name, array in zip(names, case.inputs, strict=False)
        ]
        yield f"all of the batch but row {row}", replace(case, inputs=tuple(taken))


_DROPPED_TOGETHER: Mapping[str, Sequence[tuple[tuple[str, ...], Mapping[str, Any]]]] = {
    "GroupQueryAttention": (
        (("attention_bias",), {}),
        (("head_sink",), {"smooth_softmax": 0}),
        (("cos_cache", "sin_cache", "position_ids"), {"do_rotary": 0, "rotary_interleaved": 0}),
        (("position_ids",), {}),
        (("q_norm_weight", "k_norm_weight"), {}),
        ((), {"softcap": 0.0}),
        ((), {"local_window_size": -1}),
        ((), {"smooth_softmax": 0}),
        ((), {"rotary_interleaved": 0}),
        ((), {"scale": 0.0}),
    ),
    "DecoderMaskedMultiHeadAttention": (
        (("attention_bias",), {}),
        (("mask_index",), {}),
        (("bias",), {}),
        (("beam_width", "cache_indirection"), {}),
    ),
    "PackedAttention": ((("attention_bias",), {}), ((), {"scale": 0.0})),
    "PackedMultiHeadAttention": ((("attention_bias",), {}), (("bias",), {}), ((), {"scale": 0.0})),
}


def _features(case: Case) -> Iterator[tuple[str, Case]]:
    names = OPERATORS[case.op_type][0]
    for inputs, attributes in _DROPPED_TOGETHER.get(case.op_type, ()):
        present = [n for n in inputs if case.input(n) is not None]
        set_here = [k for k, v in attributes.items() if case.attributes.get(k, v) != v]
        if not present and not set_here:
            continue
        kept = tuple(
            None if name in present else array
            for name, array in zip(names, case.inputs, strict=False)
        )
        left = {k: v for k, v in case.attributes.items() if k not in attributes}
        yield ", ".join([*present, *set_here]), replace(case, inputs=kept, attributes=left)
    if len(case.wanted) > 3 and case.wanted[3]:
        left = {k: v for k, v in case.attributes.items() if k != "qk_output"}
        yield "output 3", replace(case, wanted=case.wanted[:3], attributes=left)


def _gqa_rows(case: Case) -> Iterator[tuple[str, Case]]:
    """A shorter prompt, or a decode step over a shorter past; batch 1 only."""
    new = case.first.shape[1]
    past = case.input("past_key")
    if case.first.shape[0] != 1 or case.attributes.get("sliding_window_cache", 0):
        return
    total = int(case.require("total_sequence_length").reshape(-1)[0])
    for count in dict.fromkeys((new // 2, new - 1)):
        if count >= 1 and new == total:
            yield f"all new tokens but {count}", _with_rows(case, count, 0, 0)
        elif count >= 1:
            yield f"all new tokens but {count}", _with_rows(case, count, 0, total - new)
    before = total - new
    if past is None or before < 2 or past.shape[2] < before:
        return
    for skip in dict.fromkeys((before // 2, 1)):
        yield f"{skip} tokens of the past", _with_rows(case, new, skip, before - skip)


def _with_rows(case: Case, new: int, skip: int, before: int) -> Case:
    """`new` tokens after `before` tokens of past, of which the oldest `skip` are left out."""
    changed: dict[str, Array | None] = {}
    for name in ("query", "key", "value", "position_ids"):
        array = case.input(name)
        if array is not None and array.ndim > 1 and array.shape[1] >= new:
            changed[name] = array[:, :new]
    for name in ("past_key", "past_value"):
        array = case.input(name)
        if array is not None:
            changed[name] = array[:, :, skip:]
    bias = case.input("attention_bias")
    if bias is not None:
        changed["attention_bias"] = bias[:, :, :new, skip : skip + before + new]
    lengths, total = case.require("seqlens_k"), case.require("total_sequence_length")
    changed["seqlens_k"] = np.full_like(lengths, before + new - 1)
    changed["total_sequence_length"] = np.full_like(total, before + new)
    return _with_inputs(case, changed)


def _gqa_heads(case: Case) -> Iterator[tuple[str, Case]]:
    """One KV head and its queries, then one query head of it."""
    heads, kv = case.attributes["num_heads"], case.attributes["kv_num_heads"]
    if case.input("key") is None or case.input("k_scale") is not None:
        return  # packed rows and per-channel scales would have to be cut apart
    size = case.first.shape[-1] // heads
    if kv > 1:
        group = heads // kv
        for head in range(kv):
            queries = slice(head * group, (head + 1) * group)
            yield (
                f"all KV heads but {head}",
                _with_heads(case, size, queries, slice(head, head + 1)),
            )
    elif heads > 1:
        for head in range(heads):
            yield (
                f"all heads but {head}",
                _with_heads(case, size, slice(head, head + 1), slice(0, 1)),
            )


def _with_heads(case: Case, size: int, queries: slice, keys: slice) -> Case:
    def columns(heads: slice) -> slice:
        return slice(heads.start * size, heads.stop * size)

    changed: dict[str, Array | None] = {"query": case.first[..., columns(queries)]}
    for name in ("key", "value"):
        rows = case.require(name)
        changed[name] = rows[..., columns(keys)] if rows.ndim == 3 else rows[:, keys]
    for name in ("past_key", "past_value"):
        past = case.input(name)
        changed[name] = None if past is None else past[:, keys]
    bias, sink = case.input("attention_bias"), case.input("head_sink")
    if bias is not None and bias.shape[1] > 1:
        changed["attention_bias"] = bias[:, queries]
    if sink is not None:
        changed["head_sink"] = sink[queries]
    counts = {"num_heads": queries.stop - queries.start, "kv_num_heads": keys.stop - keys.start}
    return replace(_with_inputs(case, changed), attributes={**case.attributes, **counts})


def _with_inputs(case: Case, changed: Mapping[str, Array | None]) -> Case:
    names = OPERATORS[case.op_type][0]
    inputs = tuple(
        changed.get(name, array) for name, array in zip(names, case.inputs, strict=False)
    )
    return replace(case, inputs=inputs)
