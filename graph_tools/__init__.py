"""Reading, cutting and rebuilding ONNX graphs. Needs onnx and numpy only."""

from ort_webgpu.graph_tools.extract import FOLDER_OPTION, SubModel, extract, type_from_node_arg
from ort_webgpu.graph_tools.inline import Nested, inline_functions, nested_candidates
from ort_webgpu.graph_tools.model import ModelError, ModelFile, Weight
from ort_webgpu.graph_tools.nodes import Node
from ort_webgpu.graph_tools.partition import Stage, captured, needed_outputs, partition

__all__ = [
    "FOLDER_OPTION",
    "ModelError",
    "ModelFile",
    "Nested",
    "Node",
    "Stage",
    "SubModel",
    "Weight",
    "captured",
    "extract",
    "inline_functions",
    "needed_outputs",
    "nested_candidates",
    "partition",
    "type_from_node_arg",
]
