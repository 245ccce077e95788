"""Very long runs of digits or literals."""

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
    title="Numeric runs",
    claim="Some rows are very long sequences of digits or numeric literals.",
    mechanism=(
        "Digits of measurements, keys or binary dumps carry no pattern: each costs about ln 10 nats whatever the "
        "model learns, or more where the tokenizer joins digits by three. A run of hundreds of them gives a gradient "
        "over a handful of ids only, asks attention to copy from nowhere, and holds loss and gradient of its row away "
        "from the run's usual."
    ),
    signature="A run of digit tokens of 256 or more, or most of the row; a row loss near the entropy of the digits.",
    false_alarms=(
        "Mathematics, prices and tables hold many short numbers between words and separators. Numeric tables are "
        "legitimate data. The audit calls long runs a medium finding: alone they are never a verdict, only the "
        "replay without them can make them one."
    ),
    proof="The named rows are dropped from the batch: the excess goes with them.",
    remedies=(
        Remedy("Filter literals above a length in the loader; keep tables that have words in them."),
        Remedy("List the shards that hold such rows.", "probe batch-audit --batch SHARDS --out flagged.csv"),
    ),
    references=(
        "Lozhkov et al., StarCoder 2 and The Stack v2, 2024, section 3.4 (filters for data and literals in code)",
        "Rae et al., Gopher: Scaling Language Models, 2021, appendix A.1",
    ),
)


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    rows = flagged_rows(m, RULE.slug, t["score"].value)
    return [content_suspect(m, RULE.slug, rows, "a long run of digits", t["score"])] if rows else []


_DIGITS = {
    "audit_score": 0.35, "spans": [(10, 128, "digits", "")], "loss": 4.9, "grad_norm": 1.1,
    "reason": "numeric-runs: a run of 260 digit tokens",
}  # fmt: skip

RULE = Rule(
    slug="numeric-runs",
    order=305,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case("a run of 260 digits", {"rows": _cases.rows({1: _DIGITS})}, True),
        Case("a flagged dump", {"rows": _cases.rows({1: {**_DIGITS, "flags": ["numeric-runs"]}})}, True),
        Case(
            "near miss: a table of numbers, below medium",
            {"rows": _cases.rows({1: {**_DIGITS, "audit_score": 0.2}})},
            False,
        ),
        Case(
            "near miss: a medium finding of another kind",
            {"rows": _cases.rows({1: {**_DIGITS, "reason": "boilerplate: a template"}})},
            False,
        ),
    ),
)
