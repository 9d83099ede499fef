"""ONNX Runtime's CPU EP as an oracle: what it takes of the corpus, and its answer.

The reasons are those of shared/contract/ort-semantics.md sections 2, 3, 5 and 6.
"""

import numpy as np
import onnxruntime as ort

from ort_webgpu import PlainSession
from ort_webgpu.conformance.case import Array, Case

__all__ = ["run_case", "run_on_ort", "why_not_on_ort"]


def why_not_on_ort(case: Case) -> str | None:
    """None where ORT's CPU EP runs the case correctly, else the reason why it cannot serve."""
    check = _CHECKS.get(case.op_type)
    if check is None:
        return f"ORT's CPU EP has no kernel for {case.op_type}"
    return check(case)


def run_on_ort(case: Case) -> list[Array]:
    """The wanted outputs of `case` from ORT's CPU EP, single-threaded and deterministic."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = PlainSession(
        case.model().SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return run_case(session, case)


def run_case(session: ort.InferenceSession, case: Case) -> list[Array]:
    """The wanted outputs of `case` from any session over `case.model()`.

    An `in_place` case is bound, past and present of key and value to the same OrtValue.
    """
    if not case.in_place:
        return list(session.run(None, case.feeds()))
    binding = session.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(a.copy()) for name, a in case.feeds().items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in case.output_names():
        shared = name.replace("present", "past")
        if name.startswith("present"):
            binding.bind_ortvalue_output(name, values[shared])
        else:
            binding.bind_output(name, "cpu")
    session.run_with_iobinding(binding)
    # numpy() is a view of memory that the OrtValues above own.
    return [value.numpy().copy() for value in binding.get_outputs()]


def _why_not_gqa(case: Case) -> str | None:
    query, past = case.first, case.input("past_key")
    batch, new = query.shape[:2]
    total = int(case.require("total_sequence_length").reshape(-1)[0])
    if case.input("q_norm_weight") is not None:
        return "ORT's CPU EP refuses q_norm_weight and k_norm_weight"
    if batch > 1 and new > 1 and new != total and case.input("query_seqlens") is None:
        return "ORT's CPU EP refuses a chunk with batch > 1"
    if past is not None and not any(case.wanted[1:3]) and _brings_keys(case):
        return "ORT's CPU EP reads out of bounds without present outputs"
    if case.in_place and past is not None and past.dtype.kind == "f" and past.dtype != query.dtype:
        return "ORT casts a cache of the other float type, so past and present cannot be one value"
    return None


def _brings_keys(case: Case) -> bool:
    key = case.input("key")
    return key is None or key.shape[1] > 0


def _why_not_dmmha(case: Case) -> str | None:
    if case.first.dtype != np.float32:
        return "ORT's CPU EP has DecoderMaskedMultiHeadAttention in float32 only"
    if case.input("key") is None:
        return "ORT's CPU EP refuses packed QKV"
    if case.qk_dtype is not None and case.qk_dtype != np.float32:
        return "ORT's CPU EP gives qk in float32 only"
    if case.input("past_key") is None and case.attributes.get("past_present_share_buffer", 0):
        return "ORT's CPU EP refuses past_present_share_buffer=1 in cross attention"
    return None


_CHECKS = {
    "GroupQueryAttention": _why_not_gqa,
    "DecoderMaskedMultiHeadAttention": _why_not_dmmha,
}
