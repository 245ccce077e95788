"""Padding that carries labels, so the model is trained to predict it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Plan, Rule, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._audit import drop_plan, flagged_rows, row_evidence
from stability_probe.rules._tables import plural
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "score": Threshold(
        1.0, "audit score", "labels on padding are read off the batch itself: the audit calls them critical",
        "stability_probe/audit/labels.py (D13)",
    ),
}  # fmt: skip

PAGE = Page(
    title="Padding in the loss",
    claim="Padded positions carry labels, so part of the loss is about predicting padding.",
    mechanism=(
        "Padding is easy to predict from the second one on, so it pulls the mean loss down and makes it depend on "
        "how long the rows of a batch are: a batch of full rows then looks like a spike. Its gradients are all of one "
        "kind and push the embedding and the head towards one token. A model that meets a padded row for the first "
        "time late in training sees a long run that it never learned, with a high loss and one-sided gradients."
    ),
    signature=(
        "Labels that are not ignored at positions that the attention mask leaves out, or after the end of the row's "
        "last document. The spans are at row ends (or beginnings, with padding on the left)."
    ),
    false_alarms=(
        "Repeated tokens inside a document are data, not padding: they stand within the text and the mask keeps them. "
        "The first padding after a document may be its end mark and is then a right target. Where padding and end "
        "mark share one id, one trained end mark per document is right."
    ),
    proof="The targets on padding are ignored and the batch is replayed (or the padded rows are dropped).",
    remedies=(
        Remedy("Set the labels of padding to the ignored index in the collator.",
               "labels[attention_mask == 0] = -100"),
        Remedy("Give padding an id of its own, apart from the end mark, so that masking one does not mask the other."),
        Remedy("Pack documents instead of padding them."),
    ),
    references=(
        "PyTorch, torch.nn.CrossEntropyLoss: ignore_index",
        "transformers, DataCollatorForLanguageModeling: padding ids become -100 in the labels",
    ),
)  # fmt: skip


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    # A row that its mask leaves out from end to end has no text beside its padding: the mask is wrong, not the labels.
    masked = set(m.blind.rows) if m.blind is not None else set()
    flagged = [row for row in flagged_rows(m, RULE.slug, t["score"].value) if int(row["row"]) not in masked]
    spans = [
        (int(row["row"]), int(start), int(end))
        for row in flagged
        for start, end, kind, _ in row["spans"]
        if kind == "padding"
    ]
    if not spans:
        return []
    named = {row for row, _, _ in spans}
    rows = [row for row in flagged if int(row["row"]) in named]
    padded = sum(end - start for _, start, end in spans)
    # The labels of a span's padding count as targets; a share of one would leave nothing to replay.
    share = padded / m.valid_targets if m.valid_targets else 1.0
    plans = drop_plan(m, rows)
    if share < 1:
        plans = (Plan("ignore_targets", {"spans": spans}, f"{padded} targets on padding ignored"), *plans)
    first = spans[0]
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"{padded} padded positions in {plural(len(rows), 'row')} carry labels (row {first[0]}, positions "
            f"{first[1]}–{first[2]}): {min(share, 1):.0%} of the targets.",
            location=Location(rows=tuple(sorted(named)), positions=tuple(spans)),
            evidence=(
                Evidence("targets on padding", padded, f"of {m.valid_targets}", 0, "a batch with padding ignored"),
                *row_evidence(m, rows, t["score"]),
            ),
            plans=plans,
            strength=share,
            measures=("loss", "grad_norm"),
            latent=True,
        )
    ]


def _padded(kind: str, score: float = 1.0) -> dict[str, object]:
    return {
        "audit_score": score, "flags": ["padding-in-loss"],
        "spans": [(40, 128, kind, "labels not ignored")], "reason": "padding-in-loss: padded positions carry labels",
    }  # fmt: skip


RULE = Rule(
    slug="padding-in-loss",
    order=203,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case("one padded row is trained on", {"rows": _cases.rows({1: _padded("padding")})}, True),
        Case(
            "every row is padded and trained on",
            {"rows": _cases.rows({row: _padded("padding") for row in range(4)})},
            True,
        ),
        Case(
            "near miss: a row that its mask leaves out from end to end",
            {"rows": _cases.rows({1: _padded("padding")}), "blind": {"rows": (1,)}},
            False,
        ),
        Case(
            "near miss: the end mark is never a target, padding is ignored",
            {"rows": _cases.rows({1: _padded("eos")})},
            False,
        ),
        Case(
            "near miss: a run of one token inside the text",
            {
                "rows": _cases.rows(
                    {1: {"audit_score": 0.9, "flags": ["repeated-tokens"], "spans": [(40, 128, "period", "")]}}
                )
            },
            False,
        ),
    ),
)
