"""Cutting handmade models: all that a file can hold survives, and ORT gives the same bits."""

import resource

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from stitching import Stitched, check, indexes, load, same, whole

from ort_webgpu.graph_tools import ModelError, ModelFile, extract, type_from_node_arg

FLOAT = TensorProto.FLOAT


def value(name: str, shape=("n",), elem_type: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem_type, shape)


def untyped(name: str) -> onnx.ValueInfoProto:
    return onnx.ValueInfoProto(name=name)


def node(op_type: str, inputs: str, outputs: str, **attributes) -> onnx.NodeProto:
    """A node named like its first output; names are separated by spaces, `-` is an absent one."""
    read, made = ([n.replace("-", "") for n in names.split()] for names in (inputs, outputs))
    return helper.make_node(op_type, read, made, name=made[0], **attributes)


def model(nodes, inputs, outputs, ir_version=10, opset=22, **fields) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs, **fields)
    opsets = [helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("", opset)]
    return helper.make_model(graph, ir_version=ir_version, opset_imports=opsets)


def in_file(name: str, elem_type: int, dims, location: str, **entries) -> TensorProto:
    """A tensor whose data is in the file `location`; entries are offset and length."""
    tensor = TensorProto(name=name, data_type=elem_type, dims=dims)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    for key, entry in entries.items():
        tensor.external_data.add(key=key, value=str(entry))
    return tensor


def around(body_nodes, name="t", **fields):
    """Two branches of an If: `body_nodes`, which make `name`, and one that negates g."""
    then = helper.make_graph(body_nodes, "then", [], [value(name, None)], **fields)
    other = helper.make_graph([node("Neg", "g", "e")], "else", [], [value("e", None)])
    return {"then_branch": then, "else_branch": other}


X = {"x": np.float32([1, -2, 3])}


def test_an_initializer_that_only_a_nested_body_reads():
    inner = around([node("Add", "g w", "u")], "u")
    nodes = [
        node("Abs", "x", "g"),
        node("If", "c", "y", **around([node("If", "c", "t", **inner)])),
    ]
    weights = [numpy_helper.from_array(np.float32([5]), "w"), _true("c")]
    stitched = check(model(nodes, [value("x")], [value("y")], initializer=weights), X, "g")
    assert {t.name for t in stitched.steps[-1][0].proto.graph.initializer} == {"w", "c"}


def _true(name: str) -> TensorProto:
    return numpy_helper.from_array(np.array(True), name)


def test_loop_and_scan_bodies():
    step = helper.make_graph(
        [
            node("Identity", "go", "went"),
            node("Add", "carry g", "next"),
            node("Mul", "next k", "s"),
        ],
        "step",
        [value("i", (), TensorProto.INT64), value("go", (), TensorProto.BOOL), value("carry")],
        [value("went", (), TensorProto.BOOL), value("next"), value("s")],
    )
    scan = helper.make_graph(
        [node("Add", "sum row", "total"), node("Add", "total g", "z")],
        "scan",
        [value("sum"), value("row")],
        [value("total"), value("z")],
    )
    nodes = [
        node("Abs", "x", "g"),
        node("Loop", "three - x", "last rows", body=step),
        node("Abs", "rows", "g2"),
        node("Scan", "x g2", "y z2", body=scan, num_scan_inputs=1),
    ]
    weights = [
        numpy_helper.from_array(np.array(3), "three"),
        numpy_helper.from_array(np.float32([2]), "k"),
    ]
    outputs = [value("y"), value("z2", None), value("last")]
    stitched = check(model(nodes, [value("x")], outputs, initializer=weights), X, "g", "g2")
    assert len(stitched.stages) == 3


def test_sequences_and_optionals_cross_borders():
    nodes = [
        node("Abs", "x", "g0"),
        node("SequenceConstruct", "g0 x", "s"),
        node("Optional", "g0", "o"),
        node("Optional", "s", "os"),
        node("Optional", "", "none", type=helper.make_tensor_type_proto(FLOAT, None)),
        node("SequenceInsert", "s x", "s2"),
        node("OptionalGetElement", "o", "o2"),
        node("Neg", "o2", "g"),
        node("SequenceInsert", "s2 g", "s3"),
        node("OptionalHasElement", "none", "has"),
        node("OptionalGetElement", "os", "s4"),
        node("ConcatFromSequence", "s4", "y", axis=0),
    ]
    outputs = [untyped(n) for n in ("s3", "has", "y", "o", "os", "none")]
    proto = model(nodes, [value("x")], outputs)
    check(proto, X, "g0", "g")
    check(proto, X, "SequenceInsert", "OptionalGetElement", "OptionalHasElement")
    check(proto, X, "SequenceConstruct", "Optional")


def test_maps_in_and_out():
    made = helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(FLOAT, []))
    ml = {"domain": "ai.onnx.ml"}
    nodes = [
        node("DictVectorizer", "m", "x", string_vocabulary=["a", "b"], **ml),
        node("Neg", "x", "g"),
        node("ZipMap", "g", "z", classlabels_strings=["a", "b"], **ml),
    ]
    proto = model(nodes, [onnx.ValueInfoProto(name="m", type=made)], [untyped("z"), untyped("x")])
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    check(proto, {"m": {"b": 2.0}}, "g")
    check(proto, {"m": {"b": 2.0}}, "x", "z")


@pytest.mark.parametrize("ir_version", range(7, 15))
def test_header_fields_are_kept(ir_version):
    nodes = [node("Neg", "x", "a"), node("Abs", "a", "g"), node("Neg", "g", "y")]
    proto = model(nodes, [value("x", ("batch", 3))], [value("y", ("batch", 3))], ir_version, 13)
    proto.producer_name, proto.model_version = "a producer", 7
    helper.set_model_props(proto, {"key": "text"})
    proto.graph.doc_string = "what it does"
    stitched = check(proto, {"x": np.ones((2, 3), np.float32)}, "g")
    for sub, session in stitched.steps:
        assert sub.proto.ir_version == ir_version
        assert [(o.domain, o.version) for o in sub.proto.opset_import] == [
            ("com.microsoft", 1),
            ("", 13),
        ]
        assert session.get_modelmeta().custom_metadata_map == {"key": "text"}
        assert session.get_modelmeta().producer_name == "a producer"
        assert session.get_modelmeta().version == 7
        assert sub.proto.graph.doc_string == "what it does"
        assert session.get_inputs()[0].shape == session.get_outputs()[0].shape == ["batch", 3]


def test_a_contrib_operator_in_the_standard_domain():
    weight = numpy_helper.from_array(np.float32([1, 2, 3, 4]), "scale")
    nodes = [
        node("SimplifiedLayerNormalization", "x scale", "a", axis=-1, epsilon=1e-5),
        node("Abs", "a", "g"),
        node("SimplifiedLayerNormalization", "g scale", "y", axis=-1, epsilon=1e-5),
    ]
    proto = model(nodes, [value("x", ("n", 4))], [value("y", ("n", 4))], initializer=[weight])
    check(proto, {"x": np.float32([[1, 2, -3, 4]])}, "g")


def test_value_info_that_lists_initializers_or_is_stale():
    nodes = [node("Mul", "x w", "a"), node("Abs", "a", "g"), node("Mul", "g w", "y")]
    weight = numpy_helper.from_array(np.float32([2]), "w")
    stale = [value("w", (99,)), value("a", (1,)), value("g", (1,))]
    fields = {"initializer": [weight], "value_info": stale}
    stitched = check(model(nodes, [value("x")], [value("y")], **fields), X, "g")
    (kept,) = ModelFile.open(model(nodes, [], [], **fields)).value_types["w"].tensor_type.shape.dim
    assert kept.dim_value == 1
    assert len(stitched.steps) == 3


def test_overridable_initializers():
    nodes = [node("Mul", "x w", "a"), node("Abs", "a", "g"), node("Mul", "g w", "y")]
    weight = numpy_helper.from_array(np.float32([2]), "w")
    proto = model(nodes, [value("x"), value("w", (1,))], [value("y")], initializer=[weight])
    stitched = check(proto, X, "g")
    check(proto, X | {"w": np.float32([5])}, "g")
    assert [sub.overridable for sub, _ in stitched.steps] == [("w",), (), ("w",)]
    assert [sub.inputs for sub, _ in stitched.steps] == [("x",), ("a",), ("g",)]


def test_outputs_that_no_node_makes():
    nodes = [node("Abs", "x", "g"), node("Add", "g w", "y")]
    weight = numpy_helper.from_array(np.float32([2]), "w")
    outputs = [value("w", (1,)), value("y"), value("x"), value("g")]
    check(model(nodes, [value("x")], outputs, initializer=[weight]), X, "g")


def test_sparse_initializers_and_quantization_annotations():
    sparse = helper.make_sparse_tensor(
        helper.make_tensor("w", FLOAT, [2], [5.0, 6.0]),
        helper.make_tensor("", TensorProto.INT64, [2], [0, 2]),
        [3],
    )
    nodes = [node("Abs", "x", "g"), node("Add", "g w", "y")]
    scale = numpy_helper.from_array(np.float32(0.5), "scale")
    proto = model(nodes, [value("x")], [value("y")], initializer=[scale])
    proto.graph.sparse_initializer.append(sparse)
    annotation = proto.graph.quantization_annotation.add(tensor_name="y")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="scale")
    first, second = (sub.proto.graph for sub, _ in check(proto, X, "g").steps)
    assert not first.sparse_initializer and not first.quantization_annotation
    assert list(second.sparse_initializer) == [sparse]
    assert list(second.quantization_annotation) == [annotation]
    assert [t.name for t in second.initializer] == ["scale"]


def test_large_inline_weights_are_handed_over_and_small_ones_stay():
    rng = np.random.default_rng(1)
    large = numpy_helper.from_array(rng.standard_normal((200, 200), np.float32), "large")
    small = numpy_helper.from_array(rng.standard_normal(200, np.float32), "small")
    nodes = [
        node("MatMul", "x large", "a"),
        node("Abs", "a", "g"),
        node("MatMul", "g large", "b"),
        node("Add", "b small", "y"),
    ]
    io = [value("x", ("n", 200))], [value("y", ("n", 200))]
    proto = model(nodes, *io, initializer=[large, small])
    stitched = check(proto, {"x": rng.standard_normal((3, 200), np.float32)}, "g")
    first, _, last = (sub for sub, _ in stitched.steps)
    assert [w.name for w in first.weights] == [w.name for w in last.weights] == ["large"]
    assert first.weights[0].array() is last.weights[0].array()
    assert last.proto.ByteSize() < 2000


def test_external_weights_of_every_kind(tmp_path):
    data = np.arange(64, dtype=np.float32)
    data.tofile(tmp_path / "w.bin")
    np.uint8([0x21, 0x43]).tofile(tmp_path / "deep.bin")
    (tmp_path / "sub").mkdir()
    np.uint16([0x3F80, 0x4000, 0x4040]).tofile(tmp_path / "sub" / "bf.bin")
    inner = in_file("inner", FLOAT, [3], "w.bin", offset=4, length=12)
    body = around([node("Add", "g inner", "t")], initializer=[inner])
    nodes = [
        node("Mul", "x w", "a"),
        node("Abs", "a", "g"),
        node("If", "c", "b", **body),
        node("Cast", "bf", "bf32", to=FLOAT),
        node("Mul", "b bf32", "d"),
        node("Cast", "q", "q32", to=FLOAT),
        node("Concat", "d q32 empty", "y", axis=0),
    ]
    weights = [
        in_file("w", FLOAT, [3], "w.bin", offset=16),
        in_file("bf", TensorProto.BFLOAT16, [3], "sub/bf.bin", offset=0, length=6),
        in_file("q", TensorProto.INT4, [3], "deep.bin"),
        in_file("empty", FLOAT, [0], "w.bin", offset=0, length=0),
        _true("c"),
    ]
    path = tmp_path / "model.onnx"
    path.write_bytes(
        model(nodes, [value("x")], [value("y")], initializer=weights).SerializeToString()
    )
    stitched = check(path, X, "g")
    first, _, last = (sub for sub, _ in stitched.steps)
    assert first.folder == last.folder == tmp_path
    assert not first.weights and not last.weights
    assert [t.name for t in first.proto.graph.initializer] == ["w"]
    bytes_model = ModelFile.open(path.read_bytes(), tmp_path)
    assert same(Stitched(bytes_model, indexes(bytes_model, "g")).run(X), stitched.run(X))
    with pytest.raises(ModelError, match=r"'bf' has element type BFLOAT16, which numpy lacks"):
        bytes_model.weights["bf"].array()


def test_a_model_of_more_than_two_gigabytes(tmp_path):
    rows, width = 600_000, 960
    size = rows * width * 4
    assert size > 2**31
    with open(tmp_path / "big.bin", "wb") as file:
        file.truncate(size)
        file.seek((rows - 1) * width * 4)
        file.write(np.arange(width, dtype=np.float32).tobytes())
    nodes = [
        node("Gather", "table i", "a"),
        node("Abs", "a", "g"),
        node("Gather", "table j", "b"),
        node("Add", "g b", "y"),
    ]
    inputs = [value(n, ("n",), TensorProto.INT64) for n in "ij"]
    table = in_file("table", FLOAT, [rows, width], "big.bin", offset=0, length=size)
    proto = model(nodes, inputs, [value("y", ("n", width))], initializer=[table])
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    feeds = {"i": np.array([rows - 1, 0]), "j": np.array([0, rows - 1])}
    before = peak_memory()
    stitched = check(path, feeds, "g")
    assert stitched.run(feeds)[0].tolist() == [list(range(width))] * 2
    assert peak_memory() - before < 200 * 2**20, "a weight was loaded"


def peak_memory() -> int:
    """The most memory that this process has held so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_download_cache_of_links(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    np.float32([7, 8, 9]).tofile(blobs / "data")
    weight = in_file("w", FLOAT, [3], "model.onnx.data")
    nodes = [node("Abs", "x", "g"), node("Add", "g w", "y")]
    proto = model(nodes, [value("x")], [value("y")], initializer=[weight])
    (blobs / "model").write_bytes(proto.SerializeToString())
    (snapshot / "model.onnx").symlink_to("../../blobs/model")
    (snapshot / "model.onnx.data").symlink_to("../../blobs/data")
    check(snapshot / "model.onnx", X, "g")


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("../w.bin", r"leads to .* outside the model's folder"),
        ("link.bin", r"leads to .* outside the model's folder"),
        ("/w.bin", r"must be a path relative to the model's folder"),
        ("", r"must be a path relative to the model's folder"),
    ],
)
def test_locations_that_leave_the_folder_are_refused(tmp_path, location, message):
    folder = tmp_path / "model"
    folder.mkdir()
    np.float32([1]).tofile(tmp_path / "w.bin")
    (folder / "link.bin").symlink_to("../w.bin")
    proto = model(
        [node("Add", "x w", "y")],
        [value("x")],
        [value("y")],
        initializer=[in_file("w", FLOAT, [1], location)],
    )
    with pytest.raises(ModelError, match=message):
        ModelFile.open(proto, folder)


def test_external_data_without_a_folder_or_file(tmp_path):
    weight = in_file("w", FLOAT, [3], "w.bin", offset=4, length=12)
    proto = model([node("Add", "x w", "y")], [value("x")], [value("y")], initializer=[weight])
    with pytest.raises(ModelError, match=r"give the model's path, or the folder as base_dir"):
        ModelFile.open(proto.SerializeToString())
    opened = ModelFile.open(proto, tmp_path)
    with pytest.raises(ModelError, match=r"which cannot be read \(No such file or directory\)"):
        opened.weights["w"].array()
    np.float32([1]).tofile(tmp_path / "w.bin")
    with pytest.raises(ModelError, match=r"bytes 4 to 16 of .*, which has only 4"):
        opened.weights["w"].array()
    weight.external_data[2].value = "8"
    with pytest.raises(ModelError, match=r"needs 12 bytes, but its external data has 8"):
        ModelFile.open(model([], [], [], initializer=[weight]), tmp_path).weights["w"].array()


def test_what_is_no_model_is_said_so(tmp_path):
    with pytest.raises(ModelError, match=r"The bytes given is not an ONNX model"):
        ModelFile.open(b"\xff\xff\xff\xff")
    with pytest.raises(FileNotFoundError):
        ModelFile.open(tmp_path / "missing.onnx")


def test_an_input_of_unknown_type_is_named():
    proto = model([node("Abs", "x", "g"), node("Neg", "g", "y")], [value("x")], [value("y")])
    opened = ModelFile.open(proto)
    with pytest.raises(ModelError, match=r"'g' comes from outside .* give it in input_types"):
        extract(opened, [1], ["y"], {})
    sub = extract(opened, [1], ["y"], {"g": type_from_node_arg("tensor(float)", ["n"])})
    assert same(load(sub).run(None, {"g": np.float32([4])}), [np.float32([-4])])


def test_the_original_is_not_changed():
    weight = numpy_helper.from_array(np.zeros((200, 200), np.float32), "w")
    nodes = [node("Abs", "x", "g"), node("MatMul", "g w", "y")]
    proto = model(nodes, [value("x", ("n", 200))], [value("y", None)], initializer=[weight])
    before = proto.SerializeToString()
    check(proto, {"x": np.ones((1, 200), np.float32)}, "g")
    assert proto.SerializeToString() == before


def test_constants_are_found_by_name():
    nodes = [
        node("Constant", "", "ints", value_ints=[1, 2]),
        node("Constant", "", "number", value_float=0.5),
        node("Constant", "", "array", value=numpy_helper.from_array(np.int32([3]))),
        node("Add", "x w", "y"),
    ]
    weights = [numpy_helper.from_array(np.float32([v]), n) for n, v in (("w", 2), ("fed", 3))]
    opened = ModelFile.open(
        model(nodes, [value("x"), value("fed", (1,))], [value("y")], initializer=weights)
    )
    assert same(opened.constant("ints"), np.array([1, 2]))
    assert same(opened.constant("number"), np.array(0.5, np.float32))
    assert same(opened.constant("array"), np.int32([3]))
    assert same(opened.constant("w"), np.float32([2]))
    assert [opened.constant(n) for n in ("fed", "x", "y", "nowhere")] == [None] * 4


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("tensor(float)", helper.make_tensor_type_proto(FLOAT, ["n", 3, None])),
        ("tensor(bfloat16)", helper.make_tensor_type_proto(TensorProto.BFLOAT16, ["n", 3, None])),
        (
            "sparse_tensor(double)",
            helper.make_sparse_tensor_type_proto(TensorProto.DOUBLE, ["n", 3, None]),
        ),
        (
            "optional(seq(tensor(string)))",
            helper.make_optional_type_proto(
                helper.make_sequence_type_proto(
                    helper.make_tensor_type_proto(TensorProto.STRING, ["n", 3, None])
                )
            ),
        ),
        (
            "seq(map(int64,tensor(float)))",
            helper.make_sequence_type_proto(
                helper.make_map_type_proto(
                    TensorProto.INT64, helper.make_tensor_type_proto(FLOAT, ["n", 3, None])
                )
            ),
        ),
    ],
)
def test_types_as_ort_writes_them(kind, expected):
    assert type_from_node_arg(kind, ["n", 3, None]) == expected


def test_an_empty_shape_leaves_the_rank_open():
    assert not type_from_node_arg("tensor(int8)", []).tensor_type.HasField("shape")


@pytest.mark.parametrize("kind", ["float", "tensor(floaty)", "opaque(a,b)", ""])
def test_unknown_types_are_refused(kind):
    with pytest.raises(ModelError):
        type_from_node_arg(kind, [1])


def test_extracting_everything_is_the_model_itself():
    nodes = [node("Abs", "x", "g"), node("Neg", "g", "y")]
    proto = model(nodes, [value("x")], [value("y")], value_info=[value("g")])
    assert extract(ModelFile.open(proto), [0, 1], ["y"], {}).proto == proto
    assert same(whole(proto).run(None, X), [-np.abs(X["x"])])
