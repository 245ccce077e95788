"""Healthy tiny models are called healthy, on text that looks alarming too."""

from __future__ import annotations

import pytest

from fixtures.incidents import healthy_batch
from fixtures.tiny import tiny
from tests.planted import LENGTH, NAMES, diagnose

ALARMING = ("csv", "chat", "chinese", "spaces")


def assert_healthy(report, *also):
    verdict = report.verdict
    told = [(entry.cause, entry.status, entry.summary) for entry in verdict.ranked]
    assert verdict.cause in ("none", *also), told
    crashed = [outcome for outcome in report.outcomes if outcome.status == "crashed"]
    assert not crashed, crashed


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("with_baseline", "with_log"), [(True, False), (False, False), (False, True)])
def test_healthy_code(name, with_baseline, with_log, tmp_path):
    assert_healthy(diagnose(tiny(name), tmp_path, with_baseline=with_baseline, with_log=with_log))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("with_baseline", [True, False])
def test_healthy_tables_chats_chinese_and_white_space(name, with_baseline, tmp_path):
    report = diagnose(tiny(name), tmp_path, healthy_batch(ALARMING, LENGTH), with_baseline=with_baseline)
    assert_healthy(report, *(["data-shift"] if with_baseline else []))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["chinese", "spaces"])
def test_healthy_batches_of_one_unusual_kind(name, kind, tmp_path):
    report = diagnose(tiny(name), tmp_path, healthy_batch((kind,) * 4, LENGTH), with_baseline=kind == "chinese")
    assert_healthy(report, "data-shift")
