"""Every rule: complete pages, reasoned limits, and cases that hold through `judge`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stability_probe.judge import Case, Rule, Suspect, judge, load_rules
from stability_probe.schema import Outcome
from tests.rule_tables import measurements_from

RULES = load_rules()
CASES = [pytest.param(rule, case, id=f"{rule.slug}: {case.name}") for rule in RULES for case in rule.cases]


_JUDGED: dict[tuple[str, str], tuple[list[Suspect], list[Outcome]]] = {}


def judged(rule: Rule, case: Case) -> tuple[list[Suspect], list[Outcome]]:
    """Each case is judged once for all tests: building its data frames is what takes the time."""
    key = (rule.slug, case.name)
    if key not in _JUDGED:
        _JUDGED[key] = judge((rule,), measurements_from(case.tables))
    return _JUDGED[key]


def by_slug(rule: Rule) -> str:
    return rule.slug


@pytest.mark.parametrize(("rule", "case"), CASES)
def test_case(rule: Rule, case: Case) -> None:
    suspects, (outcome,) = judged(rule, case)
    assert outcome.status != "crashed", outcome.reason
    assert (outcome.status == "found") is case.fires, outcome
    assert bool(suspects) is case.fires


@pytest.mark.parametrize("rule", RULES, ids=by_slug)
def test_cases_show_both_sides(rule: Rule) -> None:
    fires = [case.fires for case in rule.cases]
    assert fires.count(True) >= 2
    assert fires.count(False) >= 2


@pytest.mark.parametrize("rule", RULES, ids=by_slug)
def test_page_is_complete(rule: Rule) -> None:
    page = rule.page
    for text in (page.title, page.claim, page.mechanism, page.signature, page.false_alarms, page.proof):
        assert text.strip()
        assert "TODO" not in text
    assert len(page.mechanism) > 150
    assert len(page.false_alarms) > 100
    assert len(page.remedies) >= 2
    assert page.references
    for text in (page.mechanism, page.signature, page.false_alarms, page.proof):
        assert not text.lstrip().startswith("#"), "a page field holds text without headings"


@pytest.mark.parametrize("rule", RULES, ids=by_slug)
def test_limits_are_reasoned(rule: Rule) -> None:
    assert rule.thresholds
    for name, limit in rule.thresholds.items():
        assert limit.unit, name
        assert len(limit.reason) > 20, name
        assert len(limit.source) > 10, name


@pytest.mark.parametrize("rule", RULES, ids=by_slug)
def test_suspects_are_well_formed(rule: Rule) -> None:
    for case in rule.cases:
        for suspect in judged(rule, case)[0]:
            assert suspect.cause == rule.slug
            assert suspect.summary.endswith(".")
            assert len(suspect.summary) < 300
            assert "nan" not in suspect.summary.split()
            assert suspect.evidence
            assert suspect.strength > 0
            assert all(plan.change for plan in suspect.plans)


def test_nothing_fires_on_the_healthy_model() -> None:
    suspects, outcomes = judge(RULES, measurements_from({}))
    assert not suspects
    assert {outcome.status for outcome in outcomes} <= {"clear", "skipped"}


def test_order_is_the_catalogues() -> None:
    assert len({rule.order for rule in RULES}) == len(RULES)
    assert [rule.order for rule in RULES] == sorted(rule.order for rule in RULES)


def test_file_names_are_slugs() -> None:
    for rule in RULES:
        module = sys.modules[f"stability_probe.rules.{rule.slug.replace('-', '_')}"]
        assert module.RULE is rule  # type: ignore[attr-defined]


def test_rules_load_without_torch_or_pandas() -> None:
    code = (
        "import sys; from stability_probe.judge import load_rules; load_rules(); "
        "print([name for name in ('torch', 'numpy', 'pandas', 'transformers') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
