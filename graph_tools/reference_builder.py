"""GraphBuilder: writes standard ONNX nodes that are valid at a given opset.

Only a few operators changed their form between opsets 12 and 25; the methods below hide those
changes, so that the expansions read like array code. Constants become `Constant` nodes, not
initializers, so that an expansion may also stand in a function or in a control-flow body.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = ["LOWEST", "MIN_OPSET", "GraphBuilder"]

MIN_OPSET = 12
"""Min and Max take integers, and GatherND takes the form used here, from this opset on."""

LOWEST = float(np.finfo(np.float32).min)

_AXES_ARE_AN_INPUT_SINCE = {
    "Squeeze": 13,
    "Unsqueeze": 13,
    "ReduceSum": 13,
    "ReduceMax": 18,
    "ReduceMean": 18,
}

Dim = int | str
Number = int | float  # GraphBuilder.float hides the built-in in its annotations
"""A size: a Python int, or the name of an int64 value of shape (1,)."""


class GraphBuilder:
    """Collects nodes; each method returns the name of the value it made.

    Every name it makes starts with `prefix`. `opset` is that of domain "".
    """

    def __init__(self, prefix: str, opset: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._prefix = prefix
        self._opset = opset
        self._known: dict[tuple[Any, ...], str] = {}

    def op(self, op_type: str, *inputs: str, out: str | None = None, **attributes: Any) -> str:
        """Add one node of domain "" with one output, named `out` or a fresh name."""
        out = out or self.fresh(op_type)
        self.node(op_type, inputs, [out], **attributes)
        return out

    def node(
        self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any
    ) -> None:
        """Add one node whose outputs have the given names; `domain` is an attribute here."""
        name = self.fresh(op_type)
        self.nodes.append(helper.make_node(op_type, inputs, outputs, name=name, **attributes))

    def fresh(self, hint: str) -> str:
        """A name for a value or node to come; values and nodes have separate name spaces."""
        return f"{self._prefix}{hint}_{len(self.nodes)}"

    def const(self, values: Any, dtype: Any) -> str:
        """A constant of `values`; the same values share one node."""
        array = np.asarray(values, dtype)
        key = ("const", array.dtype.str, array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = self.op("Constant", value=numpy_helper.from_array(array))
        return self._known[key]

    def ints(self, *values: int) -> str:
        """An int64 constant of shape (len(values),)."""
        return self.const(values, np.int64)

    def float(self, value: float) -> str:
        """A float32 scalar."""
        return self.const(value, np.float32)

    def dim(self, value: str, axis: int) -> str:
        """Size of `axis` (from the front) of `value`: int64 of shape (1,)."""
        key = ("dim", value, axis)
        if key not in self._known:
            shape = self._known.get(("shape", value)) or self.op("Shape", value)
            self._known["shape", value] = shape
            self._known[key] = self.op("Gather", shape, self.ints(axis), axis=0)
        return self._known[key]

    def dims(self, *sizes: Dim) -> str:
        """A shape: int64 of shape (len(sizes),)."""
        if all(isinstance(size, int) for size in sizes):
            return self.ints(*(int(size) for size in sizes))
        parts = [self.ints(size) if isinstance(size, int) else size for size in sizes]
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=0)

    def reshape(self, value: str, *sizes: Dim) -> str:
        """Reshape; a 0 keeps the size of that axis, so empty axes in front survive."""
        return self.op("Reshape", value, self.dims(*sizes))

    def vector(self, value: str) -> str:
        """A scalar or one-element tensor as int64 of shape (1,)."""
        return self.cast(self.reshape(value, 1), TensorProto.INT64)

    def slice(self, value: str, start: Dim, end: Dim, axis: int) -> str:
        """`value[start:end]` along `axis`."""
        return self.op("Slice", value, self.dims(start), self.dims(end), self.ints(axis))

    def split(self, value: str, axis: int, *sizes: Dim) -> list[str]:
        """Cut `value` along `axis` into pieces of the given sizes, in order."""
        pieces: list[str] = []
        start: Dim = 0
        for size in sizes:
            if isinstance(start, int) and isinstance(size, int):
                end: Dim = start + size
            elif start == 0:
                end = size
            else:
                end = self.op("Add", self.dims(start), self.dims(size))
            pieces.append(self.slice(value, start, end, axis))
            start = end
        return pieces

    def transpose(self, value: str, *perm: int) -> str:
        """Reorder the axes."""
        return self.op("Transpose", value, perm=perm)

    def unsqueeze(self, value: str, *axes: int) -> str:
        """Insert axes of size 1 (positions in the result)."""
        return self._with_axes("Unsqueeze", value, axes)

    def squeeze(self, value: str, *axes: int) -> str:
        """Drop axes of size 1."""
        return self._with_axes("Squeeze", value, axes)

    def reduce(self, op_type: str, value: str, axis: int) -> str:
        """ReduceSum, ReduceMax or ReduceMean over one axis, which stays with size 1."""
        return self._with_axes(op_type, value, (axis,), keepdims=1)

    def cast(self, value: str, elem_type: int, out: str | None = None) -> str:
        """Cast to an onnx element type."""
        return self.op("Cast", value, out=out, to=elem_type)

    def f32(self, value: str) -> str:
        """Cast to float32 (ORT drops it where nothing changes)."""
        return self.cast(value, TensorProto.FLOAT)

    def arange(self, count: str) -> str:
        """0, 1, ... count-1 as int64; `count` has shape (1,)."""
        key = ("arange", count)
        if key not in self._known:
            zero, one = self.const(0, np.int64), self.const(1, np.int64)
            self._known[key] = self.op("Range", zero, self.squeeze(count, 0), one)
        return self._known[key]

    def split_heads(self, value: str, heads: int) -> str:
        """(A, B, heads*H) to (A, B, heads, H); A and B may be 0."""
        head_size = self.op("Div", self.dim(value, 2), self.ints(heads))
        return self.reshape(value, 0, 0, heads, head_size)

    def merge_heads(self, value: str) -> str:
        """(A, N, B, H) to (A, B, N*H)."""
        width = self.op("Mul", self.dim(value, 1), self.dim(value, 3))
        return self.reshape(self.transpose(value, 0, 2, 1, 3), 0, 0, width)

    def scale(self, query: str, axis: int, scale: Number) -> str:
        """Multiply float32 `query` by `scale`, or by 1/sqrt(size of `axis`) where it is 0."""
        if scale:
            return self.op("Mul", query, self.float(scale))
        return self.op("Div", query, self.op("Sqrt", self.f32(self.dim(query, axis))))

    def softmax(self, logits: str) -> str:
        """Softmax of float32 `logits` over the last axis.

        A row of -inf only, or without keys, gives zeros instead of the NaN of `Softmax`.
        """
        peak = self.op("Max", self.reduce("ReduceMax", logits, -1), self.float(LOWEST))
        weights = self.op("Exp", self.op("Sub", logits, peak))
        total = self.reduce("ReduceSum", weights, -1)
        empty = self.op("Equal", total, self.float(0.0))
        return self.op("Div", weights, self.op("Where", empty, self.float(1.0), total))

    def _with_axes(self, op_type: str, value: str, axes: tuple[int, ...], **attributes: Any) -> str:
        if self._opset >= _AXES_ARE_AN_INPUT_SINCE[op_type]:
            return self.op(op_type, value, self.ints(*axes), **attributes)
        return self.op(op_type, value, axes=axes, **attributes)
