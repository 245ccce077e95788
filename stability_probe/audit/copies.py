"""Rows that are copies, or near copies, of an earlier row of the batch (D12)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stability_probe.audit.counts import hash_4grams, join_hashes
from stability_probe.audit.prepare import Content

SHARED = 0.5  # near copy: half of the smaller row's sampled 8-grams occur in the other
# … and a third of its 32-grams too: macros and forms stamped from one pattern share short n-grams, copies long ones.
LONG_GRAM, LONG_SHARED = 32, 0.33
# … or the rows agree in place: a few tokens in a hundred changed break most 32-grams.
IN_PLACE = 0.8
FEWEST = 8  # sampled 8-grams; below, the share is too coarse to mean anything
VARIED = 0.5  # a row whose own 8-grams mostly repeat (a boolean matrix) shares them with every row of its kind
MIXER = np.uint64(0xD6E8FEB86659FD93)  # odd, from a published 64-bit mixing function
SAMPLED = np.uint64(2**60)  # the top four bits are zero: one in sixteen
LONG_ROW, SAMPLED_LONG = 2000, np.uint64(2**58)  # one in 64 of a long row is still 31 or more
SHORT_ROW, SAMPLED_SHORT = 256, np.uint64(2**62)  # one in 16 of a row of 96 tokens would be five
LEAST_ENTROPY_BITS = 2.5  # at 1.5 bits, a boolean matrix, there are only a few thousand likely 8-grams
SHORTEST = 16  # tokens; short rows coincide by chance and by design ("yes", "no")
SHORTEST_SMALL = 64  # the same where a token is about a character


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


def prints_of(fours: NDArray[np.uint64], gram: int, lengths_B: NDArray[np.int64]) -> Prints:
    """One n-gram in 16 (4 in short rows, 64 in long ones), by its first four tokens: copies sample the same places.

    `fours` are the hashes of the 4-grams; `gram` is a multiple of four. Only the sampled n-grams are hashed whole.
    """
    width = fours.shape[1]
    below = SAMPLED_SHORT if width < SHORT_ROW else SAMPLED if width < LONG_ROW else SAMPLED_LONG
    rows, at = np.divmod(np.flatnonzero(fours < below), fours.shape[1])
    inside = at <= lengths_B[rows] - gram
    rows, at = rows[inside], at[inside]
    marks = fours[rows, at]
    for further in range(4, gram, 4):
        marks = marks * MIXER + fours[rows, at + further]
    return Prints(rows, marks)


def near_copies(rows: Content, prints: Prints, entropy_bits_B: NDArray[np.float64]) -> dict[int, tuple[int, float]]:
    """Row → (earlier row, shared part) for rows that share at least half of the smaller row's marks.

    Rows with fewer than 8 different marks, whose own marks mostly repeat, or with so few ids that any two rows of
    their kind share 8-grams by chance, take no part.
    """
    ordered = np.sort(prints.marks)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice) < SHARED * FEWEST:
        return {}
    # Nearly all marks stand alone: only the others need to be put in order with their rows.
    at = np.minimum(np.searchsorted(twice, prints.marks), len(twice) - 1)
    again = np.flatnonzero(twice[at] == prints.marks)
    count_rows = len(entropy_bits_B)
    sampled = np.bincount(prints.rows, minlength=count_rows)
    # Marks that stand alone are all different, so a row that shares half of its different marks repeats a third of all.
    if not (3 * np.bincount(prints.rows[again], minlength=count_rows) >= np.maximum(sampled, 1)).any():
        return {}
    order = again[np.lexsort((prints.rows[again], prints.marks[again]))]
    row_of, marks = prints.rows[order], prints.marks[order]
    new = np.ones(len(row_of), np.bool_)
    new[1:] = (marks[1:] != marks[:-1]) | (row_of[1:] != row_of[:-1])
    distinct = sampled - np.bincount(row_of[~new], minlength=count_rows)
    telling = (distinct >= np.maximum(FEWEST, VARIED * sampled)) & (entropy_bits_B >= LEAST_ENTROPY_BITS)
    keep = new & telling[row_of]
    found: dict[int, tuple[int, float]] = {}
    for earlier, later, count in _shared(row_of[keep], marks[keep], count_rows):
        part = count / min(distinct[earlier], distinct[later])
        if part >= SHARED and later not in found:
            own, other = (rows.ids_BW[row, : rows.lengths_B[row]] for row in (later, earlier))
            if in_place_share(own, other) >= IN_PLACE or long_share(own, other) >= LONG_SHARED:
                found[later] = (earlier, float(part))
    return found


def in_place_share(one: NDArray[np.int32], other: NDArray[np.int32]) -> float:
    """Share of the shorter row's tokens that stand at the same place in the other."""
    n = min(len(one), len(other))
    return float((one[:n] == other[:n]).mean()) if n else 0.0


def long_share(one: NDArray[np.int32], other: NDArray[np.int32]) -> float:
    """Share of the 32-grams of the shorter row that occur in the other (0 for rows under 32 tokens)."""
    if min(len(one), len(other)) < LONG_GRAM:
        return 0.0
    grams = []
    for row in (one, other):
        hashes, have = hash_4grams(row[None, :]), 4
        while have < LONG_GRAM:
            hashes, have = join_hashes(hashes, have), 2 * have
        grams.append(np.unique(hashes[0]))
    common = len(np.intersect1d(grams[0], grams[1], assume_unique=True))
    return common / min(len(grams[0]), len(grams[1]))


def _shared(row_of: NDArray[np.intp], marks: NDArray[np.uint64], count_rows: int) -> Iterator[tuple[int, int, int]]:
    """(earlier row, later row, marks in common), for the pairs of a mark's first row with each later one, and of
    each later one with the next: a chain of copies is found whole, and a licence header costs no square."""
    if len(marks) < 2:
        return
    new = np.ones(len(marks), np.bool_)
    new[1:] = marks[1:] != marks[:-1]
    starts = np.flatnonzero(new)
    again = np.flatnonzero(~new)
    first = row_of[starts[np.searchsorted(starts, again, "right") - 1]]
    third = again[~new[again - 1]]
    keys = np.concatenate([first * count_rows + row_of[again], row_of[third - 1] * count_rows + row_of[third]])
    pairs, counts = np.unique(keys, return_counts=True)
    enough = counts >= SHARED * FEWEST
    for pair, count in zip(pairs[enough].tolist(), counts[enough].tolist(), strict=True):
        yield pair // count_rows, pair % count_rows, count


def exact_copies(rows: Content, told_apart_by: tuple[NDArray[Any], ...], shortest: int) -> dict[int, int]:
    """Row → the first row with the same content.

    `told_apart_by` are numbers per row that equal rows share (entropy, repeats). Only rows that agree in them, in
    length and in their first and last id are compared token by token.
    """
    W = rows.ids_BW.shape[1]
    if W == 0:
        return {}
    last = rows.ids_BW[np.arange(len(rows.ids_BW)), np.maximum(rows.lengths_B - 1, 0)]
    columns: list[NDArray[Any]] = [rows.lengths_B, rows.ids_BW[:, 0], last, *told_apart_by]
    seen: dict[tuple[Any, ...], list[int]] = {}
    found = {}
    for row, key in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if key[0] < shortest:
            continue
        same_key = seen.setdefault(key, [])
        earlier = next((one for one in same_key if np.array_equal(rows.ids_BW[row], rows.ids_BW[one])), None)
        if earlier is None:
            same_key.append(row)
        else:
            found[row] = earlier
    return found
