"""Suspects that the token audit points to: rows and spans with a slug, joined to what the rows cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stability_probe.judge import Plan, Suspect, Threshold
from stability_probe.rules._tables import Record, finite, is_number, median, plural, records, times
from stability_probe.schema import Evidence, Location

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

# What a span's kind is evidence for; a row can have several findings. A kind that is not listed counts for any.
KINDS = {
    "labels": ("label-misalignment",),
    "padding": ("padding-in-loss",),
    "eos": ("padding-in-loss",),
    "round trip": ("garbage-tokens", "tokenizer-mismatch"),
    "text": ("garbage-tokens", "boilerplate"),
    "few ids": ("repeated-tokens", "garbage-tokens"),
    "separators": ("repeated-tokens", "garbage-tokens"),
    "digits": ("numeric-runs",),
    "template": ("boilerplate",),
    "copy": ("duplicate-examples",),
    "near copy": ("duplicate-examples",),
    "id": ("token-id-out-of-range",),
}
AUDIT_SCORE = Threshold(
    0.5,
    "audit score",
    "half is where the audit's high findings start; below are habits of healthy text",
    "stability_probe/audit/result.py (bands); benchmarks of the audit: no healthy class reaches it",
)
MEDIUM_SCORE = Threshold(
    0.25,
    "audit score",
    "a medium finding alone is no fault; here the replay without the rows decides",
    "stability_probe/audit/result.py (bands)",
)


def slugs_of(row: Record) -> set[str]:
    """Slugs that the audit gave the row: its flags, and the subject of its one-sentence reason (medium and up)."""
    return {*row["flags"], row["reason"].partition(":")[0]} - {""}


def flagged_rows(m: Measurements, slug: str, least_score: float) -> list[Record]:
    return [row for row in records(m.rows) if slug in slugs_of(row) and row["audit_score"] >= least_score]


def is_evidence(kind: str, slug: str) -> bool:
    if kind.startswith("period"):
        return slug == "repeated-tokens"
    return slug in KINDS.get(kind, (slug,))


def spans_of(rows: list[Record], slug: str) -> tuple[tuple[int, int, int], ...]:
    """(row, start, end) of the stretches that belong to `slug`; exact repeats in place of what lies around them."""
    found = []
    for row in rows:
        own = [(kind, int(start), int(end)) for start, end, kind, _ in row["spans"] if is_evidence(kind, slug)]
        exact = [span for span in own if span[0].startswith("period")]
        found += [(int(row["row"]), start, end) for _, start, end in exact or own]
    return tuple(found)


def covered_share(row: Record, slug: str) -> float:
    """Share of the row's tokens inside its spans of `slug`, overlaps counted once."""
    inside = {place for _, start, end in spans_of([row], slug) for place in range(start, end)}
    return len(inside) / row["tokens"] if row["tokens"] else 0.0


def squared_grad_share(m: Measurements, rows: list[Record]) -> float:
    """Share of the sum of the rows' squared gradient norms; NaN where none is known."""
    total = sum(norm**2 for norm in finite(row["grad_norm"] for row in records(m.rows)))
    return times(sum(norm**2 for norm in finite(row["grad_norm"] for row in rows)), total) if total else float("nan")


def row_evidence(m: Measurements, rows: list[Record], limit: Threshold) -> tuple[Evidence, ...]:
    """What the audit and the replay measured on the worst of `rows`, beside the other rows of the batch."""
    worst = max(rows, key=lambda row: row["audit_score"])
    named = {int(row["row"]) for row in rows}
    others = [row for row in records(m.rows) if int(row["row"]) not in named]
    where = f"row {int(worst['row'])}"
    found = [
        Evidence(
            f"audit score of {where}", worst["audit_score"], "", median((row["audit_score"] for row in others), 0.0),
            "median of the other rows", limit.value, limit.source,
        ),
    ]  # fmt: skip
    for column, what, unit in (("loss", "loss", "nats"), ("grad_norm", "gradient norm", "")):
        if is_number(worst[column]):
            usual = median(row[column] for row in others)
            reference = (usual, "median of the other rows") if is_number(usual) else (None, "")
            found.append(Evidence(f"{what} of {where}", worst[column], unit, *reference))
    share = squared_grad_share(m, rows)
    if is_number(share):
        found.append(Evidence("share of the rows' squared gradient norms", share, "", len(rows) / len(m.rows), "even"))
    if worst["reason"]:
        found.append(Evidence(f"audit of {where}", worst["reason"]))
    return tuple(found)


def drop_plan(m: Measurements, rows: list[Record]) -> tuple[Plan, ...]:
    """Drop the rows; where nothing would be left, the baseline batch stands in for the rest."""
    names = [int(row["row"]) for row in rows]
    listed = ", ".join(map(str, names[:8])) + (", …" if len(names) > 8 else "")
    change = f"{plural(len(names), 'row')} left out ({listed})"
    return (Plan("drop_rows", {"rows": names}, change),)


def content_suspect(
    m: Measurements, slug: str, rows: list[Record], what: str, limit: Threshold, latent: bool = False
) -> Suspect:
    """One suspect for all rows whose content the audit gave `slug`."""
    worst = max(rows, key=lambda row: (row["audit_score"], row["grad_norm"] if is_number(row["grad_norm"]) else 0.0))
    spans = spans_of(rows, slug)
    inside = [span for span in spans if span[0] == int(worst["row"])]
    place = f", positions {inside[0][1]}–{inside[0][2] - 1}" if inside else ""
    detail = worst["reason"].partition(": ")[2].rstrip(".") if worst["reason"].startswith(slug) else ""
    more = f" and {plural(len(rows) - 1, 'more row')}" if len(rows) > 1 else ""
    return Suspect(
        cause=slug,
        summary=f"Row {int(worst['row'])}{place}{more}: {what}{f' ({detail[:120]})' if detail else ''}.",
        location=Location(rows=tuple(int(row["row"]) for row in rows), positions=spans),
        evidence=row_evidence(m, rows, limit),
        plans=drop_plan(m, rows),
        strength=max(worst["audit_score"], 0.01),
        latent=latent,
    )
