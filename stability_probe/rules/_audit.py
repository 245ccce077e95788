"""Suspects that the token audit points to: rows and spans with a slug, joined to what the rows cost."""

from __future__ import annotations

from dataclasses import dataclass
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
SWAP = Plan("swap_baseline", {}, "the baseline batch in place of this one")
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


def row_evidence(
    m: Measurements, rows: list[Record], limit: Threshold, cost: SpanCost | None = None
) -> tuple[Evidence, ...]:
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
    if cost is not None:
        span = f"positions {cost.start}–{cost.end - 1} of {where}"
        other = "baseline" if m.baseline_loss is not None else "median of the other rows"
        found.append(Evidence(f"loss in {span}", cost.loss, "nats", cost.usual, other))
        if is_number(cost.excess_share):
            found.append(
                Evidence(f"share of the excess loss in {span}", cost.excess_share, "", cost.target_share, "even")
            )
        if cost.head is not None:
            layer, head, peak, usual = cost.head
            what = f"max logit of layer {layer} head {head}, inside the span"
            found.append(Evidence(what, peak, "", usual, "baseline"))
    if worst["reason"]:
        found.append(Evidence(f"audit of {where}", worst["reason"]))
    return tuple(found)


# A head is named beside a span where the span takes it this far above its peak on the baseline; healthy source, tables
# and Chinese reach 1.9 times their peak on documentation. Without a baseline it is
# not: heads of one healthy model differ by more (python benchmarks/healthy_ranges.py, attention logits).
HEAD_RISE = 2.0
# Of the usual loss. OPT's logbook: a loss that falls far below what text allows is a symptom too.
UNREASONABLY_LOW = 0.1


@dataclass(frozen=True)
class SpanCost:
    """What the worst row's span costs the model.

    Attributes:
        loss, usual: nats per target inside, and of the baseline, or of the median other row without one.
        excess_share: of the batch's loss above `usual`, the part inside the span; NaN where there is no excess.
        target_share: the span's share of the batch's targets.
        head: (layer, head, peak logit, usual peak) of the head that it drives highest; None where it drives none.
    """

    start: int
    end: int
    loss: float
    usual: float
    excess_share: float
    target_share: float
    head: tuple[int, int, float, float] | None

    def phrases(self, grad_share: float) -> list[str]:
        """What it costs, in words; `grad_share` is the row's share of the squared gradient norms."""
        found = []
        if self.excess_share >= 0.01:
            found.append(f"{100 * self.excess_share:.0f} % of the excess loss")
        if self.loss < UNREASONABLY_LOW * self.usual:
            found.append(f"{self.loss:.2g} nats inside, unreasonably low: it is copied, not predicted")
        if found and is_number(grad_share):
            found.append(f"{100 * grad_share:.0f} % of the squared gradient norm")
        if self.head is not None:
            found.append(f"drives layer {self.head[0]} head {self.head[1]}")
        return found


def span_cost(m: Measurements, worst: Record, slug: str) -> SpanCost | None:
    """The longest span of `slug` in a row, joined to losses and heads; None without a span, loss or reference."""
    own = [
        (int(end) - int(start), int(start), int(end), float(loss), int(targets))
        for (start, end, kind, _), (loss, targets) in zip(worst["spans"], worst["span_losses"], strict=True)
        if is_evidence(kind, slug) and targets and is_number(loss)
    ]
    others = [row["loss"] for row in records(m.rows) if row["row"] != worst["row"]]
    usual = m.baseline_loss if m.baseline_loss is not None else median(others)
    if not own or not is_number(usual):
        return None
    _, start, end, loss, targets = max(own)
    excess = (m.loss - usual) * m.valid_targets
    share = min(max(loss - usual, 0.0) * targets / excess, 1.0) if excess > 0 else float("nan")
    return SpanCost(start, end, loss, usual, share, targets / max(m.valid_targets, 1), _driven(m, worst, start, end))


def _driven(m: Measurements, worst: Record, start: int, end: int) -> tuple[int, int, float, float] | None:
    """The head whose peak lies on a query of the span, most above its usual one."""
    best: tuple[float, tuple[int, int, float, float]] | None = None
    for head in records(m.heads):
        if int(head["row"]) != int(worst["row"]) or not start <= int(head["query"]) < end:
            continue
        peak, usual = float(head["max_logit"]), float(head["baseline_max_logit"])
        ratio = times(peak, usual)
        if ratio >= HEAD_RISE and (best is None or ratio > best[0]):
            best = ratio, (int(head["layer"]), int(head["head"]), peak, usual)
    return best[1] if best else None


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
    cost = span_cost(m, worst, slug)
    costs = [] if cost is None else cost.phrases(squared_grad_share(m, [worst]))
    joined = f": {', '.join(costs)}" if costs else ""
    more = f" and {plural(len(rows) - 1, 'more row')}" if len(rows) > 1 else ""
    return Suspect(
        cause=slug,
        summary=f"Row {int(worst['row'])}{place}{more}: {what}{f' ({detail[:120]})' if detail else ''}{joined}.",
        location=Location(rows=tuple(int(row["row"]) for row in rows), positions=spans),
        evidence=row_evidence(m, rows, limit, cost),
        plans=drop_plan(m, rows),
        strength=max(worst["audit_score"], 0.01),
        latent=latent,
    )
