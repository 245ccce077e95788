"""How often ids and n-grams recur in a row: entropy, dominance, duplicates, poor windows, the published score.

Everything here works on `Content.ids_BW`, where fillers differ from every token, so a filler adds nothing to
a count of repeats. Slower twins with plain counters are in the tests.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stability_probe.audit.prepare import Ints

Floats = NDArray[np.float64]
WINDOW = 64
_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, odd: the usual multiplicative hash
# Where the high bits of a uint64 are when it is read as two uint32 and as four uint16.
HIGH_HALF, TOP_QUARTER = (1, 3) if sys.byteorder == "little" else (0, 0)


@dataclass(frozen=True)
class Unigrams:
    """Per row of B, over its content.

    Attributes:
        entropy_bits: −Σ p log2 p.
        distinct: number of different ids.
        top1, top2: share of the most frequent id, and of the two most frequent together.
    """

    entropy_bits: Floats
    distinct: NDArray[np.int64]
    top1: Floats
    top2: Floats


@lru_cache(maxsize=8)
def _count_log_count(largest: int) -> Floats:
    counts = np.arange(largest + 1, dtype=np.float64)
    counts[1:] *= np.log2(counts[1:])
    return counts


def unigrams(ids_BW: NDArray[np.int32], lengths_B: NDArray[np.int64]) -> Unigrams:
    """Entropy, distinct ids and dominance of every row, from one sort."""
    B, W = ids_BW.shape
    n = np.maximum(lengths_B, 1)
    if B == 0 or W == 0:
        return Unigrams(np.zeros(B), np.zeros(B, np.int64), np.zeros(B), np.zeros(B))
    ordered = np.sort(ids_BW, axis=1)
    starts_here = np.empty((B, W), np.bool_)
    starts_here[:, 0] = True
    np.not_equal(ordered[:, 1:], ordered[:, :-1], out=starts_here[:, 1:])
    starts = np.flatnonzero(starts_here)
    counts = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=counts[:-1])
    counts[-1] = B * W - starts[-1]
    row_starts = np.searchsorted(starts, np.arange(B) * W)
    # Fillers are runs of one, and 1 · log2 1 = 0: they leave the sum alone.
    sums = np.add.reduceat(_count_log_count(W)[counts], row_starts)
    entropy = np.where(lengths_B > 0, np.log2(n) - sums / n, 0.0)
    runs = np.diff(row_starts, append=len(starts))
    top1 = np.where(lengths_B > 0, np.maximum.reduceat(counts, row_starts), 0)
    top2 = top1.copy()
    for row in np.flatnonzero(4 * top1 >= n):  # the second can matter only where the first is a quarter
        own = counts[row_starts[row] : row_starts[row] + runs[row]]
        top2[row] = np.partition(own, -2)[-2:].sum() if len(own) > 1 else own[0]
    return Unigrams(np.maximum(entropy, 0.0), runs - (W - lengths_B), top1 / n, np.minimum(top2, n) / n)


def hash_4grams(ids_BW: NDArray[np.int32]) -> NDArray[np.uint64]:
    """64-bit hashes of the 4-grams that start at each position, (B, W − 3).

    Equal 4-grams hash alike; different ones collide with probability about 2⁻⁶⁴ a pair, so that the expected
    number of false repeats in a row of a million tokens is under 10⁻⁷.
    """
    B, W = ids_BW.shape
    halves = np.empty((B, W - 1, 2), np.uint32)
    halves[:, :, HIGH_HALF] = ids_BW[:, :-1].view(np.uint32)
    halves[:, :, 1 - HIGH_HALF] = ids_BW[:, 1:].view(np.uint32)
    pairs = halves.view(np.uint64)[:, :, 0]
    hashes = pairs[:, :-2] * _ODD
    hashes += pairs[:, 2:]
    return hashes


def join_hashes(hashes: NDArray[np.uint64], gram: int) -> NDArray[np.uint64]:
    """Hashes of 2·gram-grams from those of gram-grams."""
    joined = hashes[:, :-gram] * (_ODD ^ np.uint64(gram << 1))
    joined += hashes[:, gram:]
    return joined


def repeats(hashes: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Per row, how many n-grams repeat an earlier one, Σ (count − 1), and how many occur twice or more.

    The second number is exact where the first is 0.3 of the row or more, else no less than the first.
    """
    ordered = np.sort(hashes, axis=1)
    same = ordered[:, 1:] == ordered[:, :-1]
    repeated = np.count_nonzero(same, axis=1)
    recurring = repeated.copy()
    # A group has one member more than it has repeats. Groups are counted only where there are many repeats.
    some = np.flatnonzero(repeated >= 0.3 * hashes.shape[1])
    if len(some) and same.shape[1]:
        recurring[some] += np.count_nonzero(same[some, 1:] > same[some, :-1], axis=1) + same[some, 0]
    return repeated, recurring


def poorest_window(ids_BW: NDArray[np.int32], lengths_B: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Distinct ids in every 64-token window on a grid, (B, windows), and the grid's stride.

    The stride is 8 for rows under 1024 tokens and 64 beyond: a poor stretch of 71 (127) tokens always holds a
    whole window. The last window of each row ends at its last token. Windows that reach past the content hold
    fillers and so never look poor; rows under 64 tokens have no window, (B, 0).
    """
    B, W = ids_BW.shape
    stride = 8 if W < 1024 else WINDOW
    if B == 0 or W < WINDOW:
        return np.zeros((B, 0), np.int64), stride
    grid = np.lib.stride_tricks.sliding_window_view(ids_BW, WINDOW, axis=1)[:, ::stride]
    # Half as many bytes sort faster; fillers are negative, so padded rows keep the wider type.
    narrow = np.uint16 if W and int(ids_BW.min()) >= 0 and int(ids_BW.max()) < 2**16 else np.int32
    windows = np.empty((B, grid.shape[1] + 1, WINDOW), narrow)
    windows[:, :-1] = grid
    last = np.maximum(lengths_B - WINDOW, 0)[:, None] + np.arange(WINDOW)
    windows[:, -1] = np.take_along_axis(ids_BW, last, axis=1)
    windows.sort(axis=2)
    changes = np.add.reduce(windows[:, :, 1:] != windows[:, :, :-1], axis=2, dtype=np.uint8)
    return 1 + changes.astype(np.int64), stride


def reference_scores(ids_BT: Ints) -> Floats:
    """The published anomaly score of every row as given, padding included, for comparison only.

    Half the share of repeated 4-grams (over the first T − 4 starts, as published) plus half of
    max(0, 1 − H / 8 bits). Equal to the published loop up to the last bit of its float32 result.
    """
    wide = np.asarray(ids_BT).astype(np.int64)
    B, T = wide.shape
    if T == 0:
        return np.full(B, 0.5)
    ids = wide.astype(np.int32) if not wide.size or (wide.min() >= -(2**31) and wide.max() < 2**31) else _dense(wide)
    entropy = unigrams(ids, np.full(B, T, np.int64)).entropy_bits
    repeated = repeats(hash_4grams(ids)[:, : T - 4])[0] / (T - 4) if T > 4 else np.zeros(B)
    return published_score(repeated, entropy)


def published_score(repeated_share_B: Floats, entropy_bits_B: Floats) -> Floats:
    """The formula alone, rounded to float32 as the published code stores it."""
    score = 0.5 * repeated_share_B + 0.5 * np.maximum(0.0, 1.0 - entropy_bits_B / 8.0)
    return score.astype(np.float32).astype(np.float64)


def _dense(ids: NDArray[np.int64]) -> NDArray[np.int32]:
    """Ids renumbered from 0, for values that int32 cannot hold."""
    return np.unique(ids, return_inverse=True)[1].reshape(ids.shape).astype(np.int32)
