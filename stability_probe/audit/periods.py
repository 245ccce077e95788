"""Short and long periods (D1, D2): exact, without comparing every position at every lag.

A run of x[i] = x[i−p] that is m long contains m − 3 consecutive starts whose 4-grams agree at lag p. So it is
enough to compare 4-gram hashes at every (m − 3)-th position, for each p ≤ 512: about 1.4 comparisons a token in
all. Hits are confirmed at two more positions that any run of that length must contain, and then expanded on the
ids themselves. No run is missed and none is invented.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stability_probe.audit.counts import TOP_QUARTER

LONGEST_PERIOD = 512
SHORT_PERIOD = 13  # OLMo's filter: n-grams up to 13 …
SHORT_REPEATS = 32  # … repeated at least 32 times
LONG_REPEATS = 4
LONG_TOKENS = 64
_BLOCK = 4096


@dataclass(frozen=True)
class Run:
    """`[start, end)` of the content repeats with this period; `repeats` = (end − start) / period."""

    start: int
    end: int
    period: int

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def repeats(self) -> float:
        return self.tokens / self.period

    @property
    def short(self) -> bool:
        return self.period <= SHORT_PERIOD and self.repeats >= SHORT_REPEATS

    @property
    def long(self) -> bool:
        return self.repeats >= LONG_REPEATS and self.tokens >= LONG_TOKENS


def shortest_run(period: int) -> int:
    """Fewest equal positions x[i] = x[i−p] of a run that D1 or D2 asks for."""
    long = max((LONG_REPEATS - 1) * period, LONG_TOKENS - period)
    return min((SHORT_REPEATS - 1) * period, long) if period <= SHORT_PERIOD else long


@lru_cache(maxsize=64)
def _grid(grams: int, first_block: bool, short_only: bool) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """(position, position − period) pairs to compare in a block that holds `grams` 4-gram starts."""
    at, lag = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for period in range(1, (SHORT_PERIOD if short_only else LONGEST_PERIOD) + 1):
        run = (SHORT_REPEATS - 1) * period if short_only else shortest_run(period)
        steps = np.arange(0, grams, run - 3)
        if first_block:
            steps = steps[steps >= period]
        at.append(steps)
        lag.append(np.full(len(steps), period))
    here = np.concatenate(at).astype(np.intp)
    return here, here - np.concatenate(lag).astype(np.intp)


def find_runs(
    ids_BW: NDArray[np.int32],
    hashes: NDArray[np.uint64],
    breaks_BW: NDArray[np.bool_] | None = None,
    long_B: NDArray[np.bool_] | None = None,
) -> dict[int, list[Run]]:
    """Every run that D1 or D2 asks for, by row.

    A run never crosses a position where `breaks_BW` is True. Rows where `long_B` is False need no search beyond D1.
    """
    # Positions first: what is compared at one position of all rows then lies side by side.
    # The top 16 bits are the best mixed; that 2 in 10⁵ agree by chance costs nothing, for every hit is expanded on ids.
    top = hashes.view(np.uint16)[:, TOP_QUARTER::4]
    short_GB = np.ascontiguousarray(top.T)
    everything = np.arange(len(hashes))
    if long_B is None or 2 * np.count_nonzero(long_B) > len(long_B):
        parts = _hits(short_GB, everything, False)
    else:
        parts = _hits(short_GB, np.flatnonzero(long_B), False) + _hits(short_GB, np.flatnonzero(~long_B), True)
    if not parts:
        return {}
    row_of, period_of, position_of = np.concatenate(parts, axis=1)
    runs = {}
    for row in np.unique(row_of):
        own = row_of == row
        breaks = None if breaks_BW is None else breaks_BW[row]
        if expanded := _expand(ids_BW[row], breaks, period_of[own], position_of[own]):
            runs[int(row)] = expanded
    return runs


def _hits(short_GB: NDArray[np.uint16], wanted: NDArray[np.intp], short_only: bool) -> list[NDArray[np.intp]]:
    """(row, period, position) of every confirmed hit in the wanted rows."""
    found: list[NDArray[np.intp]] = []
    if not len(wanted):
        return found
    own = short_GB if len(wanted) == short_GB.shape[1] else short_GB[:, wanted]
    for base in range(0, len(own), _BLOCK):
        here, there = _grid(min(_BLOCK, len(own) - base), base == 0, short_only)
        if not len(here):
            continue
        here, there = (here + base, there + base) if base else (here, there)
        equal = own.take(here, axis=0) == own.take(there, axis=0)
        which, rows = np.divmod(np.flatnonzero(equal), own.shape[1])
        if len(rows):
            position, period = here[which], here[which] - there[which]
            sure = _confirmed(own, rows, position, period)
            found.append(np.stack([wanted[rows], period, position])[:, sure])
    return found


_SHORTEST = np.array([0, *(shortest_run(period) for period in range(1, LONGEST_PERIOD + 1))])


def _confirmed(
    short_GB: NDArray[np.uint16], rows: NDArray[np.intp], position: NDArray[np.intp], period: NDArray[np.intp]
) -> NDArray[np.bool_]:
    """Hits whose run reaches far enough to one side: of m − 3 agreeing starts, half lie on one side of any."""
    reach = (_SHORTEST[period] - 4) // 2
    at = position + np.stack([-reach, -(reach // 2), reach // 2, reach])
    inside = (at >= period) & (at < len(short_GB))
    at = np.where(inside, at, period)
    agree = inside & (short_GB[np.minimum(at, len(short_GB) - 1), rows] == short_GB[at - period, rows])
    return (agree[0] & agree[1]) | (agree[2] & agree[3])


def _expand(
    row: NDArray[np.int32], breaks: NDArray[np.bool_] | None, period_of: NDArray[np.intp], position_of: NDArray[np.intp]
) -> list[Run]:
    """Runs behind the hits, shortest period first; a multiple of a period inside its own run adds nothing."""
    runs: list[Run] = []
    order = np.lexsort((position_of, period_of))
    period_of, position_of = period_of[order], position_of[order]
    while len(period_of):
        period, at = int(period_of[0]), int(position_of[0])
        first, end = _equal_around(row, breaks, period, at)
        inside = (position_of >= first) & (position_of < end)
        open_ = ~(inside & (period_of == period))
        if end - first >= shortest_run(period):
            runs.append(Run(first - period, end, period))
            open_ &= ~(inside & (period_of % period == 0) & ~_reaches_out(row, first - period, end, period_of))
        open_[0] = False
        period_of, position_of = period_of[open_], position_of[open_]
    return runs


def _reaches_out(row: NDArray[np.int32], start: int, end: int, lag_of: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Whether the repeat with each lag goes on past [start, end), which repeats with a divisor of it."""
    last = len(row) - 1
    left = start > 0 and row[np.minimum(start - 1 + lag_of, last)] == row[start - 1]
    right = end <= last and row[np.maximum(end - lag_of, 0)] == row[end]
    return np.asarray(left | right)


def _equal_around(row: NDArray[np.int32], breaks: NDArray[np.bool_] | None, period: int, at: int) -> tuple[int, int]:
    """The maximal [first, end) around `at` in which x[i] = x[i−p]; empty where `at` itself differs."""

    def differs(low: int, high: int) -> NDArray[np.bool_]:
        wrong = row[low:high] != row[low - period : high - period]
        if breaks is not None:
            wrong |= breaks[low:high] | breaks[low - period : high - period]
        return wrong

    end, step = at, 256
    while end < len(row):
        wrong = differs(end, min(len(row), end + step))
        if wrong.any():
            end += int(wrong.argmax())
            break
        end, step = end + len(wrong), 2 * step
    first, step = at, 256
    while first > period and end > at:
        wrong = differs(max(period, first - step), first)[::-1]
        if wrong.any():
            first -= int(wrong.argmax())
            break
        first, step = first - len(wrong), 2 * step
    return first, end


def covered(runs: list[Run], length: int) -> int:
    """Tokens covered by at least one run."""
    inside = np.zeros(length, np.bool_)
    for run in runs:
        inside[run.start : run.end] = True
    return int(inside.sum())
