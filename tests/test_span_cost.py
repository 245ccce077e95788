"""What a span of bad tokens costs: shares against plain sums, and the heads that it drives."""

from __future__ import annotations

import math

import pytest
import torch

from stability_probe.judge import load_rules
from stability_probe.replay import Trace
from stability_probe.rules import _cases
from stability_probe.rules._audit import span_cost
from stability_probe.tables import _span_loss
from tests.rule_tables import measurements_from

SPAN = {
    "audit_score": 1.0, "flags": ["repeated-tokens"], "spans": [(20, 110, "period", "period 2")],
    "reason": "repeated-tokens: a 2-gram 45 times", "loss": 7.4, "span_losses": [(9.4, 90)], "grad_norm": 2.6,
}  # fmt: skip


def test_targets_of_a_span_are_those_that_ask_for_its_tokens():
    losses = torch.arange(8, dtype=torch.float32)[None]
    has_target = torch.ones(1, 8, dtype=torch.bool)
    has_target[0, 3] = False
    trace = Trace("fp32", losses, has_target, losses, 7)
    # tokens 3, 4, 5 are asked for by positions 2, 3, 4; 3 has no target
    assert _span_loss(trace, 0, 3, 6) == ((2 + 4) / 2, 2)
    assert _span_loss(trace, 0, 0, 2) == (0.0, 1)
    mean, count = _span_loss(trace, 0, 0, 1)  # nothing asks for the first token
    assert count == 0 and math.isnan(mean)


def test_the_share_of_the_excess_is_the_plain_sum():
    rows = _cases.rows({1: {**SPAN, "loss": 7.6}})
    losses = [row["loss"] for row in rows]
    m = measurements_from({"rows": rows, "loss": sum(losses) / 4})
    cost = span_cost(m, rows[1], "repeated-tokens")
    usual = sorted(loss for index, loss in enumerate(losses) if index != 1)[1]
    assert cost.usual == usual
    assert cost.excess_share == pytest.approx((9.4 - usual) * 90 / sum((loss - usual) * 127 for loss in losses))


def test_the_baseline_is_the_reference_where_there_is_one():
    m = measurements_from({"rows": _cases.rows({1: SPAN}), "baseline_loss": 2.0})
    assert span_cost(m, m.rows.to_dict("records")[1], "repeated-tokens").usual == 2.0


def test_no_span_of_the_cause_no_cost():
    m = measurements_from({"rows": _cases.rows({1: SPAN})})
    row = m.rows.to_dict("records")[1]
    assert span_cost(m, row, "boilerplate") is None
    assert span_cost(m, {**row, "span_losses": [(math.nan, 0)]}, "repeated-tokens") is None


@pytest.mark.parametrize(
    ("peak", "baseline", "query", "named"),
    [
        (90.0, 20.0, 50, True),
        (30.0, 20.0, 50, False),  # healthy text varies by that
        (90.0, 20.0, 115, False),  # the peak is not in the span
        (90.0, math.nan, 50, False),  # without a baseline nobody knows what is usual for this head
    ],
)
def test_the_head_that_the_span_drives(peak, baseline, query, named):
    hot = {"row": 1, "query": query, "max_logit": peak, "baseline_max_logit": baseline}
    m = measurements_from({"loss": 4.4, "rows": _cases.rows({1: SPAN}), "heads": _cases.heads({(2, 3): hot})})
    cost = span_cost(m, m.rows.to_dict("records")[1], "repeated-tokens")
    assert (cost.head is not None and cost.head[:2] == (2, 3)) is named


def test_the_sentence():
    hot = {"row": 1, "query": 50, "max_logit": 90.0, "baseline_max_logit": 20.0}
    m = measurements_from({"loss": 4.4, "rows": _cases.rows({1: SPAN}), "heads": _cases.heads({(2, 3): hot})})
    rule = {rule.slug: rule for rule in load_rules()}["repeated-tokens"]
    (suspect,) = rule.examine(m, rule.thresholds)
    assert suspect.summary.startswith("Row 1, positions 20–109: repeated tokens")
    for part in ("% of the excess loss", "% of the squared gradient norm", "drives layer 2 head 3"):
        assert part in suspect.summary


def test_an_unreasonably_low_loss_is_said():
    m = measurements_from({"rows": _cases.rows({1: {**SPAN, "loss": 1.0, "span_losses": [(0.01, 90)]}})})
    rule = {rule.slug: rule for rule in load_rules()}["repeated-tokens"]
    assert "unreasonably low" in rule.examine(m, rule.thresholds)[0].summary
