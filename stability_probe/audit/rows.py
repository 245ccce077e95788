"""The audit of one batch: ids in, a verdict per row out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stability_probe.audit import copies, counts, judgement
from stability_probe.audit.features import Features, measure_rows
from stability_probe.audit.labels import (
    Convention,
    eos_note,
    inferred_pad,
    label_shifts,
    padding_note,
    shift_note,
    usual_shift,
)
from stability_probe.audit.prepare import Content, Ints, as_numpy, content, kept_BT
from stability_probe.audit.result import FLAGGING, AuditResult, Note, RowAudit, Span, batch_verdict, judged
from stability_probe.errors import ProbeError

if TYPE_CHECKING:
    from stability_probe.audit.baseline import Baseline
    from stability_probe.audit.vocabulary import Vocabulary

Notes = dict[int, list[Note]]
WHOLE_BATCH = 0.9  # share of the rows that can be judged; one odd row does not make a fault of all others local


def audit_rows(
    ids_BT: Any,
    *,
    labels_BT: Any = None,
    mask_BT: Any = None,
    labels: Convention = "auto",
    vocab_size: int | None = None,
    tokenizer: Any = None,
    baseline: Baseline | None = None,
    pad_id: int | None = None,
    eos_id: int | None = None,
    round_trip_rows: int | None = None,
) -> AuditResult:
    """Score every row of a batch, name the span and the reason, and say whether to skip the batch.

    Args:
        ids_BT: token ids, (rows, positions): numpy or torch, any integer type, CPU or CUDA, contiguous or not.
        labels_BT: labels as stored, same shape; negative ones are ignored. None where the batch has none.
        mask_BT: attention mask, nonzero on content. Without it, padding is the constant run at a row's edge
            whose labels are ignored, else the trailing run of `pad_id`.
        labels: "unshifted" (labels[t] belongs to ids[t]), "shifted" (labels[t] is the next token), "auto" takes
            the one that most rows follow.
        vocab_size: for the range check; the tokenizer's size where only that is known.
        tokenizer: a `tokenizers.Tokenizer`, a transformers fast tokenizer, or a `Vocabulary`.
        baseline: healthy rows to rank against.
        pad_id, eos_id: taken from a transformers tokenizer where not given. Runs and templates end at EOS.
        round_trip_rows: decode and encode again at most this many rows beside those the other detectors select;
            None means all of them.

    Raises:
        ProbeError: ids that are not integers; labels or mask of another shape.
    """
    seen = _examine(
        ids_BT,
        labels_BT,
        mask_BT,
        labels,
        vocab_size,
        _vocabulary(tokenizer),
        baseline,
        pad_id,
        eos_id,
        round_trip_rows,
    )
    rows = _row_audits(seen, range(len(seen.features.tokens)))
    result = batch_verdict(rows, seen.whole_batch)
    if tokenizer is not None and _vocabulary(tokenizer) is None:
        lacking = f"{type(tokenizer).__name__} has no fast tokenizer behind it: nothing was decoded"
        result = replace(result, notes=(*result.notes, lacking))
    return result


def flagged_rows(
    ids_BT: Ints,
    *,
    mask_BT: NDArray[np.bool_] | None,
    vocab_size: int | None,
    vocabulary: Vocabulary | None,
    baseline: Baseline | None,
    pad_id: int | None,
    eos_id: int | None,
    round_trip_rows: int,
) -> tuple[RowAudit, ...]:
    """Only the flagged rows of a block of a data set: the others cost no object each."""
    seen = _examine(ids_BT, None, mask_BT, "auto", vocab_size, vocabulary, baseline, pad_id, eos_id, round_trip_rows)
    wanted = [row for row, own in seen.notes.items() if any(note.severity in FLAGGING for note in own)]
    return _row_audits(seen, wanted)


@dataclass(frozen=True)
class _Examined:
    features: Features
    notes: Notes
    p_values: NDArray[np.float64] | None
    whole_batch: str


def _examine(
    ids_BT: Any,
    labels_BT: Any,
    mask_BT: Any,
    labels: Convention,
    vocab_size: int | None,
    vocabulary: Vocabulary | None,
    baseline: Baseline | None,
    pad_id: int | None,
    eos_id: int | None,
    round_trip_rows: int | None,
) -> _Examined:
    ids = as_numpy(ids_BT, "the ids")
    targets = None if labels_BT is None else _same_shape(as_numpy(labels_BT, "the labels"), ids, "labels")
    mask = None if mask_BT is None else _same_shape(as_numpy(mask_BT, "the mask"), ids, "mask")
    if vocabulary is not None:
        vocab_size = vocab_size or vocabulary.size
        eos_id = vocabulary.eos_id if eos_id is None else eos_id
        pad_id = vocabulary.pad_id if pad_id is None else pad_id
    if targets is None and mask is None and pad_id == eos_id and eos_id is not None:
        mask = _all_eos_is_content(ids, eos_id)
    kept = kept_BT(ids, mask, targets, pad_id)
    rows = content(ids, kept)
    is_eos = None if eos_id is None else _eos(rows, eos_id)
    size = judgement.effective_vocabulary(ids, vocab_size)
    small = size <= judgement.SMALL_VOCABULARY
    measured = measure_rows(rows, is_eos, print_gram=32 if small else 8)
    features = measured.features
    if kept is not None:
        features = replace(features, reference=counts.reference_scores(ids))
    notes: Notes = {row: [] for row in range(len(ids))}
    _check_ids(ids, mask, vocab_size, rows, notes)
    judgement.judge_runs(rows, measured, size, notes)
    judgement.judge_counts(rows, measured, features, size, notes)
    if is_eos is not None:
        judgement.judge_separators(rows, is_eos, notes)
    shortest = copies.SHORTEST_SMALL if small else copies.SHORTEST
    _check_copies(rows, measured.prints, features, shortest, notes)
    whole_batch = "" if targets is None else _check_labels(ids, targets, kept, labels, pad_id, eos_id, notes)
    if vocabulary is not None:
        from stability_probe.audit.text import judge_text

        whole_batch = judge_text(vocabulary, rows, is_eos, features, round_trip_rows, notes) or whole_batch
    p_values: NDArray[np.float64] | None = None
    if baseline is not None:
        p_values = baseline.judge(rows, features, notes)
    return _Examined(features, notes, p_values, whole_batch)


def _row_audits(seen: _Examined, wanted: Iterable[int]) -> tuple[RowAudit, ...]:
    features = seen.features
    tokens, entropy = features.tokens.tolist(), features.entropy_bits.tolist()
    duplicates, reference = features.duplicate_share.tolist(), features.reference.tolist()
    nan = np.full(len(tokens), np.nan)
    ps = [None if p != p else p for p in (nan if seen.p_values is None else seen.p_values).tolist()]
    return tuple(
        judged(
            RowAudit(row, tokens[row], 0.0, (), (), (), "", entropy[row], duplicates[row], reference[row], ps[row]),
            seen.notes[row],
        )
        for row in wanted
    )


def _same_shape(array: NDArray[Any], ids: NDArray[Any], name: str) -> NDArray[Any]:
    if array.shape != ids.shape:
        raise ProbeError(
            f"cannot audit the {name}",
            f"they have shape {array.shape}, the ids {ids.shape}",
            "save ids, labels and mask of the same batch with the same shape",
        )
    return array


def _vocabulary(tokenizer: Any) -> Vocabulary | None:
    """None for a pure-Python tokenizer too: decoding every row with one would cost more than the audit is worth."""
    if tokenizer is None:
        return None
    from stability_probe.audit.vocabulary import Vocabulary

    if isinstance(tokenizer, Vocabulary):
        return tokenizer
    return Vocabulary.of(tokenizer) if Vocabulary.can_use(tokenizer) else None


def _all_eos_is_content(ids: Ints, eos_id: int) -> NDArray[np.bool_] | None:
    """Where pad = eos and a row is nothing but that id, it is a row of EOS, not an empty one."""
    only = (ids == eos_id).all(axis=1) if ids.shape[1] else np.zeros(len(ids), np.bool_)
    if not only.any():
        return None
    kept = kept_BT(ids, None, None, eos_id)
    kept = np.ones(ids.shape, np.bool_) if kept is None else kept
    kept[only] = True
    return kept


def _eos(rows: Content, eos_id: int) -> NDArray[np.bool_] | None:
    is_eos = rows.ids_BW == eos_id
    return is_eos if is_eos.any() else None


def _check_ids(ids: Ints, mask: NDArray[Any] | None, vocab_size: int | None, rows: Content, notes: Notes) -> None:
    """D0: ids outside [0, V) where the mask does not hide them, and rows without content."""
    empty = np.flatnonzero(rows.lengths_B == 0).tolist() if ids.shape[1] else []
    for row in empty:
        notes[row].append(Note("D0", "critical", "no-valid-labels", "the row is nothing but padding"))
    if not ids.size:
        return
    top = np.iinfo(np.int64).max if vocab_size is None else vocab_size - 1
    if int(ids.max()) <= top and int(ids.min()) >= 0:
        return
    wrong = (ids < 0) | (ids > top)
    if mask is not None:
        wrong &= mask != 0
    for row in np.flatnonzero(wrong.any(axis=1)).tolist():
        at = np.flatnonzero(wrong[row])
        first = int(at[0])
        limit = "" if vocab_size is None else f" for a vocabulary of {vocab_size}"
        detail = f"{len(at)} ids outside the vocabulary, first {int(ids[row, first])} at position {first}{limit}"
        spans = tuple(Span(int(i), int(i) + 1, "id", f"id {int(ids[row, i])}") for i in at[:8])
        notes[row].append(Note("D0", "critical", "token-id-out-of-range", detail, spans=spans))


def _check_copies(rows: Content, prints: copies.Prints, features: Features, shortest: int, notes: Notes) -> None:
    """D12: all but the first of equal rows; then rows that share half of their sampled 8-grams with an earlier one."""
    exact = copies.exact_copies(rows, (features.entropy_bits, features.duplicate_share), shortest)
    for row, earlier in exact.items():
        span = Span(*rows.place(row, 0, int(rows.lengths_B[row])), "copy", f"of row {earlier}")
        notes[row].append(Note("D12", "high", "duplicate-examples", f"exact copy of row {earlier}", 1.0, (span,)))
    for row, (earlier, part) in copies.near_copies(rows, prints, features.entropy_bits).items():
        if row in exact:
            continue
        span = Span(*rows.place(row, 0, int(rows.lengths_B[row])), "near copy", f"of row {earlier}")
        detail = f"shares {part:.0%} of its 8-grams with row {earlier}"
        notes[row].append(Note("D12", "high", "duplicate-examples", detail, part, (span,)))


def _check_labels(
    ids: Ints,
    targets: Ints,
    kept: NDArray[np.bool_] | None,
    labels: Convention,
    pad_id: int | None,
    eos_id: int | None,
    notes: Notes,
) -> str:
    """D13 on every row. Returns the sentence of a fault that (nearly) all rows share, else an empty string."""
    if not ids.size:
        return ""
    T = ids.shape[1]
    shifts = label_shifts(ids, targets)
    best = shifts.best_B()
    usual = usual_shift(best, labels)
    pad_id = inferred_pad(ids, kept) if pad_id is None else pad_id
    ends_in_pad = np.zeros(len(ids), np.bool_) if pad_id is None else ids[:, -1] == pad_id
    # Two ends of text and more at a row's end are padding with that id, and some text before them is the row.
    ends_in_eos = np.zeros(len(ids), np.bool_)
    if eos_id is not None and T >= 2:
        ends_in_eos = (ids[:, -2:] == eos_id).all(axis=1) & (ids != eos_id).any(axis=1)
    ignored = set(np.flatnonzero((targets < 0).all(axis=1)).tolist())
    found: dict[str, list[int]] = {}
    for row in range(len(ids)):
        own = None if kept is None else kept[row]
        made: list[Note | None] = [shift_note(int(best[row]), shifts.agree_BS[row], usual, T)]
        if own is not None or ends_in_pad[row]:
            made.append(padding_note(ids[row], targets[row], own, usual, pad_id, eos_id))
        elif ends_in_eos[row]:
            made.append(padding_note(ids[row], targets[row], own, usual, eos_id, eos_id))
        if eos_id is not None:
            made.append(eos_note(ids[row], targets[row], own, usual, eos_id))
        if row in ignored:
            made = [Note("D13", "critical", "no-valid-labels", "every label of the row is ignored")]
        for note in filter(None, made):
            if note.slug == "padding-in-loss":  # then the ends of text there are padding, and no separators
                notes[row] = [other for other in notes[row] if other.detector != "D11"]
            notes[row].append(note)
            if note.severity == "critical":
                found.setdefault(note.slug, []).append(row)
    for slug, guilty in found.items():
        if len(guilty) >= WHOLE_BATCH * len(ids):
            detail = next(note.detail for note in notes[guilty[0]] if note.slug == slug)
            for row in set(range(len(ids))) - set(guilty):
                notes[row].append(Note("D13", "critical", slug, f"the whole batch: {detail}"))
            return f"{slug} in {len(guilty)} of {len(ids)} rows ({detail})"
    return ""
