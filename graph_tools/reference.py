"""Models without the operators that ORT's CPU EP lacks: each becomes standard ONNX operators.

ONNX Runtime has PackedAttention, PackedMultiHeadAttention, RemovePadding, RestorePadding and
RelativePositionBias on CUDA only, DecoderMaskedMultiHeadAttention on the CPU in part, and
GroupQueryAttention with Q/K norm on the GPU only. `replace_unsupported` rewrites a model so that
every provider runs it; the result is also an oracle for our kernels, since it shares no code with
them. All sizes are taken at run time, so symbolic dims stay symbolic. float16 nodes compute in
float32 and round once at the end.

Values that break an operator's contract (cumulative lengths that fall, a past length beyond the
capacity) are not looked for here: the caller checks them where it has them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import onnx
import onnx.inliner
from onnx import TensorProto, helper

from ort_webgpu.graph_tools import reference_decoder as decoder
from ort_webgpu.graph_tools import reference_packed as packed
from ort_webgpu.graph_tools.nodes import Node
from ort_webgpu.graph_tools.reference_beam import BEAM_SEARCH_OPS, grow_caches
from ort_webgpu.graph_tools.reference_builder import MIN_OPSET, GraphBuilder
from ort_webgpu.graph_tools.reference_types import element_types

__all__ = ["EXPANDABLE", "Expansion", "expand", "replace_unsupported", "single_node_reference"]

_CONTRIB = "com.microsoft"
_NEW_IMPORT_OPSET = 17


@dataclass(frozen=True)
class Expansion:
    """Nodes, in order, that compute one node's outputs under their own names.

    Constants are `Constant` nodes: there are no initializers to add. `output_types` gives the
    element type of each named output that the operator fixes.
    """

    nodes: tuple[onnx.NodeProto, ...]
    output_types: dict[str, int]


Types = Callable[..., int]
"""Element type of the first of some value names that is known."""

_Expand = Callable[[GraphBuilder, Node, Types], tuple[int | None, ...] | None]
"""Writes the nodes; returns the element type of each output, None where it is input 0's."""


def _packed_attention(b: GraphBuilder, node: Node, types: Types) -> tuple[int | None, ...]:
    elem_type = types(*node.inputs[:3], *node.outputs[:1])
    packed.packed_attention(b, node, elem_type)
    return (elem_type,)


def _packed_mha(b: GraphBuilder, node: Node, types: Types) -> tuple[int | None, ...]:
    elem_type = types(*node.inputs[:4], *node.outputs[:1])
    packed.packed_multi_head_attention(b, node, elem_type)
    return (elem_type,)


def _remove_padding(b: GraphBuilder, node: Node, types: Types) -> tuple[int | None, ...]:
    packed.remove_padding(b, node)
    return (None, TensorProto.INT32, TensorProto.INT32, TensorProto.INT32)


def _restore_padding(b: GraphBuilder, node: Node, types: Types) -> tuple[int | None, ...]:
    packed.restore_padding(b, node)
    return (None,)


def _relative_position_bias(b: GraphBuilder, node: Node, types: Types) -> tuple[int | None, ...]:
    decoder.relative_position_bias(b, node)
    return (None,)


def _decoder_masked(b: GraphBuilder, node: Node, types: Types) -> tuple[int | None, ...]:
    floats = (*node.inputs[:3], *node.inputs[4:7], *node.inputs[10:11], *node.outputs[:3])
    elem_type = types(*floats)
    qk_type = types(node.outputs[3], default=elem_type) if node.has_output(3) else elem_type
    decoder.decoder_masked_attention(b, node, elem_type, qk_type)
    return (elem_type, elem_type, elem_type, qk_type)


def _normed_gqa(b: GraphBuilder, node: Node, types: Types) -> tuple[int | None, ...] | None:
    if not (node.has_input(14) or node.has_input(15)):
        return None
    floats = (*node.inputs[:3], *node.inputs[7:9], *node.inputs[10:12], *node.inputs[14:16])
    elem_type = types(*floats, *node.outputs[:1])
    cache_type = types(*node.inputs[3:5], *node.outputs[1:3], default=elem_type)
    decoder.group_query_attention_with_norm(b, node, elem_type, cache_type)
    return (elem_type, cache_type, cache_type, elem_type)


_EXPANSIONS: dict[str, _Expand] = {
    "PackedAttention": _packed_attention,
    "PackedMultiHeadAttention": _packed_mha,
    "RemovePadding": _remove_padding,
    "RestorePadding": _restore_padding,
    "DecoderMaskedMultiHeadAttention": _decoder_masked,
    "RelativePositionBias": _relative_position_bias,
    "GroupQueryAttention": _normed_gqa,
}

EXPANDABLE = frozenset(_EXPANSIONS)
"""com.microsoft operators with a standard form (GroupQueryAttention only with Q/K norm)."""


def expand(
    node: onnx.NodeProto, dtypes: Mapping[str, int], opset: int, prefix: str
) -> Expansion | None:
    """The standard-operator form of `node`, or None where it has and needs none.

    `dtypes` maps value names to onnx element types; of the node's values, one of each type
    variable must be in it. `opset` is that of domain "". Names made here start with `prefix`,
    which must be unique in the model. A GroupQueryAttention node with Q/K norm becomes norms and
    a GroupQueryAttention node without, which ORT's CPU EP has.

    Raises ValueError for an opset below 12 and where no element type is known.
    """
    if node.domain != _CONTRIB or node.op_type not in _EXPANSIONS:
        return None
    view = Node.from_proto(node, 0)
    if opset < MIN_OPSET:
        raise ValueError(
            f"{view}: its standard-operator form needs opset {MIN_OPSET} or later of domain "
            f"'ai.onnx', the model has {opset}; convert the model with onnx.version_converter"
        )
    builder = GraphBuilder(prefix, opset)

    def types(*names: str, default: int | None = None) -> int:
        found = next((dtypes[name] for name in names if name in dtypes), default)
        if found is None:
            raise ValueError(
                f"{view}: the element type of none of {[n for n in names if n]} is known; "
                "declare one of them in the graph's value_info"
            )
        return found

    output_types = _EXPANSIONS[node.op_type](builder, view, types)
    if output_types is None:
        return None
    named = zip(view.outputs, output_types, strict=False)
    declared = {name: kind or dtypes.get(view.inputs[0], 0) for name, kind in named if name}
    return Expansion(tuple(builder.nodes), {n: kind for n, kind in declared.items() if kind})


def replace_unsupported(
    model: onnx.ModelProto, ops: Collection[str] = EXPANDABLE
) -> onnx.ModelProto:
    """A copy of `model` in which the nodes of the com.microsoft operators `ops` are expanded.

    Nodes in bodies of control flow and of beam search count too (a beam search then keeps its
    caches as ORT does without such nodes); local functions that contain one are inlined first.
    External data is neither loaded nor touched, so the result belongs into the same directory.
    Everything else stays as it is.

    Raises ValueError as `expand` does.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    result = _inline_functions(result, ops)
    opsets = {"" if o.domain == "ai.onnx" else o.domain: o.version for o in result.opset_import}
    if not any(_is_wanted(node, ops) for node in _walk(result.graph)):
        return result
    if "" not in opsets:
        opsets[""] = _NEW_IMPORT_OPSET
        result.opset_import.append(helper.make_opsetid("", _NEW_IMPORT_OPSET))
    _Rewriter(ops, opsets, _all_names(result.graph)).rewrite(result.graph, {})
    return result


def single_node_reference(
    node: onnx.NodeProto, input_types: Mapping[str, int], opset: int = _NEW_IMPORT_OPSET
) -> onnx.ModelProto:
    """A model of `node` alone in its standard form, every wired input and output a graph value.

    `input_types` gives the element type of each wired input, and of outputs that differ from
    what follows from them (DecoderMaskedMultiHeadAttention's qk). Shapes are left open.

    Raises ValueError as `expand` does, or where `node` has no standard form.
    """
    view = Node.from_proto(node, 0)
    expansion = expand(node, input_types, opset, "reference/")
    if expansion is None:
        raise ValueError(
            f"{view} (domain {node.domain!r}) has no standard-operator form; there is one for "
            f"{sorted(EXPANDABLE)} in domain {_CONTRIB!r}, for GroupQueryAttention only with "
            "q_norm_weight or k_norm_weight"
        )
    inputs = [_value_info(name, input_types[name]) for name in dict.fromkeys(view.inputs) if name]
    outputs = [_value_info(name, kind) for name, kind in expansion.output_types.items()]
    graph = helper.make_graph(expansion.nodes, view.name, inputs, outputs)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(_CONTRIB, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def _value_info(name: str, elem_type: int) -> onnx.ValueInfoProto:
    return helper.make_value_info(name, helper.make_tensor_type_proto(elem_type, None))


def _is_wanted(node: onnx.NodeProto, ops: Collection[str]) -> bool:
    if node.domain != _CONTRIB or node.op_type not in ops or node.op_type not in EXPANDABLE:
        return False
    return node.op_type != "GroupQueryAttention" or any(node.input[14:16])


def _bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def _walk(owner: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """All nodes of a graph or function, those of nested bodies included."""
    for node in owner.node:
        yield node
        for body in _bodies(node):
            yield from _walk(body)


def _all_names(graph: onnx.GraphProto) -> set[str]:
    names = {value.name for value in (*graph.input, *graph.initializer)}
    for node in graph.node:
        names.update((node.name, *node.input, *node.output))
        for body in _bodies(node):
            names |= _all_names(body)
    return names


def _inline_functions(model: onnx.ModelProto, ops: Collection[str]) -> onnx.ModelProto:
    """Inline the local functions that contain a wanted node, directly or through others."""
    wanted: set[tuple[str, str]] = set()
    grown = True
    while grown:
        grown = False
        for function in model.functions:
            key = (function.domain, function.name)
            if key not in wanted and any(
                _is_wanted(n, ops) or (n.domain, n.op_type) in wanted for n in _walk(function)
            ):
                wanted.add(key)
                grown = True
    return onnx.inliner.inline_selected_functions(model, sorted(wanted)) if wanted else model


class _Rewriter:
    """Expands wanted nodes of a graph and of its bodies, in place."""

    def __init__(
        self, ops: Collection[str], opsets: Mapping[str, int], taken: Collection[str]
    ) -> None:
        self._ops = ops
        self._opsets = opsets
        self._taken = taken
        self._count = 0

    def rewrite(self, graph: onnx.GraphProto, outer: Mapping[str, int]) -> None:
        """Rewrite `graph`, whose enclosing scope has values of the types `outer`."""
        dtypes = element_types(graph, self._opsets, outer)
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            self._rewrite_bodies(node, dtypes)
            expansion = None
            if _is_wanted(node, self._ops):
                expansion = expand(node, dtypes, self._opsets[""], self._prefix(node))
            nodes.extend(expansion.nodes if expansion else (node,))
        if len(nodes) != len(graph.node):
            # `extend` copies, and must do so before the field that owns the nodes is cleared.
            rewritten = onnx.GraphProto()
            rewritten.node.extend(nodes)
            graph.ClearField("node")
            graph.node.extend(rewritten.node)

    def _rewrite_bodies(self, node: onnx.NodeProto, dtypes: Mapping[str, int]) -> None:
        is_search = node.domain == _CONTRIB and node.op_type in BEAM_SEARCH_OPS
        if is_search and "DecoderMaskedMultiHeadAttention" in self._ops:
            for attribute in node.attribute:
                if attribute.name == "decoder":
                    grow_caches(attribute.g, self._prefix(node), self._opsets[""])
        for body in _bodies(node):
            self.rewrite(body, dtypes)

    def _prefix(self, node: onnx.NodeProto) -> str:
        while True:
            prefix = f"{node.name or node.op_type}/standard{self._count}/"
            self._count += 1
            if not any(name.startswith(prefix) for name in self._taken):
                return prefix
