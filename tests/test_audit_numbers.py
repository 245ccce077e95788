"""The audit's arithmetic against obvious slower twins."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stability_probe.audit import counts, periods, shapes
from stability_probe.audit.features import measure_rows
from stability_probe.audit.prepare import Content, content

rows_of_ids = st.lists(st.integers(0, 6), min_size=0, max_size=150)


def full(rows: list[list[int]]) -> Content:
    return content(np.array(rows, np.int64), None)


def entropy_bits(row: list[int]) -> float:
    return -sum(c / len(row) * math.log2(c / len(row)) for c in Counter(row).values())


def duplicates(row: list[int], gram: int) -> int:
    seen = Counter(tuple(row[i : i + gram]) for i in range(len(row) - gram + 1))
    return sum(count - 1 for count in seen.values())


def published(row: list[int]) -> float:
    """The published score, as a plain loop."""
    grams = [tuple(row[i : i + 4]) for i in range(len(row) - 4)]
    repeated = sum(count - 1 for count in Counter(grams).values()) / len(grams) if grams else 0.0
    entropy = -sum(c / len(row) * math.log2(c / len(row)) for c in Counter(row).values())
    return 0.5 * repeated + 0.5 * max(0.0, 1.0 - entropy / 8.0)


def plain_runs(row: list[int], is_break: list[bool]) -> set[tuple[int, int, int]]:
    """Every maximal run of x[i] = x[i−p] that is long enough, searched position by position."""
    found = set()
    for period in range(1, min(len(row), periods.LONGEST_PERIOD) + 1):
        start = None
        for i in range(period, len(row) + 1):
            same = i < len(row) and row[i] == row[i - period] and not is_break[i] and not is_break[i - period]
            if same and start is None:
                start = i
            if not same and start is not None:
                if i - start >= periods.shortest_run(period):
                    found.add((start - period, i, period))
                start = None
    return found


def has_repeated_ngram(row: list[int], longest: int = 13, times: int = 32) -> bool:
    """An n-gram of up to 13 ids that stands at least 32 times in a row, searched plainly."""
    for n in range(1, longest + 1):
        for start in range(len(row) - n * times + 1):
            gram = row[start : start + n]
            if all(row[start + k * n : start + (k + 1) * n] == gram for k in range(times)):
                return True
    return False


@given(rows_of_ids)
def test_counts_agree_with_counters(row: list[int]) -> None:
    measured = measure_rows(full([row]))
    features = measured.features
    if row:
        top = Counter(row).most_common(2)
        assert features.entropy_bits[0] == pytest.approx(entropy_bits(row), abs=1e-12)
        assert features.distinct[0] == len(set(row))
        assert features.top1[0] == top[0][1] / len(row)
        if 4 * top[0][1] >= len(row):
            assert features.top2[0] == pytest.approx(sum(count for _, count in top) / len(row))
    if len(row) > 4:
        assert features.duplicate_share[0] == pytest.approx(duplicates(row, 4) / (len(row) - 3))


@given(st.lists(st.integers(-100, 300_000), min_size=0, max_size=120))
def test_the_published_score_is_reproduced(row: list[int]) -> None:
    expected = published(row) if row else 0.5
    assert counts.reference_scores(np.array([row], np.int64))[0] == pytest.approx(expected, abs=1e-7)


def test_the_published_score_as_published_with_torch_scalars() -> None:
    torch = pytest.importorskip("torch")
    ids = torch.randint(0, 300, (6, 300), generator=torch.Generator().manual_seed(0))
    ids[2, 50:200] = 7
    for row, score in zip(ids.tolist(), counts.reference_scores(ids.numpy()), strict=True):
        grams = Counter(tuple(row[i : i + 4]) for i in range(len(row) - 4))
        repeated = sum(v - 1 for v in grams.values() if v > 1) / (len(row) - 4)
        entropy = -sum((c / len(row)) * torch.log2(torch.tensor(c / len(row))).item() for c in Counter(row).values())
        assert score == pytest.approx(0.5 * repeated + 0.5 * max(0.0, 1.0 - entropy / 8.0), abs=6e-8)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 80), st.integers(1, 12), st.integers(0, 2**32 - 1), st.integers(0, 30))
def test_every_run_is_found_and_none_invented(period: int, times: int, seed: int, noise: int) -> None:
    rng = np.random.default_rng(seed)
    row = rng.integers(0, 50, 400)
    gram = rng.integers(0, 50, period)
    repeated = np.tile(gram, times * 8)[: rng.integers(1, 300)]
    at = rng.integers(0, 400 - len(repeated))
    row[at : at + len(repeated)] = repeated
    row[rng.integers(0, 400, noise)] = 51
    is_break = row == 51
    expected = plain_runs(row.tolist(), is_break.tolist())
    ids = row.astype(np.int32)[None, :]
    found = periods.find_runs(ids, counts.hash_4grams(ids), is_break[None, :]).get(0, [])
    assert {(run.start, run.end, run.period) for run in found} <= expected
    covered = {i for run in found for i in range(run.start, run.end)}
    assert covered == {i for start, end, _ in expected for i in range(start, end)}


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 15), st.integers(28, 36), st.integers(0, 60), st.integers(0, 2**32 - 1))
def test_short_periods_agree_with_a_plain_search(period: int, times: int, extra: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    head, tail = rng.integers(0, 900, extra), rng.integers(0, 900, 40)
    row = np.concatenate([head, np.tile(rng.integers(0, 900, period), times), tail])
    ids = row.astype(np.int32)[None, :]
    found = periods.find_runs(ids, counts.hash_4grams(ids)).get(0, [])
    assert any(run.short for run in found) == has_repeated_ngram(row.tolist())


def test_a_run_across_block_borders_of_a_long_row_is_whole() -> None:
    row = np.arange(20_000, dtype=np.int32)
    row[4000:12400] = np.tile(np.arange(300), 28)
    ids = row[None, :]
    (run,) = periods.find_runs(ids, counts.hash_4grams(ids))[0]
    assert (run.start, run.end, run.period) == (4000, 12400, 300)


@given(st.lists(st.integers(0, 2), min_size=33, max_size=120), st.booleans())
def test_template_coverage_agrees_with_a_plain_search(row: list[int], with_breaks: bool) -> None:
    is_break = [with_breaks and token == 2 for token in row]
    grams = [tuple(row[i : i + 16]) for i in range(len(row) - 15)]
    seen = Counter(grams)
    seen_template = shapes.template(np.array(row, np.int32), np.array(is_break))
    for times, got in ((2, seen_template.twice), (8, seen_template.stamped)):
        inside = set()
        for i, gram in enumerate(grams):
            if seen[gram] >= times and not any(is_break[i : i + 16]):
                inside |= set(range(i, i + 16))
        assert got == pytest.approx(len(inside) / len(row))


def test_the_spread_of_a_stamped_line() -> None:
    line = np.arange(20)
    even = np.concatenate([np.append(line, 100 + i) for i in range(10)]).astype(np.int32)
    assert shapes.template(even).spread == 0
    uneven = np.concatenate([np.append(line, np.arange(100 * i, 100 * i + 7 * i)) for i in range(1, 10)])
    distances = [20 + 7 * i for i in range(1, 9)]
    expected = np.std(distances) / np.mean(distances)
    assert shapes.template(uneven.astype(np.int32)).spread == pytest.approx(expected)


@given(st.lists(st.integers(0, 40), min_size=64, max_size=200))
def test_windows_agree_with_sets(row: list[int]) -> None:
    ids = np.array([row], np.int32)
    windows, stride = counts.poorest_window(ids, np.array([len(row)]))
    starts = [*range(0, len(row) - 63, stride), len(row) - 64]
    assert windows[0].tolist() == [len(set(row[start : start + 64])) for start in starts]


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_separators_agree_with_splitting(is_eos: list[bool]) -> None:
    text = "".join("|" if eos else "x" for eos in is_eos)
    documents = [len(piece) for piece in text.split("|") if piece]
    seen = shapes.separators(np.array(is_eos))
    assert seen.share == pytest.approx(text.count("|") / len(text))
    assert seen.longest_run == max(len(piece) for piece in text.replace("x", " ").split(" "))
    assert seen.documents == len(documents)
    assert seen.median_tokens == (float(np.median(documents)) if documents else 0.0)


def test_fillers_change_nothing() -> None:
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 30, (5, 200))
    kept = np.arange(200) < np.array([200, 150, 64, 5, 0])[:, None]
    packed = measure_rows(content(rows, kept)).features
    for row in range(4):
        n = int(kept[row].sum())
        alone = measure_rows(full([rows[row, :n].tolist()])).features
        for name in ("entropy_bits", "distinct", "top1", "duplicate_share", "template"):
            assert getattr(packed, name)[row] == pytest.approx(getattr(alone, name)[0]), name
