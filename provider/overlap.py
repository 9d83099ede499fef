"""Overlap: what the CPU can do while the device works is a step of its own behind the submit."""

from collections.abc import Iterable, Sequence

from ort_webgpu.graph_tools import ModelFile, Stage
from ort_webgpu.graph_tools.partition import reads

__all__ = ["split_stages"]

# Less than these is not worth a session of its own and the values handed over.
_HEAVY = frozenset(
    {
        "Attention",
        "Conv",
        "ConvTranspose",
        "FusedConv",
        "FusedGemm",
        "FusedMatMul",
        "GRU",
        "Gemm",
        "LSTM",
        "MatMul",
        "MatMulInteger",
        "MatMulNBits",
        "MoE",
        "MultiHeadAttention",
        "QLinearConv",
        "QLinearMatMul",
        "QMoE",
    }
)


def split_stages(model: ModelFile, stages: Sequence[Stage]) -> list[Stage]:
    """Stages in which CPU nodes that the device does not wait for come after its nodes.

    Such are the nodes of a feed-forward branch beside attention; their step runs between the
    submit and the first readback. Nodes that compute constants stay with each of their readers.
    """
    result = []
    for stage in stages:
        first = _ancestors(model, stage.cpu, stage.gpu)
        later = [i for i in stage.cpu if i not in first]
        if not stage.gpu or not any(model.nodes[i].op_type in _HEAVY for i in later):
            result.append(stage)
            continue
        constants = _constants(model, stage.cpu)
        copied = _ancestors(model, [i for i in stage.cpu if i in constants], later)
        both = copied & first
        result.append(Stage(tuple(i for i in stage.cpu if i in first), stage.gpu))
        result.append(Stage(tuple(i for i in stage.cpu if i not in first or i in both), ()))
    return result


def _ancestors(model: ModelFile, nodes: Iterable[int], readers: Iterable[int]) -> set[int]:
    """Those of `nodes` that `readers` depend on through `nodes`."""
    proto = model.proto.graph.node
    maker = {name: i for i in nodes for name in proto[i].output if name}
    waiting = [maker[name] for i in readers for name in reads(proto[i]) if name in maker]
    found: set[int] = set()
    while waiting:
        i = waiting.pop()
        if i not in found:
            found.add(i)
            waiting += [maker[name] for name in reads(proto[i]) if name in maker]
    return found


def _constants(model: ModelFile, nodes: Sequence[int]) -> set[int]:
    """Those of `nodes`, which are in topological order, that depend on initializers alone."""
    known = set(model.weights) - set(model.overridable)
    found = set()
    for i in nodes:
        node = model.proto.graph.node[i]
        if reads(node) <= known and not node.op_type.startswith("Random"):
            found.add(i)
            known.update(node.output)
    return found
