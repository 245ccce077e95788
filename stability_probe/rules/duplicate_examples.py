"""Rows of one batch that are copies of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Rule, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._audit import AUDIT_SCORE, content_suspect, flagged_rows
from stability_probe.schema import Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "score": AUDIT_SCORE,
    "latent_share": Threshold(
        0.05, "of the rows", "a twentieth of the rows is no chance of sampling: the shuffle or the removal of copies "
        "failed, whatever these rows cost",
        "k copies weigh k squared in the squared norm; Lee et al., Deduplicating Training Data Makes Language Models "
        "Better, 2022",
    ),
}  # fmt: skip

PAGE = Page(
    title="Duplicate examples",
    claim="Several rows of the batch are copies, or near copies, of one another.",
    mechanism=(
        "Gradients of different texts partly cancel; those of copies add up. k copies of a row weigh k times in the "
        "mean and k squared in its squared norm, so that a batch with many of them acts like a batch of one row at a "
        "much larger learning rate. If that row is hard, loss and gradient norm jump together; if it was seen often "
        "before, the loss dips and the model drifts towards reciting it."
    ),
    signature=(
        "Equal row digests, or half of the sampled 8-grams shared between two rows; nearly equal row losses; row "
        "gradients that all point the same way. All but the first copy are named."
    ),
    false_alarms=(
        "Licence headers, templates and chat prompts overlap in short stretches. Short rows coincide by chance. A "
        "batch that is deliberately repeated, for a test of overfitting, is as it should be."
    ),
    proof="All copies but the first are dropped from the batch: the excess goes with them.",
    remedies=(
        Remedy("Deduplicate the source, exactly and by near match, before mixing."),
        Remedy("Shuffle after cutting documents into rows, so that one document cannot fill a batch."),
        Remedy("Check that data-parallel ranks and restarted loaders do not read the same shard with the same seed."),
    ),
    references=(
        "Lee et al., Deduplicating Training Data Makes Language Models Better, 2021",
        "Hernandez et al., Scaling Laws and Interpretability of Learning from Repeated Data, 2022",
    ),
)


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    rows = flagged_rows(m, RULE.slug, t["score"].value)
    if not rows:
        return []
    what = f"{len(rows)} of {len(m.rows)} rows copy another row of the batch"
    latent = len(rows) >= t["latent_share"].value * len(m.rows)
    return [content_suspect(m, RULE.slug, rows, what, t["score"], latent)]


_COPY = {
    "audit_score": 0.8, "flags": ["duplicate-examples"], "spans": [(0, 128, "copy", "of row 0")],
    "reason": "duplicate-examples: a copy of row 0", "loss": 6.1, "grad_norm": 0.9, "cosine": 0.9,
}  # fmt: skip

RULE = Rule(
    slug="duplicate-examples",
    order=303,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case("two copies of row 0", {"rows": _cases.rows({1: _COPY, 3: _COPY})}, True),
        Case("one near copy", {"rows": _cases.rows({2: {**_COPY, "audit_score": 0.55}})}, True),
        Case(
            "near miss: two rows of one template",
            {"rows": _cases.rows({2: {"audit_score": 0.35, "reason": "duplicate-examples: a fifth is shared"}})},
            False,
        ),
        Case("near miss: rows with equal losses", {"rows": _cases.rows({1: {"loss": 3.3, "cosine": 0.9}})}, False),
    ),
)
