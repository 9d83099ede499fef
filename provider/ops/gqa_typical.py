"""Calls of GroupQueryAttention that a session will likely see, from what is known before a run.

A session compiles their kernels when it is made, so that neither the first prompt nor the first
decode steps wait for a compiler.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ort_webgpu.graph_tools.nodes import Node
from ort_webgpu.ops import gqa_contract as contract
from ort_webgpu.ops.gqa_contract import Attributes
from ort_webgpu.ops.spec import Known, TensorSpec, Value

__all__ = ["typical_values"]

# (new tokens, past tokens): a prompt, decode with one share of the keys, and with several
_STEPS = ((64, 0), (1, 64), (1, 2048))


def typical_values(node: Node, known: Sequence[Known | None]) -> Iterator[list[Value | None]]:
    """The inputs of such calls; none where the head size is not known."""
    a = Attributes.read(node)
    query = known[contract.QUERY]
    heads = a.num_heads + (0 if node.has_input(contract.KEY) else 2 * a.kv_num_heads)
    hidden = query.shape[-1] if query and query.shape else None
    if not isinstance(hidden, int) or hidden % heads:
        return
    head_size = hidden // heads
    for new, past in _STEPS:
        if past and not node.has_input(contract.PAST_KEY):
            continue
        values = [
            _value(i, one, a, head_size, new, past) if node.has_input(i) and one else None
            for i, one in enumerate(known)
        ]
        if all(v is not None or not node.has_input(i) for i, v in enumerate(values)):
            yield values


def _value(
    index: int, known: Known, a: Attributes, head_size: int, new: int, past: int
) -> Value | None:
    """Input `index` of a call with one batch entry, None where its shape cannot be guessed."""
    total = past + new
    rows = max(a.window, total) if a.sliding_window_cache else past
    width = head_size // (2 if a.storage == "int4" else 1)
    kv_hidden = a.kv_num_heads * head_size
    channels = 1 if a.quant == "PER_TENSOR" else kv_hidden

    def last(default: int) -> int:
        size = known.shape[-1] if known.shape else None
        return size if isinstance(size, int) else default

    def axis(number: int, size: int) -> int:
        fixed = known.shape[number] if len(known.shape) == 4 else None
        return size if fixed != 1 else 1

    shapes: dict[int, tuple[int, ...]] = {
        contract.QUERY: (1, new, last(0)),
        contract.KEY: (1, new, kv_hidden),
        contract.VALUE: (1, new, kv_hidden),
        contract.PAST_KEY: (1, a.kv_num_heads, rows, width),
        contract.PAST_VALUE: (1, a.kv_num_heads, rows, width),
        contract.SEQLENS: (1,),
        contract.TOTAL: (1,),
        contract.COS: (max(total, 4096), last(head_size // 2)),
        contract.SIN: (max(total, 4096), last(head_size // 2)),
        contract.POSITION_IDS: (1, new),
        contract.BIAS: (1, axis(1, a.num_heads), new, total),
        contract.SINK: (a.num_heads,),
        contract.K_SCALE: (channels,),
        contract.V_SCALE: (channels,),
        contract.Q_NORM: (head_size,),
        contract.K_NORM: (head_size,),
        contract.QUERY_SEQLENS: (1,),
    }
    filled = {contract.SEQLENS: total - 1, contract.TOTAL: total, contract.QUERY_SEQLENS: new}
    spec = TensorSpec(known.dtype, shapes[index])
    if spec.size > 1 << 16:  # nothing that the host reads
        return Value(spec)
    return Value(spec, np.full(spec.shape, filled.get(index, 0), spec.dtype))
