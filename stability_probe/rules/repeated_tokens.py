"""One token, or a short n-gram, repeated many times over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Rule, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._audit import AUDIT_SCORE, content_suspect, covered_share, flagged_rows
from stability_probe.rules._tables import Record
from stability_probe.schema import Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "score": AUDIT_SCORE,
    "latent_score": Threshold(
        1.0, "audit score", "a hundred repetitions of one n-gram: no text that people wrote has them",
        "stability_probe/audit (D1, critical); Soldaini et al., Dolma, 2024: the filter of its version 1.6 used 100",
    ),
    "latent_share": Threshold(
        0.10, "of the row", "a tenth of a row is where repetition starts to rule the row's gradient",
        "stability_probe/audit (D2): a tenth of the row",
    ),
}  # fmt: skip

PAGE = Page(
    title="Repeated tokens",
    claim="Some rows hold one token, or a short n-gram, repeated dozens to thousands of times.",
    mechanism=(
        "Every position of the run asks for nearly the same update: gradients that cancel in ordinary text add up, "
        "and one direction of the embedding, of the head and of the attention that copies gets all of it. A model in "
        "training may predict the run badly at its start and almost perfectly later, so the mean loss can even look "
        "low while the gradient is large and one-sided. Adam, whose second moment has not seen such a gradient, "
        "turns it into an oversized step."
    ),
    signature=(
        "The audit names row, span and period. The rows' share of the squared gradient norm is far above their share "
        "of the batch, and their gradient's cosine to the rest is low; the loss inside the run may be high or low."
    ),
    false_alarms=(
        "Verse, tables, code and logs repeat in short, interrupted runs. A separator line of dashes is a handful of "
        "tokens. A heavy row that explains nothing of the excess is only a candidate: the same batch from an earlier "
        "state of PaLM did not spike, so data alone is seldom the whole cause; look at the state as well."
    ),
    proof="The named rows are dropped from the batch: the excess goes with them.",
    remedies=(
        Remedy("Mask or drop the named rows and go on; roll back to before the step if the loss does not recover."),
        Remedy("Filter n-grams of period up to 13 that repeat 32 times or more in the loader.",
               "probe batch-audit --batch SHARDS --out flagged.csv"),
        Remedy("Clip gradients by global norm, so that one row cannot size the step."),
    ),
    references=(
        "OLMo team, 2 OLMo 2 Furious, 2024, section 3.1: repeated n-grams and loss spikes",
        "Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022, section 5.1",
        "Hernandez et al., Scaling Laws and Interpretability of Learning from Repeated Data, 2022",
    ),
)  # fmt: skip


def _heavy(row: Record, t: dict[str, Threshold]) -> bool:
    return row["audit_score"] >= t["latent_score"].value or covered_share(row, RULE.slug) >= t["latent_share"].value


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    # Where the mask leaves out a row's text, what repeats is the padding that it keeps: the mask is the matter.
    masked = set(m.blind.rows) if m.blind is not None else set()
    rows = [row for row in flagged_rows(m, RULE.slug, t["score"].value) if int(row["row"]) not in masked]
    if not rows:
        return []
    latent = any(_heavy(row, t) for row in rows)
    return [content_suspect(m, RULE.slug, rows, "repeated tokens", t["score"], latent)]


def _repeats(score: float, start: int, end: int) -> dict[str, object]:
    return {
        "audit_score": score, "flags": ["repeated-tokens"], "spans": [(start, end, "period", "period 2")],
        "reason": "repeated-tokens: a 2-gram 44 times", "loss": 5.9, "grad_norm": 2.6, "cosine": 0.05,
    }  # fmt: skip


RULE = Rule(
    slug="repeated-tokens",
    order=301,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case("a two-token n-gram over most of one row", {"rows": _cases.rows({3: _repeats(0.7, 20, 110)})}, True),
        Case("a single-token row", {"rows": _cases.rows({0: _repeats(1.0, 0, 128)})}, True),
        Case(
            "near miss: a row whose mask keeps the padding and hides the text",
            {"rows": _cases.rows({3: _repeats(1.0, 60, 128)}), "blind": {"rows": (3,)}},
            False,
        ),
        Case(
            "near miss: a table, a medium finding",
            {"rows": _cases.rows({1: {**_repeats(0.4, 20, 60), "flags": []}})},
            False,
        ),
        Case(
            "near miss: a hard row, nothing repeats", {"rows": _cases.rows({1: {"loss": 6.2, "grad_norm": 1.1}})}, False
        ),
    ),
)
