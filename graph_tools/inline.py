"""Candidates out of reach: inlining the local functions that hold some, and naming the others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import onnx
from onnx.inliner import inline_local_functions

from ort_webgpu.graph_tools.model import ModelFile, bodies, copy_fields

__all__ = ["Nested", "inline_functions", "nested_candidates"]

Wanted = Callable[[onnx.NodeProto], bool]
_Key = tuple[str, str, str]


@dataclass(frozen=True)
class Nested:
    """A candidate that is no node of the top-level graph.

    `path` leads to it, such as "If 'merge'.then_branch / Loop 'steps'.body"; `reason` says why it
    cannot be taken out of there.
    """

    name: str
    op_type: str
    domain: str
    path: str
    reason: str


def inline_functions(model: ModelFile, wanted: Wanted) -> ModelFile:
    """`model` with each local function inlined that holds a `wanted` node, directly or by calls.

    Functions that import another version of a domain than the model does stay calls, since their
    nodes would change meaning; `nested_candidates` names what is inside. The model itself is
    returned where there is nothing to inline.
    """
    functions = {_key(f): f for f in model.proto.functions}
    holding = _holding(functions, wanted)
    imports = {_domain(o.domain): o.version for o in model.proto.opset_import}
    chosen = []
    for key, function in functions.items():
        if key in holding and not _conflict(function, imports):
            imports.update((_domain(o.domain), o.version) for o in function.opset_import)
            chosen.append(function)
    if not chosen:
        return model
    shell = _without_weights(model.proto)
    shell.functions.extend(chosen)
    for nodes in (shell.graph.node, *(f.node for f in shell.functions)):
        _fill_defaults(nodes, {_key(f): f for f in chosen})
    inlined = inline_local_functions(shell)
    graph = model.proto.graph
    del inlined.graph.initializer[:], inlined.functions[:]
    inlined.graph.initializer.extend(graph.initializer)
    inlined.functions.extend(model.proto.functions)
    # onnx's inliner does not import the domains that only the functions imported.
    known = {_domain(o.domain) for o in inlined.opset_import}
    for domain, version in imports.items():
        if domain not in known:
            inlined.opset_import.add(domain=domain, version=version)
    return ModelFile(inlined, model.path, model.base_dir)


def nested_candidates(model: ModelFile, wanted: Wanted) -> tuple[Nested, ...]:
    """All `wanted` nodes in bodies of top-level nodes and in local functions that are called."""
    functions = {_key(f): f for f in model.proto.functions}
    imports = {_domain(o.domain): o.version for o in model.proto.opset_import}
    seen: set[_Key] = set()

    def walk(nodes, path: tuple[str, ...], reason: str) -> Iterator[Nested]:
        for index, node in enumerate(nodes):
            name = node.name or f"{node.op_type}_{index}"
            if path and wanted(node):
                yield Nested(name, node.op_type, node.domain, " / ".join(path), reason)
            for attribute, graph in bodies(node):
                inner = f"it is in the body of a {node.op_type} node, which ORT runs as a whole"
                place = f"{node.op_type} {name!r}.{attribute}"
                yield from walk(graph.node, (*path, place), reason or inner)
            key = (node.domain, node.op_type, node.overload)
            if key in functions and key not in seen:
                seen.add(key)
                function = functions[key]
                inner = _conflict(function, imports) or "the function that holds it stays a call"
                place = f"function '{function.domain}.{function.name}'"
                yield from walk(function.node, (*path, place), reason or inner)

    return tuple(walk(model.proto.graph.node, (), ""))


def _key(function: onnx.FunctionProto) -> _Key:
    return function.domain, function.name, function.overload


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _holding(functions: dict[_Key, onnx.FunctionProto], wanted: Wanted) -> set[_Key]:
    """Keys of the functions that hold a wanted node, or call one that does, at any depth."""
    holding: set[_Key] = set()

    def holds(nodes) -> bool:
        return any(
            wanted(node)
            or (node.domain, node.op_type, node.overload) in holding
            or any(holds(graph.node) for _, graph in bodies(node))
            for node in nodes
        )

    while True:
        found = {k for k, f in functions.items() if k not in holding and holds(f.node)}
        if not found:
            return holding
        holding |= found


def _conflict(function: onnx.FunctionProto, imports: dict[str, int]) -> str:
    """Why the function cannot be inlined into a model that imports `imports`; "" if it can."""
    for opset in function.opset_import:
        version = imports.get(_domain(opset.domain), opset.version)
        if version != opset.version:
            return (
                f"function '{function.domain}.{function.name}' imports version {opset.version} of "
                f"domain {opset.domain or 'ai.onnx'!r} and the model version {version}, so it is "
                "not inlined"
            )
    return ""


def _fill_defaults(nodes, functions: dict[_Key, onnx.FunctionProto]) -> None:
    """Write the defaults of attributes that a call leaves out into the call.

    onnx's inliner (1.23) drops an attribute of the function's nodes instead of using its default.
    """
    for node in nodes:
        function = functions.get((node.domain, node.op_type, node.overload))
        if function is not None:
            given = {attribute.name for attribute in node.attribute}
            node.attribute.extend(a for a in function.attribute_proto if a.name not in given)
        for _, graph in bodies(node):
            _fill_defaults(graph.node, functions)


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without functions and with initializers' names and types only, small to serialize."""
    shell = onnx.ModelProto()
    copy_fields(model, shell, skip=("graph", "functions"))
    copy_fields(model.graph, shell.graph, skip=("initializer",))
    for tensor in model.graph.initializer:
        shell.graph.initializer.add(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
    return shell
