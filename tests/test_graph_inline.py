"""Local functions: which are inlined, which stay calls, and what is said about the rest."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from stitching import Stitched, check, indexes, same, whole

from ort_webgpu.graph_tools import ModelFile, inline_functions, nested_candidates

OPSET = helper.make_opsetid("", 22)
LOCAL = helper.make_opsetid("local", 1)
MICROSOFT = helper.make_opsetid("com.microsoft", 1)


def wanted(node: onnx.NodeProto) -> bool:
    return node.op_type == "QuickGelu"


def function(name: str, nodes, imports=(OPSET, MICROSOFT, LOCAL)) -> onnx.FunctionProto:
    return helper.make_function("local", name, ["p"], ["q"], nodes, list(imports))


def call(name: str, read: str, made: str) -> onnx.NodeProto:
    return helper.make_node(name, [read], [made], domain="local", name=made)


QUICK = function("Quick", [helper.make_node("QuickGelu", ["p"], ["q"], domain="com.microsoft")])
AROUND = function("Around", [call("Quick", "p", "t"), helper.make_node("Neg", ["t"], ["q"])])
PLAIN = function("Plain", [helper.make_node("Abs", ["p"], ["q"])])


def model(nodes, functions, initializer=(), imports=(OPSET, LOCAL)) -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n"]) for n in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], initializer=list(initializer))
    return helper.make_model(
        graph, functions=list(functions), ir_version=10, opset_imports=list(imports)
    )


def test_a_function_called_twice_through_another():
    weight = helper.make_tensor("w", TensorProto.FLOAT, [1], [3.0])
    nodes = [
        call("Around", "x", "a"),
        call("Around", "a", "b"),
        call("Plain", "b", "c"),
        helper.make_node("Mul", ["c", "w"], ["y"]),
    ]
    proto = model(nodes, [QUICK, AROUND, PLAIN], [weight])
    before = proto.SerializeToString()
    inlined = inline_functions(ModelFile.open(proto), wanted)
    assert [n.op_type for n in inlined.nodes] == ["QuickGelu", "Neg"] * 2 + ["Plain", "Mul"]
    assert proto.SerializeToString() == before
    assert nested_candidates(inlined, wanted) == ()
    feeds = {"x": np.float32([1, -2, 3])}
    stitched = Stitched(inlined, indexes(inlined, "QuickGelu"))
    assert same(stitched.run(feeds), whole(proto).run(None, feeds))
    # The function that stayed travels with the segment that calls it, the others do not.
    assert [[f.name for f in sub.proto.functions] for sub, _ in stitched.steps[-1:]] == [["Plain"]]
    assert not any(sub.proto.functions for sub, _ in stitched.steps[:-1])


def test_a_model_without_wanted_functions_is_returned_itself():
    opened = ModelFile.open(model([call("Plain", "x", "y")], [PLAIN]))
    assert inline_functions(opened, wanted) is opened


def test_a_function_of_another_opset_stays_and_is_named():
    imports = [helper.make_opsetid("", 17), MICROSOFT]
    old = function("Old", [helper.make_node("QuickGelu", ["p"], ["q"], domain="com.microsoft")])
    del old.opset_import[:]
    old.opset_import.extend(imports)
    proto = model([call("Old", "x", "a"), call("Quick", "a", "y")], [old, QUICK])
    inlined = inline_functions(ModelFile.open(proto), wanted)
    assert [n.op_type for n in inlined.nodes] == ["Old", "QuickGelu"]
    (nested,) = nested_candidates(inlined, wanted)
    assert (nested.name, nested.path) == ("QuickGelu_0", "function 'local.Old'")
    assert "imports version 17 of domain 'ai.onnx' and the model version 22" in nested.reason
    check(inlined.proto, {"x": np.float32([1, -2])}, "QuickGelu")


def test_external_weights_are_not_needed_to_inline(tmp_path):
    weight = TensorProto(
        name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL
    )
    weight.external_data.add(key="location", value="w.bin")
    nodes = [call("Quick", "x", "a"), helper.make_node("Mul", ["a", "w"], ["y"])]
    path = tmp_path / "model.onnx"
    path.write_bytes(model(nodes, [QUICK], [weight]).SerializeToString())
    inlined = inline_functions(ModelFile.open(path), wanted)
    np.float32([2, 3]).tofile(tmp_path / "w.bin")
    assert inlined.weights["w"].path == tmp_path / "w.bin"
    feeds = {"x": np.float32([1, -2])}
    found = Stitched(inlined, indexes(inlined, "QuickGelu")).run(feeds)
    assert same(found, whole(path).run(None, feeds))


def test_attributes_and_their_defaults_reach_the_node():
    node = helper.make_node("QuickGelu", ["p"], ["q"], domain="com.microsoft")
    node.attribute.add(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name="slope")
    default = helper.make_attribute("slope", 0.5)
    soft = helper.make_function(
        "local", "Soft", ["p"], ["q"], [node], [OPSET, MICROSOFT], attribute_protos=[default]
    )
    given = call("Soft", "a", "y")
    given.attribute.append(helper.make_attribute("slope", 2.0))
    proto = model([call("Soft", "x", "a"), given], [soft])
    inlined = inline_functions(ModelFile.open(proto), wanted)
    assert [n.attributes["alpha"] for n in inlined.nodes] == [0.5, 2.0]
    feeds = {"x": np.float32([1, -2])}
    assert same(whole(inlined.proto).run(None, feeds), whole(proto).run(None, feeds))


def test_paths_of_nested_candidates():
    gelu = helper.make_node("QuickGelu", ["x"], ["t"], domain="com.microsoft", name="deep")
    out = helper.make_tensor_value_info("t", TensorProto.FLOAT, None)
    branch = helper.make_graph([gelu], "then", [], [out])
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["t"])], "else", [], [out])
    inner = helper.make_node("If", ["c"], ["r"], "pick", then_branch=branch, else_branch=other)
    body = helper.make_graph(
        [helper.make_node("Identity", ["c0"], ["c"]), inner],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c0", TensorProto.BOOL, []),
        ],
        [
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            *[onnx.ValueInfoProto(name="r")],
        ],
    )
    loop = helper.make_node("Loop", ["m", "on"], ["y"], "steps", body=body)
    (nested,) = nested_candidates(ModelFile.open(model([loop], [])), wanted)
    assert nested.path == "Loop 'steps'.body / If 'pick'.then_branch"
    assert (nested.name, nested.op_type) == ("deep", "QuickGelu")
    assert nested.reason == "it is in the body of a Loop node, which ORT runs as a whole"


@pytest.mark.parametrize("condition", [True, False])
def test_a_function_called_in_a_body_is_cut_with_it(condition):
    out = helper.make_tensor_value_info("t", TensorProto.FLOAT, None)
    branch = helper.make_graph([call("Quick", "g", "t")], "then", [], [out])
    other = helper.make_graph([helper.make_node("Neg", ["g"], ["t"])], "else", [], [out])
    nodes = [
        helper.make_node("Abs", ["x"], ["g"], "g"),
        helper.make_node("ReduceMax", ["g"], ["top"], keepdims=0),
        helper.make_node("Greater", ["top", "limit"], ["c"]),
        helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=other),
    ]
    limit = helper.make_tensor("limit", TensorProto.FLOAT, [], [1.0 if condition else 9.0])
    proto = model(nodes, [QUICK], [limit], [OPSET, LOCAL, MICROSOFT])
    check(proto, {"x": np.float32([1, -2])}, "g")
