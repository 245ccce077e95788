"""What a row looks like beyond counts: templates (D4), noise over few ids (D3), separators (D11)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stability_probe.audit.counts import WINDOW, hash_4grams, join_hashes

TEMPLATE_GRAM = 16
STAMPED_TIMES = 8


@dataclass(frozen=True)
class Template:
    """How much of a row is stamped from one pattern (D4).

    Attributes:
        twice: share of the tokens inside a 16-gram that occurs at least twice in the row.
        stamped: the same for at least eight times.
        spread: standard deviation over mean of the distances between the occurrences of the most frequent
            16-gram: near 0 for one line stamped again and again, more where code or tables repeat phrases.
    """

    twice: float
    stamped: float
    spread: float


def template(row_ids: NDArray[np.int32], breaks: NDArray[np.bool_] | None = None) -> Template:
    """Measure one row's content. 16-grams that hold a break (EOS) do not count."""
    n = len(row_ids)
    if n <= TEMPLATE_GRAM:
        return Template(0.0, 0.0, np.inf)
    fours = hash_4grams(row_ids[None, :])
    hashes = join_hashes(join_hashes(fours, 4), 8)[0]
    _, which, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    times = counts[which]
    if breaks is not None:
        until = np.concatenate([[0], np.cumsum(breaks)])
        times = np.where(until[TEMPLATE_GRAM:] == until[:-TEMPLATE_GRAM], times, 0)
    distances = np.diff(np.flatnonzero(which == which[times.argmax()]))
    spread = float(distances.std() / distances.mean()) if len(distances) else np.inf
    return Template(_covered(times >= 2, n), _covered(times >= STAMPED_TIMES, n), spread)


def _covered(starts: NDArray[np.bool_], n: int) -> float:
    """Share of n tokens inside the 16-grams that start where `starts` is True."""
    edges = np.zeros(n + 1, np.int64)
    edges[: len(starts)] += starts
    edges[TEMPLATE_GRAM : TEMPLATE_GRAM + len(starts)] -= starts
    return float(np.count_nonzero(np.cumsum(edges[:-1])) / n)


@dataclass(frozen=True)
class Few:
    """The windows of a row with few distinct ids, joined.

    Attributes:
        spans: content spans covered by poor windows.
        entropy_bits: of the ids inside.
        order_bits: of an id given the one before it, inside. Noise has nearly the same; structure much less.
    """

    spans: tuple[tuple[int, int], ...]
    entropy_bits: float
    order_bits: float

    @property
    def tokens(self) -> int:
        return sum(end - start for start, end in self.spans)


def few_ids(row_ids: NDArray[np.int32], poor: NDArray[np.bool_], stride: int) -> Few:
    """Join the poor windows of one row (`poor` as in `poorest_window`: the last entry ends the row)."""
    starts = np.flatnonzero(poor) * stride
    starts = np.minimum(starts, len(row_ids) - WINDOW)
    spans: list[tuple[int, int]] = []
    for start in starts.tolist():
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], start + WINDOW)
        else:
            spans.append((start, start + WINDOW))
    pieces = [row_ids[start:end].astype(np.int64) for start, end in spans]
    first = np.concatenate([piece[:-1] for piece in pieces])
    second = np.concatenate([piece[1:] for piece in pieces])
    before = _entropy_bits(first)
    return Few(tuple(spans), _entropy_bits(second), _entropy_bits(first << 32 | second) - before)


def _entropy_bits(values: NDArray[np.int64]) -> float:
    share = np.unique(values, return_counts=True)[1] / len(values)
    return float(-(share * np.log2(share)).sum())


@dataclass(frozen=True)
class Separators:
    """EOS in one row's content: share, longest run of adjacent ones, number and median length of documents."""

    share: float
    longest_run: int
    pairs: int
    documents: int
    median_tokens: float


def separators(is_eos: NDArray[np.bool_]) -> Separators:
    """Documents are the stretches between EOS; empty ones are left out of the median."""
    edges = np.concatenate([[-1], np.flatnonzero(is_eos), [len(is_eos)]])
    lengths = np.diff(edges) - 1
    full = lengths[lengths > 0]
    not_eos = np.concatenate([[-1], np.flatnonzero(~is_eos), [len(is_eos)]])
    longest = int((np.diff(not_eos) - 1).max(initial=0))
    pairs = int(np.count_nonzero(is_eos[1:] & is_eos[:-1]))
    median = float(np.median(full)) if len(full) else 0.0
    return Separators(float(is_eos.mean()), longest, pairs, len(full), median)
