"""Seeded bugs: how the mutants are made (here), and that the corpus kills them (marker slow)."""

import os
import time

import mutations
import pytest
from mutations import (
    EXPLAINED,
    SUFFIX,
    TEMPLATES,
    Bench,
    mutants,
    run,
    sample,
    share_killed,
    summary,
    template_names,
)

SOURCE = """{# if (x < 1u) #}
{{ header }}
  // a < b
  let i = min(lane + 1u, {{ W < 3 }}u);
  if (i <= n) { return; }
  workgroupBarrier();
  y[i] = cos_at(i) * y[i];
"""


def changes() -> dict[str, list[str]]:
    """Rule to the changed lines."""
    found: dict[str, list[str]] = {}
    for mutant in mutants("made_up", SOURCE):
        line = mutant.applied(SOURCE).splitlines()[mutant.line - 1].strip()
        found.setdefault(mutant.rule, []).append(line)
    return found


def test_mutants_leave_comments_and_jinja_alone():
    assert {mutant.line for mutant in mutants("made_up", SOURCE)} == {4, 5, 6, 7}
    assert "less or equal for less" not in changes()


def test_mutants_are_single_changes():
    found = changes()
    assert found["less for less or equal"] == ["if (i < n) { return; }"]
    assert found["max for min"] == ["let i = max(lane + 1u, {{ W < 3 }}u);"]
    assert found["zero for one"] == ["let i = min(lane + 0u, {{ W < 3 }}u);"]
    assert found["no barrier"] == [";"]
    assert found["sine for cosine"] == ["y[i] = sin_at(i) * y[i];"]
    assert found["no statement"] == [";"]
    assert found["no early return"] == ["if (i <= n) { ; }"]


def test_a_mutant_shows_its_change():
    shown = [mutant.shown for mutant in mutants("made_up", SOURCE)]
    assert "if (i [<= -> <] n) { return; }" in shown
    assert "[y[i] = cos_at(i) * y[i]; -> ;]" in shown
    twice = [mutant.shown for mutant in mutants("made_up", "a();\n  return;\nb();\n  return;\n")]
    assert twice == ["a(); [return; -> ;]", "b(); [return; -> ;]"]


def test_what_is_explained_is_a_mutant():
    for template, shown in EXPLAINED:
        source = (TEMPLATES / f"{template}{SUFFIX}").read_text("utf-8")
        assert shown in {mutant.shown for mutant in mutants(template, source)}, (template, shown)


def test_only_a_child_that_says_nothing_has_hung(monkeypatch):
    monkeypatch.setattr(mutations, "SECONDS", 0.5)

    def slow(alive):
        for _ in range(6):
            time.sleep(0.15)
            alive()
        return "done"

    assert mutations._forked(slow) == ("ok", "done")
    assert mutations._forked(lambda _: time.sleep(60)) == ("timeout", None)
    assert mutations._forked(lambda _: os._exit(3)) == ("died", None)


def test_a_sample_is_spread_over_the_rules():
    every = mutants("made_up", SOURCE)
    assert sample(every, 99) == every
    some = sample(every, 5)
    assert some == sample(every, 5)
    assert len({mutant.rule for mutant in some}) == 5


def test_every_template_has_enough_places():
    counts = {
        n: len(mutants(n, (TEMPLATES / f"{n}{SUFFIX}").read_text())) for n in template_names()
    }
    assert min(counts.values()) >= 1, counts
    assert sum(counts.values()) >= 40 * len(counts), counts


@pytest.fixture(scope="module")
def bench(adapter_names: list[str]) -> Bench:
    found = next((name for name in adapter_names if "llvmpipe" in name), None)
    if found is None:
        pytest.skip("lavapipe is missing; `sh tests/run.sh` sets it up")
    return Bench(found)


@pytest.mark.slow
@pytest.mark.parametrize("template", template_names())
def test_the_corpus_kills_the_mutants(template: str, bench: Bench):
    outcomes = list(run(bench, template, 40))
    survivors = [o.mutant for o in outcomes if o.status == "survived"]
    assert share_killed(outcomes) >= 0.95, (summary(outcomes), survivors)
