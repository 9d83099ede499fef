"""DecoderMaskedMultiHeadAttention's contract: attributes, shapes and small inputs of one call.

Letters: B batch (with beams: groups times W), N heads, H head size, D = N*H, M cache rows, p past
length, T keys (p+1 in self attention, the encoder's L in cross attention). Source: contract
ort-semantics.md 1.2, 3 and 6. Where ORT crashes or misreads memory, the call is refused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ort_webgpu.errors import InvalidInputError, InvalidModelError
from ort_webgpu.graph_tools.nodes import Node
from ort_webgpu.ops.spec import Accepted, Rejected, Value

__all__ = ["INPUTS", "Attributes", "Shapes", "beams_of", "check_dmmha_node", "is_self"]

INPUTS = (
    "query",
    "key",
    "value",
    "mask_index",
    "attention_bias",
    "past_key",
    "past_value",
    "past_sequence_length",
    "beam_width",
    "cache_indirection",
    "bias",
)
(
    QUERY,
    KEY,
    VALUE,
    MASK,
    ATTENTION_BIAS,
    PAST_KEY,
    PAST_VALUE,
    PAST_LENGTH,
    BEAM_WIDTH,
    CACHE_INDIRECTION,
    BIAS,
) = range(11)
FLOATS = ("float32", "float16")


def is_self(node: Node) -> bool:
    """Whether the node has a cache to append to; else it is cross attention."""
    return node.has_input(PAST_KEY)


@dataclass(frozen=True)
class Attributes:
    """The attributes of a node, with ORT's defaults."""

    num_heads: int
    scale: float
    mask_filter_value: float
    share_buffer: bool

    @classmethod
    def read(cls, node: Node) -> "Attributes":
        """From a node; InvalidModelError without a positive num_heads."""
        a = node.attributes
        heads = int(a.get("num_heads", 0))
        if heads <= 0:
            raise InvalidModelError(
                f"{node}: attribute num_heads is {heads}; it is required and positive"
            )
        return cls(
            heads,
            float(a.get("scale", 0.0)),
            float(a.get("mask_filter_value", -10000.0)),
            a.get("past_present_share_buffer", 0) == 1,
        )

    def score_scale(self, head_size: int) -> float:
        """The factor on q k^T: the attribute, or 1/sqrt(head size) where it is 0 or absent."""
        return self.scale if self.scale != 0.0 else 1.0 / math.sqrt(head_size)


def check_dmmha_node(node: Node, dtypes: Sequence[str | None]) -> Accepted | Rejected:
    """OpSpec.check_node of DecoderMaskedMultiHeadAttention."""
    Attributes.read(node)
    if not node.has_input(QUERY):
        raise InvalidModelError(f"{node}: required input query is missing")
    for first, second in ((KEY, VALUE), (PAST_KEY, PAST_VALUE)):
        if node.has_input(first) != node.has_input(second):
            raise InvalidModelError(
                f"{node}: {INPUTS[first]} and {INPUTS[second]} must be given together"
            )
    if node.has_output(3) and node.attributes.get("output_qk", 0) == 0:
        raise InvalidModelError(f"{node}: output qk is wired; set attribute output_qk to 1")
    _check_mode(node)
    if dtypes[QUERY] not in (None, *FLOATS):
        return Rejected(f"query is {dtypes[QUERY]}; the device takes float32 and float16")
    return Accepted()


def _check_mode(node: Node) -> None:
    """The wiring of self and of cross attention."""
    presents = node.has_output(1), node.has_output(2)
    if is_self(node):
        if presents != (True, True):
            raise InvalidModelError(
                f"{node}: self attention writes its cache to present_key and present_value, which"
                " ONNX Runtime crashes without; wire both outputs"
            )
        if not node.has_input(PAST_LENGTH):
            raise InvalidModelError(f"{node}: self attention needs input past_sequence_length")
        return
    if any(presents):
        raise InvalidModelError(
            f"{node}: present_key or present_value is wired without past_key and past_value; wire"
            " the past for self attention, or leave the presents out for cross attention"
        )
    if not node.has_input(KEY):
        raise InvalidModelError(f"{node}: cross attention needs inputs key and value")
    if node.has_input(ATTENTION_BIAS):
        raise InvalidModelError(
            f"{node}: attention_bias is for self attention; cross attention takes none"
        )


def _refuse(node: Node, index: int, value: Value, allowed: str) -> None:
    raise InvalidInputError(
        f"{node}: input {INPUTS[index]} is {value.dtype} {value.shape}; expected {allowed}"
    )


@dataclass(frozen=True)
class Shapes:
    """Sizes of one call. `rows` is M, or L in cross attention; `past` is p, 0 there."""

    batch: int
    head_size: int
    rows: int
    past: int
    packed: bool
    dtype: str
    is_self: bool

    @property
    def keys(self) -> int:
        """T."""
        return self.past + 1 if self.is_self else self.rows

    @classmethod
    def read(cls, node: Node, a: Attributes, values: Sequence[Value | None]) -> "Shapes":
        """Checked against each other; InvalidInputError otherwise."""
        query = values[QUERY]
        assert query is not None  # check_dmmha_node has seen the wiring
        packed = values[KEY] is None
        parts = 3 * a.num_heads if packed else a.num_heads
        fits = len(query.shape) == 3 and query.shape[0] > 0 and query.shape[1] == 1
        if query.dtype not in FLOATS or not fits or query.shape[2] % parts or not query.shape[2]:
            _refuse(
                node,
                QUERY,
                query,
                f"a float32 or float16 tensor (batch, sequence of 1, multiple of {parts})",
            )
        batch, _, width = query.shape
        head_size = width // parts
        if is_self(node):
            if not a.share_buffer:
                raise InvalidInputError(
                    f"{node}: past_present_share_buffer is not 1; self attention requires it (past"
                    " and present have the same rows, in one buffer or in two)"
                )
            if not packed:
                cls._new_rows(node, values, (batch, 1, a.num_heads * head_size))
            rows = cls._cache(node, values, (batch, a.num_heads, head_size))
            past = _past_length(node, values, rows)
        else:
            rows, past = cls._encoder(node, values, (batch, a.num_heads, head_size)), 0
        return cls(batch, head_size, rows, past, packed, query.dtype, is_self(node))

    @staticmethod
    def _new_rows(node: Node, values: Sequence[Value | None], shape: tuple[int, ...]) -> None:
        query = values[QUERY]
        for index in (KEY, VALUE):
            value = values[index]
            assert value is not None and query is not None
            if value.dtype != query.dtype or value.shape != shape:
                _refuse(node, index, value, f"{query.dtype} {shape}, as query")

    @staticmethod
    def _cache(node: Node, values: Sequence[Value | None], sizes: tuple[int, int, int]) -> int:
        """Rows of past_key and past_value (B,N,M,H)."""
        batch, heads, head_size = sizes
        query, key, value = values[QUERY], values[PAST_KEY], values[PAST_VALUE]
        assert query is not None and key is not None and value is not None
        for index, one in ((PAST_KEY, key), (PAST_VALUE, value)):
            if (
                one.dtype != query.dtype
                or len(one.shape) != 4
                or (*one.shape[:2], one.shape[3]) != sizes
                or one.shape[2] != key.shape[2]
            ):
                allowed = f"{query.dtype} ({batch}, {heads}, rows, {head_size})"
                _refuse(node, index, one, f"{allowed}, the rows of both alike")
        return key.shape[2]

    @staticmethod
    def _encoder(node: Node, values: Sequence[Value | None], sizes: tuple[int, int, int]) -> int:
        """Rows of key and value (B,N,L,H)."""
        batch, heads, head_size = sizes
        query, key, value = values[QUERY], values[KEY], values[VALUE]
        assert query is not None and key is not None and value is not None
        for index, one in ((KEY, key), (VALUE, value)):
            if (
                one.dtype != query.dtype
                or len(one.shape) != 4
                or (*one.shape[:2], one.shape[3]) != sizes
                or one.shape[2] != key.shape[2]
            ):
                allowed = f"{query.dtype} ({batch}, {heads}, encoder length, {head_size})"
                _refuse(node, index, one, f"{allowed}: cross attention takes no 3-D keys")
        return key.shape[2]


def _past_length(node: Node, values: Sequence[Value | None], rows: int) -> int:
    value = values[PAST_LENGTH]
    assert value is not None and value.host is not None
    if value.dtype != "int32" or value.spec.size != 1:
        _refuse(node, PAST_LENGTH, value, "int32 with one element")
    past = int(value.host.reshape(-1)[0])
    if not 0 <= past < rows:
        raise InvalidInputError(
            f"{node}: past_sequence_length is {past}; the cache of {rows} rows needs one of 0 to"
            f" {rows - 1}, so that the new row fits"
        )
    return past


def beams_of(node: Node, shapes: Shapes, values: Sequence[Value | None]) -> np.ndarray | None:
    """cache_indirection as int32 (B,M), and its beam width in shape (W of (B/W,W,M)); checked.

    None without it, and in cross attention, which ORT lets have one and does not read.
    """
    width, rows = values[BEAM_WIDTH], values[CACHE_INDIRECTION]
    declared = None
    if width is not None:
        if width.dtype != "int32" or width.spec.size != 1:
            _refuse(node, BEAM_WIDTH, width, "int32 with one element")
        assert width.host is not None
        declared = int(width.host.reshape(-1)[0])
    if rows is None:
        if declared is not None and declared > 1 and shapes.is_self:
            raise InvalidInputError(
                f"{node}: beam_width is {declared} without cache_indirection; give the beams'"
                " history, or a beam_width of 1"
            )
        return None
    if not shapes.is_self:
        return None
    beams = rows.shape[1] if len(rows.shape) == 3 else 0
    if (
        rows.dtype != "int32"
        or len(rows.shape) != 3
        or rows.shape[0] * beams != shapes.batch
        or rows.shape[2] != shapes.rows
    ):
        _refuse(
            node,
            CACHE_INDIRECTION,
            rows,
            f"int32 (groups, beam width, {shapes.rows}) of {shapes.batch} beams in all",
        )
    if declared is not None and declared != beams:
        raise InvalidInputError(
            f"{node}: beam_width is {declared}, cache_indirection {rows.shape} has {beams} beams"
        )
    assert rows.host is not None
    used = rows.host[:, :, : shapes.past]
    if used.size and (used.min() < 0 or used.max() >= beams):
        raise InvalidInputError(
            f"{node}: cache_indirection holds {int(used.min())} to {int(used.max())}; with"
            f" {beams} beams it must lie in [0, {beams})"
        )
    return rows.host
