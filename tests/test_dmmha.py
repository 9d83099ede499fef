"""DecoderMaskedMultiHeadAttention: routes below the session, refusals, the exported decoders."""

import json

import numpy as np
import onnxruntime
import pytest
from running import call_of, check_routes, spec_of

from ort_webgpu import InvalidInputError, NoAdapterError, WebGPUSession
from ort_webgpu.conformance.cases import corpus, rejections
from ort_webgpu.conformance.cases_dmmha import DmmhaConfig
from ort_webgpu.conformance.checks import check_rejected, compare_outputs
from ort_webgpu.conformance.oracles import numpy_oracle
from ort_webgpu.ops.spec import Caps, Rejected

OP = "DecoderMaskedMultiHeadAttention"
SMALL = [
    DmmhaConfig(groups=2, beams=3, mask="newest", attention_bias="BN", qk="f32", bias=True),
    DmmhaConfig(beams=2, packed=True, head_size=40, mask="some", dtype="f16", qk="f16"),
    DmmhaConfig(length=0, packed=True, bias=True, qk="f16", in_place=True),
    DmmhaConfig(length=130, head_size=12, mask="some", attention_bias="11", in_place=True),
    DmmhaConfig(kind="cross", length=130, head_size=20, mask="some", qk="f32", bias=True),
    DmmhaConfig(kind="cross", length=33, dtype="f16", mask="full", qk="f32", share=True),
    DmmhaConfig(kind="cross", length=1, heads=3, groups=2, scale=-0.8),
]


@pytest.mark.parametrize("config", SMALL, ids=DmmhaConfig.name)
def test_every_route(config, adapter):
    names = check_routes(config.case(7), adapter)
    assert {"splitk_nosg", "serial"} <= set(names)


@pytest.mark.parametrize("config", SMALL[:5], ids=DmmhaConfig.name)
def test_every_route_through_tint(config):
    try:
        names = check_routes(config.case(7), "SwiftShader", "dawn")
    except NoAdapterError as missing:
        pytest.skip(str(missing))
    assert {"splitk_nosg", "serial"} <= set(names)


@pytest.mark.slow
@pytest.mark.parametrize("case", corpus(OP), ids=str)
def test_every_route_of_the_corpus(case, adapter):
    check_routes(case, adapter)


def test_head_sizes_that_no_route_takes_say_so():
    call = call_of(DmmhaConfig(head_size=6).case(1))
    for route in spec_of(DmmhaConfig().case(1)).routes:
        verdict = route.check(call.problem, Caps(storage_buffers=10))
        assert isinstance(verdict, Rejected) and "head size 6" in verdict.reason


def test_card_variants(shared):
    card = json.loads((shared / "contract" / "variants.json").read_text())[OP]
    caps, found = Caps(storage_buffers=10, subgroup_min=32, subgroup_max=32), set()
    for mask in ("off", "some"):
        for qk in ("off", "f32"):
            case = DmmhaConfig(kind="cross", length=33, mask=mask, qk=qk).case(1)
            problem = call_of(case).problem
            for route in spec_of(case).routes:
                if not isinstance(route.check(problem, caps), Rejected):
                    found.add(route.card_variant(problem, caps))
    assert found - {None} == set(card)


def test_a_card_variant_is_one_partition_of_cross_attention():
    caps = Caps(storage_buffers=10, subgroup_min=32, subgroup_max=32)
    for config in (DmmhaConfig(), DmmhaConfig(kind="cross", length=1500)):
        problem, spec = call_of(config.case(1)).problem, spec_of(config.case(1))
        assert {route.card_variant(problem, caps) for route in spec.routes} == {None}


@pytest.mark.parametrize("case", rejections(OP), ids=str)
def test_refused(case, adapter):
    check_rejected(lambda model: WebGPUSession(model, adapter=adapter), case)


def test_a_session_works_after_a_refusal(adapter):
    case = DmmhaConfig(groups=2, beams=2).case(2)
    session = WebGPUSession(case.model().SerializeToString(), adapter=adapter)
    for name in ("cache_indirection", "past_sequence_length"):
        with pytest.raises(InvalidInputError, match=name):
            session.run(None, case.feeds() | {name: np.full_like(case.require(name), 99)})
    compare_outputs(session.run(None, case.feeds()), numpy_oracle(case), case)


def test_a_head_size_for_the_cpu_still_runs(adapter):
    case = DmmhaConfig(head_size=6, groups=2).case(3)
    session = WebGPUSession(case.model().SerializeToString(), adapter=adapter)
    compare_outputs(session.run(None, case.feeds()), numpy_oracle(case), case)


# -- exported decoders ---------------------------------------------------------------------------

FILES = {
    "dmmha_whisper_decoder/model.onnx": (0, 2e-5),
    # Float16 weights and activations around the nodes: ORT's CPU EP on the standard-operator form
    # is up to 2.4e-2 off too, with logits of size 26, whose last float16 digit is 1.6e-2.
    "dmmha_whisper_decoder/model_fp16.onnx": (1.5e-2, 2e-2),
    "dmmha_t5_decoder/model_rpb_decomposed.onnx": (0, 2e-5),
    "dmmha_t5_decoder/model_as_emitted.onnx": (0, 2e-5),
}


def session_of(path, adapter, route=None):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    routes = {OP: route} if route else {}
    return WebGPUSession(path, options, adapter=adapter, routes=routes)


def outputs_of(session, feeds):
    given = {}
    for value in session.get_inputs():
        array = feeds[value.name]
        given[value.name] = array.astype(np.float16) if "float16" in value.type else array
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, given), strict=True))


def placed(session):
    rows = [row for row in session.explain().rows if row.op_type == OP]
    return [row.placed for row in rows]


@pytest.mark.parametrize("place", ["default", "splitk_nosg", "serial", "none"])
@pytest.mark.parametrize("name", FILES)
def test_decoder_at_every_step(shared, adapter, name, place):
    path, (rtol, atol) = shared / "models" / name, FILES[name]
    data = np.load(path.parent / "io.npz")
    where = "none" if place == "none" else adapter
    session = session_of(path, where, None if place in ("default", "none") else place)
    feeds, steps = {}, sorted({key.split(".")[0] for key in data.files})
    for step in steps:
        feeds |= {k.split(".in.")[1]: data[k] for k in data.files if k.startswith(f"{step}.in.")}
        got = outputs_of(session, feeds)
        for key in (k for k in data.files if k.startswith(f"{step}.ref.")):
            value, want = got[key.split(".ref.")[1]], data[key]
            value = value[:, :, : want.shape[2]] if value.ndim == 4 else value
            np.testing.assert_allclose(value, want, rtol=rtol, atol=atol, err_msg=key)
        feeds |= {k.replace("present", "past"): a for k, a in got.items() if k != "logits"}
    assert len(steps) >= 5
    assert placed(session) == ["cpu" if place == "none" else "webgpu"] * 4


@pytest.mark.parametrize(("file", "atol"), [("model.onnx", 2e-5), ("model_fp16.onnx", 1.5e-2)])
def test_whisper_decoder_with_beams(shared, adapter, file, atol):
    folder = shared / "models" / "dmmha_whisper_decoder"
    data, first = np.load(folder / "io_beam.npz"), np.load(folder / "io.npz")
    feeds = {key[3:]: data[key] for key in data.files if key.startswith("in.")}
    for key in (k for k in first.files if "cross" in k):
        feeds[key.split(".in.")[1]] = np.repeat(first[key], 2, axis=0)
    session = session_of(folder / file, adapter)
    got = outputs_of(session, feeds)
    rtol = 0 if file == "model.onnx" else atol
    np.testing.assert_allclose(got["logits"], data["ref.logits"], rtol=rtol, atol=atol)
    for name in (n for n in got if n != "logits"):
        np.testing.assert_allclose(got[name], data[f"ort_cpu.{name}"], rtol=rtol, atol=atol)
    assert placed(session) == ["webgpu"] * 4
