"""com.microsoft.DecoderMaskedMultiHeadAttention, version 1: one token, self or cross attention.

Semantics: contract ort-semantics.md 3; letters as in dmmha_contract. Beyond ORT's CPU EP: float16,
packed q, k, v in input 0, and cross nodes with past_present_share_buffer=1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from ort_webgpu.errors import InvalidInputError
from ort_webgpu.graph_tools.nodes import Node
from ort_webgpu.ops import dmmha_contract as contract
from ort_webgpu.ops.attention import (
    CORE_ROUTES,
    AttentionProblem,
    Parts,
    SplitK,
    composed_routes,
    sequences,
)
from ort_webgpu.ops.dmmha_contract import Attributes, Shapes
from ort_webgpu.ops.prepare import CacheCopy, Prepare, bytes_per_row
from ort_webgpu.ops.repack import repack
from ort_webgpu.ops.spec import (
    Accepted,
    Call,
    Caps,
    OpSpec,
    Output,
    Rejected,
    TensorSpec,
    Value,
)

__all__ = ["DecoderMaskedMultiHeadAttention", "DmmhaProblem"]

PAST = ("past_key", "past_value")
PRESENT = ("present_key", "present_value")
ENCODER = ("key", "value")


@dataclass(frozen=True)
class DmmhaProblem:
    """One call: past to present where they are two values, q, k and v prepared, then attention.

    `keys` names the attended operands; `qk_dtype` the type of output qk.
    """

    core: AttentionProblem
    prepare: Prepare
    keys: tuple[str, str]
    before: CacheCopy | None
    qk_dtype: str

    def check(self, caps: Caps) -> Accepted | Rejected:
        """Whether the prologue can run; the core route checks the rest."""
        if self.core.head_size % 4:
            return Rejected(
                f"head size {self.core.head_size}: rows of the cache must be whole groups of four"
                " elements"
            )
        return self.prepare.check(caps)

    def prologue(self, caps: Caps, half_queries: bool = False) -> Parts:
        """Past to present, then queries, keys and values to their places."""
        prepare = self.prepare.parts(caps)
        copied = self.before.parts().launches if self.before else ()
        scratch = prepare.scratch
        if self._repacks_qk:
            scratch += (("qk_scratch", self._qk_elements * 4),)
        return Parts(copied + prepare.launches, scratch)

    def epilogue(self, caps: Caps) -> Parts:
        """qk as float16."""
        if not self._repacks_qk:
            return Parts()
        width = self.core.qk_width
        rows = self._qk_elements // max(1, width)
        return Parts(repack("qk_scratch", "qk", "float16", rows, width, width).launches)

    def names(self) -> dict[str, str]:
        """What the core's operands are called here."""
        return {
            "k": self.keys[0],
            "v": self.keys[1],
            "out": "output",
            "qk_out": "qk_scratch" if self._repacks_qk else "qk",
        }

    def card_variant(self, core_route: str, caps: Caps) -> str | None:
        """The name in variants.json that this call on `core_route` is.

        The card has cross attention on one partition of the keys only.
        """
        route = next(core for core in CORE_ROUTES if core.name == core_route)
        if self.keys != ENCODER or not isinstance(route, SplitK):
            return None
        if route.splits(self.core, caps) != 1:
            return None
        words = {
            "cross": True,
            "mask": self.core.mask_width > 0,
            "qk": self.core.qk > 0,
            "nosg": not route.features,
            "direct": True,
        }
        return "_".join(word for word, on in words.items() if on)

    @property
    def _qk_elements(self) -> int:
        return self.core.batch * self.core.num_heads * self.core.qk_width

    @property
    def _repacks_qk(self) -> bool:
        return self.core.qk > 0 and self.qk_dtype == "float16"


class DecoderMaskedMultiHeadAttention(OpSpec):
    """The operator's contract. `qk_dtype` is the type of output qk, "" that of the query."""

    op_type = "DecoderMaskedMultiHeadAttention"
    host_inputs = frozenset({contract.PAST_LENGTH, contract.BEAM_WIDTH, contract.CACHE_INDIRECTION})
    weight_inputs = frozenset({contract.BIAS})
    caches = MappingProxyType({1: contract.PAST_KEY, 2: contract.PAST_VALUE})
    routes = composed_routes()

    def __init__(self, qk_dtype: str = ""):
        self.qk_dtype = qk_dtype

    def typed(self, output_dtypes: Sequence[str | None]) -> OpSpec:
        found = output_dtypes[3] if len(output_dtypes) > 3 else None
        return DecoderMaskedMultiHeadAttention(found) if found else self

    def check_node(self, node: Node, input_dtypes: Sequence[str | None]) -> Accepted | Rejected:
        if self.qk_dtype not in ("", *contract.FLOATS):
            return Rejected(f"output qk is {self.qk_dtype}; the device writes float32 and float16")
        return contract.check_dmmha_node(node, input_dtypes)

    def call(self, node: Node, values: Sequence[Value | None], in_place: frozenset[int]) -> Call:
        return _CallBuilder(node, values, {1, 2} <= in_place, self.qk_dtype).build()


class _CallBuilder:
    """Validates one call and says how it is run."""

    def __init__(
        self, node: Node, values: Sequence[Value | None], in_place: bool, qk_dtype: str
    ) -> None:
        missing = [None] * (len(contract.INPUTS) - len(values))
        self.node, self.values = node, [*values, *missing]
        self.a = Attributes.read(node)
        self.shapes = Shapes.read(node, self.a, self.values)
        self.in_place = in_place
        self.qk_dtype = qk_dtype or self.shapes.dtype
        self.inputs = {"query": contract.QUERY}
        self.arrays: dict[str, np.ndarray] = {}
        self.beams = self._beams()
        self._check_side_inputs()

    def build(self) -> Call:
        shapes = self.shapes
        if not shapes.packed:
            self.inputs |= {"key": contract.KEY, "value": contract.VALUE}
        self.arrays["seq"] = self._sequences()
        problem = DmmhaProblem(
            self._core(),
            self._prepare(),
            PRESENT if shapes.is_self else ENCODER,
            self._copy(),
            self.qk_dtype,
        )
        return Call(problem, self.inputs, self._outputs(), self.arrays)

    def _sequences(self) -> np.ndarray:
        shapes = self.shapes
        entries = np.arange(shapes.batch)
        bias = self.values[contract.ATTENTION_BIAS]
        # With beams ORT reads the bias of the group's number, though it has a row for each beam.
        bias_batch = entries // self.beams if bias and bias.shape[0] > 1 else 0
        return sequences(
            shapes.batch,
            q_row=entries,
            q_valid=1,
            k_row=entries * self.a.num_heads * shapes.rows,
            past=shapes.past,
            total=shapes.keys,
            bias_batch=bias_batch,
            write=shapes.past,
            keep=shapes.rows,
            new=shapes.past,
            new_count=1,
        )

    def _copy(self) -> CacheCopy | None:
        """All rows of the past, those behind the new one included, where it stays another value."""
        shapes = self.shapes
        if not shapes.is_self or self.in_place:
            return None
        self.inputs |= {"past_key": contract.PAST_KEY, "past_value": contract.PAST_VALUE}
        row_bytes = bytes_per_row(shapes.dtype, shapes.head_size)
        return CacheCopy(
            shapes.batch, self.a.num_heads, row_bytes, PAST, shapes.rows, PRESENT, shapes.rows
        )

    def _prepare(self) -> Prepare:
        shapes, heads = self.shapes, self.a.num_heads
        return Prepare(
            shapes.batch,
            1,
            heads,
            heads,
            shapes.head_size,
            shapes.dtype,
            shapes.dtype,
            shapes.rows,
            self.a.score_scale(shapes.head_size),
            packed=shapes.packed,
            new_kv=shapes.is_self,
            bias=self.values[contract.BIAS] is not None,
            k_out=PRESENT[0],
            v_out=PRESENT[1],
        )

    def _core(self) -> AttentionProblem:
        shapes = self.shapes
        mask, bias = self.values[contract.MASK], self.values[contract.ATTENTION_BIAS]
        wants_qk = self.node.has_output(3)
        return AttentionProblem(
            batch=shapes.batch,
            q_len=1,
            num_heads=self.a.num_heads,
            kv_heads=self.a.num_heads,
            head_size=shapes.head_size,
            v_head_size=shapes.head_size,
            kv_dtype=shapes.dtype,
            out_dtype=shapes.dtype,
            kv_head_rows=shapes.rows,
            max_keys=shapes.keys,
            causal=False,  # the only query sees every key
            bias_dtype=bias.dtype if bias else "",
            bias_heads=bias.shape[1] if bias else 1,
            bias_width=shapes.keys if bias else 0,
            mask_width=shapes.keys if mask else 0,
            mask_filter=self.a.mask_filter_value if mask else 0.0,
            beam_width=self.beams if "beams" in self.arrays else 0,
            beam_rows=shapes.rows if "beams" in self.arrays else 0,
            exclude_lowest=False,
            appended=shapes.is_self,
            qk=1 if wants_qk else 0,
            qk_width=shapes.keys if wants_qk else 0,
        )

    def _outputs(self) -> dict[int, Output]:
        shapes, heads = self.shapes, self.a.num_heads
        hidden = heads * shapes.head_size
        outputs = {0: Output("output", TensorSpec(shapes.dtype, (shapes.batch, 1, hidden)))}
        if shapes.is_self:
            spec = TensorSpec(shapes.dtype, (shapes.batch, heads, shapes.rows, shapes.head_size))
            outputs[1] = Output(PRESENT[0], spec, contract.PAST_KEY, self.in_place)
            outputs[2] = Output(PRESENT[1], spec, contract.PAST_VALUE, self.in_place)
        if self.node.has_output(3):
            spec = TensorSpec(self.qk_dtype, (shapes.batch, heads, 1, shapes.keys))
            outputs[3] = Output("qk", spec)
        return outputs

    # -- side inputs ---------------------------------------------------------------------------

    def _beams(self) -> int:
        """Beam width, 1 without beams; their history becomes an operand."""
        rows = contract.beams_of(self.node, self.shapes, self.values)
        if rows is None:
            return 1
        self.arrays["beams"] = rows.reshape(self.shapes.batch, self.shapes.rows)
        return rows.shape[1]

    def _check_side_inputs(self) -> None:
        shapes, heads = self.shapes, self.a.num_heads
        mask = self.values[contract.MASK]
        bias, added = self.values[contract.ATTENTION_BIAS], self.values[contract.BIAS]
        if mask:
            if mask.dtype != "int32" or mask.shape != (shapes.batch, shapes.keys):
                self._refuse(contract.MASK, f"int32 ({shapes.batch}, {shapes.keys})")
            self.inputs["mask"] = contract.MASK
        if bias:
            allowed = ((1, shapes.batch), (1, heads), (1,), (shapes.keys,))
            if (
                bias.dtype != shapes.dtype
                or len(bias.shape) != 4
                or not all(n in c for n, c in zip(bias.shape, allowed, strict=True))
            ):
                wanted = f"(1 or {shapes.batch}, 1 or {heads}, 1, {shapes.keys})"
                self._refuse(contract.ATTENTION_BIAS, f"{shapes.dtype} {wanted}")
            self.inputs["bias"] = contract.ATTENTION_BIAS
        if added:
            width = 3 * heads * shapes.head_size
            if added.dtype != shapes.dtype or added.shape != (width,):
                self._refuse(contract.BIAS, f"{shapes.dtype} ({width},)")
            self.inputs["qkv_bias"] = contract.BIAS

    def _refuse(self, index: int, allowed: str) -> None:
        value = self.values[index]
        assert value is not None
        raise InvalidInputError(
            f"{self.node}: input {contract.INPUTS[index]} is {value.dtype} {value.shape};"
            f" expected {allowed}"
        )
