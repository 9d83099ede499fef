"""Plans on a device made of numpy: results are ORT's, and nothing is done twice or in vain."""

import threading

import numpy as np
import onnx
import onnxruntime
import pytest
from fake_gpu import FakeGpu, Gelu, GeluRoute
from onnx import TensorProto, helper, numpy_helper

from ort_webgpu import NotOffloadedError, WebGPUSession
from ort_webgpu import build as build_module
from ort_webgpu.ops import OPS

FLOAT = TensorProto.FLOAT


@pytest.fixture
def gpu(monkeypatch):
    """A fake device that runs com.microsoft.Gelu and nothing else."""
    fake = FakeGpu()
    monkeypatch.setattr(build_module, "open_gpu", lambda adapter, backend: fake)
    OPS_BEFORE = dict(OPS)
    OPS.clear()
    OPS["com.microsoft", "Gelu"] = Gelu([GeluRoute("small", 4), GeluRoute("any")])
    yield fake
    OPS.clear()
    OPS.update(OPS_BEFORE)


def gelu(source: str, target: str, name: str = "") -> onnx.NodeProto:
    return helper.make_node("Gelu", [source], [target], name or target, domain="com.microsoft")


def value(name: str, shape=("rows", 3), elem_type: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem_type, list(shape))


def model(nodes, inputs, outputs, initializers=()) -> bytes:
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(initializers))
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9).SerializeToString()


def chain() -> bytes:
    """Neg, gelu, Add of the gelu and the input, two gelus of it, and their product."""
    nodes = [
        helper.make_node("Neg", ["x"], ["n"]),
        gelu("n", "g1"),
        helper.make_node("Add", ["g1", "x"], ["a"]),
        gelu("a", "g2"),
        gelu("x", "g3"),
        helper.make_node("Mul", ["g2", "g3"], ["y"]),
    ]
    return model(nodes, [value("x")], [value("y"), value("g1"), value("a")])


def plain(data: bytes) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])


def same(ours, theirs) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_chain_is_ort_s_result(gpu, rng):
    x = rng.standard_normal((5, 3), dtype=np.float32)
    session = WebGPUSession(chain())
    assert session.get_providers() == ["WebGpuExecutionProvider", "CPUExecutionProvider"]
    same(session.run(None, {"x": x}), plain(chain()).run(None, {"x": x}))
    assert gpu.submits == [["gelu", "gelu"], ["gelu"]]


def test_values_cross_in_one_transfer_each(gpu, rng):
    x = rng.standard_normal((2, 3), dtype=np.float32)
    WebGPUSession(chain()).run(["y"], {"x": x})
    # n, x, a go up once each; g1 comes down for the Add, g2 and g3 together for the Mul
    assert gpu.counters.bytes_up == 3 * x.nbytes
    assert gpu.downloads == [1, 2]


def test_steps_that_are_not_asked_for_do_not_run(gpu, rng):
    x = rng.standard_normal((2, 3), dtype=np.float32)
    session = WebGPUSession(chain())
    same(session.run(["a"], {"x": x}), plain(chain()).run(["a"], {"x": x}))
    assert gpu.submits == [["gelu_small"]]


def test_same_output_twice_is_two_arrays(gpu, rng):
    x = rng.standard_normal((2, 3), dtype=np.float32)
    first, second = WebGPUSession(chain()).run(["g1", "g1"], {"x": x})
    first[:] = 0
    assert np.abs(second).max() > 0


def test_direct_chain_is_one_submit_and_stays_on_the_device(gpu, rng):
    data = model([gelu("x", "g1"), gelu("g1", "y")], [value("x")], [value("y")])
    x = rng.standard_normal((2, 3), dtype=np.float32)
    same(WebGPUSession(data).run(None, {"x": x}), plain(data).run(None, {"x": x}))
    assert gpu.submits == [["gelu_small", "gelu_small"]]
    assert gpu.downloads == [1]


def test_input_read_on_the_host_is_ready_before_it_is_read(gpu, rng):
    OPS["com.microsoft", "Gelu"] = Gelu([GeluRoute("any")], frozenset({0}))
    data = model([gelu("x", "g1"), gelu("g1", "y")], [value("x")], [value("y")])
    x = rng.standard_normal((2, 3), dtype=np.float32)
    same(WebGPUSession(data).run(None, {"x": x}), plain(data).run(None, {"x": x}))
    assert gpu.submits == [["gelu"], ["gelu"]]


def test_initializer_is_uploaded_once(gpu, rng):
    weight = rng.standard_normal((2, 3), dtype=np.float32)
    nodes = [gelu("w", "g"), helper.make_node("Add", ["g", "x"], ["y"])]
    data = model(nodes, [value("x")], [value("y")], [numpy_helper.from_array(weight, "w")])
    session = WebGPUSession(data)
    for _ in range(3):
        same(session.run(None, {"x": weight}), plain(data).run(None, {"x": weight}))
    assert gpu.counters.bytes_up == weight.nbytes


def test_overridable_initializer_can_be_fed(gpu, rng):
    weight = rng.standard_normal((2, 3), dtype=np.float32)
    nodes = [
        gelu("w", "g"),
        helper.make_node("Add", ["g", "x"], ["s"]),
        helper.make_node("Mul", ["s", "w"], ["y"]),
    ]
    inputs = [value("x"), value("w", (2, 3))]
    data = model(nodes, inputs, [value("y")], [numpy_helper.from_array(weight, "w")])
    session, reference = WebGPUSession(data), plain(data)
    assert [a.name for a in session.get_overridable_initializers()] == ["w"]
    assert [a.name for a in session.get_inputs()] == ["x"]
    for feeds in ({"x": weight}, {"x": weight, "w": weight * 2}):
        same(session.run(None, feeds), reference.run(None, feeds))


def test_graph_outputs_that_no_node_makes(gpu, rng):
    weight = rng.standard_normal((2, 3), dtype=np.float32)
    outputs = [value("y"), value("x"), value("w", (2, 3))]
    data = model([gelu("x", "y")], [value("x")], outputs, [numpy_helper.from_array(weight, "w")])
    x = weight + 1
    ours = WebGPUSession(data).run(None, {"x": x})
    same(ours, [plain(data).run(["y"], {"x": x})[0], x, weight])
    for array in ours:
        array[:] = 0
    assert np.abs(x).max() > 0


def test_body_reads_a_device_value(gpu, rng):
    def branch(name, op_type):
        node = helper.make_node(op_type, ["g"], [name])
        return helper.make_graph([node], name, [], [value(name)])

    nodes = [
        gelu("x", "g"),
        helper.make_node(
            "If",
            ["c"],
            ["y"],
            then_branch=branch("t", "Neg"),
            else_branch=branch("e", "Abs"),
        ),
    ]
    data = model(nodes, [value("x"), value("c", (), TensorProto.BOOL)], [value("y")])
    session, reference = WebGPUSession(data), plain(data)
    x = rng.standard_normal((2, 3), dtype=np.float32)
    for flag in (True, False):
        feeds = {"x": x, "c": np.array(flag)}
        same(session.run(None, feeds), reference.run(None, feeds))


def sequences() -> bytes:
    """A gelu between values that are no tensors: a sequence, an optional and a string tensor."""
    floats = helper.make_tensor_type_proto(FLOAT, ["rows", 3])
    nodes = [
        helper.make_node("SequenceAt", ["s", "zero"], ["first"]),
        gelu("first", "g"),
        helper.make_node("SequenceInsert", ["s", "g"], ["longer"]),
        helper.make_node("Identity", ["t"], ["words"]),
        helper.make_node("Optional", ["g"], ["maybe"]),
        helper.make_node("SequenceLength", ["longer"], ["n"]),
    ]
    inputs = [
        helper.make_value_info("s", helper.make_sequence_type_proto(floats)),
        value("t", ("words",), TensorProto.STRING),
    ]
    outputs = [
        helper.make_value_info("longer", helper.make_sequence_type_proto(floats)),
        value("words", ("words",), TensorProto.STRING),
        helper.make_value_info("maybe", helper.make_optional_type_proto(floats)),
        value("n", (), TensorProto.INT64),
        value("g"),
    ]
    return model(nodes, inputs, outputs, [numpy_helper.from_array(np.array(0), "zero")])


def test_sequences_strings_and_optionals_pass_through(gpu, rng):
    session, reference = WebGPUSession(sequences()), plain(sequences())
    for ours, theirs in zip(session.get_outputs(), reference.get_outputs(), strict=True):
        assert (ours.name, ours.type, ours.shape) == (theirs.name, theirs.type, theirs.shape)
    arrays = [rng.standard_normal((2, 3), dtype=np.float32) for _ in range(2)]
    feeds = {"s": arrays, "t": np.array(["a", "bc"])}
    ours, theirs = session.run(None, feeds), reference.run(None, feeds)
    same(ours[0], theirs[0])
    assert ours[1].tolist() == theirs[1].tolist() == ["a", "bc"]
    same([ours[2], ours[4]], [theirs[2], theirs[4]])
    assert ours[3] == theirs[3] == 3


def test_routes_and_why_not_the_others(gpu, rng):
    session = WebGPUSession(chain())
    assert {row.route for row in session.explain().rows} == {"not run yet"}
    session.run(None, {"x": rng.standard_normal((9, 3), dtype=np.float32)})
    rows = session.explain().rows
    assert [row.node for row in rows] == ["g1", "g2", "g3"]
    assert {row.route for row in rows} == {"any"}
    assert rows[0].rejected == {"small": "9 rows; small takes up to 4"}
    session.run(None, {"x": rng.standard_normal((2, 3), dtype=np.float32)})
    row = session.explain().rows[0]
    assert (row.route, row.rejected) == ("small", {"any": "would do; small comes before it"})
    assert "would do; small comes before it" in str(session.explain())
    assert session.explain().to_dict()["rows"][0]["placed"] == "webgpu"


def test_forced_route_that_rejects_is_an_error(gpu, rng):
    session = WebGPUSession(chain(), routes={"Gelu": "small"})
    session.run(None, {"x": np.ones((4, 3), np.float32)})
    with pytest.raises(NotOffloadedError, match=r"'g1'.*small.*9 rows"):
        session.run(None, {"x": np.ones((9, 3), np.float32)})
    with pytest.raises(ValueError, match=r"no such route.*'any', 'small'"):
        WebGPUSession(chain(), routes={"Gelu": "huge"})


def test_call_that_no_route_takes_runs_on_the_cpu(gpu, rng):
    OPS["com.microsoft", "Gelu"] = Gelu([GeluRoute("small", 4)])
    x = rng.standard_normal((9, 3), dtype=np.float32)
    session = WebGPUSession(chain())
    same(session.run(None, {"x": x}), plain(chain()).run(None, {"x": x}))
    row = session.explain().rows[0]
    assert row.placed == "cpu" and "9 rows; small takes up to 4" in row.reason
    session.run(None, {"x": x[:2]})
    assert session.explain().rows[0].placed == "webgpu"
    with pytest.raises(NotOffloadedError, match="9 rows"):
        WebGPUSession(chain(), fallback="error").run(None, {"x": x})


def test_offload_selects_nodes(gpu):
    def offloaded(offload):
        rows = WebGPUSession(chain(), offload=offload).explain().rows
        return {row.node for row in rows if row.placed == "webgpu"}

    assert offloaded("all") == offloaded(["Gelu"]) == {"g1", "g2", "g3"}
    assert offloaded(["g2"]) == offloaded(lambda node: node.name == "g2") == {"g2"}
    assert offloaded("none") == offloaded(False) == set()
    with pytest.raises(NotOffloadedError, match=r"'g4'.*'g1', 'g2', 'g3'"):
        WebGPUSession(chain(), offload=["g4"])


def test_partial_offload_is_ort_s_result(gpu, rng):
    x = rng.standard_normal((3, 3), dtype=np.float32)
    session = WebGPUSession(chain(), offload=["g2"])
    same(session.run(None, {"x": x}), plain(chain()).run(None, {"x": x}))
    assert gpu.submits == [["gelu_small"]]


def test_refused_node_falls_back_with_one_warning(gpu):
    OPS["com.microsoft", "Gelu"] = Gelu([GeluRoute("any")], refused="g2")
    x = np.ones((2, 3), np.float32)
    with pytest.warns(RuntimeWarning, match="1 attention node.*'g2': refused by name") as caught:
        session = WebGPUSession(chain())
    assert len(caught) == 1 and caught[0].filename == __file__
    same(session.run(None, {"x": x}), plain(chain()).run(None, {"x": x}))
    placed = [(row.node, row.placed) for row in session.explain().rows]
    assert placed == [("g1", "webgpu"), ("g2", "cpu"), ("g3", "webgpu")]
    with pytest.raises(NotOffloadedError, match="'g2': refused by name"):
        WebGPUSession(chain(), fallback="error")


def test_candidate_in_a_body_is_reported(gpu):
    body = helper.make_graph([gelu("x", "t", "inner")], "then", [], [value("t")])
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["e"])], "else", [], [value("e")])
    node = helper.make_node("If", ["c"], ["y"], "choice", then_branch=body, else_branch=other)
    data = model([node], [value("x"), value("c", (), TensorProto.BOOL)], [value("y")])
    with pytest.warns(RuntimeWarning, match=r"If 'choice'.then_branch / inner"):
        session = WebGPUSession(data)
    (row,) = session.explain().rows
    assert row.placed == "cpu" and "body of a If" in row.reason
    feeds = {"x": np.ones((2, 3), np.float32), "c": np.array(True)}
    same(session.run(None, feeds), plain(data).run(None, feeds))


def test_function_that_holds_a_candidate_is_inlined(gpu, rng):
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    inner = [gelu("a", "b"), helper.make_node("Neg", ["b"], ["c"])]
    function = helper.make_function("mine", "Twice", ["a"], ["c"], inner, imports)
    nodes = [
        helper.make_node("Twice", ["x"], ["m"], domain="mine"),
        helper.make_node("Twice", ["m"], ["y"], domain="mine"),
    ]
    graph = helper.make_graph(nodes, "g", [value("x")], [value("y")])
    imports = [*imports, helper.make_opsetid("mine", 1)]
    data = helper.make_model(
        graph, opset_imports=imports, functions=[function], ir_version=9
    ).SerializeToString()
    x = rng.standard_normal((2, 3), dtype=np.float32)
    session = WebGPUSession(data)
    assert [row.placed for row in session.explain().rows] == ["webgpu", "webgpu"]
    same(session.run(None, {"x": x}), plain(data).run(None, {"x": x}))


def test_threads_share_a_session(gpu, rng):
    session, reference = WebGPUSession(chain()), plain(chain())
    feeds = [rng.standard_normal((n + 1, 3), dtype=np.float32) for n in range(6)]
    results: dict[int, list] = {}

    def work(n: int) -> None:
        for _ in range(20):
            results[n] = session.run(None, {"x": feeds[n]})

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, x in enumerate(feeds):
        same(results[n], reference.run(None, {"x": x}))


def test_no_adapter_runs_on_the_cpu_and_says_so(gpu, monkeypatch):
    monkeypatch.setattr(build_module, "open_gpu", lambda adapter, backend: None)
    x = np.ones((2, 3), np.float32)
    with pytest.warns(RuntimeWarning, match=r"3 attention node.*no adapter was found"):
        session = WebGPUSession(chain())
    assert session.get_providers() == ["CPUExecutionProvider"]
    same(session.run(None, {"x": x}), plain(chain()).run(None, {"x": x}))
    assert [row.reason for row in session.explain().rows] == ["no adapter was found"] * 3
    WebGPUSession(chain(), adapter="none")  # as asked for: no warning
    with pytest.raises(NotOffloadedError):
        WebGPUSession(chain(), adapter="none", fallback="error")


def test_cpu_branch_beside_the_device_runs_behind_the_submit(gpu, rng, monkeypatch):
    """Parallel branches: the device's gelu of a product, and a feed-forward that ORT runs."""
    wide, back = rng.standard_normal((3, 8)), rng.standard_normal((8, 3))
    weights = [
        numpy_helper.from_array(wide.astype(np.float32), "wide"),
        numpy_helper.from_array(back.astype(np.float32), "back"),
    ]
    nodes = [
        helper.make_node("Neg", ["x"], ["n"]),
        gelu("n", "g"),
        helper.make_node("MatMul", ["n", "wide"], ["m"]),
        helper.make_node("Relu", ["m"], ["r"]),
        helper.make_node("MatMul", ["r", "back"], ["f"]),
        helper.make_node("Add", ["g", "f"], ["y"]),
    ]
    data = model(nodes, [value("x")], [value("y")], weights)
    session = WebGPUSession(data)
    order = []
    for step in session._plan.steps:
        run = step.run

        def record(*args, _run=run, _step=step):
            order.append((type(_step).__name__, _step.outputs, len(gpu.downloads)))
            return _run(*args)

        monkeypatch.setattr(step, "run", record)
    x = rng.standard_normal((2, 3), dtype=np.float32)
    same(session.run(None, {"x": x}), plain(data).run(None, {"x": x}))
    assert order == [
        ("CpuStep", ("n",), 0),
        ("GpuStep", ("g",), 0),
        ("CpuStep", ("f",), 0),
        ("CpuStep", ("y",), 0),
    ]
    assert gpu.downloads == [1]
