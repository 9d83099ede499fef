"""What PackedAttention and PackedMultiHeadAttention share of their contracts.

Letters: Tok packed tokens, B sequences, S padded length, N heads. Source: contract ort-semantics.md
1.3, 1.4 and 4. A schedule that leaves ORT's kernels to disagree with one another is refused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ort_webgpu.errors import InvalidInputError, InvalidModelError
from ort_webgpu.graph_tools.nodes import Node
from ort_webgpu.ops.spec import Accepted, Rejected, Value

__all__ = [
    "FLOATS",
    "Names",
    "Schedule",
    "check_packed_node",
    "heads_of",
    "padded_bias",
    "refuse",
    "score_scale",
]

FLOATS = ("float32", "float16")


@dataclass(frozen=True)
class Names:
    """Input names of an operator by index, and the indexes that both operators have."""

    inputs: tuple[str, ...]
    required: tuple[int, ...]
    token_offset: int
    lengths: int
    attention_bias: int


def check_packed_node(
    node: Node, names: Names, dtypes: Sequence[str | None]
) -> Accepted | Rejected:
    """Wiring, num_heads and element type."""
    for index in names.required:
        if not node.has_input(index):
            raise InvalidModelError(f"{node}: required input {names.inputs[index]} is missing")
    heads_of(node)
    if dtypes[0] not in (None, *FLOATS):
        return Rejected(f"{names.inputs[0]} is {dtypes[0]}; the device takes float32 and float16")
    return Accepted()


def heads_of(node: Node) -> int:
    """num_heads; InvalidModelError where it is missing or not positive."""
    heads = int(node.attributes.get("num_heads", 0))
    if heads <= 0:
        raise InvalidModelError(
            f"{node}: attribute num_heads is {heads}; it is required and positive"
        )
    return heads


def score_scale(node: Node, head_size: int) -> float:
    """The factor on q k^T: the attribute, or 1/sqrt(head size) where it is 0 or absent."""
    scale = float(node.attributes.get("scale", 0.0))
    return scale if scale != 0.0 else 1.0 / math.sqrt(head_size)


def refuse(node: Node, name: str, value: Value, allowed: str) -> None:
    """Raise InvalidInputError about input `name`."""
    raise InvalidInputError(
        f"{node}: input {name} is {value.dtype} {value.shape}; expected {allowed}"
    )


@dataclass(frozen=True)
class Schedule:
    """Which packed rows are which sequence: `starts` and `lengths` int64 [B], `padded` S."""

    starts: np.ndarray
    lengths: np.ndarray
    padded: int

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths.max(initial=0))

    @classmethod
    def read(
        cls, node: Node, names: Names, values: Sequence[Value | None], tokens: int
    ) -> "Schedule":
        """From token_offset (B,S) and cumulative_sequence_length (B+1), for `tokens` rows."""
        offset, bounds = values[names.token_offset], values[names.lengths]
        assert offset is not None and bounds is not None  # check_packed_node has seen the wiring
        offset_name, bounds_name = names.inputs[names.token_offset], names.inputs[names.lengths]
        if offset.dtype != "int32" or len(offset.shape) != 2:
            refuse(node, offset_name, offset, "an int32 tensor (batch, sequence)")
        batch, padded = offset.shape
        if bounds.dtype != "int32" or bounds.shape != (batch + 1,):
            refuse(node, bounds_name, bounds, f"int32 ({batch + 1},): one more than token_offset")
        assert offset.host is not None and bounds.host is not None
        ends = bounds.host.astype(np.int64)
        lengths = np.diff(ends)
        if ends[0] != 0 or ends[-1] != tokens or (lengths < 0).any() or (lengths > padded).any():
            raise InvalidInputError(
                f"{node}: {bounds_name} is {_shown(ends)}; it must rise from 0 to the {tokens}"
                f" packed tokens in steps of at most {padded}, token_offset's second dimension"
            )
        is_token = np.arange(padded) < lengths[:, None]
        expected = np.flatnonzero(is_token)
        found = offset.host.reshape(-1)[:tokens]
        if not np.array_equal(found, expected):
            at = int((found != expected).argmax())
            raise InvalidInputError(
                f"{node}: {offset_name} sends token {at} to slot {found[at]}; with"
                f" {bounds_name}={_shown(ends)} it belongs to slot {expected[at]}. Only sequences"
                " that are in order and padded on the right have one meaning in ONNX Runtime"
            )
        return cls(ends[:-1], lengths, padded)


def _shown(values: np.ndarray) -> str:
    """`values` as a list, its middle left out where it is long."""
    if len(values) <= 10:
        return str(values.tolist())
    return f"[{', '.join(map(str, values[:4]))}, ..., {', '.join(map(str, values[-4:]))}]"


def padded_bias(
    node: Node, names: Names, value: Value | None, schedule: Schedule, heads: int, dtype: str
) -> Value | None:
    """The attention bias, checked: (B or 1, N or 1, S, S) in padded coordinates."""
    if value is None:
        return None
    batch, padded = schedule.batch, schedule.padded
    allowed = ((1, batch), (1, heads), (padded,), (padded,))
    if (
        value.dtype != dtype
        or len(value.shape) != 4
        or not all(n in choices for n, choices in zip(value.shape, allowed, strict=True))
    ):
        refuse(
            node,
            names.inputs[names.attention_bias],
            value,
            f"{dtype} (1 or {batch}, 1 or {heads}, {padded}, {padded})",
        )
    return value
