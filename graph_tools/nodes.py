"""Node: a frozen, readable view of one onnx.NodeProto."""

from dataclasses import dataclass, field
from typing import Any

import onnx

__all__ = ["Node"]


@dataclass(frozen=True)
class Node:
    """One node of the top-level graph.

    `name` is the node's own, or `<op_type>_<index>` where it has none. `domain` is "" for ai.onnx.
    `inputs` and `outputs` keep their positions; "" is an absent value. `attributes` holds Python
    values (str for strings, list for repeated fields, onnx messages for tensors and graphs).
    """

    index: int
    name: str
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def from_proto(cls, proto: onnx.NodeProto, index: int) -> "Node":
        """View `proto`, which is node number `index` of its graph."""
        attributes = {a.name: _attribute(a) for a in proto.attribute if not a.ref_attr_name}
        domain = "" if proto.domain == "ai.onnx" else proto.domain
        name = proto.name or f"{proto.op_type}_{index}"
        return cls(
            index, name, proto.op_type, domain, tuple(proto.input), tuple(proto.output), attributes
        )

    def has_input(self, index: int) -> bool:
        """Whether input `index` is wired to a value."""
        return index < len(self.inputs) and self.inputs[index] != ""

    def has_output(self, index: int) -> bool:
        """Whether output `index` is wired to a value."""
        return index < len(self.outputs) and self.outputs[index] != ""

    def __str__(self) -> str:
        return f"{self.op_type} node {self.name!r}"


def _attribute(attribute: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, list | tuple) or hasattr(value, "extend"):
        return [v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in value]
    return value
