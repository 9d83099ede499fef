"""The command line: what each command prints, and its exit status."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from broken_route import broken  # noqa: F401 (a fixture)
from session_helpers import MODEL, feeds
from typer.testing import CliRunner

from ort_webgpu import WebGPUSession, cli, devices

NODE = "/model/layers.{}/attn/GroupQueryAttention"


@pytest.fixture
def command(monkeypatch):
    """Runs the command line in this process; returns exit status and stdout."""

    def run(*args: object) -> tuple[int, str]:
        monkeypatch.setattr(cli.console, "width", 200)
        result = CliRunner().invoke(cli.app, [str(arg) for arg in args])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output

    return run


def test_devices_lists_every_adapter(command, adapter):
    status, text = command("devices", "--backend", "wgpu")
    assert status == 0
    assert all(info.name in text for info in devices("wgpu"))


def test_devices_as_json(command, adapter):
    status, text = command("devices", "--backend", "wgpu", "--json")
    assert status == 0
    assert [one["name"] for one in json.loads(text)] == [info.name for info in devices("wgpu")]


def test_explain_names_every_node_and_its_route(command, adapter):
    status, text = command(
        "explain", MODEL, "--adapter", adapter, "--run", "--route", "GroupQueryAttention=serial"
    )
    assert status == 0
    assert all(NODE.format(layer) in text for layer in range(4))
    assert text.count("serial") >= 4
    assert adapter in text


def test_explain_as_json_shows_what_offload_left_out(command, adapter):
    status, text = command(
        "explain", MODEL, "--adapter", adapter, "--json", "--offload", NODE.format(1)
    )
    assert status == 0
    rows = json.loads(text)["rows"]
    assert {row["node"]: row["placed"] for row in rows} == {
        NODE.format(layer): "webgpu" if layer == 1 else "cpu" for layer in range(4)
    }


def test_run_makes_inputs_and_saves_outputs(command, adapter, tmp_path):
    file = tmp_path / "out.npz"
    status, text = command(
        "run", MODEL, "--adapter", adapter, "--batch", 1, "--length", 4, "--past", 2,
        "--compare", "--save-outputs", file,
    )  # fmt: skip
    assert status == 0, text
    with np.load(file) as outputs:
        assert outputs["logits"].shape == (1, 4, 512)
        assert outputs["present.0.key"].shape == (1, 2, 6, 32)


def test_run_takes_the_given_inputs(command, adapter, tmp_path):
    given = feeds([[5, 9, 200]], past=3)
    np.savez(tmp_path / "in.npz", **given)
    status, text = command(
        "run", MODEL, "--adapter", adapter, "--inputs", tmp_path / "in.npz",
        "--save-outputs", tmp_path / "out.npz",
    )  # fmt: skip
    assert status == 0, text
    expected = WebGPUSession(MODEL, adapter=adapter).run(["logits"], given)[0]
    with np.load(tmp_path / "out.npz") as outputs:
        np.testing.assert_array_equal(outputs["logits"], expected)


def test_compare_passes_a_right_model_and_checks_a_saved_run(command, adapter, tmp_path):
    run = tmp_path / "run.npz"
    status, text = command("compare", MODEL, "--adapter", adapter, "--steps", 2, "--save", run)
    assert status == 0, text
    assert "PASSED  2 of 2 steps" in text
    again = ["compare", MODEL, "--golden", run, "--saved", run, "--atol", "logits=0"]
    assert command(*again)[0] == 0


def test_compare_names_the_bad_node_and_writes_it_down(command, adapter, broken, tmp_path):  # noqa: F811
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "junit", "html")}
    options = [part for kind, path in files.items() for part in (f"--{kind}", path)]
    route = f"{NODE.format(2)}={broken}"
    status, text = command(
        "compare", MODEL, "--adapter", adapter, "--route", route, *options,
        "--repro", tmp_path / "bad",
    )  # fmt: skip
    assert status == 1
    assert f"first bad node: {NODE.format(2)} (step 0)" in text
    assert all(NODE.format(2) in path.read_text() for path in files.values())
    assert (tmp_path / "bad" / "repro.py").is_file()
    assert (tmp_path / "bad" / "shrunk" / "repro.py").is_file()


def test_wrong_use_is_told_with_status_2(command):
    status, text = command("run", MODEL, "--dim", "batch_size")
    assert status == 2
    assert "NAME=VALUE" in text


def test_errors_are_one_line_with_status_1():
    process = subprocess.run(
        [sys.executable, "-m", "ort_webgpu.cli", "run", str(MODEL), "--adapter", "no such thing"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert process.returncode == 1
    assert "no such thing" in process.stderr
    assert "Traceback" not in process.stderr


def test_a_missing_extra_gives_a_hint():
    code = "import sys; sys.modules['typer'] = None; import ort_webgpu.cli"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 1
    assert process.stderr.count("\n") == 1
    assert "pip install 'ort-webgpu[cli]'" in process.stderr
