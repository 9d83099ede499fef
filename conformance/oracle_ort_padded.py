"""The packed operators on ORT's CPU EP, by way of the padded operator that they abbreviate.

PackedAttention is RestorePadding, `Attention` with a mask of lengths, RemovePadding;
PackedMultiHeadAttention the same around `MultiHeadAttention`. ORT's CPU EP has both padded
operators in float32, so float16 cases run on widened inputs. Source: ort-semantics.md section 4.
"""

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from ort_webgpu import PlainSession
from ort_webgpu.conformance.case import Array, Case
from ort_webgpu.conformance.oracle_numpy_packed import restore_padding

__all__ = ["run_padded_on_ort"]

LOWEST = float(np.finfo(np.float32).min)


def run_padded_on_ort(case: Case) -> list[Array]:
    """The output of a PackedAttention or PackedMultiHeadAttention case, float32 inside."""
    bounds = case.require("cumulative_sequence_length")
    lengths = np.diff(bounds).astype(np.int32)
    if case.op_type == "PackedAttention":
        padded = _attention(case, lengths)
    else:
        padded = _multi_head_attention(case, lengths)
    flat = padded.reshape(-1, padded.shape[-1])
    tokens = case.first.shape[0]
    output = flat[case.require("token_offset").reshape(-1)[:tokens]]
    return [output.astype(case.first.dtype)]


def _padded(case: Case, tokens: Array) -> Array:
    """(Tok,D) to float32 (B,S,D)."""
    inputs = (tokens.astype(np.float32), case.require("token_offset"))
    scatter = Case(name=case.name, op_type="RestorePadding", attributes={}, inputs=inputs)
    return restore_padding(scatter).wanted()[0][0]


def _attention(case: Case, lengths: Array) -> Array:
    inputs = {
        "input": _padded(case, case.first),
        "weights": case.input("weights"),
        "bias": case.input("bias"),
        "mask_index": lengths,
        "": None,
        "attention_bias": case.input("attention_bias"),
    }
    return _run("Attention", inputs, {**case.attributes, "mask_filter_value": LOWEST})


def _multi_head_attention(case: Case, lengths: Array) -> Array:
    query = case.first
    if query.ndim == 4:
        rows = [query[:, :, i].reshape(query.shape[0], -1) for i in range(3)]
    else:
        rows = [query, case.require("key"), case.require("value")]
    q, k, v = (_padded(case, x) for x in rows)
    inputs = {
        "query": q,
        "key": k,
        "value": v,
        "bias": case.input("bias"),
        "key_padding_mask": lengths,
        "attention_bias": case.input("attention_bias"),
    }
    return _run("MultiHeadAttention", inputs, {**case.attributes, "mask_filter_value": LOWEST})


def _run(op_type: str, inputs: dict[str, Array | None], attributes: dict[str, Any]) -> Array:
    given = {
        name: a.astype(np.float32) if a.dtype == np.float16 else a
        for name, a in inputs.items()
        if a is not None
    }
    names = [name if name in given else "" for name in inputs]
    node = helper.make_node(op_type, names, ["output"], domain="com.microsoft", **attributes)
    graph = helper.make_graph(
        [node],
        "padded",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for name, a in given.items()
        ],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, None)],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = PlainSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, given)[0]
