"""Sessions on models of every kind: bytes, external data, functions, bodies, beyond 2 GB."""

import resource

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from session_helpers import BOTH, MODEL, feeds, options, outcome, same


def test_bytes_find_their_data_where_ort_does(make, monkeypatch, tmp_path, theirs):
    data = MODEL.read_bytes()
    monkeypatch.chdir(MODEL.parent)
    session = make(data)
    assert session.get_providers() == BOTH
    same(session.run(None, feeds()), theirs.run(None, feeds()))
    monkeypatch.chdir(tmp_path)
    expected = outcome(lambda: onnxruntime.InferenceSession(data, options()))
    assert expected is not None
    with pytest.raises(expected[0]) as caught:
        make(data)
    assert str(caught.value) == expected[1]
    assert "has no folder: give its path, or add_session_config_entry" in caught.value.__notes__[0]


@pytest.mark.parametrize("damage", ["missing", "cut off"])
def test_damaged_data_is_ort_s_error(make, tmp_path, damage):
    path = tmp_path / "model.onnx"
    path.write_bytes(MODEL.read_bytes())
    if damage == "cut off":
        data = MODEL.with_name("model.onnx.data").read_bytes()
        (tmp_path / "model.onnx.data").write_bytes(data[: len(data) // 2])
    expected = outcome(lambda: onnxruntime.InferenceSession(path, options()))
    assert expected is not None
    assert outcome(lambda: make(path)) == expected


def gqa(query: str, output: str, name: str = "") -> onnx.NodeProto:
    return helper.make_node(
        "GroupQueryAttention",
        [query, query, query, "", "", "lengths", "total"],
        [output],
        name or output,
        domain="com.microsoft",
        num_heads=4,
        kv_num_heads=4,
    )


def gqa_model(nodes, inputs=(), initializers=(), functions=(), ir_version: int = 10, **extra):
    """A model over x [1, s, 32] with `lengths` and `total` as GroupQueryAttention wants them."""
    given = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "s", 32]),
        helper.make_tensor_value_info("lengths", TensorProto.INT32, [1]),
        helper.make_tensor_value_info("total", TensorProto.INT32, []),
        *inputs,
    ]
    made = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", given, made, initializers)
    imports = [helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("", 18)]
    imports += [helper.make_opsetid("mine", 1)] if functions else []
    return helper.make_model(
        graph, opset_imports=imports, functions=list(functions), ir_version=ir_version, **extra
    )


def gqa_feeds(rows: int = 5) -> dict[str, np.ndarray]:
    x = np.random.default_rng(rows).standard_normal((1, rows, 32), dtype=np.float32)
    return {"x": x, "lengths": np.array([rows - 1], np.int32), "total": np.array(rows, np.int32)}


@pytest.mark.parametrize("ir_version", [7, 8, 9, 10, 11, 13])
def test_ir_versions(make, ir_version):
    proto = gqa_model([gqa("x", "a"), helper.make_node("Neg", ["a"], ["y"])], ir_version=ir_version)
    reference = onnxruntime.InferenceSession(proto.SerializeToString(), options())
    session = make(proto)
    assert session.get_providers() == BOTH
    same(session.run(None, gqa_feeds()), reference.run(None, gqa_feeds()))


def test_gqa_in_a_function_called_twice(make):
    """Public case G3."""
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    node = gqa("q", "o", "attention")
    function = helper.make_function(
        "mine", "Block", ["q", "lengths", "total"], ["o"], [node], imports
    )
    calls = [
        helper.make_node("Block", [a, "lengths", "total"], [b], domain="mine")
        for a, b in (("x", "m"), ("m", "y"))
    ]
    proto = gqa_model(calls, functions=[function])
    reference = onnxruntime.InferenceSession(proto.SerializeToString(), options())
    session = make(proto)
    assert [row.placed for row in session.explain().rows] == ["webgpu", "webgpu"]
    same(session.run(None, gqa_feeds()), reference.run(None, gqa_feeds()))


def test_gqa_in_both_branches_of_an_if(make):
    """Public case G1."""
    branches = {
        f"{name}_branch": helper.make_graph(
            [gqa("x", f"{name}_y")],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)],
        )
        for name in ("then", "else")
    }
    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, [])
    proto = gqa_model([helper.make_node("If", ["flag"], ["y"], "choice", **branches)], [flag])
    reference = onnxruntime.InferenceSession(proto.SerializeToString(), options())
    with pytest.warns(RuntimeWarning, match="2 attention node"):
        session = make(proto)
    assert {row.node for row in session.explain().rows} == {
        "If 'choice'.then_branch / then_y",
        "If 'choice'.else_branch / else_y",
    }
    given = {**gqa_feeds(), "flag": np.array(True)}
    same(session.run(None, given), reference.run(None, given))


def test_model_beyond_two_gigabytes_is_not_read(make, tmp_path):
    """Public case M2: a table of 2.2 GB in a sparse file, of which a run reads one row."""
    rows = 2_200_000_000 // 128
    table = onnx.TensorProto(name="table", data_type=TensorProto.FLOAT, dims=[rows, 32])
    table.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "table.bin"), ("offset", "0"), ("length", str(rows * 128))):
        table.external_data.add(key=key, value=value)
    with (tmp_path / "table.bin").open("wb") as file:
        file.truncate(rows * 128)
        file.seek((rows - 1) * 128)
        file.write(np.arange(32, dtype=np.float32).tobytes())
    nodes = [
        helper.make_node("Gather", ["table", "row"], ["picked"]),
        helper.make_node("Add", ["x", "picked"], ["q"]),
        gqa("q", "y"),
    ]
    row = helper.make_tensor_value_info("row", TensorProto.INT64, [])
    proto = gqa_model(nodes, [row], [table])
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    session = make(path)
    (result,) = session.run(None, {**gqa_feeds(), "row": np.array(rows - 1)})
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 1e9
    small = gqa_model(nodes[1:], [helper.make_tensor_value_info("picked", TensorProto.FLOAT, [32])])
    reference = onnxruntime.InferenceSession(small.SerializeToString(), options())
    given = {**gqa_feeds(), "picked": np.arange(32, dtype=np.float32)}
    same([result], reference.run(None, given))
