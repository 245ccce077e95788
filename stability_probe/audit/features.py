"""The numbers of every row, measured in chunks that stay in cache."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from stability_probe.audit import counts
from stability_probe.audit.copies import Prints, prints_of
from stability_probe.audit.periods import Run, find_runs
from stability_probe.audit.prepare import Content
from stability_probe.audit.shapes import Few, few_ids
from stability_probe.audit.shapes import template as measure_template

# Large enough that the calls themselves do not count, small enough for a shared cache: 23.8, 27.3, 28.2 and 27.6 M
# tokens/s at 32, 64, 128 and 256 thousand tokens (the audit of benchmarks/audit_speed.py, this constant changed).
CHUNK_TOKENS = 131072
POOR_DISTINCT = 7  # of 64: 0.12 rounded down
TEMPLATE_SHORTEST = 512
# A repeated 16-gram holds 13 repeated 4-grams. So D4 cannot hold below these shares of 4-grams that occur twice or more
# (0.8 · 13/16), or that repeat an earlier one where each occurs eight times (0.6 · 13/16 · 7/8).
TEMPLATE_GATE, STAMP_GATE = 0.65, 0.42
# Four repetitions over a tenth of the row make three quarters of a tenth of its 4-grams repeats; below, D2 cannot hold.
LONG_GATE = 0.07
# Slot-filled templates, log lines and navigation lists spread by 0.00–0.03 of their length; the font table of a real
# package, the most template-like healthy text that was found, by 0.18 (benchmarks/audit_recall.py --templates).
STAMP_SPREAD = 0.15


@dataclass(frozen=True)
class Features:
    """One number per row of B, over its content.

    Attributes:
        tokens: content length.
        duplicate_share: share of 4-grams that repeat an earlier one.
        poorest: fewest distinct ids in a 64-token window, as a share; 1 where a row has no window.
        template, stamped: share covered by 16-grams that occur at least twice, and at least eight times at even
            distances; 0 where the share of repeated 4-grams says that it cannot reach the threshold.
    """

    tokens: NDArray[np.int64]
    entropy_bits: NDArray[np.float64]
    distinct: NDArray[np.int64]
    top1: NDArray[np.float64]
    top2: NDArray[np.float64]
    duplicate_share: NDArray[np.float64]
    poorest: NDArray[np.float64]
    template: NDArray[np.float64]
    stamped: NDArray[np.float64]
    reference: NDArray[np.float64]

    @staticmethod
    def joined(parts: list[Features]) -> Features:
        return Features(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Features)))


@dataclass(frozen=True)
class Measured:
    """Features of all rows, and by row index the runs and poor windows that some have; sampled n-grams for D12."""

    features: Features
    runs: dict[int, list[Run]]
    few: dict[int, Few]
    prints: Prints


def measure_rows(rows: Content, breaks_BW: NDArray[np.bool_] | None = None, print_gram: int = 8) -> Measured:
    """Measure every row; nothing that is a run or a template crosses a position where `breaks_BW` is True (EOS).

    `print_gram` is the length of the n-grams that are sampled to find near copies: a power of two from 8 on.
    """
    B, W = rows.ids_BW.shape
    size = max(1, CHUNK_TOKENS // max(W, 1))
    runs: dict[int, list[Run]] = {}
    few: dict[int, Few] = {}
    prints: list[Prints] = []
    features = []
    for low in range(0, max(B, 1), size):
        breaks = None if breaks_BW is None else breaks_BW[low : low + size]
        part = _measure_chunk(rows.ids_BW[low : low + size], rows.lengths_B[low : low + size], breaks, print_gram)
        features.append(part.features)
        runs |= {row + low: own for row, own in part.runs.items()}
        few |= {row + low: own for row, own in part.few.items()}
        prints.append(Prints(part.prints.rows + low, part.prints.marks))
    return Measured(Features.joined(features), runs, few, Prints.joined(prints))


def _measure_chunk(
    ids_BW: NDArray[np.int32], lengths_B: NDArray[np.int64], breaks_BW: NDArray[np.bool_] | None, print_gram: int
) -> Measured:
    B, W = ids_BW.shape
    words = counts.unigrams(ids_BW, lengths_B)
    repeated = recurring = np.zeros(B, np.int64)
    last_repeats = np.zeros(B, np.bool_)
    runs: dict[int, list[Run]] = {}
    prints: list[Prints] = []
    if W > 4:
        hashes = counts.hash_4grams(ids_BW)
        repeated, recurring = counts.repeats(hashes)
        last_repeats = (hashes[:, :-1] == hashes[:, -1:]).any(axis=1)
        runs = find_runs(ids_BW, hashes, breaks_BW, repeated >= LONG_GATE * (lengths_B - 3))
        prints = [prints_of(hashes, print_gram, lengths_B)]
    windows, stride = counts.poorest_window(ids_BW, lengths_B)
    poor = windows <= POOR_DISTINCT
    few = {
        int(row): few_ids(ids_BW[row, : lengths_B[row]], poor[row], stride)
        for row in np.flatnonzero(poor.any(axis=1) & (lengths_B >= counts.WINDOW))
    }
    template, stamped = np.zeros(B), np.zeros(B)
    duplicate_share = repeated / np.maximum(lengths_B - 3, 1)
    could_be = (duplicate_share >= STAMP_GATE) | (recurring >= TEMPLATE_GATE * (lengths_B - 3))
    for row in np.flatnonzero(could_be & (lengths_B >= TEMPLATE_SHORTEST)):
        n = lengths_B[row]
        own_breaks = None if breaks_BW is None else breaks_BW[row, :n]
        seen = measure_template(ids_BW[row, :n], own_breaks)
        template[row], stamped[row] = seen.twice, seen.stamped if seen.spread <= STAMP_SPREAD else 0.0
    # The published score leaves out the last 4-gram; right only where the row as given is all content.
    published = (repeated - last_repeats) / np.maximum(W - 4, 1)
    return Measured(
        Features(
            tokens=lengths_B,
            entropy_bits=words.entropy_bits,
            distinct=words.distinct,
            top1=words.top1,
            top2=words.top2,
            duplicate_share=duplicate_share,
            poorest=windows.min(axis=1, initial=counts.WINDOW) / counts.WINDOW,
            template=template,
            stamped=stamped,
            reference=counts.published_score(published, words.entropy_bits),
        ),
        runs,
        few,
        Prints.joined(prints),
    )
