"""Rows, or a whole batch, without a single target."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Rule, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._audit import drop_plan
from stability_probe.rules._tables import plural, records
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "targets": Threshold(
        0, "valid targets", "a mean over nothing is 0/0",
        "PyTorch, torch.nn.CrossEntropyLoss: the mean is divided by the number of non-ignored targets",
    ),
    "shortest_row": Threshold(
        2, "tokens", "a row of one token has no next token to predict, by construction",
        "next-token targets of a row of T tokens are T - 1",
    ),
}  # fmt: skip

PAGE = Page(
    title="No valid labels",
    claim="Every label of a row, or of the whole batch, is ignored: there is nothing to average.",
    mechanism=(
        "Cross-entropy with mean reduction divides by the number of targets that are not ignored. With none left it "
        "computes 0/0, and the NaN goes into every gradient. It happens when truncation cuts a chat before its first "
        "answer, when a filter masks all tokens of a document, or when the last batch is filled with padding rows. "
        "Frameworks that average per row or per micro-batch are hit by one such row; some log the NaN as 0.0."
    ),
    signature=(
        "A count of valid targets of zero for a row with tokens in it. The logits are finite; only the loss is not."
    ),
    false_alarms=(
        "Rows whose queries see no key give NaN as well, but there the logits are NaN too. A row of one token has no "
        "target by construction. Where the loss is divided by the global count of targets, such a row costs nothing "
        "beyond its computation: it is then a waste, and a sign of a fault in the data pipeline."
    ),
    proof="None is needed: the count is zero. The other rows' loss is what remains without it.",
    remedies=(
        Remedy("Skip rows without targets in the loader; fill the last batch with real rows."),
        Remedy("Divide the summed loss by the larger of one and the global count of targets.",
               "loss = F.cross_entropy(logits, targets, reduction='sum') / max(count, 1)"),
        Remedy("Truncate chats from the left, so that an answer remains."),
    ),
    references=(
        "PyTorch, torch.nn.CrossEntropyLoss: ignore_index and reduction='mean'",
        "transformers, Trainer: logging_nan_inf_filter hides a NaN in the logged loss",
    ),
)  # fmt: skip


def _logged_nan(m: Measurements) -> bool:
    return m.log is not None and m.log.logged_loss is not None and not math.isfinite(m.log.logged_loss)


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    table = records(m.rows)
    # Targets outside the vocabulary were taken out before the replay: such rows belong to token-id-out-of-range.
    taken_out = {row for row, _, _ in m.bad_ids}
    # A row of nothing but padding has no tokens left; a row of one token never had a target.
    empty = [
        row for row in table
        if row["valid_targets"] <= t["targets"].value
        and int(row["row"]) not in taken_out
        and (row["tokens"] == 0 or row["tokens"] >= t["shortest_row"].value)
    ]  # fmt: skip
    if not empty:
        return []
    names = [int(row["row"]) for row in empty]
    padding = sum(row["tokens"] == 0 for row in empty)
    whole = len(empty) == len(table)
    listed = ", ".join(map(str, names[:8])) + (", …" if len(names) > 8 else "")
    who = "the batch" if whole else f"{plural(len(names), 'row')} ({listed})"
    kind = "; all of it is padding" if padding == len(empty) else ""
    # Rows of padding that fill up a last batch do no harm where the loss is divided by the global count.
    filler = padding == len(empty) and not whole and not _logged_nan(m)
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"No label is valid in {who}{kind}: the mean loss there is 0/0.",
            location=Location(
                rows=tuple(names),
                positions=tuple((int(row["row"]), 0, int(row["tokens"])) for row in empty if row["tokens"]),
            ),
            evidence=(
                Evidence(
                    f"valid targets in row {names[0]}", int(empty[0]["valid_targets"]), "targets",
                    max((int(row["valid_targets"]) for row in table), default=0), "fullest row of the batch",
                    t["targets"].value, t["targets"].source,
                ),
                Evidence("rows without a target", len(empty), f"of {len(table)}"),
            ),
            # The replay divides by the global count, so it cannot contradict a NaN that the run has logged.
            plans=() if _logged_nan(m) else drop_plan(m, empty),
            strength=float(len(empty)),
            measures=("nonfinite", "loss"),
            decisive=not filler,
            latent=filler,
        )
    ]  # fmt: skip


RULE = Rule(
    slug="no-valid-labels",
    order=201,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case(
            "one row of four has only ignored labels",
            {"rows": _cases.rows({2: {"valid_targets": 0, "loss": _cases.NAN}})},
            True,
        ),
        Case(
            "the whole batch is ignored",
            {
                "rows": _cases.rows({row: {"valid_targets": 0, "loss": _cases.NAN} for row in range(4)}),
                "loss": _cases.NAN, "loss_nonfinite": True, "valid_targets": 0,
            },
            True,
        ),
        Case(
            "a row of nothing but padding",
            {"rows": _cases.rows({3: {"valid_targets": 0, "tokens": 0, "loss": _cases.NAN}})},
            True,
        ),
        Case(
            "near miss: a row without targets because its ids are outside the vocabulary",
            {"rows": _cases.rows({2: {"valid_targets": 0, "loss": _cases.NAN}}), "bad_ids": [(2, 0, 65000)]},
            False,
        ),
        Case("near miss: a single target is left", {"rows": _cases.rows({2: {"valid_targets": 1}})}, False),
        Case(
            "near miss: a row of one token",
            {"rows": _cases.rows({2: {"valid_targets": 0, "tokens": 1, "loss": _cases.NAN}})},
            False,
        ),
        Case("near miss: the loss is NaN although every row has targets", {"loss": _cases.NAN, "loss_nonfinite": True},
             False),
    ),
)  # fmt: skip
