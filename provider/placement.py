"""Placement: which nodes of a model are offloaded, and for each of the others why not."""

import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from ort_webgpu.errors import NotOffloadedError
from ort_webgpu.graph_tools import ModelFile, Nested, Node
from ort_webgpu.graph_tools.reference import EXPANDABLE
from ort_webgpu.ops import OPS
from ort_webgpu.ops.spec import OpSpec, Rejected
from ort_webgpu.values import DTYPES

__all__ = [
    "Offload",
    "Placement",
    "is_candidate",
    "mentions",
    "needs_expansion",
    "place",
]

Offload = str | bool | None | Iterable[str] | Callable[[Node], bool]

_DTYPES = {
    **DTYPES,
    "tensor(bfloat16)": "bfloat16",
    "tensor(float8e4m3fn)": "float8_e4m3fn",
    "tensor(float8e5m2)": "float8_e5m2",
}
_CUDA_ONLY = EXPANDABLE - {"DecoderMaskedMultiHeadAttention", "GroupQueryAttention"}


def is_candidate(node: onnx.NodeProto | Node) -> bool:
    """Whether there is an operator of ours for the node, whatever its attributes and types."""
    return (node.domain, node.op_type) in OPS


def mentions(data: bytes | mmap.mmap) -> bool:
    """Whether a serialized model can hold a node that concerns us; no parsing, so it may err."""
    names = {op_type for _, op_type in OPS} | EXPANDABLE
    return any(data.find(name.encode()) >= 0 for name in names)


@dataclass(frozen=True)
class Placement:
    """`offloaded` nodes by index with their specs; `kept` are the other candidates and why.

    `kept_by_caller` are the indexes of those in `kept` that `offload=` left out.
    """

    offloaded: dict[int, OpSpec]
    kept: tuple[tuple[Node, str], ...]
    kept_by_caller: frozenset[int]
    nested: tuple[Nested, ...]

    @property
    def unwanted(self) -> dict[str, str]:
        """Node name or path to reason, of what the caller wanted offloaded and is not."""
        found = {n.name: why for n, why in self.kept if n.index not in self.kept_by_caller}
        return found | {f"{n.path} / {n.name}": n.reason for n in self.nested}


def place(
    model: ModelFile,
    offload: Offload,
    kinds: Mapping[str, str],
    nested: Sequence[Nested],
    obstacle: str | None,
) -> Placement:
    """Decide for each candidate of `model`.

    `kinds` are ORT's type strings of values; `obstacle` a reason that keeps every node on the CPU.
    Raises NotOffloadedError where `offload` names something that the model does not have.
    """
    wanted = _selection(model, offload)
    offloaded: dict[int, OpSpec] = {}
    kept: list[tuple[Node, str]] = []
    by_caller = set()
    for node in filter(is_candidate, model.nodes):
        if not wanted(node):
            kept.append((node, "left out by offload="))
            by_caller.add(node.index)
            continue
        if obstacle is not None:
            kept.append((node, obstacle))
            continue
        dtypes = [_DTYPES.get(kinds.get(name, "")) for name in node.inputs]
        made = [_DTYPES.get(kinds.get(name, "")) for name in node.outputs]
        spec = OPS[node.domain, node.op_type].typed(made)
        verdict = spec.check_node(node, dtypes)
        if isinstance(verdict, Rejected):
            kept.append((node, verdict.reason))
        else:
            offloaded[node.index] = spec
    reported = () if offload in ("none", False, None) else tuple(nested)
    return Placement(offloaded, tuple(kept), frozenset(by_caller), reported)


def _selection(model: ModelFile, offload: Offload) -> Callable[[Node], bool]:
    if offload in ("all", True):
        return lambda node: True
    if offload in ("none", False, None):
        return lambda node: False
    if callable(offload):
        return offload
    names = {offload} if isinstance(offload, str) else set(offload)  # type: ignore[arg-type]
    known = {node.name for node in model.nodes} | {op_type for _, op_type in OPS}
    if unknown := sorted(map(str, names - known)):
        candidates = [node.name for node in filter(is_candidate, model.nodes)]
        raise NotOffloadedError(
            f"offload= names {unknown}, which are neither nodes of the model nor operator types"
            f" that can be offloaded. Candidates in this model: {candidates}; operator types:"
            f" {sorted(op_type for _, op_type in OPS)}"
        )
    return lambda node: node.name in names or node.op_type in names


def needs_expansion(node: Node, kinds: Mapping[str, str]) -> bool:
    """Whether ORT's CPU EP 1.32 cannot run the node and there is a standard-operator form.

    Its DecoderMaskedMultiHeadAttention is float32 with separate q, k and v; in cross mode it
    refuses past_present_share_buffer=1, which exporters write (ort-semantics.md 1.2, 6).
    """
    if node.domain != "com.microsoft" or node.op_type not in EXPANDABLE:
        return False
    if node.op_type == "GroupQueryAttention":
        return node.has_input(14) or node.has_input(15)
    if node.op_type == "DecoderMaskedMultiHeadAttention":
        cross = not node.has_input(5)
        shared = node.attributes.get("past_present_share_buffer", 0) == 1
        plain = kinds.get(node.inputs[0]) == "tensor(float)" and node.has_input(1)
        return not plain or (cross and shared)
    return node.op_type in _CUDA_ONLY
