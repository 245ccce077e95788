"""Markup and navigation text that leaked through extraction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Rule, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._audit import MEDIUM_SCORE, content_suspect, flagged_rows
from stability_probe.schema import Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {"score": MEDIUM_SCORE}

PAGE = Page(
    title="Boilerplate",
    claim="Some rows are markup, menus or slot-filled templates instead of text.",
    mechanism=(
        "A template repeats with small variations: the fixed parts are soon predicted at no loss, the slots never "
        "are. The gradient concentrates on the few tokens of the markup and on the slots' ids. Rows like this come in "
        "bulk from one site, so that a batch can be full of them, with a loss far from the run's usual, in either "
        "direction, and gradients that agree with each other and not with the rest."
    ),
    signature=(
        "A large share of the row covered by repeated long n-grams, together with a high share of markup tokens; row "
        "losses that stand apart from the other rows'."
    ),
    false_alarms=(
        "Source code, tables and log files repeat their structure as well, but with identifiers and values that "
        "differ, and they are legitimate. The audit calls templates a medium finding for that reason: alone they "
        "are never a verdict, only the replay without them can make them one."
    ),
    proof="The named rows are dropped from the batch: the excess goes with them.",
    remedies=(
        Remedy("Extract the main text of pages before tokenising; drop pages that are mostly links."),
        Remedy("Filter by duplicate lines and n-grams per document.", "probe batch-audit --batch SHARDS"),
    ),
    references=(
        "Rae et al., Gopher: Scaling Language Models, 2021, appendix A.1 (repetition filters)",
        "Penedo et al., The FineWeb Datasets, 2024, section 3 (extraction and line filters)",
    ),
)


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    rows = flagged_rows(m, RULE.slug, t["score"].value)
    return [content_suspect(m, RULE.slug, rows, "markup or a template", t["score"])] if rows else []


_TEMPLATE = {
    "audit_score": 0.4, "spans": [(0, 120, "template", "")], "loss": 5.4, "grad_norm": 1.2,
    "reason": "boilerplate: 92 % of the row are repeated 16-grams",
}  # fmt: skip

RULE = Rule(
    slug="boilerplate",
    order=304,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case("a navigation list", {"rows": _cases.rows({1: _TEMPLATE})}, True),
        Case("a flagged spam template", {"rows": _cases.rows({1: {**_TEMPLATE, "flags": ["boilerplate"]}})}, True),
        Case(
            "near miss: source code, below medium", {"rows": _cases.rows({1: {**_TEMPLATE, "audit_score": 0.1}})}, False
        ),
        Case(
            "near miss: a medium finding of another kind",
            {"rows": _cases.rows({1: {**_TEMPLATE, "reason": "numeric-runs: a run of 260 digit tokens"}})},
            False,
        ),
    ),
)
