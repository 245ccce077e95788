"""Do the labels belong to the ids? (D13)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stability_probe.audit.prepare import Ints
from stability_probe.audit.result import Note, Span

Convention = Literal["auto", "shifted", "unshifted", "absent"]
SHIFTS = (0, 1, -1, 2, 3, -2)  # the two conventions first: a repetitive row agrees at many shifts, and they win ties
AGREES = 0.9  # below one: labels that replace a few tokens (noise, masks) are still labels of these ids
DISAGREES = 0.5
FEWEST = 8  # labels; fewer agree with a wrong shift by chance
BARE_PADS = 4  # where no mask shows the padding: two or three of the id at a row's end are chance in a small vocabulary
TAIL = 8  # tokens of one id at the ends of two rows and more: padding, where nothing says what the padding is
STRAY_PADS = 2  # the first pad after a document may be its EOS, and is then a right target


@dataclass(frozen=True)
class Shifts:
    """Share of a row's valid labels that equal the id `shift` positions on, (B, len(SHIFTS)).

    NaN under 8 labels, and for the shifts that no convention is where a convention holds for every label of the row.
    """

    agree_BS: NDArray[np.float64]

    def best_B(self) -> NDArray[np.int64]:
        """The shift that agrees best; ties go to the conventions. −99 where no shift agrees or none can be told."""
        filled = np.where(np.isnan(self.agree_BS), -1.0, self.agree_BS)
        best = np.array(SHIFTS)[filled.argmax(axis=1)]
        return np.where(filled.max(axis=1) >= AGREES, best, -99)


def label_shifts(ids_BT: Ints, labels_BT: Ints) -> Shifts:
    """How well labels[t] equals ids[t + s] for every s of SHIFTS, over labels that are not ignored."""
    B = len(ids_BT)
    agree = np.full((B, len(SHIFTS)), np.nan)
    conventions = [SHIFTS.index(0), SHIFTS.index(1)]
    for column in conventions:
        agree[:, column] = _agreement(ids_BT, labels_BT, SHIFTS[column])
    # Where a convention holds for every label no other shift can beat it: nearly always, and then all is said.
    others = np.flatnonzero(~(agree[:, conventions] == 1.0).any(axis=1))
    if len(others):
        for column in range(len(conventions), len(SHIFTS)):
            agree[others, column] = _agreement(ids_BT[others], labels_BT[others], SHIFTS[column])
    return Shifts(agree)


def _agreement(ids_BT: Ints, labels_BT: Ints, shift: int) -> NDArray[np.float64]:
    T = ids_BT.shape[1]
    low, high = max(0, -shift), T - max(0, shift)
    if high <= low:
        return np.full(len(ids_BT), np.nan)
    targets = labels_BT[:, low:high]
    valid = targets >= 0
    hits = np.count_nonzero((targets == ids_BT[:, low + shift : high + shift]) & valid, axis=1)
    totals = np.count_nonzero(valid, axis=1)
    return np.where(totals >= FEWEST, hits / np.maximum(totals, 1), np.nan)


def usual_shift(best_B: NDArray[np.int64], convention: Convention) -> int:
    """The shift that the rows should have: as declared, else the convention that most rows follow."""
    if convention in ("shifted", "unshifted"):
        return int(convention == "shifted")
    return int(np.count_nonzero(best_B == 1) > np.count_nonzero(best_B == 0))


def shift_note(best: int, agreement: NDArray[np.float64], usual: int, T: int) -> Note | None:
    """The note on a row whose labels are not where the convention puts them."""
    where = (Span(0, T, "labels", ""),)
    names = {0: "the token itself (unshifted)", 1: "the next token (shifted)"}
    if best == usual or np.isnan(agreement).all():
        return None
    if best != -99:
        right = f"labels[t] is ids[t{best:+d}]" if best else "labels[t] is ids[t]"
        detail = f"{right} for {agreement[SHIFTS.index(best)]:.0%} of the labels; expected {names[usual]}"
        return Note("D13", "critical", "label-misalignment", detail, spans=where)
    if float(np.nanmax(agreement)) < DISAGREES:
        detail = f"labels agree with the ids at no shift from −2 to 3 (best {np.nanmax(agreement):.0%})"
        return Note("D13", "high", "label-misalignment", detail, 0.5, where)
    return None


def padding_note(
    ids: Ints, labels: Ints, kept: NDArray[np.bool_] | None, shift: int, pad_id: int | None, eos_id: int | None
) -> Note | None:
    """The note on a row whose padding carries labels (`kept` is False on padding)."""
    padded = np.zeros(len(ids), np.bool_) if kept is None else ~kept
    if pad_id is not None:
        own = int(np.argmax(ids[::-1] != pad_id)) if (ids != pad_id).any() else len(ids)
        padded[len(ids) - own :] = True
    # What a label at t predicts sits at t + shift.
    target_padded = padded[shift:] if shift else padded
    trained = np.flatnonzero(target_padded & (labels[: len(target_padded)] >= 0)) + shift
    fewest = BARE_PADS if kept is None else STRAY_PADS
    if len(trained) < fewest or (pad_id is not None and pad_id == eos_id and len(trained) <= 1):
        return None
    start, end = int(trained[0]), int(trained[-1]) + 1
    detail = f"{len(trained)} padded positions ({start}–{end}) carry labels and are trained on"
    return Note(
        "D13", "critical", "padding-in-loss", detail, spans=(Span(start, end, "padding", "labels not ignored"),)
    )


def eos_note(ids: Ints, labels: Ints, kept: NDArray[np.bool_] | None, shift: int, eos_id: int) -> Note | None:
    """The note on a row whose documents end in EOS but where EOS is never a target (pad = eos, masked by id).

    Only an EOS inside the content counts, or one that the attention mask shows: the first id of the padding may
    be the document's EOS or may not, and then nobody can tell.
    """
    is_eos = ids == eos_id
    if kept is not None:
        is_eos = is_eos & kept
    ends = np.flatnonzero(is_eos[1:] & ~is_eos[:-1]) + 1
    ends = ends[ends > shift]
    # The token before the end must itself be trained on: prompts are masked together with their separators.
    ends = ends[labels[np.maximum(ends - 1 - shift, 0)] >= 0]
    if not len(ends) or bool((labels[ends - shift] >= 0).any()):
        return None
    detail = f"EOS ends {len(ends)} documents here but is never a target: masked together with padding of the same id"
    first = int(ends[0])
    return Note("D13", "critical", "padding-in-loss", detail, spans=(Span(first, first + 1, "eos", "label ignored"),))


def inferred_pad(ids_BT: Ints, kept: NDArray[np.bool_] | None) -> int | None:
    """The id that fills the padding of this batch, where one id does; without a mask, the id that fills its tails."""
    if kept is None:
        return _tail_id(ids_BT)
    fills = np.unique(ids_BT[~kept], return_counts=True)
    if not len(fills[0]) or fills[1].max() < 0.9 * fills[1].sum():
        return None
    return int(fills[0][fills[1].argmax()])


def _tail_id(ids_BT: Ints) -> int | None:
    """The one id that ends several rows in runs of different lengths: documents are as long as they are."""
    if not ids_BT.size:
        return None
    changed = ids_BT[:, ::-1] != ids_BT[:, -1:]
    has_text_B = changed.any(axis=1)
    runs_B = np.where(has_text_B, changed.argmax(axis=1), 0)
    long_B = runs_B >= TAIL
    ids = set(ids_BT[long_B, -1].tolist())
    if len(ids) != 1 or len(set(runs_B[long_B].tolist())) < 2:
        return None
    tail = ids.pop()
    # An end of text may stand between documents too; a token of the text comes back all the time.
    elsewhere = int((ids_BT[has_text_B] == tail).sum()) - int(runs_B[ids_BT[:, -1] == tail].sum())
    return tail if elsewhere <= len(ids_BT) else None
