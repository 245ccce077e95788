"""Rows that are not text in any language: random bytes, blobs, wrong encodings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Rule, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._audit import AUDIT_SCORE, SWAP, content_suspect, drop_plan, flagged_rows, slugs_of
from stability_probe.rules._tables import Record, is_number, median, records
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "score": AUDIT_SCORE,
    "latent_score": Threshold(
        1.0, "audit score", "a row that does not survive decoding and encoding is not this tokenizer's text",
        "stability_probe/audit (D6, critical)",
    ),
    "noise": Threshold(
        0.95, "x ln V", "random ids cost a trained model ln V and more; the hardest real text stays far under it",
        "Chinese and French on models whose own text costs 3 nats: 5.6 to 5.7 of 10.8",
    ),
    "over_others": Threshold(
        3.0, "nats over the median of the other rows", "rare languages cost 2.7 nats more than a model's own text",
        "the same measurement; rows of one domain differ by under 1 nat",
    ),
    "token_spread": Threshold(
        3.0, "nats", "single tokens differ by this much, so a row with few targets must stand out by four standard "
        "errors: 12 nats with one target, 4.2 with eight, no more than above from 16 on",
        "a healthy tiny decoder: one target of 9.8 nats, the other rows' median at 6.1 of 6.5 = ln V",
    ),
}  # fmt: skip

PAGE = Page(
    title="Garbage tokens",
    claim="Some rows are not text: random bytes, base64 or hex blobs, text in a wrong encoding, or shuffled ids.",
    mechanism=(
        "Nothing in such a row can be predicted, so its loss is near the logarithm of the vocabulary, twice or three "
        "times the usual, and no update can lower it for any other row. The gradient is large, points nowhere useful, "
        "and drags rare rows of the embedding and head along. Enough of it in one batch moves the mean loss by whole "
        "nats and the optimizer's second moments with it."
    ),
    signature=(
        "A row loss near or above ln V with a high unigram entropy; the audit's findings on decoding, byte fall-back "
        "or separators; a gradient whose cosine to the other rows' is near zero."
    ),
    false_alarms=(
        "A rare language or a new domain is hard too, but it has structure: its loss stays well under ln V, and under "
        "the unigram entropy of enough of its text. Code with an embedded picture is mostly code. Where every row is "
        "affected and the baseline is fine, the tokenizer is the likelier cause."
    ),
    proof="The named rows are dropped from the batch: the excess goes with them.",
    remedies=(
        Remedy("Drop the named rows; find the document behind them and the filter that let it pass."),
        Remedy("Filter by encoding (round trip through the tokenizer, replacement characters) before tokenising.",
               "probe batch-audit --batch SHARDS --tokenizer TOKENIZER --out flagged.csv"),
        Remedy("Check byte order and integer width of the shards: shuffled bytes look like this as well."),
    ),
    references=(
        "Rae et al., Gopher: Scaling Language Models, 2021, appendix A.1 (quality filters)",
        "Penedo et al., The FineWeb Datasets, 2024, section 3",
    ),
)  # fmt: skip


def _unpredictable(m: Measurements, t: dict[str, Threshold]) -> list[Record]:
    """Rows that cost as much as noise, while the rest of the batch does not."""
    table = [row for row in records(m.rows) if is_number(row["loss"])]
    usual = median(row["loss"] for row in table)
    noise = t["noise"].value * math.log(m.vocab_size)
    if not usual < noise:
        return []

    def stands_out(row: Record) -> bool:
        error = t["token_spread"].value / math.sqrt(max(row["valid_targets"], 1))
        return bool(row["loss"] >= max(noise, usual + max(t["over_others"].value, 4 * error)))

    noisy = [row for row in table if stands_out(row)]
    return noisy if 2 * len(noisy) < len(table) else []


def _may_be_noise(m: Measurements, row: Record) -> bool:
    """Whether nothing shows the row to be text: what survives decoding and encoding is some, however dear."""
    return not m.tokenizer_known or bool(slugs_of(row) & {RULE.slug, "tokenizer-mismatch"})


def _is_predicted(m: Measurements, rows: list[Record]) -> bool:
    """Whether all rows are flagged and cost no more than the baseline: then the tokenizer is not the model's."""
    return len(rows) == len(m.rows) and m.baseline_loss is not None and m.loss <= m.baseline_loss


def _by_loss(m: Measurements, rows: list[Record], t: dict[str, Threshold]) -> Suspect:
    worst = max(rows, key=lambda row: row["loss"])
    usual = median(row["loss"] for row in records(m.rows))
    names = [int(row["row"]) for row in rows]
    return Suspect(
        cause=RULE.slug,
        summary=f"Row {int(worst['row'])} costs {worst['loss']:.2f} nats, as much as noise (ln V is "
        f"{math.log(m.vocab_size):.2f}); the batch's median row costs {usual:.2f}.",
        location=Location(rows=tuple(names)),
        evidence=(
            Evidence(
                f"loss of row {int(worst['row'])}", worst["loss"], "nats", usual, "median row of the batch",
                t["noise"].value * math.log(m.vocab_size), t["noise"].source,
            ),
        ),
        plans=drop_plan(m, rows),
        strength=worst["loss"] / math.log(m.vocab_size),
    )  # fmt: skip


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    rows = flagged_rows(m, RULE.slug, t["score"].value)
    if rows and _is_predicted(m, rows):
        return []
    if rows:
        latent = any(row["audit_score"] >= t["latent_score"].value for row in rows)
        suspect = content_suspect(m, RULE.slug, rows, "tokens that are not text", t["score"], latent)
        # Where every row is garbage nothing is left after dropping them: then only another batch can tell.
        return [suspect if suspect.plans or m.baseline_loss is None else replace(suspect, plans=(SWAP,))]
    named = [row for row in _unpredictable(m, t) if not row["flags"] and _may_be_noise(m, row)]
    return [_by_loss(m, named, t)] if named else []


def _garbage(score: float) -> dict[str, object]:
    return {
        "audit_score": score, "flags": ["garbage-tokens"], "spans": [(0, 128, "round trip", "")],
        "reason": "garbage-tokens: a third of the bigrams do not survive the round trip", "loss": 7.4, "grad_norm": 1.9,
    }  # fmt: skip


RULE = Rule(
    slug="garbage-tokens",
    order=302,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case("a row that does not survive decoding", {"rows": _cases.rows({1: _garbage(1.0)})}, True),
        Case("a row of noise that only the loss shows", {"rows": _cases.rows({1: {"loss": 7.8, "cosine": 0.0}})}, True),
        Case(
            "near miss: no row survives the tokenizer at hand, and the model predicts them as well as the baseline",
            {
                "rows": _cases.rows({row: _garbage(0.7) | {"loss": 2.4} for row in range(4)}),
                "loss": 2.4,
                "baseline_loss": 2.5,
            },
            False,
        ),
        Case(
            "no row survives the tokenizer, and they cost nats more than the baseline",
            {"rows": _cases.rows({row: _garbage(0.7) for row in range(4)}), "loss": 7.4, "baseline_loss": 2.5},
            True,
        ),
        Case("near miss: a rare language at 5.7 nats", {"rows": _cases.rows({1: {"loss": 5.7}})}, False),
        Case(
            "near miss: a row in a script that the model never saw, which the tokenizer gives back as it was",
            {"rows": _cases.rows({1: {"loss": 9.1}}), "tokenizer_known": True},
            False,
        ),
        Case(
            "near miss: one answer of two tokens, both improbable",
            {"rows": _cases.rows({1: {"loss": 8.3, "valid_targets": 2}})},
            False,
        ),
        Case(
            "near miss: the model is broken, and one row costs even more than the others",
            {
                "rows": _cases.rows(
                    {0: {"loss": 1900.0}, 1: {"loss": 2260.0}, 2: {"loss": 1880.0}, 3: {"loss": 1910.0}}
                ),
                "loss": 1980.0,
            },
            False,
        ),
        Case(
            "near miss: every row costs as much as noise",
            {"rows": _cases.rows({row: {"loss": 7.5} for row in range(4)}), "loss": 7.5},
            False,
        ),
    ),
)
