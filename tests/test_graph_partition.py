"""Stages of handmade graphs: order, captured values, constants, what is handed on."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from stitching import check

from ort_webgpu.graph_tools import ModelError, ModelFile, captured, needed_outputs, partition

FLOAT = TensorProto.FLOAT


def value(name: str, shape=("n",), elem_type: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem_type, shape)


def model(nodes, inputs, outputs, **fields) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs, **fields)
    opsets = [helper.make_opsetid("", 22), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, ir_version=10, opset_imports=opsets)


def node(op_type: str, inputs: str, outputs: str, **attributes) -> onnx.NodeProto:
    """A node named like its first output; names are separated by spaces, `-` is an absent one."""
    read, made = ([n.replace("-", "") for n in names.split()] for names in (inputs, outputs))
    return helper.make_node(op_type, read, made, name=made[0], **attributes)


def test_a_diamond_and_a_chain():
    proto = model(
        [
            node("Neg", "x", "a"),
            node("Abs", "a", "g1"),
            node("Neg", "a", "b"),
            node("Add", "g1 b", "c"),
            node("Abs", "c", "g2"),
            node("Add", "g2 x", "y"),
        ],
        [value("x")],
        [value("y"), value("g1"), value("x")],
    )
    stages = partition(ModelFile.open(proto), {1, 4})
    assert [(s.cpu, s.gpu) for s in stages] == [((0, 2), (1,)), ((3,), (4,)), ((5,), ())]
    assert needed_outputs(ModelFile.open(proto), stages) == (("a", "b"), ("c",), ("y",))
    check(proto, {"x": np.float32([1, -2, 3])}, "g1", "g2")


def test_nothing_offloaded_is_one_stage():
    proto = model([node("Neg", "x", "y")], [value("x")], [value("y")])
    (stage,) = partition(ModelFile.open(proto), frozenset())
    assert (stage.cpu, stage.gpu) == ((0,), ())


def test_a_graph_without_nodes_has_no_stage():
    proto = model([], [value("x")], [value("x")])
    assert partition(ModelFile.open(proto), ()) == ()


def test_nodes_in_any_order():
    proto = model(
        [node("Add", "g a", "y"), node("Abs", "a", "g"), node("Neg", "x", "a")],
        [value("x")],
        [value("y")],
    )
    assert [(s.cpu, s.gpu) for s in partition(ModelFile.open(proto), {1})] == [
        ((2,), (1,)),
        ((0,), ()),
    ]
    check(proto, {"x": np.float32([1, -2])}, "g")


def test_a_cycle_is_named():
    proto = model([node("Add", "x b", "a"), node("Neg", "a", "b")], [value("x")], [value("b")])
    with pytest.raises(ModelError, match=r"nodes .*'a'.*'b'.* form a cycle"):
        partition(ModelFile.open(proto), ())


def test_an_unknown_index_is_refused():
    proto = model([node("Neg", "x", "y")], [value("x")], [value("y")])
    with pytest.raises(ValueError, match=r"No node has index \[7\]; the graph has 1 nodes"):
        partition(ModelFile.open(proto), {7})


def test_an_absent_name_connects_nothing():
    proto = model(
        [
            node("Dropout", "x", "a -"),
            node("Clip", "a - high", "g"),
            node("Clip", "g -", "y"),
        ],
        [value("x"), value("high", ())],
        [value("y")],
    )
    stages = partition(ModelFile.open(proto), {1})
    assert [(s.cpu, s.gpu) for s in stages] == [((0,), (1,)), ((2,), ())]
    check(proto, {"x": np.float32([1, 5]), "high": np.array(2, np.float32)}, "g")


def test_captured_values_of_nested_bodies():
    innermost = helper.make_graph(
        [node("Add", "t outer", "u"), node("Mul", "u w", "v")], "in", [], [value("v")]
    )
    otherwise = helper.make_graph([node("Neg", "x", "z")], "else", [], [value("z")])
    body = helper.make_graph(
        [
            node("Neg", "local", "t"),
            helper.make_node("If", ["cond"], ["r"], then_branch=innermost, else_branch=otherwise),
        ],
        "out",
        [value("local")],
        [value("r")],
        initializer=[helper.make_tensor("w", FLOAT, [1], [1.0])],
    )
    scan = helper.make_node("Scan", ["s"], ["y"], body=body, num_scan_inputs=1)
    assert captured(scan) == {"outer", "cond", "x"}
    assert captured(node("Neg", "x", "y")) == set()


@pytest.mark.parametrize("condition", [True, False])
def test_an_if_that_captures_an_offloaded_output(condition):
    then = helper.make_graph([node("Add", "g w", "t")], "then", [], [value("t", None)])
    other = helper.make_graph([node("Neg", "a", "e")], "else", [], [value("e", None)])
    proto = model(
        [
            node("Neg", "x", "a"),
            node("Abs", "a", "g"),
            helper.make_node("If", ["c"], ["i"], "if", then_branch=then, else_branch=other),
            node("Exp", "i", "g2"),
            node("Neg", "g2", "y"),
        ],
        [value("x"), value("c", (), TensorProto.BOOL)],
        [value("y")],
        initializer=[helper.make_tensor("w", FLOAT, [1], [10.0])],
    )
    stitched = check(proto, {"x": np.float32([1, -2]), "c": np.array(condition)}, "g", "g2")
    assert [(s.cpu, s.gpu) for s in stitched.stages] == [((0,), (1,)), ((2,), (3,)), ((4,), ())]


def test_constants_travel_with_their_readers():
    proto = model(
        [
            node("Constant", "", "one", value_ints=[1, -1]),
            node("Cast", "w", "w32", to=FLOAT),
            node("Reshape", "x one", "a"),
            node("Abs", "a", "g"),
            node("Mul", "g w32", "b"),
            node("Reshape", "b one", "y"),
        ],
        [value("x")],
        [value("y", None)],
        initializer=[helper.make_tensor("w", TensorProto.FLOAT16, [1], [2.0])],
    )
    stages = partition(ModelFile.open(proto), {3})
    assert [(s.cpu, s.gpu) for s in stages] == [((0, 2), (3,)), ((0, 1, 4, 5), ())]
    assert needed_outputs(ModelFile.open(proto), stages) == (("a",), ("y",))
    check(proto, {"x": np.float32([1, -2])}, "g")


def test_constants_that_the_device_and_the_caller_read():
    proto = model(
        [
            node("Constant", "", "k", value_float=2.0),
            node("Constant", "", "out", value_float=3.0),
            node("Constant", "", "unread", value_float=4.0),
            node("Abs", "x", "g"),
            node("Mul", "g k", "g2"),
            node("Add", "g2 k", "y"),
        ],
        [value("x")],
        [value("y"), value("out", ())],
    )
    stages = partition(ModelFile.open(proto), {3, 4})
    assert [(s.cpu, s.gpu) for s in stages] == [((1, 2), (3,)), ((0,), (4,)), ((0, 5), ())]
    assert needed_outputs(ModelFile.open(proto), stages) == (("out",), ("k",), ("y",))
    check(proto, {"x": np.float32([1, -2])}, "g", "g2")


def test_random_nodes_draw_once():
    proto = model(
        [
            node("RandomNormal", "", "r", shape=[2]),
            node("Add", "x r", "a"),
            node("Abs", "a", "g"),
            node("Sub", "g r", "y"),
        ],
        [value("x")],
        [value("y")],
    )
    stages = partition(ModelFile.open(proto), {2})
    assert [(s.cpu, s.gpu) for s in stages] == [((0, 1), (2,)), ((3,), ())]
    assert needed_outputs(ModelFile.open(proto), stages)[0] == ("r", "a")
