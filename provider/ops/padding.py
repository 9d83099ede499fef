"""com.microsoft.RemovePadding and RestorePadding, version 1.

Letters: B batch, S padded length, D row width, Tok packed tokens. Semantics: contract
ort-semantics.md 1.5 and 4. Which rows go where is decided on the host, where the counts and offsets
are read anyway; the device only moves rows, and the integer outputs never reach it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ort_webgpu.errors import InvalidInputError, InvalidModelError
from ort_webgpu.graph_tools.nodes import Node
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
    item_size,
)
from ort_webgpu.wgsl.kernel import Binding, Kernel, Launch, Program

__all__ = ["RemovePadding", "RestorePadding", "RowsProblem"]

FLOATS = ("float32", "float16")


@dataclass(frozen=True)
class RowsProblem:
    """`rows` rows of `width` elements of `dtype` to write."""

    rows: int
    width: int
    dtype: str


class Rows(Route):
    """One pass over the words of the output; takes everything."""

    name = "rows"

    def check(self, problem: RowsProblem, caps: Caps) -> Accepted | Rejected:
        return Accepted()

    def program(self, problem: RowsProblem, caps: Caps) -> Program:
        size = problem.width * item_size(problem.dtype)
        if problem.rows * size == 0:
            return Program(())
        halves = size % 4 != 0
        word, bytes_per_word = ("vec4<u32>", 16) if size % 16 == 0 else ("u32", 4)
        width = problem.width if halves else size // bytes_per_word
        words = -(-problem.rows * size // bytes_per_word)
        kernel = Kernel(
            "rows",
            (("halves", halves), ("width", width), ("word", word)),
            (
                Binding("source", word),
                Binding("picked", "i32"),
                Binding("out", word, "read_write"),
            ),
            (("words", "u32"), ("rows", "u32")),
            256,
        )
        launch = Launch(
            kernel,
            (("source", "input"), ("picked", "picked"), ("out", "output")),
            -(-words // 256),
            (("words", words), ("rows", problem.rows)),
        )
        return Program((launch,))


class _Padding(OpSpec):
    """What the two operators have in common: float rows, and a table of int32 on the host."""

    host_inputs = frozenset({1})
    routes = (Rows(),)
    input_names: tuple[str, str]

    def check_node(self, node: Node, input_dtypes: Sequence[str | None]) -> Accepted | Rejected:
        for index, name in enumerate(self.input_names):
            if not node.has_input(index):
                raise InvalidModelError(f"{node}: required input {name} is missing")
        dtype = input_dtypes[0]
        if dtype not in (None, *FLOATS):
            return Rejected(f"input is {dtype}; the device takes float32 and float16")
        return Accepted()

    def _refuse(self, node: Node, index: int, value: Value, allowed: str) -> None:
        raise InvalidInputError(
            f"{node}: input {self.input_names[index]} is {value.dtype} {value.shape}; expected"
            f" {allowed}"
        )


class RemovePadding(_Padding):
    """input (B,S,D), sequence_token_count (B) to (Tok,D) and where its tokens came from."""

    op_type = "RemovePadding"
    input_names = ("input", "sequence_token_count")

    def call(self, node: Node, values: Sequence[Value | None], in_place: frozenset[int]) -> Call:
        tokens, counts = values[:2]
        assert tokens is not None and counts is not None  # check_node has seen the wiring
        if tokens.dtype not in FLOATS or len(tokens.shape) != 3:
            self._refuse(node, 0, tokens, "a float32 or float16 tensor (batch, sequence, width)")
        batch, length, width = tokens.shape
        if counts.dtype != "int32" or counts.shape != (batch,):
            self._refuse(node, 1, counts, f"int32 ({batch},)")
        assert counts.host is not None
        kept = np.clip(counts.host, 0, length).astype(np.int32)
        is_token = np.arange(length) < kept[:, None]
        index = np.arange(batch * length, dtype=np.int32).reshape(batch, length)
        picked = index[is_token]
        offsets = np.concatenate([picked, index[~is_token]]).reshape(batch, length)
        made = {
            1: offsets,
            2: np.concatenate([[0], np.cumsum(kept)]).astype(np.int32),
            3: np.array([kept.max(initial=0)], np.int32),
        }
        return Call(
            RowsProblem(picked.size, width, tokens.dtype),
            {"input": 0},
            {0: Output("output", TensorSpec(tokens.dtype, (picked.size, width)))},
            {"picked": picked},
            {i: array for i, array in made.items() if node.has_output(i)},
        )


class RestorePadding(_Padding):
    """input (Tok,D) to the slots of token_offset (B,S); all other slots are zero: (B,S,D)."""

    op_type = "RestorePadding"
    input_names = ("input", "token_offset")

    def call(self, node: Node, values: Sequence[Value | None], in_place: frozenset[int]) -> Call:
        tokens, offsets = values[:2]
        assert tokens is not None and offsets is not None  # check_node has seen the wiring
        if offsets.dtype != "int32" or len(offsets.shape) != 2:
            self._refuse(node, 1, offsets, "an int32 tensor (batch, sequence)")
        batch, length = offsets.shape
        slots = batch * length
        if tokens.dtype not in FLOATS or len(tokens.shape) != 2 or tokens.shape[0] > slots:
            self._refuse(
                node,
                0,
                tokens,
                f"a float32 or float16 tensor (tokens, width) of at most {slots} tokens, as many as"
                f" token_offset {offsets.shape} has slots",
            )
        count, width = tokens.shape
        assert offsets.host is not None
        target = offsets.host.reshape(-1)[:count]
        outside = (target < 0) | (target >= slots)
        if outside.any():
            at = int(outside.argmax())
            raise InvalidInputError(
                f"{node}: token_offset sends token {at} to slot {target[at]}; there are slots 0 to"
                f" {slots - 1}"
            )
        picked = np.full(slots, -1, np.int32)
        picked[target] = np.arange(count, dtype=np.int32)
        if (picked >= 0).sum() != count:
            raise InvalidInputError(
                f"{node}: token_offset sends two tokens to one slot; each of its first {count}"
                " entries must be another slot"
            )
        return Call(
            RowsProblem(slots, width, tokens.dtype),
            {"input": 0},
            {0: Output("output", TensorSpec(tokens.dtype, (batch, length, width)))},
            {"picked": picked},
        )
