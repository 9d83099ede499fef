"""GroupQueryAttention's contract: attributes and shapes of one call, checked as ORT checks them.

Source: contract ort-semantics.md sections 1.1, 2 and 6 (onnxruntime 1.32, CPU EP). Where ORT
crashes, reads out of bounds or gives values that change from run to run, the call is refused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ort_webgpu.errors import InvalidInputError, InvalidModelError
from ort_webgpu.graph_tools.nodes import Node
from ort_webgpu.ops.spec import Accepted, Rejected, Value

__all__ = ["INPUTS", "Attributes", "Lengths", "Shapes", "check_gqa_node", "read_lengths"]

INPUTS = (
    "query",
    "key",
    "value",
    "past_key",
    "past_value",
    "seqlens_k",
    "total_sequence_length",
    "cos_cache",
    "sin_cache",
    "position_ids",
    "attention_bias",
    "head_sink",
    "k_scale",
    "v_scale",
    "q_norm_weight",
    "k_norm_weight",
    "query_seqlens",
)
(
    QUERY,
    KEY,
    VALUE,
    PAST_KEY,
    PAST_VALUE,
    SEQLENS,
    TOTAL,
    COS,
    SIN,
    POSITION_IDS,
    BIAS,
    SINK,
    K_SCALE,
    V_SCALE,
    Q_NORM,
    K_NORM,
    QUERY_SEQLENS,
) = range(17)
FLOATS = ("float32", "float16")


@dataclass(frozen=True)
class Attributes:
    """The attributes of a node, with ORT's defaults and its rules for odd values."""

    num_heads: int
    kv_num_heads: int
    scale: float
    softcap: float
    do_rotary: bool
    interleaved: bool
    window: int
    smooth_softmax: bool
    causal: bool
    qk_output: int
    quant: str
    bit_width: int
    sliding_window_cache: bool
    q_epsilon: float
    k_epsilon: float

    @classmethod
    def read(cls, node: Node) -> "Attributes":
        """From a node; InvalidModelError for what ORT refuses when it creates a session."""
        a = node.attributes
        epsilon = a.get("qk_norm_epsilon", 1e-6)
        return cls(
            num_heads=_positive(node, "num_heads"),
            kv_num_heads=_positive(node, "kv_num_heads"),
            scale=float(a.get("scale", 0.0)),
            softcap=max(0.0, float(a.get("softcap", 0.0))),
            do_rotary=a.get("do_rotary", 0) == 1,
            interleaved=a.get("rotary_interleaved", 0) == 1,
            window=max(-1, int(a.get("local_window_size", -1))),
            smooth_softmax=a.get("smooth_softmax", -1) == 1,
            causal=bool(a.get("causal", 1)),
            qk_output=int(a.get("qk_output", 0)),
            quant=a.get("k_quant_type", "NONE"),
            bit_width=int(a.get("kv_cache_bit_width", 0)),
            sliding_window_cache=a.get("sliding_window_cache", 0) == 1,
            q_epsilon=float(a.get("q_norm_epsilon", epsilon)),
            k_epsilon=float(a.get("k_norm_epsilon", epsilon)),
        )

    @property
    def storage(self) -> str | None:
        """The quantized storage of the cache, None for a float cache."""
        return None if self.quant == "NONE" else {8: "int8", 4: "int4"}.get(self.bit_width)


def _positive(node: Node, name: str) -> int:
    value = node.attributes.get(name, 0)
    if value <= 0:
        raise InvalidModelError(f"{node}: attribute {name} is {value}; it is required and positive")
    return int(value)


def check_gqa_node(node: Node, dtypes: Sequence[str | None]) -> Accepted | Rejected:
    """OpSpec.check_node of GroupQueryAttention."""
    _check_types(node, dtypes)
    a = Attributes.read(node)
    _check_attributes(node, a)
    _check_wiring(node, a)
    dtype = dtypes[QUERY] if dtypes else None
    if dtype not in (None, *FLOATS):
        return Rejected(f"query is {dtype}; the device takes float32 and float16")
    past = dtypes[PAST_KEY] if len(dtypes) > PAST_KEY and node.has_input(PAST_KEY) else None
    allowed = {None: FLOATS, "int8": ("int8",), "int4": ("uint8",)}[a.storage]
    if past not in (None, *allowed):
        return Rejected(
            f"the cache is {past}; with k_quant_type={a.quant} and"
            f" kv_cache_bit_width={a.bit_width} the device takes {' or '.join(allowed)}"
        )
    return Accepted()


def _check_types(node: Node, dtypes: Sequence[str | None]) -> None:
    for index in (QUERY, PAST_KEY):
        dtype = dtypes[index] if index < len(dtypes) else None
        if dtype and dtype.startswith(("bfloat16", "float8")):
            raise InvalidModelError(
                f"{node}: {INPUTS[index]} is {dtype}; neither the device nor ONNX Runtime's CPU EP"
                " has a kernel for it. Export the model with float32 or float16 and a cache of"
                " float32, float16, int8 or int4 (uint8)"
            )


def _check_attributes(node: Node, a: Attributes) -> None:
    raw = node.attributes
    if a.num_heads % a.kv_num_heads:
        raise InvalidModelError(
            f"{node}: num_heads {a.num_heads} is no multiple of kv_num_heads {a.kv_num_heads}"
        )
    if raw.get("causal", 1) not in (0, 1):
        raise InvalidModelError(f"{node}: causal is {raw['causal']}; it must be 0 or 1")
    if not a.causal and raw.get("local_window_size", -1) != -1:
        raise InvalidModelError(
            f"{node}: causal=0 with local_window_size={raw['local_window_size']}; bidirectional"
            " attention takes no window (-1)"
        )
    if a.sliding_window_cache and a.window <= 0:
        raise InvalidModelError(
            f"{node}: sliding_window_cache=1 needs local_window_size > 0, found {a.window}"
        )
    if a.qk_output not in (0, 1, 2):
        raise InvalidModelError(f"{node}: qk_output is {a.qk_output}; it must be 0, 1 or 2")
    if a.quant not in ("NONE", "PER_TENSOR", "PER_CHANNEL") or a.quant != raw.get(
        "v_quant_type", "NONE"
    ):
        raise InvalidModelError(
            f"{node}: k_quant_type={a.quant}, v_quant_type={raw.get('v_quant_type', 'NONE')};"
            " both must be the same of NONE, PER_TENSOR, PER_CHANNEL"
        )
    if (a.bit_width != 0) if a.quant == "NONE" else (a.bit_width not in (4, 8)):
        raise InvalidModelError(
            f"{node}: kv_cache_bit_width is {a.bit_width} with quantization {a.quant};"
            " it is 4 or 8 for a quantized cache, else 0"
        )


def _check_wiring(node: Node, a: Attributes) -> None:
    for first, second in ((KEY, VALUE), (PAST_KEY, PAST_VALUE), (COS, SIN), (Q_NORM, K_NORM)):
        if node.has_input(first) != node.has_input(second):
            raise InvalidModelError(
                f"{node}: {INPUTS[first]} and {INPUTS[second]} must be given together"
            )
    for index in (QUERY, SEQLENS, TOTAL):
        if not node.has_input(index):
            raise InvalidModelError(f"{node}: required input {INPUTS[index]} is missing")
    if node.has_output(1) != node.has_output(2):
        raise InvalidModelError(f"{node}: present_key and present_value must be requested together")
    if (a.qk_output != 0) != node.has_output(3):
        raise InvalidModelError(
            f"{node}: qk_output={a.qk_output} and output output_qk"
            f" {'present' if node.has_output(3) else 'absent'}; set qk_output to 1 or 2 and wire"
            " the fourth output, or neither"
        )
    if a.do_rotary and not node.has_input(COS):
        raise InvalidModelError(f"{node}: do_rotary=1 needs cos_cache and sin_cache")
    if a.quant != "NONE":
        for index in (PAST_KEY, K_SCALE, V_SCALE):
            if not node.has_input(index):
                raise InvalidModelError(f"{node}: a quantized cache needs {INPUTS[index]}")
    if a.sliding_window_cache and not (node.has_input(PAST_KEY) and node.has_output(1)):
        raise InvalidModelError(
            f"{node}: sliding_window_cache=1 needs past_key, past_value and both presents"
        )
    if a.sliding_window_cache and a.qk_output:
        raise InvalidModelError(f"{node}: sliding_window_cache=1 cannot give output_qk")
    if node.has_input(QUERY_SEQLENS) and not (a.causal and node.has_input(PAST_KEY)):
        raise InvalidModelError(f"{node}: query_seqlens needs causal=1 and a past")


@dataclass(frozen=True)
class Shapes:
    """Sizes of one call. `past_rows` is None without a past; `kv_len` counts new keys."""

    batch: int
    q_len: int
    kv_len: int
    head_size: int
    past_rows: int | None
    packed: bool
    dtype: str
    kv_dtype: str

    @classmethod
    def read(cls, node: Node, a: Attributes, values: Sequence[Value | None]) -> "Shapes":
        """Checked against each other; InvalidInputError otherwise."""
        query = values[QUERY]
        assert query is not None  # check_gqa_node has seen the wiring
        if query.dtype not in FLOATS or len(query.shape) != 3:
            _refuse(node, "query", query, "a float32 or float16 tensor (batch, sequence, hidden)")
        batch, q_len, hidden = query.shape
        if batch == 0 or q_len == 0:
            _refuse(node, "query", query, "at least one batch entry and one token")
        packed = values[KEY] is None
        heads = a.num_heads + (2 * a.kv_num_heads if packed else 0)
        head_size = hidden // heads
        if hidden % heads or head_size % 8 or head_size == 0:
            _refuse(
                node,
                "query",
                query,
                f"a hidden size of {heads} heads, each of a multiple of 8 elements",
            )
        kv_len = q_len if packed else cls._key_length(node, a, values, batch, q_len, head_size)
        past_rows, kv_dtype = cls._past(node, a, values, batch, head_size)
        if kv_len == 0 and past_rows is None:
            raise InvalidInputError(f"{node}: key of length 0 needs past_key to attend to")
        return cls(
            batch, q_len, kv_len, head_size, past_rows, packed, query.dtype, kv_dtype or query.dtype
        )

    @staticmethod
    def _key_length(
        node: Node,
        a: Attributes,
        values: Sequence[Value | None],
        batch: int,
        q_len: int,
        head_size: int,
    ) -> int:
        key, value, query = values[KEY], values[VALUE], values[QUERY]
        assert key is not None and value is not None and query is not None
        for name, one in (("key", key), ("value", value)):
            fits = (
                one.dtype == query.dtype
                and len(one.shape) == 3
                and one.shape[0] == batch
                and one.shape[1] in (0, q_len)
                and one.shape[2] == a.kv_num_heads * head_size
            )
            if not fits:
                _refuse(
                    node,
                    name,
                    one,
                    f"{query.dtype} ({batch}, {q_len} or 0, {a.kv_num_heads * head_size})",
                )
        if key.shape != value.shape:
            _refuse(node, "value", value, f"key's shape {key.shape}")
        return key.shape[1]

    @staticmethod
    def _past(
        node: Node, a: Attributes, values: Sequence[Value | None], batch: int, head_size: int
    ) -> tuple[int | None, str | None]:
        key, value = values[PAST_KEY], values[PAST_VALUE]
        if key is None or value is None:
            return None, None
        storage = a.storage
        allowed = {None: FLOATS, "int8": ("int8",), "int4": ("uint8",)}[storage]
        width = head_size // 2 if storage == "int4" else head_size
        for name, one in (("past_key", key), ("past_value", value)):
            fits = (
                one.dtype in allowed
                and len(one.shape) == 4
                and one.shape[:2] == (batch, a.kv_num_heads)
                and one.shape[3] == width
            )
            if not fits:
                _refuse(
                    node,
                    name,
                    one,
                    f"{' or '.join(allowed)} ({batch}, {a.kv_num_heads}, rows, {width})",
                )
        if key.shape != value.shape or key.dtype != value.dtype:
            _refuse(node, "past_value", value, f"past_key's {key.dtype} {key.shape}")
        return key.shape[2], storage or key.dtype


@dataclass(frozen=True)
class Lengths:
    """Where each batch entry stands. All arrays are int64 [batch].

    `total` keys in all, `past` of them before this call, `new` valid query rows; `first_prompt`
    says that the past is ignored; `scalar` is total_sequence_length; `rows` the presents' axis 2.
    """

    total: np.ndarray
    past: np.ndarray
    new: np.ndarray
    first_prompt: bool
    scalar: int
    rows: int


def read_lengths(
    node: Node, a: Attributes, shapes: Shapes, values: Sequence[Value | None]
) -> Lengths:
    """Lengths of one call, checked so that no kernel can leave the cache."""
    total = _seqlens(node, shapes, values) + 1
    scalar = _scalar(node, values)
    past_rows = shapes.past_rows or 0
    rows = past_rows if a.sliding_window_cache else max(scalar, past_rows)
    _check_scalar(node, a, shapes, scalar)
    query_seqlens = values[QUERY_SEQLENS] if len(values) > QUERY_SEQLENS else None
    new = np.full(shapes.batch, shapes.q_len, np.int64)
    first_prompt = shapes.q_len == scalar and query_seqlens is None
    if query_seqlens is not None:
        new = _query_seqlens(node, shapes, query_seqlens, total)
    if first_prompt or shapes.past_rows is None:
        past = np.zeros(shapes.batch, np.int64)
    else:
        past = total - new
    limit = scalar if a.sliding_window_cache else rows
    for b in range(shapes.batch):
        if not 0 < total[b] <= limit:
            raise InvalidInputError(
                f"{node}: seqlens_k[{b}] is {total[b] - 1}; it must lie in [0, {limit})"
            )
        if first_prompt and a.sliding_window_cache and total[b] < shapes.q_len:
            raise InvalidInputError(
                f"{node}: seqlens_k[{b}] is {total[b] - 1} in a prompt of {shapes.q_len} tokens; a"
                " window cache takes no right padding. Feed the entries apart"
            )
        if past[b] < 0:
            raise InvalidInputError(
                f"{node}: seqlens_k[{b}] is {total[b] - 1}, fewer keys than the {new[b]} new ones"
            )
        if past[b] > past_rows and shapes.kv_len and not a.sliding_window_cache:
            raise InvalidInputError(
                f"{node}: seqlens_k[{b}] is {total[b] - 1}, so {past[b]} past rows are needed;"
                f" past_key has {past_rows}"
            )
        if shapes.kv_len and past[b] + shapes.q_len > rows and query_seqlens is not None:
            raise InvalidInputError(
                f"{node}: {past[b]} past and {shapes.q_len} new rows of batch entry {b} do not fit"
                f" the cache capacity of {rows}"
            )
    return Lengths(total, past, new, first_prompt, scalar, rows)


def _seqlens(node: Node, shapes: Shapes, values: Sequence[Value | None]) -> np.ndarray:
    value = values[SEQLENS]
    assert value is not None and value.host is not None
    batch = shapes.batch
    if value.dtype != "int32" or value.shape not in ((batch,), (batch, 1), (1, batch)):
        _refuse(node, "seqlens_k", value, f"int32 ({batch},)")
    return value.host.reshape(-1).astype(np.int64)


def _scalar(node: Node, values: Sequence[Value | None]) -> int:
    value = values[TOTAL]
    assert value is not None and value.host is not None
    if value.dtype != "int32" or value.shape not in ((), (1,)):
        _refuse(node, "total_sequence_length", value, "an int32 scalar or (1,)")
    return int(value.host.reshape(()))


def _check_scalar(node: Node, a: Attributes, shapes: Shapes, scalar: int) -> None:
    if scalar <= 0 or scalar < shapes.kv_len:
        raise InvalidInputError(
            f"{node}: total_sequence_length is {scalar}; it must be positive and at least the"
            f" {shapes.kv_len} new keys"
        )
    if shapes.past_rows is None:
        if scalar != shapes.q_len:
            raise InvalidInputError(
                f"{node}: total_sequence_length is {scalar}; without a past it must equal the"
                f" sequence length {shapes.q_len}"
            )
        return
    if a.sliding_window_cache:
        if shapes.past_rows < a.window or not shapes.kv_len:
            raise InvalidInputError(
                f"{node}: a window cache of {shapes.past_rows} rows with {shapes.kv_len} new keys;"
                f" it needs at least local_window_size={a.window} rows and new keys"
            )
        return
    grown = shapes.past_rows + shapes.kv_len
    if scalar > shapes.past_rows and (scalar != grown or not shapes.kv_len):
        raise InvalidInputError(
            f"{node}: total_sequence_length is {scalar}; with a past of {shapes.past_rows} rows and"
            f" {shapes.kv_len} new keys it is {grown} (a cache that grows) or at most"
            f" {shapes.past_rows} (a cache of fixed size)"
        )


def _query_seqlens(node: Node, shapes: Shapes, value: Value, total: np.ndarray) -> np.ndarray:
    if value.dtype != "int32" or value.shape != (shapes.batch,):
        _refuse(node, "query_seqlens", value, f"int32 ({shapes.batch},)")
    assert value.host is not None
    new = value.host.astype(np.int64)
    if shapes.kv_len != shapes.q_len:
        raise InvalidInputError(f"{node}: query_seqlens needs new keys, key has length 0")
    for b in range(shapes.batch):
        if not 0 <= new[b] <= min(shapes.q_len, total[b]):
            raise InvalidInputError(
                f"{node}: query_seqlens[{b}] is {new[b]}; it must lie in"
                f" [0, {min(shapes.q_len, total[b])}]"
            )
    return new


def score_scale(a: Attributes, head_size: int) -> float:
    """The factor on q k^T: the attribute, or 1/sqrt(head size) where it is 0 or absent."""
    return a.scale if a.scale != 0.0 else 1.0 / math.sqrt(head_size)


def _refuse(node: Node, name: str, value: Value, allowed: str) -> None:
    raise InvalidInputError(
        f"{node}: input {name} is {value.dtype} {value.shape}; expected {allowed}"
    )
