"""The bench: one tiny work end to end, ceilings, reports from a saved record, wrong kernels."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from tint import tint

from ort_webgpu.conformance import bench, bench_report
from ort_webgpu.conformance.bench_ceilings import ceilings, copy_program, matrix_program
from ort_webgpu.conformance.bench_peers import Peer, run_peer
from ort_webgpu.conformance.bench_time import time_work
from ort_webgpu.conformance.bench_works import CaseWork, GqaWork, hardware_works, software_works
from ort_webgpu.conformance.cases_dmmha import DmmhaConfig
from ort_webgpu.conformance.cases_packed import PackedConfig
from ort_webgpu.device import Gpu, open_gpu
from ort_webgpu.ops.spec import TensorSpec
from ort_webgpu.wgsl.render import render

TINY = GqaWork("tiny", 5, 12, 2, 4, 2, 16, "float32")


@pytest.fixture
def gpu(adapter: str) -> Gpu:
    found = open_gpu(adapter, "wgpu")
    assert found is not None
    return found


@pytest.mark.parametrize(
    "work",
    [
        TINY,
        GqaWork("window", 9, 20, heads=2, kv_heads=1, head_size=32, dtype="float32", window=7),
        GqaWork("int4", 1, 40, heads=4, kv_heads=2, head_size=32, dtype="float32", cache="int4"),
        GqaWork("all", 3, 9, heads=2, kv_heads=2, head_size=16, dtype="float32", softcap=5.0,
                bias=True, sink=True),
        CaseWork("packed", PackedConfig(lengths=(7, 3))),
        CaseWork("dmmha", DmmhaConfig(length=20, in_place=True)),
    ],
    ids=lambda work: work.name,
)  # fmt: skip
def test_every_kind_of_work_is_right_on_its_chosen_route(gpu: Gpu, work):
    (timing,) = time_work(gpu, work, 3, frozenset({"chosen"}))
    assert not isinstance(timing, str), timing
    assert timing.chosen
    assert timing.error < 1e-5
    assert 0 < timing.whole.low <= timing.node <= timing.whole.high
    assert [p.part.name for p in timing.parts] == [p.name for p in work.parts]


def test_wrong_kernel_is_not_timed(gpu: Gpu):
    class Wrong(GqaWork):
        def sample(self, rng):
            sample = super().sample(rng)
            return dataclasses.replace(sample, error=lambda out, rng: sample.error(out * 1.01, rng))

    (line,) = time_work(gpu, Wrong(**dataclasses.asdict(TINY)), 3, frozenset({"chosen"}))
    assert isinstance(line, str)
    assert "WRONG" in line and "tiny" in line


def test_not_finite_is_wrong(rng: np.random.Generator):
    sample = TINY.sample(rng)
    shape = (2, 5, 64)
    assert np.isnan(sample.error(np.full(shape, np.nan, np.float32), rng))
    assert sample.error(np.zeros(shape, np.float32), rng) == pytest.approx(1.0)


def test_named_route_that_rejects_says_why(gpu: Gpu):
    (line,) = time_work(gpu, TINY, 3, frozenset({"flash_matrix"}))
    assert "subgroup matrices" in line


def test_visible_keys_and_bytes_are_those_of_the_mask():
    assert TINY.visible == 13 + 14 + 15 + 16 + 17
    window = dataclasses.replace(TINY, window=4)
    assert window.visible == 5 * 4
    assert TINY.cache_bytes == 2 * 2 * 2 * 17 * 16 * 4
    assert window.cache_bytes == 2 * 2 * 2 * 8 * 16 * 4


def test_works_have_names_of_their_own():
    works = [*hardware_works(False), *software_works(False)]
    assert len({w.name for w in works}) == len(works)
    quick = {w.name for w in (*hardware_works(True), *software_works(True))}
    assert quick < {w.name for w in works}


def test_ceilings_are_positive_and_the_copy_copies(gpu: Gpu, rng: np.random.Generator):
    found = ceilings(gpu)
    assert {"copy", "fma_f32"} <= found.keys()
    assert all(rate > 0 for rate in found.values())
    data = rng.integers(0, 1 << 31, 1000, np.int32)
    source, target = gpu.upload(data), gpu.upload(np.zeros_like(data))
    gpu.run([(copy_program(data.nbytes), {"source": source, "out": target})])
    (copied,) = gpu.download([(target, TensorSpec("int32", data.shape))])
    assert (copied == data).all()


def test_tint_takes_the_matrix_ceiling():
    (launch,) = matrix_program(1, 1).launches
    assert tint([render(launch.kernel, "tint")]) == [""]


def test_command_measures_saves_and_reports(adapter: str, tmp_path: Path, capsys):
    saved, results = tmp_path / "run.json", tmp_path / "RESULTS.md"
    command = ["--adapter", adapter, "--backend", "wgpu", "--works", "decode-1024-small-f32"]
    assert (
        bench.main([*command, "--no-peers", "--json", str(saved), "--results", str(results)]) == 0
    )
    record = json.loads(saved.read_text())
    assert [row["work"] for row in record["works"]] == ["decode-1024-small-f32"]
    assert [step["work"] for step in record["steps"]] == ["decode-1024-small-f32"]
    assert record["adapter"]["name"] in results.read_text()
    first = results.read_text()
    assert bench.main(["--load", str(saved), "--results", str(results)]) == 0
    assert results.read_text() == first
    assert "decode-1024-small-f32" in capsys.readouterr().out


def test_unknown_work_names_those_that_there_are(adapter: str, capsys):
    assert bench.main(["--adapter", adapter, "--backend", "wgpu", "--works", "nothing"]) == 1
    assert "prefill-2048-f16" in capsys.readouterr().err


def test_file_of_another_program_is_refused(tmp_path: Path, capsys):
    (tmp_path / "other.json").write_text("[1]")
    assert bench.main(["--load", str(tmp_path / "other.json")]) == 1
    assert "bench --json" in capsys.readouterr().err


def test_results_keep_what_stands_around_sections(tmp_path: Path):
    path = tmp_path / "RESULTS.md"
    record = _record()
    other = {**record, "adapter": {**record["adapter"], "backend": "dawn"}}
    bench_report.update_results(path, record)
    path.write_text(path.read_text() + "\nA note by hand.\n")
    bench_report.update_results(path, other)
    record["works"][0]["node"]["median"] = 0.005
    bench_report.update_results(path, record)
    text = path.read_text()
    assert text.count("## a card, backend wgpu") == text.count("## a card, backend dawn") == 1
    assert "A note by hand." in text
    assert "| w | flash_matrix | 2 | 5 |" in text


def test_report_has_ratios_ceilings_and_errors_of_peers():
    text = bench_report.markdown(_record())
    assert "| w | torch SDPA 2 | 1 | 2 | 0.5x | - | - |" in text
    assert "| w | ORT WebGPU EP | 8 | 2 | 4x | 4 | 2x |" in text
    assert "| w | ORT CPU EP | no kernel |" in text
    assert "| 50 % |" in text  # 1e11 operations at 1e14 a second, in 2 ms
    assert "ORT WebGPU EP: 4x over 1 works" in text


def test_plots_are_written_and_need_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib")
    from ort_webgpu.conformance.bench_plots import write_plots

    written = write_plots(tmp_path / "plots", _record())
    assert sorted(p.name for p in written) == [
        "roofline.png", "roofline.svg", "time.png", "time.svg",
    ]  # fmt: skip
    assert all(p.stat().st_size > 1000 for p in written)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ValueError, match="ort-webgpu\\[report\\]"):
        write_plots(tmp_path, _record())


def test_peer_that_cannot_run_is_reported_not_raised():
    import sys

    peer = Peer("ghost", "bench_peer_ort.py", sys.executable, {"ep": "webgpu"})
    heard: list[str] = []
    (figure,) = run_peer(peer, [TINY], True, heard.append)
    assert figure.seconds is None
    assert "onnxruntime_ep_webgpu" in figure.error
    assert heard == ["tiny"]


def test_ort_cpu_is_measured_as_a_slope():
    import sys

    peer = Peer("ort-cpu", "bench_peer_ort.py", sys.executable, {"ep": "cpu"})
    work = GqaWork("small", 64, 0, 1, 4, 2, 32, "float32")
    (figure,) = run_peer(peer, [work], True, lambda name: None)
    assert figure.peer.startswith("ORT CPU EP")
    (few, first), (many, second) = figure.detail["runs"]
    if figure.seconds is not None:
        assert figure.seconds == pytest.approx((second - first) / (many - few))
    else:
        assert "noisy" in figure.error


def _record() -> dict:
    times = {"median": 0.002, "low": 0.0019, "high": 0.0021, "count": 9}
    work = GqaWork("w", 512)
    part = {"name": "attention", "templates": ["attention"], "flops": 1e11, "bytes": 1e6}
    row = {
        "work": "w",
        "operator": "GroupQueryAttention",
        "shape": dataclasses.asdict(work),
        "route": "flash_matrix",
        "chosen": True,
        "node": dict(times),
        "parts": [{"part": part, "times": dict(times)}],
        "error": 1e-4,
        "launches": 2,
    }
    return {
        "format": 1,
        "command": "ort-webgpu bench",
        "date": "2026-01-01",
        "seconds": 9,
        "quick": True,
        "seed": 0,
        "adapter": {
            "index": 0, "name": "a card", "backend": "wgpu", "api": "Vulkan",
            "kind": "DiscreteGPU", "driver": "1",
        },
        "versions": {"ort-webgpu": "0"},
        "host": {"platform": "p", "python": "3", "cores": 2},
        "ceilings": {"copy": 1e12, "fma_f32": 1e13, "matrix_f16": 1e14},
        "works": [row],
        "refused": [],
        "steps": [{"work": "w", "seconds": 0.004, "runs": [[1, 0.005], [2, 0.009]]}],
        "peers": [
            {"peer": "torch SDPA 2", "work": "w", "seconds": 0.001, "error": "", "detail": {}},
            {"peer": "ORT WebGPU EP", "work": "w", "seconds": 0.008, "error": "", "detail": {}},
            {"peer": "ORT CPU EP", "work": "w", "seconds": None, "error": "no kernel",
             "detail": {}},
        ],
        "notes": [],
    }  # fmt: skip
