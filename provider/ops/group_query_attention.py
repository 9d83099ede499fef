"""com.microsoft.GroupQueryAttention, version 1.

Semantics: contract ort-semantics.md section 2, as ORT's CPU EP 1.32 has them; beyond it: chunks
with batch > 1, Q/K RMS norm. Bidirectional (causal=0), softcap, window, bias, sink, quantized and
window caches combine freely.
"""

import contextlib
from collections.abc import Iterator, Sequence
from types import MappingProxyType

from ort_webgpu.errors import InvalidInputError
from ort_webgpu.graph_tools.nodes import Node
from ort_webgpu.ops import gqa_contract as contract
from ort_webgpu.ops.attention import composed_routes
from ort_webgpu.ops.gqa_call import CallBuilder
from ort_webgpu.ops.gqa_typical import typical_values
from ort_webgpu.ops.spec import Accepted, Call, Known, OpSpec, Rejected, Value

__all__ = ["GroupQueryAttention"]


class GroupQueryAttention(OpSpec):
    """The operator's contract."""

    op_type = "GroupQueryAttention"
    host_inputs = frozenset(
        {
            contract.SEQLENS,
            contract.TOTAL,
            contract.POSITION_IDS,
            contract.K_SCALE,
            contract.V_SCALE,
            contract.Q_NORM,
            contract.K_NORM,
            contract.QUERY_SEQLENS,
        }
    )
    weight_inputs = frozenset({contract.COS, contract.SIN, contract.SINK, contract.BIAS})
    caches = MappingProxyType({1: contract.PAST_KEY, 2: contract.PAST_VALUE})
    routes = composed_routes()

    def cache_kind(self, node: Node) -> str:
        return "window" if node.attributes.get("sliding_window_cache", 0) == 1 else "growing"

    def check_node(self, node: Node, input_dtypes: Sequence[str | None]) -> Accepted | Rejected:
        return contract.check_gqa_node(node, input_dtypes)

    def typical_calls(self, node: Node, known: Sequence[Known | None]) -> Iterator[Call]:
        for values in typical_values(node, known):
            with contextlib.suppress(InvalidInputError):  # a guess that the contract refuses
                yield self.call(node, values, frozenset())

    def call(self, node: Node, values: Sequence[Value | None], in_place: frozenset[int]) -> Call:
        return CallBuilder(node, values, {1, 2} <= in_place).build()
