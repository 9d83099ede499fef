"""ModelFile: an ONNX model whose weights stay where they are, in their files or in its proto.

Sources: onnx.proto (TensorProto.external_data) and ONNX Runtime 1.32, which refuses absolute
locations and locations outside the model's own folder; the same is refused here.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, numpy_helper

from ort_webgpu.graph_tools.nodes import Node

__all__ = [
    "ModelError",
    "ModelFile",
    "Weight",
    "bodies",
    "captured",
    "copy_fields",
    "external",
    "tensors",
]

# Element types that numpy has itself. The others (bfloat16, float8, int4, strings) stay in a proto.
_NUMPY: dict[int, np.dtype] = {
    TensorProto.FLOAT: np.dtype(np.float32),
    TensorProto.DOUBLE: np.dtype(np.float64),
    TensorProto.FLOAT16: np.dtype(np.float16),
    TensorProto.INT8: np.dtype(np.int8),
    TensorProto.INT16: np.dtype(np.int16),
    TensorProto.INT32: np.dtype(np.int32),
    TensorProto.INT64: np.dtype(np.int64),
    TensorProto.UINT8: np.dtype(np.uint8),
    TensorProto.UINT16: np.dtype(np.uint16),
    TensorProto.UINT32: np.dtype(np.uint32),
    TensorProto.UINT64: np.dtype(np.uint64),
    TensorProto.BOOL: np.dtype(np.bool_),
    TensorProto.COMPLEX64: np.dtype(np.complex64),
    TensorProto.COMPLEX128: np.dtype(np.complex128),
}


class ModelError(ValueError):
    """A model file that cannot be read or cut. The message says what was found and what to do."""


def external(tensor: TensorProto) -> bool:
    """Whether `tensor`'s data lies in a file of its own."""
    return tensor.data_location == TensorProto.EXTERNAL


def bodies(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """Attribute name and graph of each body of a control-flow or beam-search node."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.name, attribute.g
        for index, graph in enumerate(attribute.graphs):
            yield f"{attribute.name}[{index}]", graph


def captured(node: onnx.NodeProto) -> set[str]:
    """Names of the outer values that `node`'s bodies, and bodies inside these, read."""
    names: set[str] = set()
    for _, graph in bodies(node):
        read = {output.name for output in graph.output}
        made = {value.name for value in graph.input}
        made.update(tensor.name for tensor in graph.initializer)
        made.update(sparse.values.name for sparse in graph.sparse_initializer)
        for inner in graph.node:
            read.update(inner.input, captured(inner))
            made.update(inner.output)
        names |= read - made
    names.discard("")
    return names


def tensors(nodes) -> Iterator[TensorProto]:
    """Every dense tensor stored in attributes of `nodes` (NodeProtos) or in bodies of these."""
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
        for _, graph in bodies(node):
            yield from graph.initializer
            yield from tensors(graph.node)


def copy_fields(source, target, skip: Iterable[str] = (), only: Iterable[str] = ()) -> None:
    """Copy the set fields of a message, but not `skip`, or `only` those named."""
    for descriptor, value in source.ListFields():
        name = descriptor.name
        if name in skip or (only and name not in only):
            continue
        if hasattr(value, "extend"):
            getattr(target, name).extend(value)
        elif hasattr(value, "CopyFrom"):
            getattr(target, name).CopyFrom(value)
        else:
            setattr(target, name, value)


@dataclass(frozen=True)
class Weight:
    """One initializer of the top-level graph; reading its array is put off until asked for.

    `elem_type` is a TensorProto.DataType. `path`, `offset` and `length` (bytes) say where external
    data lies; an inline weight has path None, offset 0 and its size in bytes.
    """

    name: str
    elem_type: int
    shape: tuple[int, ...]
    path: Path | None
    offset: int
    length: int
    tensor: TensorProto = field(repr=False, compare=False)

    @property
    def external(self) -> bool:
        """Whether the data lies outside the model proto."""
        return self.path is not None

    @property
    def dtype(self) -> np.dtype | None:
        """The numpy dtype; None for the element types that numpy lacks, and for strings."""
        return _NUMPY.get(self.elem_type)

    def array(self) -> np.ndarray:
        """The values, read-only: a view of the mapped file, or of the proto's data.

        Raises:
            ModelError: numpy lacks the element type, or the file is missing or too short.
        """
        return self._array

    @cached_property
    def _array(self) -> np.ndarray:
        if self.dtype is None:
            kind = TensorProto.DataType.Name(self.elem_type)
            raise ModelError(
                f"Initializer {self.name!r} has element type {kind}, which numpy lacks; "
                "leave it in the graph instead of asking for its array."
            )
        if self.path is not None:
            return self._mapped(self.path, self.dtype)
        array = numpy_helper.to_array(self.tensor)
        array.flags.writeable = False
        return array

    def _mapped(self, path: Path, dtype: np.dtype) -> np.ndarray:
        count = int(np.prod(self.shape, dtype=np.int64))
        if self.length != count * dtype.itemsize:
            raise ModelError(
                f"Initializer {self.name!r} of shape {list(self.shape)} and type {dtype} needs "
                f"{count * dtype.itemsize} bytes, but its external data has {self.length}."
            )
        if count == 0:
            return np.empty(self.shape, dtype)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ModelError(
                f"The data of initializer {self.name!r} should be in {str(path)!r}, which cannot "
                f"be read ({error.strerror}); put the file beside the model."
            ) from error
        if size < self.offset + self.length:
            raise ModelError(
                f"The data of initializer {self.name!r} should be bytes {self.offset} to "
                f"{self.offset + self.length} of {str(path)!r}, which has only {size}; "
                "the file is cut off or belongs to another model."
            )
        flat = np.memmap(path, dtype, "r", self.offset, (count,))
        return np.asarray(flat).reshape(self.shape)


class ModelFile:
    """A model, opened without its external data.

    Attributes:
        proto: the model as read; not to be changed.
        path: the model's file; None where it came as bytes or as a ModelProto.
        base_dir: folder that external data is relative to; None where it is not known.
        nodes: the top-level nodes, in file order.
        weights: dense initializers of the top-level graph by name.
        sparse: sparse initializers of the top-level graph by name.
        value_types: types of graph inputs, outputs, value_info and initializers by name.
        inputs, outputs: names of the graph's inputs (without initializers) and outputs.
        overridable: initializers that are graph inputs too, in the order of the graph's inputs.
        data_folder: the real folder that holds all files of external data; None where there are
            none. Unlike `base_dir` it lies behind any links.
    """

    def __init__(self, proto: onnx.ModelProto, path: Path | None, base_dir: Path | None):
        self.proto = proto
        self.path = path
        self.base_dir = base_dir
        graph = proto.graph
        self.nodes = tuple(Node.from_proto(node, i) for i, node in enumerate(graph.node))
        self._resolved: dict[str, Path] = {}
        for nodes in (graph.node, *(function.node for function in proto.functions)):
            for tensor in filter(external, tensors(nodes)):
                self.locate(tensor)
        self.weights: Mapping[str, Weight] = {t.name: self._weight(t) for t in graph.initializer}
        self.sparse: Mapping[str, onnx.SparseTensorProto] = {
            s.values.name: s for s in graph.sparse_initializer
        }
        self.value_types = _value_types(graph)
        stored = self.weights.keys() | self.sparse.keys()
        self.inputs = tuple(v.name for v in graph.input if v.name not in stored)
        self.overridable = tuple(v.name for v in graph.input if v.name in stored)
        self.outputs = tuple(v.name for v in graph.output)
        parents = [file.parent for file in self._resolved.values()]
        self.data_folder = Path(os.path.commonpath(parents)) if parents else None

    @classmethod
    def open(
        cls,
        source: str | os.PathLike | bytes | onnx.ModelProto,
        base_dir: str | os.PathLike | None = None,
    ) -> "ModelFile":
        """Open a model given as a path, as its bytes or as a proto; external data is not read.

        Args:
            source: a file name, the bytes of a serialized ModelProto, or a ModelProto (kept, not
                copied).
            base_dir: folder that external data is relative to; a path's own folder if not given.

        Raises:
            FileNotFoundError: no such file.
            ModelError: not an ONNX protobuf; external data without a folder, or outside of it.
        """
        path = None
        if isinstance(source, onnx.ModelProto):
            proto = source
        elif isinstance(source, bytes | bytearray | memoryview):
            proto = _parse(bytes(source), "The bytes given")
        else:
            path = Path(os.fspath(source))
            proto = _parse(path.read_bytes(), f"The file {str(path)!r}")
        folder = Path(base_dir) if base_dir is not None else path.parent if path else None
        return cls(proto, path, folder)

    def locate(self, tensor: TensorProto) -> tuple[Path, int, int]:
        """File, offset and length in bytes of an external tensor's data; the file is not touched.

        Raises:
            ModelError: the folder is not known, or the location leaves it.
        """
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        if location not in self._resolved:
            self._resolved[location] = self._resolve(tensor.name, location)
        length = entries.get("length")
        size = int(length) if length else _byte_size(tensor)
        return self._resolved[location], int(entries.get("offset") or 0), size

    def constant(self, name: str) -> np.ndarray | None:
        """The value of an initializer or Constant node called `name`; None where there is none.

        An overridable initializer is no constant. Element types that numpy lacks give None.
        """
        weight = self.weights.get(name)
        if weight is not None:
            fixed = weight.dtype is not None and name not in self.overridable
            return weight.array() if fixed else None
        return self._constant_nodes.get(name)

    @cached_property
    def _constant_nodes(self) -> dict[str, np.ndarray]:
        found = {}
        for node in self.nodes:
            if node.domain == "" and node.op_type == "Constant":
                value = _constant_value(node)
                if value is not None:
                    found[node.outputs[0]] = value
        return found

    def _weight(self, tensor: TensorProto) -> Weight:
        path, offset, length = None, 0, _byte_size(tensor)
        if external(tensor):
            path, offset, length = self.locate(tensor)
        shape = tuple(tensor.dims)
        return Weight(tensor.name, tensor.data_type, shape, path, offset, length, tensor)

    def _resolve(self, name: str, location: str) -> Path:
        if self.base_dir is None:
            raise ModelError(
                f"Tensor {name!r} has external data in {location!r}, but a model given as bytes "
                "has no folder; give the model's path, or the folder as base_dir."
            )
        if not location or os.path.isabs(location):
            raise ModelError(
                f"Tensor {name!r} has external data at {location!r}; the location must be a path "
                "relative to the model's folder."
            )
        # A download cache links both the model and its data into a snapshot folder, so the folder
        # that the model's own link leads to counts as well.
        allowed = {os.path.realpath(self.base_dir)}
        if self.path is not None:
            allowed.add(os.path.dirname(os.path.realpath(self.path)))
        target = os.path.realpath(self.base_dir / location)
        if not any(os.path.commonpath([folder, target]) == folder for folder in allowed):
            raise ModelError(
                f"Tensor {name!r} has external data at {location!r}, which leads to {target!r}, "
                f"outside the model's folder {sorted(allowed)}; move the file there."
            )
        return Path(target)


def _parse(data: bytes, what: str) -> onnx.ModelProto:
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError as error:
        raise ModelError(f"{what} is not an ONNX model (protobuf): {error}") from error
    return proto


def _byte_size(tensor: TensorProto) -> int:
    """Bytes that the tensor's dense data takes; 0 for strings."""
    if tensor.data_type in (TensorProto.STRING, TensorProto.UNDEFINED):
        return 0
    count = int(np.prod(tensor.dims, dtype=np.int64))
    if tensor.data_type in _NUMPY:
        return count * _NUMPY[tensor.data_type].itemsize
    kind = TensorProto.DataType.Name(tensor.data_type)
    bits = 16 if kind == "BFLOAT16" else 8 if "8" in kind else 2 if kind.endswith("T2") else 4
    return (count * bits + 7) // 8


def _constant_value(node: Node) -> np.ndarray | None:
    attributes = node.attributes
    tensor = attributes.get("value")
    if tensor is not None:
        plain = tensor.data_type in _NUMPY and not external(tensor)
        return numpy_helper.to_array(tensor) if plain else None
    for name, dtype in (("value_float", np.float32), ("value_int", np.int64)):
        for key in (name, name + "s"):
            if key in attributes:
                return np.array(attributes[key], dtype)
    return None


def _value_types(graph: onnx.GraphProto) -> dict[str, onnx.TypeProto]:
    types = {v.name: v.type for v in graph.value_info if v.type.WhichOneof("value")}
    types.update((v.name, v.type) for v in graph.output if v.type.WhichOneof("value"))
    # What is stored is the truth about an initializer, whatever value_info says.
    stored = [(t.name, t.data_type, t.dims) for t in graph.initializer]
    stored += [(s.values.name, s.values.data_type, s.dims) for s in graph.sparse_initializer]
    for name, elem_type, dims in stored:
        types[name] = onnx.helper.make_tensor_type_proto(elem_type, list(dims))
    types.update((v.name, v.type) for v in graph.input if v.type.WhichOneof("value"))
    return types
