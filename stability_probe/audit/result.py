"""What the audit says about a row and about a batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

Severity = Literal["info", "medium", "high", "critical"]

# Bands of the row score: where a severity starts, and how far a strong finding may rise inside its band.
BANDS: dict[str, tuple[float, float]] = {
    "info": (0.01, 0.23),
    "medium": (0.25, 0.24),
    "high": (0.50, 0.49),
    "critical": (1.0, 0.0),
}
FLAGGING = ("high", "critical")
SKIP_SHARE = 0.10  # a batch is skipped only when more than a tenth of its rows is flagged; else drop the rows


@dataclass(frozen=True)
class Span:
    """Half-open `[start, end)` in the row as given, padding included."""

    start: int
    end: int
    kind: str
    detail: str


@dataclass(frozen=True)
class Note:
    """One thing that one detector saw in one row.

    Attributes:
        detector: "D0" … "D16", as in the legend.
        severity: only high and critical become flags.
        slug: the cause of the catalogue that this would be evidence for.
        strength: 0…1, how far past its threshold; places the score inside the severity's band.
    """

    detector: str
    severity: Severity
    slug: str
    detail: str
    strength: float = 0.0
    spans: tuple[Span, ...] = ()

    @property
    def score(self) -> float:
        low, width = BANDS[self.severity]
        return float(low + width * min(1.0, max(0.0, self.strength)))


@dataclass(frozen=True)
class RowAudit:
    """The verdict on one row.

    Attributes:
        row: index in the batch (or in the shard).
        tokens: content tokens, padding left out.
        score: maximum over the notes, never a mean: critical 1, high 0.5–0.99, medium 0.25–0.49, info below.
        flags: slugs of the high and critical notes, strongest first, each once.
        reason: one sentence; empty where there is nothing to say.
        unigram_entropy_bits: of the content tokens.
        duplicate_ngram_fraction: share of the content's 4-grams that repeat an earlier 4-gram.
        reference_score: the published anomaly score of the row as given, for comparison only.
        p_value: smallest conformal p-value over the features (Bonferroni-corrected); None without a baseline.
    """

    row: int
    tokens: int
    score: float
    flags: tuple[str, ...]
    notes: tuple[Note, ...]
    spans: tuple[Span, ...]
    reason: str
    unigram_entropy_bits: float
    duplicate_ngram_fraction: float
    reference_score: float
    p_value: float | None = None
    previews: tuple[str, ...] = ()


@dataclass(frozen=True)
class AuditResult:
    """The verdict on a batch.

    Attributes:
        skip: more than a tenth of the rows is flagged, or an id or label check fails for the whole batch.
        drop_rows: rows to mask or drop where the batch is kept.
    """

    rows: tuple[RowAudit, ...]
    skip: bool
    reason: str
    notes: tuple[str, ...] = ()

    @property
    def drop_rows(self) -> tuple[int, ...]:
        return tuple(row.row for row in self.rows if row.flags)


def judged(row: RowAudit, notes: Iterable[Note]) -> RowAudit:
    """The row with its score, flags, spans and sentence taken from `notes`."""
    ordered = tuple(sorted(notes, key=lambda note: -note.score))
    if not ordered:
        return row
    flags = dict.fromkeys(note.slug for note in ordered if note.severity in FLAGGING)
    spans = sorted({span for note in ordered if note.severity != "info" for span in note.spans}, key=_by_place)
    worst = ordered[0]
    return replace(
        row,
        score=worst.score,
        flags=tuple(flags),
        notes=ordered,
        spans=tuple(spans),
        reason=f"{worst.slug}: {worst.detail}" if worst.severity != "info" else "",
    )


def _by_place(span: Span) -> tuple[Any, ...]:
    return (span.start, span.end, span.kind)


def batch_verdict(rows: tuple[RowAudit, ...], whole_batch: str = "") -> AuditResult:
    """Skip, or name the rows to drop. `whole_batch` is the sentence of a fault that every row shares."""
    flagged = [row for row in rows if row.flags]
    if whole_batch:
        return AuditResult(rows, True, f"skip the batch: {whole_batch}")
    if not flagged:
        return AuditResult(rows, False, "no row is flagged")
    names = ", ".join(str(row.row) for row in flagged[:8]) + (", …" if len(flagged) > 8 else "")
    share = f"{len(flagged)} of {len(rows)} rows flagged (row {names})"
    if len(flagged) > SKIP_SHARE * len(rows):
        return AuditResult(rows, True, f"skip the batch: {share}, more than a tenth")
    return AuditResult(rows, False, f"drop or mask the named rows, keep the batch: {share}")
