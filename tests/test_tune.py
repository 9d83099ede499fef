"""Choice by measurement: what a finding changes and what not, its storage, `ort-webgpu tune`."""

import dataclasses
import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
from running import call_of, run_route, spec_of
from session_helpers import MODEL, feeds, same
from typer.testing import CliRunner

from ort_webgpu import OrtWebGpuError, WebGPUSession, cli, tuning
from ort_webgpu.conformance import tune
from ort_webgpu.conformance.bench_works import GqaWork
from ort_webgpu.conformance.cases_gqa import GqaConfig
from ort_webgpu.conformance.cases_packed import PackedConfig
from ort_webgpu.conformance.checks import compare_outputs
from ort_webgpu.conformance.oracles import oracle
from ort_webgpu.device import AdapterInfo, open_gpu
from ort_webgpu.ops.attention import CORE_ROUTES
from ort_webgpu.ops.spec import Caps, pick
from ort_webgpu.ops.tuned import CallClass, Finding, Tuned

CAPS = Caps(subgroup_min=32, subgroup_max=32)
PROMPT = GqaConfig(phase="prompt", length=40, head_size=64)
DECODE = GqaConfig(phase="decode", length=1023, head_size=64)
INFO = AdapterInfo(0, "A card (TM) 9", "wgpu", "Vulkan", "DiscreteGPU", "driver 1.2")
CALLS = CallClass(4, 1024, 8, 128, 128, "float16", ("bias",))
FINDING = Finding(
    CALLS, (("splitk", 2e-5), ("flash", 5e-5)), ("splitk", 3e-5), (("splitk", (16,)),), "2026-11-30"
)


def problem_of(config: GqaConfig | PackedConfig):
    return call_of(config.case(0)).problem


def tuned(config: GqaConfig | PackedConfig, route: str, *settings, caps: Caps = CAPS) -> Caps:
    """Caps on which `route` was measured to be the best for the config's call."""
    calls = problem_of(config).core.call_class
    finding = Finding(calls, ((route, 2e-5), ("serial", 1e-3)), ("x", 3e-5), settings, "2026-11-30")
    return replace(caps, tuned=Tuned((finding,)))


def picked(config: GqaConfig | PackedConfig, caps: Caps, forced: str | None = None):
    return pick(spec_of(config.case(0)).routes, problem_of(config), caps, forced)


# -- choosing, with made-up caps -------------------------------------------------------------------


def test_measured_route_comes_before_the_rules():
    assert picked(PROMPT, CAPS).route.name == "flash"
    by_measure = picked(PROMPT, tuned(PROMPT, "flash_nosg"))
    assert by_measure.route.name == "flash_nosg"
    assert str(by_measure.finding) == "tuned: 0.02 ms against 0.03 ms by rule (x), 2026-11-30"


def test_measured_route_that_rejects_leaves_the_order_of_the_rules():
    for name in ("splitk", "flash_matrix", "a route of another version"):
        found = picked(PROMPT, tuned(PROMPT, name))
        assert found.route.name == "flash"
        assert found.finding is None


def test_forced_route_wins_over_a_measurement():
    found = picked(PROMPT, tuned(PROMPT, "flash_nosg"), "serial")
    assert found.route.name == "serial"
    assert found.finding is None


def test_route_that_only_tests_force_is_not_preferred():
    assert picked(PROMPT, tuned(PROMPT, "matrix_emulated")).route.name == "flash"


def test_measurement_of_the_core_does_not_judge_projections():
    matrix = ((16, 16, 16, "f16", "f32"),)
    caps = Caps(
        dialect="tint", workgroup_memory=32768, subgroup_min=32, subgroup_max=32, f16=True,
        storage_buffers=10, matrix_tiles=matrix,
    )  # fmt: skip
    packed = PackedConfig(dtype="f16", heads=4, head_size=64, input_size=256, lengths=(128,) * 2)
    assert picked(packed, caps).route.name == "matrix_staged_flash_matrix"
    names = {
        name: picked(packed, tuned(packed, name, caps=caps)).route.name
        for name in ("flash_nosg", "matrix")
    }
    assert names == {
        "flash_nosg": "matrix_staged_flash_nosg",
        "matrix": "matrix_staged_flash_matrix",
    }


@pytest.mark.parametrize("route", ["splitk", "splitk_nosg"])
def test_measured_shares_of_the_keys_are_taken(route: str):
    core = problem_of(DECODE).core
    splitk = next(r for r in CORE_ROUTES if r.name == route)
    by_rule = splitk.splits(core, CAPS)
    assert splitk.settings(core, CAPS)[0] == (by_rule,)
    for shares in (1, 3, 64):
        caps = tuned(DECODE, route, (route, (shares,)))
        assert splitk.splits(core, caps) == shares
    assert splitk.splits(core, tuned(DECODE, route, (route, (1 << 20,)))) == 64
    assert splitk.splits(core, tuned(DECODE, route, ("other", (3,)))) == by_rule


def test_measured_tile_is_taken_where_it_fits():
    flash = next(r for r in CORE_ROUTES if r.name == "flash")
    core = problem_of(PROMPT).core
    first, *others = flash.settings(core, CAPS)
    assert dataclasses.astuple(flash.tile(core, CAPS)) == first
    for setting in others:
        found = flash.tile(core, tuned(PROMPT, "flash", ("flash", setting)))
        assert dataclasses.astuple(found) == setting
    misfit = flash.tile(core, tuned(PROMPT, "flash", ("flash", (128, 8, 4, 4))))
    assert dataclasses.astuple(misfit) == first


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ({"keys": 2048, "rows": 8, "heads": 4}, True),
        ({"keys": 2049}, False),
        ({"keys": 511}, False),
        ({"rows": 9}, False),
        ({"heads": 3}, False),
        ({"head_size": 64}, False),
        ({"kv_dtype": "float32"}, False),
        ({"features": ()}, False),
    ],
)
def test_finding_holds_up_to_twice_each_size(change: dict, holds: bool):
    assert (Tuned((FINDING,)).find(replace(CALLS, **change)) is FINDING) == holds


def test_nearest_finding_holds():
    far = replace(FINDING, calls=replace(CALLS, keys=4096))
    both = Tuned((far, FINDING))
    assert both.find(replace(CALLS, keys=1500)) is FINDING
    assert both.find(replace(CALLS, keys=2048 + 100)) is far


# -- storage ---------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_stored_findings_come_back_and_replace_those_of_their_class(cache):
    assert tuning.load(INFO) == tuning.Stored(tuning.file_of(INFO))
    other = replace(FINDING, calls=replace(CALLS, keys=9000))
    path = tuning.store(INFO, [FINDING, other])
    assert path.is_relative_to(cache) and path == tuning.file_of(INFO)
    assert tuning.load(INFO).tuned.findings == (FINDING, other)
    again = replace(FINDING, times=(("flash", 1e-5),), settings=())
    tuning.store(INFO, [again])
    assert tuning.load(INFO).tuned.findings == (again, other)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("change", [{"driver": "driver 1.3"}, {"backend": "dawn"}, {"name": "B"}])
def test_results_of_another_adapter_or_driver_are_not_used(cache, change: dict):
    mine = tuning.store(INFO, [FINDING])
    other = replace(INFO, **change)
    if "driver" not in change:
        assert tuning.file_of(other) != mine
        mine.rename(tuning.file_of(other))
    found = tuning.load(other)
    assert not found.tuned
    assert "`ort-webgpu tune`" in found.obstacle and not found.damaged


@pytest.mark.parametrize(
    ("entry", "value"), [("format", 99), ("ort-webgpu", "0.0.0"), ("backend", "wgpu 0")]
)
def test_results_of_another_version_are_not_used(cache, entry: str, value: object):
    path = tuning.store(INFO, [FINDING])
    data = json.loads(path.read_text())
    data["key"][entry] = value
    path.write_text(json.dumps(data))
    found = tuning.load(INFO)
    assert not found.tuned
    assert repr(value) in found.obstacle


def damages() -> dict[str, object]:
    """Texts of damaged files: cut ones, other JSON, and single wrong values."""

    def with_finding(**change: object) -> str:
        finding = {**dataclasses.asdict(FINDING), **change}
        return json.dumps({"key": tuning._key(INFO), "findings": [finding]})

    calls = dataclasses.asdict(CALLS)
    return {
        "empty": "",
        "cut": with_finding()[:-20],
        "list": "[1]",
        "deep": "[" * 100_000,
        "no text": b"\xff\xfe{}",
        "no findings": json.dumps({"key": tuning._key(INFO)}),
        "size": with_finding(calls={**calls, "keys": -1}),
        "kind": with_finding(calls={**calls, "kv_dtype": 7}),
        "less": with_finding(calls={}),
        "no times": with_finding(times=[]),
        "time": with_finding(times=[["flash", float("nan")]]),
        "rule": with_finding(by_rule=["flash"]),
        "setting": with_finding(settings=[["flash", "many"]]),
    }


@pytest.mark.parametrize("name", damages())
def test_damaged_file_is_one_warning(cache, name: str):
    text = damages()[name]
    path = tuning.file_of(INFO)
    path.parent.mkdir(parents=True)
    path.write_bytes(text if isinstance(text, bytes) else str(text).encode())
    with pytest.warns(RuntimeWarning, match="tune --clear") as caught:
        assert not tuning.load(INFO).tuned
    assert len(caught) == 1 and str(path) in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not tuning.load(INFO).tuned
    tuning.store(INFO, [FINDING])
    assert tuning.load(INFO).tuned.findings == (FINDING,)


def test_unreadable_file_is_one_warning(cache):
    tuning.file_of(INFO).mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="ignored"):
        assert not tuning.load(INFO).tuned


def test_results_are_cleared(cache):
    tuning.store(INFO, [FINDING])
    assert tuning.load(INFO).tuned
    assert tuning.clear(INFO)
    assert not tuning.load(INFO).tuned
    assert not tuning.clear(INFO)


def test_folder_that_cannot_be_written_is_named(cache):
    cache.write_text("a file")
    with pytest.raises(OrtWebGpuError, match=tuning.VARIABLE):
        tuning.store(INFO, [FINDING])


# -- on adapters -----------------------------------------------------------------------------------


def test_tuned_settings_are_right(adapter):
    gpu = open_gpu(adapter, "wgpu")
    case = GqaConfig(phase="decode", length=150, head_size=32).case(5)
    core = call_of(case).problem.core
    for route in spec_of(case).routes:
        if route.name not in ("splitk", "splitk_nosg"):
            continue
        for shares in (1, 3, 64):
            calls = core.call_class
            time = (route.name, 1.0)
            finding = Finding(calls, (time,), time, ((route.name, (shares,)),))
            caps = replace(gpu.caps, tuned=Tuned((finding,)))
            assert route.core_route.splits(core, caps) == shares
            compare_outputs(run_route(case, gpu, route, caps=caps), oracle(case), case)


def test_session_takes_the_tuned_route_and_says_so(adapter, cache, theirs):
    gpu = open_gpu(adapter, "auto")
    inputs = feeds()
    calls = []
    session = WebGPUSession(MODEL, adapter=adapter)
    session.run_traced(None, inputs, calls.append)
    assert calls[0].route != "serial" and calls[0].tuned == ""
    core = session._plan.gpu_nodes[0].choice.problem.core
    rule = (calls[0].route, 3.4e-5)
    finding = Finding(core.call_class, (("serial", 2.1e-5), rule), rule, (), "2026-11-30")
    tuning.store(gpu.info, [finding])

    calls.clear()
    session = WebGPUSession(MODEL, adapter=adapter)
    outputs = session.run_traced(None, inputs, calls.append)
    same(outputs, theirs.run(None, inputs))
    why = f"tuned: 0.021 ms against 0.034 ms by rule ({rule[0]}), 2026-11-30"
    assert {(call.route, call.tuned) for call in calls} == {("serial", why)}
    (row, *_) = session.explain().rows
    assert (row.route, row.reason) == ("serial", f"offloaded; {why}")
    assert row.rejected[rule[0]] == "would do; measured 0.034 ms"

    untuned = WebGPUSession(MODEL, adapter=adapter, tuned=False)
    untuned.run(None, inputs)
    forced = WebGPUSession(MODEL, adapter=adapter, routes={"GroupQueryAttention": "flash_nosg"})
    forced.run(None, inputs)
    assert untuned.explain().rows[0].route == rule[0]
    assert forced.explain().rows[0].route == "flash_nosg"


def test_session_says_that_results_are_stale(adapter, cache):
    info = open_gpu(adapter, "auto").info
    tuning.store(replace(info, driver="an older one"), [FINDING])
    assert "an older one" in str(WebGPUSession(MODEL, adapter=adapter).explain())


def test_command_measures_shows_and_clears(adapter, cache, monkeypatch):
    monkeypatch.setattr(cli.console, "width", 200)
    tiny = [
        GqaWork("tiny decode", 1, 130, heads=2, kv_heads=1, head_size=32, dtype="float32"),
        GqaWork("tiny prompt", 33, heads=2, kv_heads=1, head_size=32, dtype="float32"),
    ]
    monkeypatch.setattr(tune, "default_works", lambda gpu, quick: tiny)
    monkeypatch.setattr("ort_webgpu.conformance.bench_time.SOFTWARE_CACHE_BYTES", 0)

    def command(*options: str) -> str:
        done = CliRunner().invoke(cli.app, ["tune", "--adapter", adapter, *options])
        assert done.exit_code == 0, (done.output, done.exception)
        return done.output

    assert "nothing is tuned" in command("--show")
    assert "kept in" in command("--quick")
    stored = json.loads(command("--show", "--json"))
    decode, prompt = stored["tuned"]["findings"]
    assert decode["calls"]["rows"] == 2 and prompt["calls"]["rows"] == 66
    timed = {route for route, _ in decode["times"]}
    assert timed >= {"splitk", "flash", "serial"} and "matrix_emulated" not in timed
    assert decode["times"][0][1] <= decode["by_rule"][1]
    assert "float32" in command("--show")
    assert "deleted" in command("--clear")
    assert "nothing is tuned" in command("--show")


def test_wrong_candidate_is_reported_and_left_out(adapter):
    work = GqaWork("tiny", 1, 130, heads=2, kv_heads=1, head_size=32, dtype="float32")

    class Wrong(GqaWork):
        drawn = 0

        def sample(self, rng):
            sample = super().sample(rng)

            def error(out, rng):  # the first candidate's alone
                Wrong.drawn += 1
                return 1.0 if Wrong.drawn == 1 else sample.error(out, rng)

            return replace(sample, error=error)

    gpu = open_gpu(adapter, "wgpu")
    finding, wrong = tune.tune_work(gpu, Wrong(**dataclasses.asdict(work)), quick=True)
    assert len(wrong) == 1 and "WRONG" in wrong[0] and "splitk" in wrong[0]
    assert np.isfinite([seconds for _, seconds in finding.times]).all()


def test_model_gives_the_shapes_of_its_nodes(adapter):
    works = tune.model_works(open_gpu(adapter, "wgpu"), MODEL, quick=True)
    assert {(w.heads, w.kv_heads, w.head_size, w.dtype) for w in works} == {(4, 2, 32, "float32")}
    assert {w.q_len > 1 for w in works} == {True, False}
