"""Offloads one node of a model and leaves its sisters to the CPU: how to find which node differs.

`offload=` takes "all", "none", a list of node names or operator types, or a function of a node.
"""

import sys
from pathlib import Path

import onnx

from ort_webgpu import WebGPUSession

HERE = Path(__file__).parent


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "model" / "model.onnx"
    nodes = onnx.load(path, load_external_data=False).graph.node
    names = [node.name for node in nodes if node.op_type == "GroupQueryAttention"]
    session = WebGPUSession(path, offload=names[:1])
    print(session.explain())


if __name__ == "__main__":
    main()
