"""What only the tokenizer can tell: round trip, bytes per token, mojibake, digits, markup (D6–D8, D14–D16)."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stability_probe.audit import encodings
from stability_probe.audit.features import Features
from stability_probe.audit.prepare import Content
from stability_probe.audit.result import Note, Severity, Span
from stability_probe.audit.vocabulary import Vocabulary

Notes = dict[int, list[Note]]

PRESERVED = 0.985  # share of bigrams that survive decoding and encoding; text that the tokenizer wrote has 1.0
SURE_TOKENS = 512  # below, one stray character costs more than 1.5 % of the bigrams
BROKEN = 0.95  # from 64 tokens on: three broken bigrams of sixty, more than one stray character costs
LEAST_TOKENS = 64
EDGE = 2  # bigrams at either end of a segment: rows are cut inside words and inside characters
BYTES_PER_TOKEN = 1.6
WORDS = 2.0  # mean bytes of the vocabulary's own tokens: below, it is a character vocabulary and D7 says nothing
DIGIT_RUN = 256
ENCODED_TOKENS = 256  # below, a key or a checksum in ordinary code is a third of the row
WHOLE_ROW = 128  # a window of fewer tokens may lie inside an icon of ordinary code
ALL_ENCODED = 0.95  # of the text in long words: then there is no ordinary code around it, however short the row
MISMATCH = 0.5  # of the rows: then it is the tokenizer, not the rows
WHOLE_BATCH = 0.9
FEW_REPEATS = 0.02  # of 4-grams: text of 512 tokens and more has more; shuffled ids have not
RULERS, LINE = frozenset("-=_*#~./+ "), 80  # what lines are drawn with, and how wide they are
RULERS_SHARE = 0.5  # of the row: less than half of it
LOW_BYTES = 2.2  # bytes per token of base64, hex and mojibake stay below; English has 3–4.5


def judge_text(
    vocabulary: Vocabulary,
    rows: Content,
    is_eos: NDArray[np.bool_] | None,
    features: Features,
    round_trip_rows: int | None,
    notes: Notes,
) -> str:
    """Add the notes of D6, D7, D8, D14, D15 and D16, and lower D1 on rulers.

    Returns the sentence of a fault that all rows share, or "".
    """
    bytes_B = _bytes_per_token(vocabulary, rows)
    chosen = _chosen(features, bytes_B, round_trip_rows, notes)
    _judge_rulers(vocabulary, rows, notes)
    _judge_digits(vocabulary, rows, notes)
    if vocabulary.bytes_of_id.mean() >= WORDS:
        for row in np.flatnonzero((features.tokens >= LEAST_TOKENS) & (bytes_B < BYTES_PER_TOKEN)).tolist():
            detail = f"{bytes_B[row]:.2f} bytes a token"
            notes[row].append(Note("D7", "info", "garbage-tokens", detail, 1 - bytes_B[row] / BYTES_PER_TOKEN))
    pieces = {row: _segments(rows, is_eos, row) for row in chosen if features.tokens[row] >= LEAST_TOKENS}
    owners = [row for row, own in pieces.items() for _ in own]
    spans = [span for own in pieces.values() for span in own]
    ids = [rows.ids_BW[row, start:end] for row, (start, end) in zip(owners, spans, strict=True)]
    texts = vocabulary.decodes(ids) if ids else []
    again = vocabulary.encode(texts) if texts else []
    broken: dict[int, list[tuple[int, int, int, float]]] = {}
    whole_text: dict[int, list[str]] = {}
    for row, (start, end), own, back, text in zip(owners, spans, ids, again, texts, strict=True):
        kept, total = preserved_bigrams(own.astype(np.int64), back)
        broken.setdefault(row, []).append((start, end, total, kept))
        whole_text.setdefault(row, []).append(text)
    for row, parts in whole_text.items():
        _judge_characters("\n".join(parts), rows, row, notes)
    return _judge_round_trip(rows, broken, notes)


def _judge_rulers(vocabulary: Vocabulary, rows: Content, notes: Notes) -> None:
    """A line of dashes is not a fault: D1 counts less where all that repeats is one such character, for a line's width.

    Larger vocabularies hold such a line in a few tokens, small ones spell it.
    """
    for row, own in notes.items():
        for at, note in enumerate(own):
            if note.detector != "D1" or note.severity != "high" or not vocabulary.size:
                continue
            first, n = rows.place(row, 0, 1)[0], int(rows.lengths_B[row])
            runs = [rows.ids_BW[row, span.start - first : span.end - first] for span in note.spans]
            texts = [text.strip() or " " for text in vocabulary.decodes(runs)]
            is_ruler = all(len(set(text)) <= 2 and set(text) <= RULERS and len(text) <= LINE for text in texts)
            if is_ruler and sum(map(len, runs)) < RULERS_SHARE * n:
                own[at] = replace(note, severity="medium")


def preserved_bigrams(ids: NDArray[np.int64], again: NDArray[np.int64]) -> tuple[float, int]:
    """How many of the bigrams of `ids` (edges left out) also stand in `again`, as multisets, and how many there are."""
    own = ids[EDGE : len(ids) - EDGE]
    if len(own) < 2:
        return 0.0, 0
    keys, counts = np.unique(own[:-1] << 32 | own[1:], return_counts=True)
    if len(again) < 2:
        return 0.0, len(own) - 1
    back, back_counts = np.unique(again[:-1] << 32 | again[1:], return_counts=True)
    at = np.minimum(np.searchsorted(back, keys), len(back) - 1)
    return float(np.minimum(counts, np.where(back[at] == keys, back_counts[at], 0)).sum()), len(own) - 1


def _bytes_per_token(vocabulary: Vocabulary, rows: Content) -> NDArray[np.float64]:
    if not vocabulary.size:
        return np.zeros(len(rows.lengths_B))
    table = np.append(vocabulary.bytes_of_id, 0)  # fillers and ids beyond the vocabulary count nothing
    ids = np.where((rows.ids_BW < 0) | (rows.ids_BW >= vocabulary.size), vocabulary.size, rows.ids_BW)
    return table[ids].sum(axis=1, dtype=np.int64) / np.maximum(rows.lengths_B, 1)


def _chosen(features: Features, bytes_B: NDArray[np.float64], most: int | None, notes: Notes) -> list[int]:
    """Rows to decode: all, or the suspicious ones and `most` others drawn at random."""
    everything = range(len(features.tokens))
    if most is None:
        return list(everything)
    strange = (features.duplicate_share <= FEW_REPEATS) | (bytes_B <= LOW_BYTES)
    suspicious = {row for row in everything if notes[row] or strange[row]}
    others = [row for row in everything if row not in suspicious]
    return sorted(suspicious | set(random.Random(len(others)).sample(others, min(most, len(others)))))


def _segments(rows: Content, is_eos: NDArray[np.bool_] | None, row: int) -> list[tuple[int, int]]:
    """The row's documents, EOS left out; those under 16 tokens say nothing about a round trip."""
    n = int(rows.lengths_B[row])
    ends = [-1, *(np.flatnonzero(is_eos[row, :n]).tolist() if is_eos is not None else ()), n]
    return [(a + 1, b) for a, b in itertools.pairwise(ends) if b - a > 16]


def _judge_round_trip(rows: Content, broken: dict[int, list[tuple[int, int, int, float]]], notes: Notes) -> str:
    failed: dict[int, Note] = {}
    for row, segments in broken.items():
        total = sum(count for _, _, count, _ in segments)
        share = sum(kept for _, _, _, kept in segments) / max(1, total)
        long = [(kept / count, start, end) for start, end, count, kept in segments if count >= SURE_TOKENS]
        worst = min(long, default=(1.0, 0, 0))
        if min(share, worst[0]) >= PRESERVED or total < LEAST_TOKENS - 2 * EDGE - 1:
            continue
        low, start, end = worst if worst[0] < share else (share, segments[0][0], segments[-1][1])
        detail = f"{low:.1%} of the bigrams survive decoding and encoding again"
        span = (Span(*rows.place(row, start, end), "round trip", f"{low:.1%} of the bigrams kept"),)
        sure = total >= SURE_TOKENS or worst[0] < PRESERVED
        severity: Severity = "critical" if sure else "high" if low < BROKEN else "medium"
        note = Note("D6", severity, "garbage-tokens", detail, 1 - low, span)
        notes[row].append(note)
        if severity != "medium":
            failed[row] = note
    if len(broken) < 2 or len(failed) < MISMATCH * len(broken):
        return ""
    for row, note in failed.items():
        notes[row][notes[row].index(note)] = Note(
            note.detector, note.severity, "tokenizer-mismatch", note.detail, note.strength, note.spans
        )
    if len(failed) < WHOLE_BATCH * len(broken):
        return ""
    detail = f"tokenizer-mismatch: {len(failed)} of {len(broken)} rows do not survive decoding and encoding again"
    for row in notes.keys() - failed.keys():
        notes[row].append(Note("D6", "critical", "tokenizer-mismatch", f"the whole batch: {detail}"))
    return detail


def _judge_characters(text: str, rows: Content, row: int, notes: Notes) -> None:
    whole = (Span(*rows.place(row, 0, int(rows.lengths_B[row])), "text", ""),)
    found = encodings.mojibake(text)
    if found:
        detail = f"mojibake: {found.what}, {found.share:.0%} of the characters"
        notes[row].append(Note("D8", "high", "garbage-tokens", detail, found.share, whole))
    kind, share = encodings.encoded_share(text)
    if share >= encodings.ENCODED_SHARE:
        detail = f"{share:.0%} of the text is {kind}"
        n = rows.lengths_B[row]
        all_encoded = encodings.long_encoded_share(text) >= ALL_ENCODED
        sure = n >= SURE_TOKENS or all_encoded or (n >= ENCODED_TOKENS and share >= encodings.ENCODED_SHARE_SHORT)
        whole_row = all_encoded and n >= WHOLE_ROW
        severity: Severity = "critical" if whole_row else "high" if sure else "medium"
        notes[row].append(Note("D16", severity, "garbage-tokens", detail, share, whole))
    markup = encodings.markup_share(text)
    if markup >= encodings.MARKUP_SHARE and any(note.detector == "D4" for note in notes[row]):
        detail = f"{markup:.0%} of the characters are markup"
        notes[row].append(Note("D15", "medium", "boilerplate", detail, markup, whole))


def _judge_digits(vocabulary: Vocabulary, rows: Content, notes: Notes) -> None:
    if rows.ids_BW.shape[1] < DIGIT_RUN or not vocabulary.size:
        return
    digits = np.append(vocabulary.is_digits, False)
    ids = np.where((rows.ids_BW < 0) | (rows.ids_BW >= vocabulary.size), vocabulary.size, rows.ids_BW)
    is_digit = digits[ids]
    for row in np.flatnonzero(np.count_nonzero(is_digit, axis=1) >= DIGIT_RUN).tolist():
        edges = np.concatenate([[-1], np.flatnonzero(~is_digit[row]), [len(is_digit[row])]])
        gaps = np.diff(edges) - 1
        longest = int(gaps.max())
        if longest >= DIGIT_RUN:
            start = int(edges[gaps.argmax()]) + 1
            share = is_digit[row].sum() / int(rows.lengths_B[row])
            span = (Span(*rows.place(row, start, start + longest), "digits", f"{longest} tokens"),)
            detail = f"{longest} digit tokens without a break; {share:.0%} of the row is digits"
            notes[row].append(Note("D14", "medium", "numeric-runs", detail, longest / 2048, span))
