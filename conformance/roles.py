"""What the inputs of a whole model are to its attention nodes, read off the graph's wiring.

A graph input's role comes from the attention input that it is wired to, through casts if need be,
else from the name that exporters give it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ort_webgpu.conformance.case import OPERATORS
from ort_webgpu.graph_tools import ModelFile, Node

__all__ = ["Cache", "Roles", "find_roles"]

_PASSED_THROUGH = frozenset({"Cast", "Identity", "Squeeze", "Unsqueeze"})
_TABLES = {
    "Gather": {1: 0},
    "GatherBlockQuantized": {1: 0},
    "EmbedLayerNormalization": {0: 2, 1: 4},
}
"""Operator to (position of indices: position of the table that they index)."""

_BY_NAME = (
    (r"position_ids", "position_ids"),
    (r"(encoder|cross).*mask", "encoder_mask"),
    (r"mask", "attention_mask"),
    (r"token_type|segment_ids", "token_type_ids"),
    (r"input_ids|decoder_input_ids", "ids"),
    (r"past.*(key|value)", "cache"),
)
_DIRECT = frozenset(
    {
        "seqlens_k",
        "total_sequence_length",
        "position_ids",
        "query_seqlens",
        "past_sequence_length",
        "beam_width",
        "cache_indirection",
        "token_offset",
        "cumulative_sequence_length",
        "sequence_token_count",
        "cos_cache",
        "sin_cache",
        "k_scale",
        "v_scale",
    }
)


@dataclass(frozen=True)
class Cache:
    """A past that is a graph input; `present` is the graph output that continues it, if any.

    `window` is the fixed number of rows of a sliding_window_cache, else None. `head_size` is None
    where the graph does not tell it; `bits` is 4 where a byte holds two elements.
    """

    node: Node
    present: str | None = None
    head_size: int | None = None
    window: int | None = None
    bits: int = 0


@dataclass(frozen=True)
class Roles:
    """`role` by graph input ("other" where nothing is known), `caches` and `bounds` by input.

    `bounds` are the sizes of the tables that integer inputs index. `logits` is the output that
    the next token is chosen from, None where the model has none.
    """

    role: Mapping[str, str]
    caches: Mapping[str, Cache]
    bounds: Mapping[str, int]
    logits: str | None = None
    attention: frozenset[str] = field(default_factory=frozenset)

    def of(self, role: str) -> str | None:
        """The graph input with that role, None where there is none."""
        return next((name for name, found in self.role.items() if found == role), None)


def find_roles(model: ModelFile) -> Roles:
    """The roles of every graph input of `model`."""
    origin = _origins(model)
    role: dict[str, str] = {}
    caches: dict[str, Cache] = {}
    bounds: dict[str, int] = {}
    for node in model.nodes:
        if node.op_type in OPERATORS and node.domain == "com.microsoft":
            _read_attention(model, node, origin, role, caches)
        for indices, table in _TABLES.get(node.op_type, {}).items():
            source = origin.get(node.inputs[indices]) if node.has_input(indices) else None
            weight = model.weights.get(node.inputs[table]) if node.has_input(table) else None
            if source is not None and weight is not None:
                bounds[source] = min(weight.shape[0], bounds.get(source, weight.shape[0]))
    for name in model.inputs:
        role.setdefault(name, _named(name))
    logits = next((name for name in model.outputs if "logits" in name), None)
    operators = {n.op_type for n in model.nodes if n.domain == "com.microsoft"}
    return Roles(role, caches, bounds, logits, frozenset(operators & OPERATORS.keys()))


def _named(name: str) -> str:
    return next((found for pattern, found in _BY_NAME if re.search(pattern, name, re.I)), "other")


def _origins(model: ModelFile) -> dict[str, str]:
    """Value name to the graph input that it is, seen through casts and reshapes."""
    origin = {name: name for name in model.inputs}
    for node in model.nodes:
        if node.op_type in _PASSED_THROUGH and node.inputs and node.inputs[0] in origin:
            origin[node.outputs[0]] = origin[node.inputs[0]]
    return origin


def _read_attention(
    model: ModelFile,
    node: Node,
    origin: Mapping[str, str],
    role: dict[str, str],
    caches: dict[str, Cache],
) -> None:
    for name, source in _wired(node, origin):
        if name in _DIRECT:
            role[source] = name
        elif name in ("past_key", "past_value"):
            role[source] = "cache"
            caches[source] = _cache(model, node, name)
        elif name in ("key", "value") and node.op_type == "DecoderMaskedMultiHeadAttention":
            if len(_shape(model, source)) == 4:
                role[source] = "cross_cache"
        elif name == "mask_index":
            role[source] = "encoder_mask"


def _wired(node: Node, origin: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(attention input name, graph input) for each input of `node` that is a graph input."""
    for name, value in zip(OPERATORS[node.op_type][0], node.inputs, strict=False):
        if value in origin:
            yield name, origin[value]


def _cache(model: ModelFile, node: Node, name: str) -> Cache:
    index = 1 if name == "past_key" else 2
    present = node.outputs[index] if node.has_output(index) else None
    size = node.attributes.get("local_window_size", -1)
    window = size if node.attributes.get("sliding_window_cache", 0) else None
    bits = node.attributes.get("kv_cache_bit_width", 0)
    return Cache(
        node, present if present in model.outputs else None, _head_size(model, node), window, bits
    )


def _head_size(model: ModelFile, node: Node) -> int | None:
    """From the width of the query or of the output, else from the rotary table."""
    heads = node.attributes.get("num_heads", 0)
    both = heads + 2 * node.attributes.get("kv_num_heads", heads)
    packed = not node.has_input(1)
    for value, parts in ((node.inputs[0], both if packed else heads), (node.outputs[0], heads)):
        shape = _shape(model, value)
        if parts and shape and isinstance(shape[-1], int) and shape[-1] > 0:
            return shape[-1] // parts
    if node.op_type == "GroupQueryAttention" and node.has_input(7):
        shape = _shape(model, node.inputs[7])
        partial = node.attributes.get("rotary_embedding_dim", 0)
        if not partial and len(shape) == 2 and isinstance(shape[1], int):
            return 2 * shape[1]
    return None


def _shape(model: ModelFile, value: str) -> list[int | str]:
    """The dims that the file declares for `value`; empty where it does not."""
    kind = model.value_types.get(value)
    if kind is None or not kind.tensor_type.HasField("shape"):
        return []
    return [dim.dim_param or dim.dim_value for dim in kind.tensor_type.shape.dim]
