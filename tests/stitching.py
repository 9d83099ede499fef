"""Whole-model ORT against a model cut in segments, for the tests of graph_tools.

Nodes to be offloaded run as one-node ORT sessions here, so that only the cutting is under test.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from ort_webgpu.graph_tools import (
    FOLDER_OPTION,
    ModelFile,
    SubModel,
    extract,
    needed_outputs,
    partition,
    type_from_node_arg,
)


def options(optimize: bool = True) -> ort.SessionOptions:
    """One thread, and quiet: ORT logs every fallback of its own."""
    made = ort.SessionOptions()
    if not optimize:
        made.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    made.intra_op_num_threads = 1
    made.log_severity_level = 3
    return made


def load(sub: SubModel, optimize: bool = True) -> ort.InferenceSession:
    """An ORT session for a sub-model, set up as `SubModel` asks for."""
    sess_options = options(optimize)
    if sub.weights:
        names = [weight.name for weight in sub.weights]
        values = [ort.OrtValue.ortvalue_from_numpy(weight.array()) for weight in sub.weights]
        sess_options.add_external_initializers(names, values)
    if sub.folder is not None:
        sess_options.add_session_config_entry(FOLDER_OPTION, str(sub.folder))
    serialized = sub.proto.SerializeToString()
    return ort.InferenceSession(serialized, sess_options, providers=["CPUExecutionProvider"])


class Stitched:
    """A model as a chain of ORT sessions, one for the CPU nodes of a stage, one per other node."""

    def __init__(self, model: ModelFile, offloaded: Iterable[int], optimize: bool = True):
        self.model = model
        self.optimize = optimize
        self.stages = partition(model, offloaded)
        self.steps: list[tuple[SubModel, ort.InferenceSession]] = []
        types: dict[str, onnx.TypeProto] = {}
        made: set[str] = set()
        for stage, outputs in zip(self.stages, needed_outputs(model, self.stages), strict=True):
            if outputs:
                self._add(stage.cpu, outputs, types)
            for index in stage.gpu:
                self._add([index], [n for n in model.nodes[index].outputs if n], types)
            made |= set(types)
        if rest := [name for name in model.outputs if name not in made]:
            self._add([], rest, types)

    def _add(self, nodes, outputs, types) -> None:
        sub = extract(self.model, nodes, outputs, types)
        session = load(sub, self.optimize)
        self.steps.append((sub, session))
        for value in session.get_outputs():
            types[value.name] = type_from_node_arg(value.type, value.shape)

    def run(self, feeds: Mapping[str, Any]) -> list[Any]:
        """Values of the model's outputs, in their order."""
        values = dict(feeds)
        for sub, session in self.steps:
            fed = {name: values[name] for name in sub.inputs}
            fed.update({name: feeds[name] for name in sub.overridable if name in feeds})
            values.update(zip(sub.outputs, session.run(list(sub.outputs), fed), strict=True))
        return [values[name] for name in self.model.outputs]


def whole(source: onnx.ModelProto | bytes | Path, optimize: bool = True) -> ort.InferenceSession:
    """A plain ORT session for the whole model."""
    if isinstance(source, onnx.ModelProto):
        source = source.SerializeToString()
    return ort.InferenceSession(source, options(optimize), providers=["CPUExecutionProvider"])


def same(found: Any, expected: Any) -> bool:
    """Bit for bit equality of arrays, sequences, maps and None."""
    if isinstance(expected, np.ndarray):
        return (
            isinstance(found, np.ndarray)
            and found.dtype == expected.dtype
            and found.shape == expected.shape
            and found.tobytes() == expected.tobytes()
        )
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return type(found) is type(expected) and found == expected


def indexes(model: ModelFile, *wanted: str) -> list[int]:
    """Indexes of the nodes whose name or operator type is in `wanted`; at least one."""
    found = [n.index for n in model.nodes if n.name in wanted or n.op_type in wanted]
    assert found, f"the model has no node {wanted}"
    return found


def check(
    source: onnx.ModelProto | Path, feeds: Mapping[str, Any], *wanted: str, optimize: bool = True
) -> Stitched:
    """Assert that cutting out the nodes `wanted` changes no bit of any output.

    Where a cut runs through a pattern that ORT fuses, `optimize=False` compares what was written.
    """
    model = ModelFile.open(source)
    stitched = Stitched(model, indexes(model, *wanted), optimize)
    expected = whole(source, optimize).run(None, dict(feeds))
    found = stitched.run(feeds)
    for name, a, b in zip(model.outputs, found, expected, strict=True):
        assert same(a, b), f"output {name!r} differs: {a} instead of {b}"
    return stitched
