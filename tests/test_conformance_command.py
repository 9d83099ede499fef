"""`ort-webgpu conformance`: what it counts, and that the corpus is right by ORT's own CPU EP."""

import json

import pytest
from broken_route import broken  # noqa: F401 (a fixture)
from typer.testing import CliRunner

from ort_webgpu import cli
from ort_webgpu.conformance import Candidate, CandidateError, run_suite, select
from ort_webgpu.conformance.cases import OPERATORS
from ort_webgpu.conformance.report_suite import known_variants


def test_ort_cpu_passes_all_that_it_claims():
    """By float64 numpy: the corpus itself is right."""
    suite = run_suite(Candidate("ort-cpu"), select(), refused=True)
    counts = suite.counts()
    assert not counts["failed"], [r for r in suite.results if r.status == "failed"][:3]
    assert not counts["unsupported"]
    assert counts["passed"] > 400
    assert set(suite.by_operator()) == set(OPERATORS)


def test_every_route_of_a_case_is_counted(adapter):
    case = next(c for c in select(["GroupQueryAttention"], words=["decode"]) if not c.in_place)
    suite = run_suite(Candidate(adapter=adapter), [case], every_route=True)
    routes = [result.route for result in suite.results]
    assert suite.passed
    assert len(set(routes)) == len(routes) > 2
    assert {"serial", "splitk_nosg"} <= set(routes)
    cards = {name for found in suite.cards().values() for name in found}
    assert cards <= set(known_variants()["GroupQueryAttention"])


def test_a_forced_route_is_the_one_that_runs(adapter):
    cases = [c for c in select(["GroupQueryAttention"], words=["prompt"]) if not c.in_place][:2]
    candidate = Candidate(adapter=adapter, routes={"GroupQueryAttention": "serial"})
    suite = run_suite(candidate, cases)
    assert suite.routes() == {"GroupQueryAttention": {"serial": 2}}
    assert suite.features()["prompt"]["GroupQueryAttention"] == (2, 2)


def test_a_broken_route_fails(adapter, broken):  # noqa: F811
    prompts = select(["GroupQueryAttention"], words=["prompt", "f32"])
    cases = [c for c in prompts if not c.in_place and c.first.shape[1] > 16][:2]
    candidate = Candidate(adapter=adapter, routes={"GroupQueryAttention": broken})
    suite = run_suite(candidate, cases)
    assert not suite.passed
    assert suite.counts()["failed"] == 2
    assert all("differ" in result.detail for result in suite.results)


def test_a_candidate_in_another_process(adapter):
    cases = [c for c in select(["GroupQueryAttention"], words=["decode"]) if not c.in_place][:2]
    suite = run_suite(Candidate("ort-cpu", isolated=True), cases)
    assert suite.counts() == {"passed": 2}


def test_a_missing_ep_is_an_error_that_says_what_there_is():
    with pytest.raises(CandidateError, match="CPUExecutionProvider"):
        run_suite(Candidate("NoSuchExecutionProvider"), select(["RemovePadding"])[:1])


def test_the_command_prints_the_tables_and_writes_json(adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(cli.console, "width", 200)
    file = tmp_path / "suite.json"
    arguments = ["conformance", "--adapter", adapter, "--operator", "RemovePadding"]
    result = CliRunner().invoke(cli.app, [*arguments, "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "passed of all, by feature" in result.output
    data = json.loads(file.read_text())
    assert data["passed"] is True
    assert data["operators"]["RemovePadding"]["passed"] == len(data["results"])
    assert data["routes"]["RemovePadding"]


def test_the_command_refuses_what_selects_nothing():
    result = CliRunner().invoke(cli.app, ["conformance", "-k", "no_such_feature"])
    assert result.exit_code == 2
