"""Two faults that have nothing to do with each other are both named, in order, with what each explains."""

from __future__ import annotations

import pytest

from fixtures.fresh_pairs import PAIRS, Pair
from stability_probe.pipeline import run

# A cap hurts a model that has lost its positions less than it helps, and labels of another position leave nothing to
# win on a spoilt weight: what the second repair gains shows only on top of the first.
ENTANGLED = {
    "two: positions that start again, and a cap": 0.45,
    "two: labels shifted twice, and one absurd weight": 0.4,
}


@pytest.mark.parametrize("made", [pytest.param(pair, id=pair.incident.name) for pair in PAIRS])
def test_both_are_named_in_order(made: Pair, tmp_path):
    verdict = run(made.incident.make(tmp_path)).verdict
    named = [entry.cause for entry in verdict.ranked]
    assert [cause for cause in named if cause in made.causes] == list(made.causes), (named, verdict.summary)
    first, *others = verdict.ranked
    assert verdict.cause == first.cause == made.causes[0]
    assert first.explained is not None and first.explained >= 0.5
    assert all(entry.why_not_first for entry in others)


@pytest.mark.parametrize("made", [pytest.param(p, id=p.incident.name) for p in PAIRS if p.incident.name in ENTANGLED])
def test_what_shows_only_on_top_of_the_other_repair_has_its_share(made: Pair, tmp_path):
    report = run(made.incident.make(tmp_path))
    second = next(entry for entry in report.verdict.ranked if entry.cause == made.causes[1])
    assert second.status in ("confirmed", "likely")
    assert second.explained >= ENTANGLED[made.incident.name]
    alone = [r for r in report.interventions if r.cause == second.cause and "on top of" not in r.change]
    joint = [r for r in report.interventions if r.cause == second.cause and "on top of" in r.change]
    assert max((r.explained or 0.0) for r in alone) < 0.25
    best = max(joint, key=lambda r: r.explained or 0.0)
    assert best.before > best.after and best.explained > second.explained
    assert second.cause in report.verdict.summary and "before the first cause is repaired" in second.why_not_first
    assert any(second.cause in remedy.action for remedy in report.verdict.remedies)
