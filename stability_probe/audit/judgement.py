"""From numbers to notes: the thresholds of D1–D5, D10 and D11, each with its reason."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stability_probe.audit.features import Features, Measured
from stability_probe.audit.periods import Run, covered
from stability_probe.audit.prepare import Content, Ints
from stability_probe.audit.result import Note, Severity, Span
from stability_probe.audit.shapes import separators

CRITICAL_REPEATS = 100  # dolma 1.6 removed documents at 100 repeats; OLMo's training filter at 32
# A numeric table of a manual repeats 76 tokens: 0.30 of a row of 256. Shorter runs count where they are half the row.
SURE_TOKENS, SURE_SHARE = 96, 0.50
LONG_SHARE = 0.10  # of the row, by runs of four repeats or more
# Test tables and generated code reach a tenth by several short runs of five to nine repeats; a loop is one long one
# (python -m benchmarks.audit_recall --lengths --dilution 2048: the healthy rows that were flagged).
SCATTERED_SHARE = 0.25
TOP1, TOP2, DOMINATED_TOKENS = 0.30, 0.50, 64  # English: "," or "the" stay under 0.07, indentation under 0.15
FLAT, FLAT_TOKENS = 0.95, 512  # H / log2 n: 2 048 tokens of text have 0.65–0.80, of uniform ids over 50 000 0.99
NOISE_ENTROPY_BITS = 2.0  # five equally likely ids have 2.32; a 0/1 matrix has 1 to 1.5
NOISE_ORDER = 0.85  # H(next | previous) / H: text, tables and matrices with separators stay under 0.7
TEMPLATE = 0.80
# By 16-grams that occur eight times or more at even distances: slot-filled templates and a log line with new
# timestamps have 0.65 and 0.79, healthy rows stay under 0.42 (benchmarks/audit_recall.py --templates).
STAMPED = 0.60
EOS_SHARE, EOS_MEDIAN_TOKENS, EOS_TOKENS = 0.10, 8, 64
EOS_RUN = 3  # BOS and EOS of one id make pairs at every boundary of some pipelines; three in a row have no such excuse
EOS_DOCUMENTS = 8
# With so few ids a token is about a character: a ruler of 70 dashes or an indent is then a run of 70 ids.
SMALL_VOCABULARY = 512
SMALL_TOP1, SMALL_TOP2 = 0.60, 0.80  # an indented page is 40 % spaces
SMALL_SHARE = 0.8  # of the row; below it and below 100 repeats such a run is only worth a look
TOY_VOCABULARY = 64  # windows of 64 tokens say nothing about rows over so few ids

Notes = dict[int, list[Note]]


def effective_vocabulary(ids: Ints, vocab_size: int | None) -> int:
    """The vocabulary's size, or the smallest that holds these ids."""
    return vocab_size if vocab_size is not None else int(ids.max(initial=0)) + 1


def judge_runs(rows: Content, measured: Measured, vocabulary: int, notes: Notes) -> None:
    """D1 and D2 from the runs that were found."""
    for row, runs in measured.runs.items():
        n = int(rows.lengths_B[row])
        short = [run for run in runs if run.short]
        long = [run for run in runs if run.long]
        if short:
            notes[row].append(_short_note(rows, row, short, n, vocabulary))
        tokens = covered(long, n)
        share = tokens / n
        if long and share >= LONG_SHARE:
            worst = max(long, key=lambda run: run.tokens)
            detail = f"{share:.0%} of the row repeats with a period up to 512 (most: {_run_words(rows, row, worst)})"
            scattered = worst.tokens < LONG_SHARE * n and share < SCATTERED_SHARE
            sure: Severity = "high" if (tokens >= SURE_TOKENS or share >= SURE_SHARE) and not scattered else "medium"
            notes[row].append(Note("D2", sure, "repeated-tokens", detail, share, _run_spans(rows, row, long)))


def _short_note(rows: Content, row: int, runs: list[Run], n: int, vocabulary: int) -> Note:
    worst = max(runs, key=lambda run: run.repeats)
    detail = _run_words(rows, row, worst)
    critical = worst.repeats >= CRITICAL_REPEATS
    if vocabulary <= SMALL_VOCABULARY and covered(runs, n) < SMALL_SHARE * n:
        if not critical:
            return Note("D1", "medium", "repeated-tokens", detail, worst.repeats / 100, _run_spans(rows, row, runs))
        return Note("D1", "high", "repeated-tokens", detail, 0.5, _run_spans(rows, row, runs))
    severity: Severity = "critical" if critical else "high"
    return Note("D1", severity, "repeated-tokens", detail, worst.repeats / 100, _run_spans(rows, row, runs))


def _run_words(rows: Content, row: int, run: Run) -> str:
    start, end = rows.place(row, run.start, run.end)
    what = "one token" if run.period == 1 else f"an n-gram of {run.period} tokens"
    return f"positions {start}–{end - 1} repeat {what} {run.repeats:.0f} times"


def _run_spans(rows: Content, row: int, runs: list[Run]) -> tuple[Span, ...]:
    longest = sorted(runs, key=lambda run: -run.tokens)[:8]
    return tuple(
        Span(*rows.place(row, run.start, run.end), f"period-{run.period} repeat", f"{run.repeats:.0f} repeats")
        for run in longest
    )


def judge_counts(rows: Content, measured: Measured, features: Features, vocabulary: int, notes: Notes) -> None:
    """D3, D4, D5 and D10."""
    n = features.tokens
    if vocabulary > TOY_VOCABULARY:
        for row in measured.few:
            note = _few_note(rows, measured, row)
            if note.severity == "high" or vocabulary > SMALL_VOCABULARY:
                notes[row].append(note)
        least1, least2 = (TOP1, TOP2) if vocabulary > SMALL_VOCABULARY else (SMALL_TOP1, SMALL_TOP2)
        dominated = (n >= DOMINATED_TOKENS) & ((features.top1 >= least1) | (features.top2 >= least2))
        for row in np.flatnonzero(dominated).tolist():
            top1, top2 = features.top1[row], features.top2[row]
            detail = f"one token fills {top1:.0%} of the row, the two most frequent {top2:.0%}"
            notes[row].append(Note("D5", "medium", "repeated-tokens", detail, top2))
    for row in np.flatnonzero((features.template >= TEMPLATE) | (features.stamped >= STAMPED)).tolist():
        share, stamped = features.template[row], features.stamped[row]
        if stamped >= STAMPED:
            detail = f"a template: {stamped:.0%} of the row is 16-grams that come back 8 times or more, evenly spaced"
            whole = (Span(*rows.place(row, 0, int(n[row])), "template", ""),)
            notes[row].append(Note("D4", "high", "boilerplate", detail, 2 * (stamped - STAMPED), whole))
        else:
            detail = f"{share:.0%} of the row lies in 16-grams that occur more than once"
            notes[row].append(Note("D4", "medium", "boilerplate", detail, 5 * (share - TEMPLATE)))
    flat = features.entropy_bits / np.log2(np.maximum(n, 2))
    for row in np.flatnonzero((n >= FLAT_TOKENS) & (flat >= FLAT)).tolist():
        detail = f"ids are nearly all different: entropy {features.entropy_bits[row]:.2f} of {np.log2(n[row]):.2f} bits"
        notes[row].append(Note("D10", "high", "garbage-tokens", detail, 20 * (flat[row] - FLAT)))


def _few_note(rows: Content, measured: Measured, row: int) -> Note:
    """Few ids in a window: noise where their order is as random as their choice, else only worth a look."""
    few = measured.few[row]
    spans = tuple(Span(*rows.place(row, *span), "few ids", "") for span in few.spans[:8])
    start, end = rows.place(row, *max(few.spans, key=lambda span: span[1] - span[0]))
    what = f"64-token windows with {measured.features.poorest[row] * 64:.0f} different ids (most: {start}–{end})"
    noise = few.entropy_bits >= NOISE_ENTROPY_BITS and few.order_bits >= NOISE_ORDER * few.entropy_bits
    if noise:
        detail = f"{what}, in random order ({few.order_bits:.1f} of {few.entropy_bits:.1f} bits)"
        return Note("D3", "high", "garbage-tokens", detail, few.tokens / max(int(rows.lengths_B[row]), 1), spans)
    return Note("D3", "medium", "repeated-tokens", what, 1 - measured.features.poorest[row] / 0.12, spans)


def judge_separators(rows: Content, is_eos: NDArray[np.bool_], notes: Notes) -> None:
    """D11."""
    for row in _odd_separators(is_eos, rows.lengths_B).tolist():
        n = int(rows.lengths_B[row])
        seen = separators(is_eos[row, :n])
        whole = (Span(*rows.place(row, 0, n), "separators", ""),)
        if seen.documents == 0:
            notes[row].append(Note("D11", "high", "repeated-tokens", "the row is nothing but EOS", 1.0, whole))
        elif n >= EOS_TOKENS and seen.share >= EOS_SHARE:
            detail = f"{seen.share:.0%} of the row is EOS (documents of {seen.median_tokens:.0f} tokens)"
            notes[row].append(Note("D11", "high", "garbage-tokens", detail, seen.share * 2, whole))
        elif seen.documents >= EOS_DOCUMENTS and seen.median_tokens < EOS_MEDIAN_TOKENS:
            detail = f"half of the {seen.documents} documents have {seen.median_tokens:.0f} tokens or fewer"
            notes[row].append(Note("D11", "high", "garbage-tokens", detail, 0.3, whole))
        elif seen.longest_run >= EOS_RUN:
            detail = f"{seen.longest_run} EOS in a row inside the content"
            notes[row].append(Note("D11", "high", "garbage-tokens", detail, 0.2, whole))
        elif seen.pairs:
            detail = f"{seen.pairs} pairs of adjacent EOS: empty documents, or BOS and EOS of the same id"
            notes[row].append(Note("D11", "medium", "garbage-tokens", detail, seen.pairs / 10, whole))


def _odd_separators(is_eos: NDArray[np.bool_], lengths_B: NDArray[np.int64]) -> NDArray[np.intp]:
    """Rows that D11 can have something to say about: many EOS, adjacent ones, or mostly short documents."""
    B, W = is_eos.shape
    row_of, at = np.divmod(np.flatnonzero(is_eos), W)
    counts = np.bincount(row_of, minlength=B)
    gaps, same_row = np.diff(at), row_of[1:] == row_of[:-1]
    adjacent = np.bincount(row_of[1:][same_row & (gaps == 1)], minlength=B)
    short = np.bincount(row_of[1:][same_row & (gaps <= EOS_MEDIAN_TOKENS)], minlength=B)
    # The first and the last document of a row stand between no two EOS: they may be short too.
    mostly_short = (counts >= EOS_DOCUMENTS - 1) & (2 * (short + 2) >= counts + 1)
    whole = counts >= lengths_B
    return np.flatnonzero((counts > 0) & ((adjacent > 0) | mostly_short | whole | (counts >= EOS_SHARE * lengths_B)))
