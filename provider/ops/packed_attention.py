"""com.microsoft.PackedAttention and PackedMultiHeadAttention, version 1.

Letters: Tok packed tokens, B sequences, S padded length, N heads, H head size of q and k, Dq = Dk
and Dv projected widths. Semantics: contract ort-semantics.md 1.3, 1.4 and 4. The projection is not
rounded to the node's type: it is float32 until the output.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ort_webgpu.errors import InvalidInputError, InvalidModelError
from ort_webgpu.graph_tools.nodes import Node
from ort_webgpu.ops.attention import CORE_ROUTES, composed_routes
from ort_webgpu.ops.attention_core import (
    AttentionProblem,
    ComposedRoute,
    CoreRoute,
    Parts,
    sequences,
)
from ort_webgpu.ops.packed_contract import (
    FLOATS,
    Names,
    Schedule,
    check_packed_node,
    heads_of,
    padded_bias,
    refuse,
    score_scale,
)
from ort_webgpu.ops.packed_prologue import KEYS, MatrixProjection, PackedRows, Projection, Split
from ort_webgpu.ops.repack import repack
from ort_webgpu.ops.spec import (
    Accepted,
    Call,
    Caps,
    OpSpec,
    Output,
    Rejected,
    Route,
    TensorSpec,
    Value,
)
from ort_webgpu.wgsl.kernel import Program

__all__ = ["PackedAttention", "PackedMultiHeadAttention", "PackedProblem"]


@dataclass(frozen=True)
class PackedProblem:
    """One call: a prologue over the tokens, then attention within each sequence.

    `card` says that the operator has a kernel card, which names variants.
    """

    core: AttentionProblem
    source: Projection | Split
    card: bool

    @property
    def rows(self) -> PackedRows:
        """The operands between prologue and core."""
        return self.source.rows

    def check(self, caps: Caps) -> Accepted | Rejected:
        """Whether the operands between the kernels can be bound."""
        for name, size in (*self.rows.scratch, *self._scratch):
            if size > caps.storage_binding:
                return Rejected(
                    f"needs {size:,} bytes for {name}, the adapter binds {caps.storage_binding:,}"
                )
        return Accepted()

    def prologue(self, caps: Caps, half_queries: bool = False) -> Parts:
        """Rows of q, k and v."""
        rows = replace(self.rows, half_queries=half_queries)
        return replace(self.source, rows=rows).parts(caps)

    def epilogue(self, caps: Caps) -> Parts:
        """Rows of a V head size that is no multiple of four, made dense."""
        if not self._repacks:
            return Parts()
        rows, width = self.rows.tokens * self.rows.heads, self.rows.v_head_size
        dense = repack("padded_output", "output", self.rows.dtype, rows, width, 4 * self.core.v4)
        return Parts(dense.launches, self._scratch)

    def names(self) -> dict[str, str]:
        """What the core's operands are called here."""
        return {
            "k": KEYS[0],
            "v": KEYS[1],
            "out": "padded_output" if self._repacks else "output",
        }

    def card_variant(self, core_route: str, caps: Caps) -> str | None:
        """The name in variants.json that this call on `core_route` is."""
        if not self.card or core_route not in ("flash", "flash_nosg", "serial"):
            return None
        dtype = "f16" if self.rows.dtype == "float16" else "f32"
        bias = "_attn_bias" if self.core.bias_dtype else ""
        return f"{dtype}{bias}_{core_route}"

    @property
    def _repacks(self) -> bool:
        return self.rows.v_head_size % 4 != 0

    @property
    def _scratch(self) -> tuple[tuple[str, int], ...]:
        if not self._repacks:
            return ()
        return (("padded_output", self.rows.tokens * self.rows.heads * self.core.v4 * 16),)


class MatrixRoute(ComposedRoute):
    """A core route behind a projection on the matrix layer."""

    stage = "projected"

    def __init__(self, core: CoreRoute, native: bool, direct: bool = False):
        super().__init__(core)
        self.native, self.direct = native, direct
        self.forced_only = not native
        self.kind = "matrix_direct" if direct else "matrix_staged"
        self.name = f"{self.kind}_{core.name}" + ("" if native else "_emulated")

    def _projected(self, problem: PackedProblem) -> PackedProblem:
        assert isinstance(problem.source, Projection)
        source = MatrixProjection(
            problem.source.rows, problem.source.depth, self.native, self.direct
        )
        return replace(problem, source=source)

    def check(self, problem: Any, caps: Caps) -> Accepted | Rejected:
        projection = self._projected(problem).source
        assert isinstance(projection, MatrixProjection)
        verdict = super().check(problem, caps)
        if isinstance(verdict, Rejected):
            return verdict
        return projection.rejection(caps) or verdict

    def program(self, problem: Any, caps: Caps) -> Program:
        return super().program(self._projected(problem), caps)

    def card_variant(self, problem: Any, caps: Caps) -> str | None:
        name = problem.card_variant(self.core_route.name, caps)
        return f"{self.kind}_{name}" if name and self.native else None


def _projected_routes() -> tuple[Route, ...]:
    """Matrix projections where the device has them, the register-tiled one, and for tests the
    emulated matrix projection.

    Operands read from where they lie come last: that was slower than staging them wherever it was
    measured on an H200 (contract wgsl-attention.md).
    """
    names = ("flash_matrix", "flash", "flash_nosg", "serial")
    cores = [core for core in CORE_ROUTES if core.name in names]
    *native, serial = (MatrixRoute(core, True) for core in cores)
    direct = (MatrixRoute(core, True, True) for core in cores)
    emulated = (MatrixRoute(cores[2], False, direct) for direct in (False, True))
    return (*native, *composed_routes(), serial, *direct, *emulated)


def _call(
    node: Node,
    source: Projection | Split,
    schedule: Schedule,
    bias: Value | None,
    inputs: dict[str, int],
    card: bool,
) -> Call:
    rows = source.rows
    core = AttentionProblem(
        batch=schedule.batch,
        q_len=schedule.longest,
        num_heads=rows.heads,
        kv_heads=rows.heads,
        head_size=rows.head_size,
        v_head_size=rows.v_head_size,
        kv_dtype=rows.kv_dtype,
        out_dtype="float32" if rows.v_head_size % 4 else rows.dtype,
        kv_head_rows=rows.tokens,
        max_keys=schedule.longest,
        causal=False,
        bias_dtype=bias.dtype if bias else "",
        bias_heads=bias.shape[1] if bias else 1,
        bias_rows=schedule.padded if bias else 0,
        bias_width=schedule.padded if bias else 0,
        packed_rows=True,
        scale=rows.scale,
        half_queries=rows.dtype == "float16",
    )
    seq = sequences(
        schedule.batch,
        q_row=schedule.starts,
        q_valid=schedule.lengths,
        k_row=schedule.starts,
        total=schedule.lengths,
        bias_batch=np.arange(schedule.batch) if bias and bias.shape[0] > 1 else 0,
    )
    spec = TensorSpec(rows.dtype, (rows.tokens, rows.heads * rows.v_head_size))
    problem = PackedProblem(core, source, card)
    return Call(problem, inputs, {0: Output("output", spec)}, {"seq": seq})


class PackedAttention(OpSpec):
    """input (Tok,Din), weights (Din,Dq+Dk+Dv), bias to (Tok,Dv)."""

    op_type = "PackedAttention"
    names = Names(
        (
            "input",
            "weights",
            "bias",
            "token_offset",
            "cumulative_sequence_length",
            "attention_bias",
        ),
        required=(0, 1, 2, 3, 4),
        token_offset=3,
        lengths=4,
        attention_bias=5,
    )
    host_inputs = frozenset({3, 4})
    weight_inputs = frozenset({1, 2, 5})
    routes = _projected_routes()

    def check_node(self, node: Node, input_dtypes: Sequence[str | None]) -> Accepted | Rejected:
        sizes, heads = node.attributes.get("qkv_hidden_sizes"), heads_of(node)
        if sizes and (
            len(sizes) != 3
            or sizes[0] != sizes[1]
            or any(size <= 0 or size % heads for size in sizes)
        ):
            raise InvalidModelError(
                f"{node}: qkv_hidden_sizes is {sizes}; it must be three positive multiples of"
                f" num_heads={heads}, the first two equal"
            )
        return check_packed_node(node, self.names, input_dtypes)

    def call(self, node: Node, values: Sequence[Value | None], in_place: frozenset[int]) -> Call:
        values = [*values, *[None] * (6 - len(values))]
        source, weights, bias = values[:3]
        assert source is not None and weights is not None and bias is not None
        if source.dtype not in FLOATS or len(source.shape) != 2:
            refuse(node, "input", source, "a float32 or float16 tensor (tokens, width)")
        tokens, depth = source.shape
        dtype = source.dtype
        if weights.dtype != dtype or len(weights.shape) != 2 or weights.shape[0] != depth:
            refuse(node, "weights", weights, f"{dtype} ({depth}, width of q, k and v)")
        if bias.dtype != dtype or bias.shape != weights.shape[1:]:
            refuse(node, "bias", bias, f"{dtype} {weights.shape[1:]}, as wide as weights")
        heads = heads_of(node)
        head_size, v_head_size = self._head_sizes(node, heads, weights.shape[1])
        schedule = Schedule.read(node, self.names, values, tokens)
        attention_bias = padded_bias(node, self.names, values[5], schedule, heads, dtype)
        scale = score_scale(node, head_size)
        rows = PackedRows(tokens, heads, head_size, v_head_size, dtype, dtype, scale)
        inputs = {"input": 0, "weights": 1, "qkv_bias": 2}
        if attention_bias:
            inputs["bias"] = 5
        return _call(node, Projection(rows, depth), schedule, attention_bias, inputs, card=True)

    @staticmethod
    def _head_sizes(node: Node, heads: int, width: int) -> tuple[int, int]:
        """Head size of q and k, and of v."""
        sizes = node.attributes.get("qkv_hidden_sizes")
        if sizes:
            if sum(sizes) != width:
                raise InvalidInputError(
                    f"{node}: qkv_hidden_sizes {sizes} add up to {sum(sizes)}; weights have"
                    f" {width} columns"
                )
            return sizes[0] // heads, sizes[2] // heads
        if width == 0 or width % (3 * heads):
            raise InvalidInputError(
                f"{node}: weights have {width} columns; without qkv_hidden_sizes they are three"
                f" equal parts of num_heads={heads} heads each"
            )
        return width // (3 * heads), width // (3 * heads)


class PackedMultiHeadAttention(OpSpec):
    """query (Tok,Dq), key (Tok,Dq), value (Tok,Dv), or query (Tok,N,3,H) alone, to (Tok,Dv)."""

    op_type = "PackedMultiHeadAttention"
    names = Names(
        (
            "query",
            "key",
            "value",
            "bias",
            "token_offset",
            "cumulative_sequence_length",
            "attention_bias",
        ),
        required=(0, 4, 5),
        token_offset=4,
        lengths=5,
        attention_bias=6,
    )
    host_inputs = frozenset({4, 5})
    weight_inputs = frozenset({3, 6})
    routes = composed_routes()

    def check_node(self, node: Node, input_dtypes: Sequence[str | None]) -> Accepted | Rejected:
        if node.has_input(1) != node.has_input(2):
            raise InvalidModelError(f"{node}: key and value must be given together, or neither")
        return check_packed_node(node, self.names, input_dtypes)

    def call(self, node: Node, values: Sequence[Value | None], in_place: frozenset[int]) -> Call:
        values = [*values, *[None] * (7 - len(values))]
        query, bias = values[0], values[3]
        assert query is not None
        heads, dtype = heads_of(node), query.dtype
        joined = values[1] is None
        head_size, v_head_size = self._head_sizes(node, heads, values)
        tokens = query.shape[0]
        width = heads * (2 * head_size + v_head_size)
        inputs = {"query": 0} if joined else {"query": 0, "key": 1, "value": 2}
        if bias is not None:
            if bias.dtype != dtype or bias.shape != (width,):
                refuse(node, "bias", bias, f"{dtype} ({width},)")
            inputs["qkv_bias"] = 3
        schedule = Schedule.read(node, self.names, values, tokens)
        attention_bias = padded_bias(node, self.names, values[6], schedule, heads, dtype)
        if attention_bias:
            inputs["bias"] = 6
        scale = score_scale(node, head_size)
        rows = PackedRows(tokens, heads, head_size, v_head_size, dtype, dtype, scale)
        source = Split(rows, joined, bias is not None)
        return _call(node, source, schedule, attention_bias, inputs, card=False)

    @staticmethod
    def _head_sizes(node: Node, heads: int, values: Sequence[Value | None]) -> tuple[int, int]:
        """Head size of q and k, and of v; query, key and value checked."""
        query, key, value = values[:3]
        assert query is not None
        if key is None or value is None:
            fits = len(query.shape) == 4 and query.shape[1:3] == (heads, 3) and query.shape[3] > 0
            if query.dtype not in FLOATS or not fits:
                allowed = f"a float32 or float16 tensor (tokens, {heads}, 3, head size)"
                refuse(node, "query", query, f"{allowed}, as key and value are absent")
            return query.shape[3], query.shape[3]
        if query.dtype not in FLOATS or len(query.shape) != 2 or query.shape[1] % heads:
            allowed = f"a float32 or float16 tensor (tokens, multiple of num_heads={heads})"
            refuse(node, "query", query, allowed)
        if key.dtype != query.dtype or key.shape != query.shape:
            refuse(node, "key", key, f"{query.dtype} {query.shape}, as query")
        tokens = query.shape[0]
        if (
            value.dtype != query.dtype
            or len(value.shape) != 2
            or value.shape[0] != tokens
            or value.shape[1] % heads
        ):
            allowed = f"{query.dtype} ({tokens}, multiple of num_heads={heads})"
            refuse(node, "value", value, allowed)
        if not query.shape[1] or not value.shape[1]:
            refuse(node, "value", value, "heads of at least one element")
        return query.shape[1] // heads, value.shape[1] // heads
