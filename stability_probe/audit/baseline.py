"""Healthy rows to rank against: conformal p-values, and the surprisal of a row under their unigrams (D9)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stability_probe.audit.features import Features, measure_rows
from stability_probe.audit.prepare import Content, Ints, as_numpy, content, kept_BT
from stability_probe.audit.result import Note

# Feature, and whether large values are the strange ones. Entropy is strange at both ends.
_RANKED = (
    ("entropy_bits", False),
    ("entropy_bits", True),
    ("duplicate_share", True),
    ("top1", True),
    ("poorest", False),
)
_FEATURE_OF = {"D3": ("poorest", False), "D4": ("template", True), "D5": ("top1", True), "D10": ("entropy_bits", True)}
FEWEST_ROWS = 20  # of a length bin; with fewer no p-value under 0.05 is possible
USUAL = 0.01  # a finding that one healthy row in a hundred shares is not worth a flag
SURPRISAL_TOKENS = 1_000_000  # unigram counts of a smaller baseline are too rough for rare ids
SURPRISAL_BITS = 4.0  # above the baseline's p99.9
_P999 = 99.9


@dataclass(frozen=True)
class Baseline:
    """Features of healthy rows by length bin (the power of two), and the counts of their ids.

    Attributes:
        bins: bin → feature → sorted values.
        id_counts: (largest id + 1,) counts over all rows.
        surprisal_limit: p99.9 of the rows' own mean surprisal plus 4 bits; NaN under a million tokens.
    """

    bins: dict[int, dict[str, NDArray[np.float64]]]
    id_counts: NDArray[np.int64]
    surprisal_limit: float

    @staticmethod
    def of(rows: list[tuple[Any, Any]], pad_id: int | None = None) -> Baseline:
        """From (ids, mask or None) matrices of healthy rows."""
        parts: list[Features] = []
        contents: list[Content] = []
        counts = np.zeros(0, np.int64)
        for ids_BT, mask_BT in rows:
            ids: Ints = as_numpy(ids_BT, "the baseline")
            mask = None if mask_BT is None else as_numpy(mask_BT, "the baseline's mask")
            one = content(ids, kept_BT(ids, mask, None, pad_id))
            own = np.bincount(one.ids_BW[one.ids_BW >= 0])
            counts = np.pad(counts, (0, max(0, len(own) - len(counts))))
            counts[: len(own)] += own
            parts.append(measure_rows(one).features)
            contents.append(one)
        features = Features.joined(parts)
        bin_of = _bins(features.tokens)
        names = {name for name, _ in (*_RANKED, *_FEATURE_OF.values())}
        bins = {
            int(which): {name: np.sort(getattr(features, name)[bin_of == which]) for name in names}
            for which in np.unique(bin_of)
        }
        limit = float("nan")
        if counts.sum() >= SURPRISAL_TOKENS:
            own_bits = np.concatenate([_surprisal_bits(counts, one) for one in contents])
            limit = float(np.percentile(own_bits, _P999)) + SURPRISAL_BITS
        return Baseline(bins, counts, limit)

    def judge(self, rows: Content, features: Features, notes: dict[int, list[Note]]) -> NDArray[np.float64]:
        """Add D9, take back what is usual in the baseline, and return a p-value per row (NaN where none can be)."""
        bin_of = _bins(features.tokens)
        p_values = np.full(len(features.tokens), np.nan)
        for row in range(len(features.tokens)):
            healthy = self._like(int(bin_of[row]))
            if healthy is None:
                continue
            ps = [_p_value(healthy[name], getattr(features, name)[row], large) for name, large in _RANKED]
            p_values[row] = min(1.0, len(ps) * min(ps))
            notes[row] = [_calibrated(note, healthy, features, row) for note in notes[row]]
        if not np.isnan(self.surprisal_limit):
            bits = _surprisal_bits(self.id_counts, rows)
            for row in np.flatnonzero((bits > self.surprisal_limit) & (features.tokens >= 64)).tolist():
                over = bits[row] - self.surprisal_limit
                detail = (
                    f"{bits[row]:.1f} bits a token under the baseline's unigrams (limit {self.surprisal_limit:.1f})"
                )
                notes[row].append(Note("D9", "medium", "data-shift", detail, over / 4))
        return p_values

    def _like(self, wanted: int) -> dict[str, NDArray[np.float64]] | None:
        """The bin of this length, or the nearest one with enough rows."""
        enough = [which for which, own in self.bins.items() if len(own["top1"]) >= FEWEST_ROWS]
        return self.bins[min(enough, key=lambda which: abs(which - wanted))] if enough else None


def _bins(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.log2(np.maximum(lengths, 1)).astype(np.int64)


def _p_value(healthy: NDArray[np.float64], value: float, large: bool) -> float:
    """Conformal: (1 + healthy rows at least as strange) / (healthy rows + 1)."""
    n = len(healthy)
    strange = n - np.searchsorted(healthy, value, "left") if large else np.searchsorted(healthy, value, "right")
    return float((1 + strange) / (n + 1))


def _calibrated(note: Note, healthy: dict[str, NDArray[np.float64]], features: Features, row: int) -> Note:
    if note.detector not in _FEATURE_OF or note.severity == "info":
        return note
    name, large = _FEATURE_OF[note.detector]
    value = getattr(features, name)[row]
    if note.detector == "D4":  # its threshold is the larger of 0.80 and the baseline's p99.9
        usual = value <= np.percentile(healthy[name], _P999)
    else:
        usual = _p_value(healthy[name], value, large) > max(USUAL, 1.5 / (len(healthy[name]) + 1))
    return replace(note, severity="info", detail=f"{note.detail}; usual in the baseline") if usual else note


def _surprisal_bits(counts: NDArray[np.int64], rows: Content) -> NDArray[np.float64]:
    """Mean −log2 q(x) per row, q with one added to every count and one unseen id."""
    bits = np.log2(counts.sum() + len(counts) + 1) - np.log2(np.append(counts, 0) + 1.0)
    ids = np.where((rows.ids_BW < 0) | (rows.ids_BW >= len(counts)), len(counts), rows.ids_BW)
    inside = np.arange(ids.shape[1]) < rows.lengths_B[:, None]
    return np.where(inside, bits[ids], 0.0).sum(axis=1) / np.maximum(rows.lengths_B, 1)
