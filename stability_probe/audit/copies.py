"""Rows that are copies, or near copies, of an earlier row of the batch (D12)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stability_probe.audit.prepare import Content

SHARED = 0.5  # near copy: half of the smaller row's sampled 8-grams occur in the other
FEWEST = 8  # sampled 8-grams; below, the share is too coarse to mean anything
VARIED = 0.5  # a row whose own 8-grams mostly repeat (a boolean matrix) shares them with every row of its kind
SHORTEST = 16  # tokens; short rows coincide by chance and by design ("yes", "no")
SHORTEST_SMALL = 64  # the same where a token is about a character
_CROWD = 64  # rows that share one 8-gram (a licence header) beyond which no further pairs are counted


@dataclass(frozen=True)
class Prints:
    """Sampled n-grams of many rows: `marks[i]` occurs in row `rows[i]`."""

    rows: NDArray[np.intp]
    marks: NDArray[np.uint64]

    @staticmethod
    def joined(parts: list[Prints]) -> Prints:
        if not parts:
            return Prints(np.zeros(0, np.intp), np.zeros(0, np.uint64))
        return Prints(np.concatenate([p.rows for p in parts]), np.concatenate([p.marks for p in parts]))


def prints_of(hashes: NDArray[np.uint64], gram: int, lengths_B: NDArray[np.int64]) -> Prints:
    """One n-gram in sixteen, chosen by its content, so that copies sample the same places."""
    sampled = (hashes >> np.uint64(32)).astype(np.uint32) & np.uint32(15) == 0
    rows, at = np.nonzero(sampled)
    inside = at <= lengths_B[rows] - gram
    return Prints(rows[inside], hashes[rows[inside], at[inside]])


def near_copies(prints: Prints, count_rows: int) -> dict[int, tuple[int, float]]:
    """Row → (earlier row, shared part) for rows that share at least half of the smaller row's marks.

    Rows with fewer than 8 different marks, or whose own marks mostly repeat, take no part.
    """
    ordered = np.sort(prints.marks)
    if np.count_nonzero(ordered[1:] == ordered[:-1]) < SHARED * FEWEST:
        return {}
    order = np.lexsort((prints.rows, prints.marks))
    rows, marks = prints.rows[order], prints.marks[order]
    new = np.ones(len(rows), np.bool_)
    new[1:] = (marks[1:] != marks[:-1]) | (rows[1:] != rows[:-1])
    sampled, distinct = np.bincount(rows, minlength=count_rows), np.bincount(rows[new], minlength=count_rows)
    telling = distinct >= np.maximum(FEWEST, VARIED * sampled)
    keep = new & telling[rows]
    shared: dict[tuple[int, int], int] = {}
    for pair in _pairs(rows[keep], marks[keep]):
        shared[pair] = shared.get(pair, 0) + 1
    found: dict[int, tuple[int, float]] = {}
    for (earlier, later), count in sorted(shared.items()):
        part = count / min(distinct[earlier], distinct[later])
        if part >= SHARED and later not in found:
            found[later] = (earlier, float(part))
    return found


def _pairs(rows: NDArray[np.intp], marks: NDArray[np.uint64]) -> Iterator[tuple[int, int]]:
    """For every mark, its first row with each later one, and each later one with the next."""
    starts = np.flatnonzero(np.concatenate([[True], marks[1:] != marks[:-1]])) if len(marks) else np.zeros(0, np.intp)
    sizes = np.diff(starts, append=len(marks))
    for start, size in zip(starts[sizes > 1].tolist(), sizes[sizes > 1].tolist(), strict=True):
        own = rows[start : start + min(size, _CROWD)].tolist()
        yield from ((own[0], later) for later in own[1:])
        yield from itertools.pairwise(own[1:])


def exact_copies(rows: Content, shortest: int) -> dict[int, int]:
    """Row → the first row with the same content."""
    B, W = rows.ids_BW.shape
    if B < 2 or W == 0:
        return {}
    # A polynomial over the ids finds the candidates; they are then compared themselves.
    powers = np.cumprod(np.full(W, 0x9E3779B97F4A7C15, np.uint64))
    sums = np.empty(B, np.uint64)
    for row in range(B):
        sums[row] = np.dot(rows.ids_BW[row].astype(np.uint64), powers)
    first: dict[tuple[int, int], int] = {}
    found = {}
    for row, key in enumerate(zip(sums.tolist(), rows.lengths_B.tolist(), strict=True)):
        earlier = first.setdefault(key, row)
        if earlier != row and key[1] >= shortest and np.array_equal(rows.ids_BW[row], rows.ids_BW[earlier]):
            found[row] = earlier
    return found
