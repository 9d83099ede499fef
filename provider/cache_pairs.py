"""Which graph inputs are pasts and which outputs their presents, found by following the graph."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ort_webgpu.graph_tools import ModelFile, Node
from ort_webgpu.ops import OPS
from ort_webgpu.values import DTYPES

__all__ = ["Pair", "find_pairs"]

Kinds = Mapping[str, tuple[str, list[Any]]]


@dataclass(frozen=True)
class Pair:
    """A graph input that an attention node reads as its past, and the output that follows it.

    `kind` is that of `OpSpec.cache_kind`, or "constant" for keys or values of cross attention: they
    have no `present`. `heads`, `rows` and `width` are axes 1 to 3 of the past, None where the model
    leaves them open.
    """

    past: str
    present: str | None
    kind: str
    dtype: str
    heads: int | None
    rows: int | None
    width: int | None


def find_pairs(model: ModelFile, inputs: Mapping[str, Any], kinds: Kinds) -> tuple[Pair, ...]:
    """The pairs of `model`. `inputs` are ORT's NodeArgs, `kinds` the types of other values."""
    outputs = _outputs(model)
    found: dict[str, Pair] = {}
    for node in model.nodes:
        spec = OPS.get((node.domain, node.op_type))
        if spec is None:
            continue
        for present, past in spec.caches.items():
            if not node.has_input(past) or not node.has_output(present):
                continue
            name, output = node.inputs[past], outputs.get(node.outputs[present])
            if name in inputs and inputs[name].type in DTYPES and output is not None:
                found[name] = _pair(node, inputs[name], output, spec.cache_kind(node), kinds)
        if spec.op_type == "DecoderMaskedMultiHeadAttention":
            for position in (1, 2):
                name = node.inputs[position] if node.has_input(position) else ""
                if name in inputs and len(inputs[name].shape) == 4:
                    found.setdefault(name, _pair(node, inputs[name], None, "constant", kinds))
    return tuple(found.values())


def _outputs(model: ModelFile) -> dict[str, str]:
    """Value to the graph output that is it, itself or through Identity nodes."""
    found = {name: name for name in model.outputs}
    for node in reversed(model.nodes):
        if node.op_type == "Identity" and node.domain == "" and node.outputs[0] in found:
            found.setdefault(node.inputs[0], found[node.outputs[0]])
    return found


def _pair(node: Node, past: Any, present: str | None, kind: str, kinds: Kinds) -> Pair:
    shape = [d if isinstance(d, int) else None for d in past.shape]
    _, heads, rows, width = shape if len(shape) == 4 else [None] * 4
    if kind != "constant":
        attribute = "kv_num_heads" if "kv_num_heads" in node.attributes else "num_heads"
        heads = heads or node.attributes.get(attribute)
        width = width or _width(node, kinds)
    if kind == "window" and rows is None:
        rows = node.attributes.get("local_window_size")
    return Pair(past.name, present, kind, DTYPES[past.type], heads, rows, width)


def _width(node: Node, kinds: Kinds) -> int | None:
    """Elements of a cache row, from the width of the query."""
    shape = kinds.get(node.inputs[0], ("", []))[1]
    hidden = shape[-1] if shape else None
    if not isinstance(hidden, int):
        return None
    heads = node.attributes.get("num_heads", 0)
    if not node.has_input(1):
        heads += 2 * node.attributes.get("kv_num_heads", heads)
    width = hidden // heads if heads else 0
    return width // 2 if node.attributes.get("kv_cache_bit_width", 0) == 4 else width or None
