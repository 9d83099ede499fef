"""Packed attention and padding: routes below the session, refusals, chains on the device."""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from running import accepting, call_of, check_routes, run_route, spec_of

from ort_webgpu import InvalidInputError, NoAdapterError, WebGPUSession
from ort_webgpu.conformance.case import Case
from ort_webgpu.conformance.cases import corpus, rejections
from ort_webgpu.conformance.cases_packed import PackedConfig, padding_offsets
from ort_webgpu.conformance.checks import check_rejected, compare_outputs
from ort_webgpu.conformance.oracles import numpy_oracle, ort_padded_oracle
from ort_webgpu.device import open_gpu
from ort_webgpu.ops.packed_prologue import _TILES, Projection
from ort_webgpu.ops.spec import Caps, Rejected

ATTENTION = ("PackedAttention", "PackedMultiHeadAttention")
PADDING = ("RemovePadding", "RestorePadding")
SMALL = [
    PackedConfig(lengths=(17, 1, 0, 5), attention_bias="BN", slack=3),
    PackedConfig(lengths=(9, 20), dtype="f16", head_size=6, v_head_size=5, input_size=21),
    PackedConfig(lengths=(33,), head_size=10, v_head_size=24, heads=3, attention_bias="1N"),
    PackedConfig(op="mha", lengths=(4, 11), dtype="f16", head_size=40, attention_bias="B1"),
    PackedConfig(op="mha", lengths=(0, 3), head_size=7, v_head_size=8, slack=2, bias=False),
    PackedConfig(op="mha_packed", lengths=(1, 1, 6), head_size=5, scale=1.3),
    PackedConfig(op="mha_packed", lengths=(16, 40), dtype="f16", head_size=32),
]


@pytest.mark.parametrize("config", SMALL, ids=PackedConfig.name)
def test_every_route(config, adapter):
    names = check_routes(config.case(5), adapter)
    assert {"flash_nosg", "serial"} <= set(names)


@pytest.mark.parametrize("case", [c for op in PADDING for c in corpus(op)], ids=str)
def test_padding(case, adapter):
    assert check_routes(case, adapter) == ["rows"]


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for op in ATTENTION for c in corpus(op)], ids=str)
def test_every_route_of_the_corpus(case, adapter):
    check_routes(case, adapter)
    gpu = open_gpu(adapter, "wgpu")
    for route in accepting(case, gpu):
        compare_outputs(run_route(case, gpu, route), ort_padded_oracle(case), case)


@pytest.mark.parametrize("tile", _TILES, ids=str)
def test_every_tile_of_the_projection(tile, adapter, monkeypatch):
    monkeypatch.setattr(Projection, "tile", lambda self, caps: tile)
    for head_size, depth, dtype in ((8, 36, "f32"), (7, 35, "f16"), (12, 33, "f32")):
        config = PackedConfig(
            lengths=(90, 45), head_size=head_size, input_size=depth, dtype=dtype, heads=5
        )
        case, gpu = config.case(2), open_gpu(adapter, "wgpu")
        (route,) = [r for r in spec_of(case).routes if r.name == "flash_nosg"]
        compare_outputs(run_route(case, gpu, route), numpy_oracle(case), case)


def test_tiles_fit_the_device_and_the_problem():
    case = PackedConfig(lengths=(200, 300), head_size=64, heads=12, input_size=20).case(1)
    large = call_of(case).problem.source
    few = replace(large, rows=replace(large.rows, tokens=3))
    assert large.tile(Caps()) == _TILES[1]  # 128 x 128 would leave most processors idle
    assert replace(large, rows=replace(large.rows, tokens=9000)).tile(Caps()) == _TILES[0]
    assert few.tile(Caps()) == _TILES[-1]
    tight = Caps(workgroup_memory=4096, workgroup_invocations=64)
    assert large.tile(tight) == _TILES[2]
    for tile in _TILES:
        assert tile.memory <= Caps().workgroup_memory
        assert tile.rl * tile.cl % (tile.cl * tile.tn) == 0  # what gemm.wgsl.j2 counts on


def test_scratch_beyond_a_binding_is_a_reason():
    case = PackedConfig(lengths=(64,)).case(1)
    for route in spec_of(case).routes:
        verdict = route.check(call_of(case).problem, Caps(storage_binding=1024))
        assert isinstance(verdict, Rejected) and "1,024" in verdict.reason


MATRIX_CAPS = Caps(
    storage_buffers=10,
    subgroup_min=32,
    subgroup_max=32,
    f16=True,
    workgroup_memory=49152,
    matrix_tiles=((16, 16, 16, "f16", "f32"), (8, 8, 8, "f32", "f32")),
)


def test_card_variants(shared):
    names = json.loads((shared / "contract" / "variants.json").read_text())["PackedAttention"]
    caps, found = MATRIX_CAPS, set()
    for dtype in ("f32", "f16"):
        for bias in ("off", "BN"):
            # a tile of tokens and of the depth, without which nothing is read from where it lies
            config = PackedConfig(dtype=dtype, attention_bias=bias, lengths=(40,), input_size=32)
            case = config.case(1)
            problem = call_of(case).problem
            for route in spec_of(case).routes:
                if not isinstance(route.check(problem, caps), Rejected):
                    found.add(route.card_variant(problem, caps))
    assert set(names) <= found
    separate = PackedConfig(op="mha").case(1)
    problem = call_of(separate).problem
    assert {route.card_variant(problem, caps) for route in spec_of(separate).routes} == {None}


@pytest.mark.parametrize(
    "case", [c for op in (*ATTENTION, *PADDING) for c in rejections(op)], ids=str
)
def test_refused(case, adapter):
    check_rejected(lambda model: WebGPUSession(model, adapter=adapter), case)


def test_a_session_works_after_a_refusal(adapter):
    case = PackedConfig(lengths=(5, 3), slack=1).case(2)
    session = WebGPUSession(case.model().SerializeToString(), adapter=adapter)
    bad = {
        "token_offset": padding_offsets((4, 4), 6),
        "cumulative_sequence_length": np.array([0, 5, 9], np.int32),
    }
    for name, array in bad.items():
        with pytest.raises(InvalidInputError, match=name):
            session.run(None, case.feeds() | {name: array})
    compare_outputs(session.run(None, case.feeds()), numpy_oracle(case), case)


@pytest.mark.parametrize("config", SMALL[:4], ids=PackedConfig.name)
def test_every_route_through_tint(config):
    try:
        names = check_routes(config.case(5), "SwiftShader", "dawn")
    except NoAdapterError as missing:
        pytest.skip(str(missing))
    assert {"flash_nosg", "serial"} <= set(names)


def no_tokens(op_type):
    """Two sequences without a token."""
    bounds, offsets = np.zeros(3, np.int32), padding_offsets((0, 0), 3)
    x, w, b = (np.zeros(s, np.float32) for s in ((0, 8), (8, 24), (24,)))
    inputs = (x, w, b, offsets, bounds)
    if op_type == "PackedMultiHeadAttention":
        inputs = (x, x, x, b, offsets, bounds)
    return Case(name="none", op_type=op_type, attributes={"num_heads": 2}, inputs=inputs)


@pytest.mark.parametrize("op_type", ATTENTION)
def test_no_tokens_at_all(op_type, adapter):
    case = no_tokens(op_type)
    session = WebGPUSession(case.model().SerializeToString(), adapter=adapter)
    (output,) = session.run(None, case.feeds())
    assert output.shape == (0, 8) and session.explain().rows[0].placed == "webgpu"


def chain(dtype):
    """RemovePadding, two attentions, RestorePadding: input (B,S,8), counts (B)."""
    kinds = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16}

    def node(op_type, inputs, outputs, **attributes):
        return helper.make_node(
            op_type, inputs, outputs, name=outputs[0], domain="com.microsoft", **attributes
        )

    rng = np.random.default_rng(3)
    numpy_type = np.float16 if dtype == "f16" else np.float32
    weights = {"w": rng.standard_normal((8, 24)) / 3, "b": rng.standard_normal(24)}
    schedule = ["offset", "bounds"]
    nodes = [
        node("RemovePadding", ["x", "counts"], ["packed", *schedule, "longest"]),
        node("PackedAttention", ["packed", "w", "b", *schedule], ["first"], num_heads=2),
        node(
            "PackedMultiHeadAttention",
            ["first", "packed", "first", "", *schedule],
            ["second"],
            num_heads=2,
        ),
        node("RestorePadding", ["second", "offset"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "chain",
        [
            helper.make_tensor_value_info("x", kinds[dtype], ["batch", "length", 8]),
            helper.make_tensor_value_info("counts", TensorProto.INT32, ["batch"]),
        ],
        [
            helper.make_tensor_value_info("y", kinds[dtype], ["batch", "length", 8]),
            helper.make_tensor_value_info("longest", TensorProto.INT32, [1]),
        ],
        initializer=[
            onnx.numpy_helper.from_array(array.astype(numpy_type), name)
            for name, array in weights.items()
        ],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), numpy_type


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_a_chain_stays_on_the_device(dtype, adapter):
    model, numpy_type = chain(dtype)
    x = np.random.default_rng(4).standard_normal((3, 6, 8)).astype(numpy_type)
    feeds = {"x": x, "counts": np.array([4, 0, 6], np.int32)}
    session = WebGPUSession(model, adapter=adapter)
    session.run(None, feeds)  # weights go up once
    counters = open_gpu(adapter).counters
    submits, down, up = counters.submits, counters.bytes_down, counters.bytes_up
    y, longest = session.run(None, feeds)
    assert counters.submits - submits == 1  # all four nodes and the download of y
    assert counters.bytes_down - down == -(-y.nbytes // 4) * 4
    assert counters.bytes_up - up < x.nbytes + 1200  # x and tables of rows; no weights
    assert longest == [6]
    on_cpu, _ = WebGPUSession(model, adapter="none").run(None, feeds)
    np.testing.assert_allclose(
        y.astype(np.float32), on_cpu.astype(np.float32), atol=1e-5 if dtype == "f32" else 1e-2
    )
    assert not y[1].any() and not y[0, 4:].any()


# -- exported encoders ---------------------------------------------------------------------------

FILES = {
    "packed_bert_tiny/model_packed_fp32.onnx": 2e-5,
    "packed_bert_tiny/model_packed_fp32_noembed.onnx": 2e-5,
    "packed_bert_tiny/model_packed_fp16.onnx": 6e-3,
    "packed_minilm_2layer_fp16/model_packed_fp16.onnx": 6e-3,
}


@pytest.mark.parametrize("route", ["flash", "flash_nosg", "serial"])
@pytest.mark.parametrize("name", FILES)
def test_exported_encoder_on_each_route(shared, adapter, name, route):
    path = shared / "models" / name
    data = np.load(path.parent / "io.npz")
    session = WebGPUSession(path, adapter=adapter, routes={"PackedAttention": route})
    feeds = {}
    for value in session.get_inputs():
        array = data[value.name]
        feeds[value.name] = array.astype(np.int32) if "int32" in value.type else array
    (hidden,) = session.run([session.get_outputs()[0].name], feeds)
    kind = "fp16" if "fp16" in name else "fp32"
    valid = data["attention_mask"] > 0
    expected = data[f"last_hidden_state_packed_{kind}_expected"]
    difference = np.abs(hidden.astype(np.float64) - expected)[valid]
    assert difference.max() <= FILES[name]
    assert not hidden[~valid].any()
    rows = session.explain().rows
    assert {row.placed for row in rows} == {"webgpu"}
    assert {row.route for row in rows if row.op_type == "PackedAttention"} == {route}


def test_direct_reads_need_whole_tiles():
    for config, words in (
        (PackedConfig(lengths=(40,), input_size=36), "input width 36"),
        (PackedConfig(lengths=(20,), input_size=32), "20 tokens"),
    ):
        case = config.case(1)
        (route,) = [r for r in spec_of(case).routes if r.name == "matrix_direct_flash"]
        verdict = route.check(call_of(case).problem, MATRIX_CAPS)
        assert isinstance(verdict, Rejected) and words in verdict.reason


def test_direct_reads_take_whole_tiles_and_staged_ones_the_rest():
    case = PackedConfig(lengths=(40,), input_size=32).case(1)
    (route,) = [r for r in spec_of(case).routes if r.name == "matrix_direct_flash"]
    direct, staged = route.program(call_of(case).problem, MATRIX_CAPS).launches[:2]
    assert [dict(x.kernel.constants)["direct"] for x in (direct, staged)] == [True, False]
    spans = [(dict(x.uniforms)["first"], dict(x.uniforms)["end"]) for x in (direct, staged)]
    assert spans == [(0, 32), (32, 40)]
