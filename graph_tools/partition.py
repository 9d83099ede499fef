"""Cutting a graph into stages: what ORT runs, then what is offloaded, and so on in turn.

A node's level is the greatest level of what it reads, values captured by its bodies included; the
outputs of an offloaded node are one level up. Stage k holds the nodes of level k, the CPU's before
the offloaded ones, so every value is made in an earlier place than it is read.
"""

import graphlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx

from ort_webgpu.graph_tools.model import ModelError, ModelFile, bodies, captured

__all__ = ["Stage", "captured", "needed_outputs", "partition", "reads"]

# Copies of these would draw different numbers.
_RANDOM = {
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
}


@dataclass(frozen=True)
class Stage:
    """Indexes of the nodes of one level, each group in topological order."""

    cpu: tuple[int, ...]
    gpu: tuple[int, ...]


def reads(node: onnx.NodeProto) -> set[str]:
    """Names of all values that `node` and its bodies take from the graph around it."""
    return (set(node.input) | captured(node)) - {""}


def partition(model: ModelFile, offloaded: Iterable[int]) -> tuple[Stage, ...]:
    """Stages in which the nodes of `model` can run, the nodes `offloaded` (indexes) on the device.

    Each node is in one stage, save those that compute from constants alone: they are in every
    stage that reads them, so that ORT folds them there and still sees a constant.

    Raises:
        ValueError: `offloaded` holds something that is no node's index.
        ModelError: the nodes form a cycle.
    """
    graph = model.proto.graph
    wanted = frozenset(offloaded)
    if unknown := sorted(wanted - set(range(len(graph.node)))):
        raise ValueError(f"No node has index {unknown}; the graph has {len(graph.node)} nodes.")
    read = [reads(node) for node in graph.node]
    maker = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    sources = [{maker[name] for name in names if name in maker} for names in read]
    order = _order(model, sources)
    levels = _levels(order, sources, wanted)
    fixed = _fixed_nodes(model, order, sources, read, wanted)
    stages_of = {i: {levels[i]} for i in order if i not in fixed}
    _place_fixed(model, [i for i in reversed(order) if i in fixed], sources, wanted, stages_of)
    count = 1 + max((max(stages) for stages in stages_of.values()), default=-1)
    return tuple(
        Stage(
            tuple(i for i in order if i not in wanted and k in stages_of[i]),
            tuple(i for i in order if i in wanted and k in stages_of[i]),
        )
        for k in range(count)
    )


def needed_outputs(model: ModelFile, stages: Sequence[Stage]) -> tuple[tuple[str, ...], ...]:
    """For each stage, the values its CPU nodes must hand out, in the order they are made.

    These are values that a CPU node of another stage, an offloaded node or the caller reads. A
    value made in several stages (see `partition`) is handed out by the first of them only. Graph
    outputs that no node makes (a graph input, an initializer) are in no stage.
    """
    graph = model.proto.graph
    needed = set(model.outputs)
    for stage in stages:
        made = {name for i in stage.cpu for name in graph.node[i].output}
        for i in stage.cpu:
            needed |= reads(graph.node[i]) - made
        for i in stage.gpu:
            needed |= reads(graph.node[i])
    needed.discard("")
    result = []
    for stage in stages:
        names = [name for i in stage.cpu for name in graph.node[i].output if name in needed]
        needed.difference_update(names)
        result.append(tuple(names))
    return tuple(result)


def _order(model: ModelFile, sources: Sequence[set[int]]) -> list[int]:
    """Node indexes in topological order: the file's own where that is one (ORT accepts others)."""
    if all(source < i for i, found in enumerate(sources) for source in found):
        return list(range(len(sources)))
    try:
        return list(graphlib.TopologicalSorter(dict(enumerate(sources))).static_order())
    except graphlib.CycleError as error:
        names = " -> ".join(repr(model.nodes[i].name) for i in error.args[1])
        raise ModelError(f"The nodes {names} form a cycle; the model cannot run.") from error


def _levels(order, sources, wanted) -> dict[int, int]:
    levels: dict[int, int] = {}
    for i in order:
        levels[i] = max((levels[s] + (s in wanted) for s in sources[i]), default=0)
    return levels


def _fixed_nodes(model: ModelFile, order, sources, read, wanted) -> set[int]:
    """CPU nodes whose values depend on constants alone and that may be run more than once."""
    stored = (model.weights.keys() | model.sparse.keys()) - set(model.overridable)
    fixed: set[int] = set()
    for i in order:
        node, proto = model.nodes[i], model.proto.graph.node[i]
        if i in wanted or node.domain not in ("", "com.microsoft") or node.op_type in _RANDOM:
            continue
        made = {name for s in sources[i] if s in fixed for name in model.nodes[s].outputs}
        if not any(bodies(proto)) and read[i] <= stored | made:
            fixed.add(i)
    return fixed


def _place_fixed(model: ModelFile, fixed, sources, wanted, stages_of: dict[int, set[int]]) -> None:
    """Give each node of `fixed` (readers before what they read) the stages that need it."""
    readers: dict[int, list[int]] = {}
    for reader, found in enumerate(sources):
        for source in found:
            readers.setdefault(source, []).append(reader)
    outputs = set(model.outputs)
    for i in fixed:
        around = readers.get(i, ())
        stages = set().union(*(stages_of[r] for r in around if r not in wanted))
        device = min((min(stages_of[r]) for r in around if r in wanted), default=None)
        if device is not None and not any(stage <= device for stage in stages):
            stages.add(device)
        if not stages and (not outputs.isdisjoint(model.nodes[i].outputs) or not around):
            stages.add(0)
        stages_of[i] = stages
