"""The records of the corpus: Case (to run), RejectCase (to refuse), Expected (what is right)."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = ["OPERATORS", "Array", "Case", "Expected", "RejectCase"]

Array = np.ndarray[Any, Any]

OPERATORS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "GroupQueryAttention": (
        (
            "query", "key", "value", "past_key", "past_value", "seqlens_k",
            "total_sequence_length", "cos_cache", "sin_cache", "position_ids", "attention_bias",
            "head_sink", "k_scale", "v_scale", "q_norm_weight", "k_norm_weight", "query_seqlens",
        ),
        ("output", "present_key", "present_value", "output_qk"),
    ),
    "DecoderMaskedMultiHeadAttention": (
        (
            "query", "key", "value", "mask_index", "attention_bias", "past_key", "past_value",
            "past_sequence_length", "beam_width", "cache_indirection", "bias",
        ),
        ("output", "present_key", "present_value", "qk"),
    ),
    "PackedAttention": (
        (
            "input", "weights", "bias", "token_offset", "cumulative_sequence_length",
            "attention_bias",
        ),
        ("output",),
    ),
    "PackedMultiHeadAttention": (
        (
            "query", "key", "value", "bias", "token_offset", "cumulative_sequence_length",
            "attention_bias",
        ),
        ("output",),
    ),
    "RemovePadding": (
        ("input", "sequence_token_count"),
        ("output", "token_offset", "cumulated_seq_len", "max_seq_len"),
    ),
    "RestorePadding": (("input", "token_offset"), ("output",)),
}  # fmt: skip
"""Input and output names of each operator, by position."""

_INTEGER_OUTPUTS = {"token_offset", "cumulated_seq_len", "max_seq_len"}


@dataclass(frozen=True, eq=False, kw_only=True)
class _Node:
    """One com.microsoft node with its inputs.

    `inputs` has an array or None by position. `wanted` says by position which outputs the node
    has. `baked` are input positions that are initializers of the model instead of feeds.
    `symbolic` gives every input symbolic dimensions. `qk_dtype` is the type of a
    DecoderMaskedMultiHeadAttention node's `qk` output where it is not the query's.
    """

    name: str
    op_type: str
    attributes: dict[str, Any]
    inputs: tuple[Array | None, ...]
    wanted: tuple[bool, ...] = (True,)
    source: str = "generated"
    seed: int = 0
    baked: frozenset[int] = frozenset()
    symbolic: bool = False
    qk_dtype: np.dtype[Any] | None = None

    @property
    def first(self) -> Array:
        """The first input, which every operator needs; its dtype is the node's T."""
        return self.require(OPERATORS[self.op_type][0][0])

    def input(self, name: str) -> Array | None:
        """The input called `name` in OPERATORS, None where absent."""
        position = OPERATORS[self.op_type][0].index(name)
        return self.inputs[position] if position < len(self.inputs) else None

    def require(self, name: str) -> Array:
        """The input called `name`; KeyError where this node has none."""
        array = self.input(name)
        if array is None:
            raise KeyError(f"{self.name}: {self.op_type} case without input {name!r}")
        return array

    def output_names(self) -> list[str]:
        """Names of the wanted outputs, in order: what `run(None, ...)` returns."""
        names = OPERATORS[self.op_type][1]
        return [name for name, wanted in zip(names, self.wanted, strict=False) if wanted]

    def feeds(self) -> dict[str, Array]:
        """The input_feed of the one-node model."""
        names = OPERATORS[self.op_type][0]
        return {
            name: array
            for i, (name, array) in enumerate(zip(names, self.inputs, strict=False))
            if array is not None and i not in self.baked
        }

    def model(self) -> onnx.ModelProto:
        """The one-node model: opset 21, com.microsoft 1, IR 10."""
        in_names, out_names = OPERATORS[self.op_type]
        present = [n if a is not None else "" for n, a in zip(in_names, self.inputs, strict=False)]
        wanted = [n if w else "" for n, w in zip(out_names, self.wanted, strict=False)]
        node = helper.make_node(
            self.op_type,
            _without_trailing_blanks(present),
            _without_trailing_blanks(wanted),
            name=self.op_type,
            domain="com.microsoft",
            **self.attributes,
        )
        initializers = [
            numpy_helper.from_array(self.require(in_names[i]), in_names[i])
            for i in sorted(self.baked)
        ]
        graph = helper.make_graph(
            [node],
            "case",
            [self._input_info(name, array) for name, array in self.feeds().items()],
            [
                helper.make_tensor_value_info(name, self._output_type(name), None)
                for name in self.output_names()
            ],
            initializer=initializers,
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def _input_info(self, name: str, array: Array) -> onnx.ValueInfoProto:
        shape: list[int | str] = list(array.shape)
        if self.symbolic:
            shape = [f"{name}_{axis}" for axis in range(array.ndim)]
        return helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(array.dtype), shape
        )

    def _output_type(self, name: str) -> int:
        if name in _INTEGER_OUTPUTS:
            return TensorProto.INT32
        dtype = next(a.dtype for a in self.inputs if a is not None)
        if name == "qk" and self.qk_dtype is not None:
            dtype = self.qk_dtype
        if name.startswith("present"):
            past = self.input(f"past_{name.removeprefix('present_')}")
            dtype = past.dtype if past is not None else dtype
        return helper.np_dtype_to_tensor_dtype(dtype)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False, kw_only=True)
class Case(_Node):
    """A node whose right outputs are known to some oracle.

    `features` are what the case exercises. `in_place` asks the runner to bind past and present
    to the same value (rows outside the written range then stay what they were).
    """

    features: frozenset[str] = field(default_factory=frozenset)
    in_place: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class RejectCase(_Node):
    """A node that must be refused.

    `kind` is "input" (InvalidInputError, at run) or "model" (InvalidModelError or ORT's own
    error, at session creation or at run). `mentions` are words of which the message must hold
    at least one (names of the culprit). `ort` says what ORT's CPU EP does: "rejects", "accepts"
    (reads out of bounds or returns wrong rows), "crashes" (never run it in process),
    "no kernel".
    """

    kind: str
    mentions: tuple[str, ...]
    ort: str = "rejects"


@dataclass(frozen=True)
class Expected:
    """What an oracle says, by output position (None: not wanted).

    `care` is a boolean array by output position, True where the contract specifies the element;
    None means everywhere. `oracle` names who produced the values.
    """

    outputs: tuple[Array | None, ...]
    care: tuple[Array | None, ...]
    oracle: str

    def wanted(self) -> list[tuple[Array, Array | None]]:
        """(values, care) of the wanted outputs, in order."""
        pairs = zip(self.outputs, self.care, strict=True)
        return [(values, care) for values, care in pairs if values is not None]


def _without_trailing_blanks(names: list[str]) -> list[str]:
    while names and names[-1] == "":
        names = names[:-1]
    return names
