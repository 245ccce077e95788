"""Which convention the labels follow, and the edits of a batch; laws against slow twins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stability_probe.batches.base import IGNORED, Batch
from stability_probe.batches.conventions import to_batch
from stability_probe.batches.edit import (
    declared_offset,
    join,
    moved,
    realigned,
    select,
    with_target_offset,
    without_rows,
)
from stability_probe.batches.objects import fields_of
from stability_probe.errors import ProbeError

STREAM = torch.randint(5, 1000, (4, 40), generator=torch.Generator().manual_seed(1))
X, Y = STREAM[:, :32], STREAM[:, 1:33]


def batch_of(raw: object, labels: str = "auto") -> Batch:
    return to_batch(fields_of(raw), labels)


def unshifted_by(s: int) -> dict[str, torch.Tensor]:
    """Labels of the transformers convention whose targets are ids[t + s]: right at s = 1."""
    return {"input_ids": X, "labels": moved(X, s - 1)}


@pytest.mark.parametrize("s", [-1, 0, 1, 2, 3])
def test_misaligned_labels_load_as_declared_and_their_offset_is_seen(s):
    batch = batch_of(unshifted_by(s), "unshifted")
    assert batch.convention == "unshifted"
    assert declared_offset(batch) == s
    right = with_target_offset(batch, 1 - s)
    valid = right.targets_BT != IGNORED
    assert valid[:, 4:-4].all()
    assert torch.equal(right.targets_BT[valid], moved(X, 1)[valid])


@pytest.mark.parametrize("s", [-1, 0, 1, 2, 3])
def test_pairs_at_every_offset_load_as_declared(s):
    batch = batch_of((X, moved(X, s)), "shifted")
    assert declared_offset(batch) == s
    assert torch.equal(batch.targets_BT, moved(X, s))


def test_labels_shifted_twice_are_honoured_when_declared_and_read_as_shifted_when_not():
    raw = unshifted_by(2)
    assert declared_offset(batch_of(raw, "unshifted")) == 2
    batch = batch_of(raw)
    assert (batch.convention, declared_offset(batch)) == ("shifted", 1)
    assert "declare --labels" in batch.convention_reason


@pytest.mark.parametrize("s", [-1, 3])
def test_labels_that_fit_neither_convention_follow_their_key_names(s):
    batch = batch_of(unshifted_by(s))
    assert batch.convention == "unshifted" and "by keys 'input_ids' and 'labels'" in batch.convention_reason
    batch = batch_of({"tokens": X, "labels": moved(X, s)})
    assert batch.convention == "shifted" and "by keys 'tokens' and 'labels'" in batch.convention_reason
    with pytest.raises(ProbeError, match="cannot tell") as caught:
        batch_of({"ids": X, "labels": moved(X, s)})
    assert "--labels" in caught.value.hint


def test_labels_that_fit_both_conventions_need_key_names_or_a_word():
    flat = torch.full((2, 8), 7)
    assert batch_of({"input_ids": flat, "labels": flat}).convention == "unshifted"
    assert batch_of((flat, flat)).convention == "shifted"
    with pytest.raises(ProbeError, match="cannot tell"):
        batch_of({"ids": flat, "labels": flat})
    assert batch_of({"ids": flat, "labels": flat}, "shifted").convention == "shifted"


def test_one_misaligned_row_of_four_does_not_change_how_the_others_are_read():
    labels = X.clone()
    labels[2] = moved(X, 1)[2]
    batch = batch_of({"ids": X, "labels": labels})
    assert batch.convention == "unshifted"
    assert declared_offset(batch) is None
    assert declared_offset(without_rows(batch, [0, 1, 3])) == 2


def test_labels_that_are_all_ignored_decide_nothing():
    assert (batch_of({"ids": X, "labels": torch.full_like(X, -1)}).targets_BT == IGNORED).all()


def test_shift_labels_are_shifted_by_name_unless_unshifted_ones_are_asked_for():
    raw = {"input_ids": X, "labels": X, "shift_labels": X}
    assert torch.equal(batch_of(raw).targets_BT, X)
    assert torch.equal(batch_of(raw, "unshifted").targets_BT, moved(X, 1))


TOKENS = st.integers(1, 50)
STREAMS = st.integers(2, 9).flatmap(
    lambda width: st.lists(st.lists(TOKENS, min_size=width, max_size=width), min_size=1, max_size=4)
)


@given(STREAMS)
def test_shifted_and_unshifted_forms_of_the_same_tokens_agree_where_both_have_targets(stream):
    stream_BT = torch.tensor(stream)
    ids_BT = stream_BT[:, :-1]
    shifted = batch_of((ids_BT, stream_BT[:, 1:]), "shifted")
    unshifted = batch_of({"input_ids": ids_BT, "labels": ids_BT}, "unshifted")
    absent = batch_of(ids_BT, "unshifted")
    assert torch.equal(shifted.targets_BT[:, :-1], unshifted.targets_BT[:, :-1])
    assert torch.equal(absent.targets_BT, unshifted.targets_BT)
    assert (unshifted.targets_BT[:, -1] == IGNORED).all()


@given(STREAMS, st.data())
def test_targets_without_labels_agree_with_a_loop_over_real_tokens(stream, data):
    ids_BT = torch.tensor(stream)
    mask_BT = torch.tensor(data.draw(st.lists(st.booleans(), min_size=ids_BT.numel(), max_size=ids_BT.numel())))
    mask_BT = mask_BT.reshape(ids_BT.shape)
    batch = batch_of({"input_ids": ids_BT, "attention_mask": mask_BT})
    for b, row in enumerate(stream):
        for t in range(len(row)):
            real = t + 1 < len(row) and mask_BT[b, t] and mask_BT[b, t + 1]
            assert batch.targets_BT[b, t] == (row[t + 1] if real else IGNORED)


@given(STREAMS, st.lists(st.integers(0, 8), max_size=12), st.integers(-3, 5))
def test_moved_targets_agree_with_a_loop(stream, ignored, k):
    ids_BT = torch.tensor(stream)
    labels_BT = ids_BT.clone()
    labels_BT[:, [t for t in ignored if t < ids_BT.shape[1]]] = -100
    batch = batch_of({"input_ids": ids_BT, "labels": labels_BT}, "unshifted")
    changed = with_target_offset(batch, k)
    width = ids_BT.shape[1]
    for b in range(len(stream)):
        for t in range(width):
            inside = 0 <= t + k < width
            assert changed.targets_BT[b, t] == (batch.targets_BT[b, t + k] if inside else IGNORED)
    assert torch.equal(with_target_offset(batch, 0).targets_BT, batch.targets_BT)


@given(STREAMS, st.integers(-1, 3))
def test_realigned_targets_are_the_next_tokens_or_ignored(stream, s):
    ids_BT = torch.tensor(stream)
    batch = batch_of((ids_BT, moved(ids_BT, s)), "shifted")
    again = realigned(batch)
    valid = again.targets_BT != IGNORED
    assert torch.equal(again.targets_BT[valid], moved(ids_BT, 1)[valid])
    assert torch.equal(valid[:, :-1], (batch.targets_BT != IGNORED)[:, :-1])
    assert not valid[:, -1].any()


def test_realigning_leaves_padding_out():
    ids_BT, mask_BT = torch.tensor([[0, 5, 6, 0]]), torch.tensor([[0, 1, 1, 0]])
    batch = batch_of({"input_ids": ids_BT, "labels": ids_BT, "attention_mask": mask_BT}, "unshifted")
    assert realigned(batch).targets_BT.tolist() == [[IGNORED, 6, IGNORED, IGNORED]]
    assert with_target_offset(batch, -1).targets_BT.tolist() == [[IGNORED, 5, 6, IGNORED]]


def test_an_offset_of_one_is_preferred_where_repetition_fits_all():
    flat = torch.full((1, 12), 3)
    assert declared_offset(batch_of((flat, flat), "shifted")) == 1
    assert declared_offset(batch_of(X[:, :1])) is None


def test_random_labels_have_no_offset():
    assert declared_offset(batch_of((X, X.flip(1)), "shifted")) is None


def test_joined_batches_stand_below_each_other_padded_and_masked():
    short, long = batch_of({"input_ids": X[:2, :5], "labels": X[:2, :5]}), batch_of((X, Y))
    both = join([short, long])
    assert both.ids_BT.shape == (6, 32)
    assert torch.equal(both.ids_BT[2:], X) and torch.equal(both.targets_BT[2:], Y)
    assert torch.equal(both.targets_BT[:2, :5], short.targets_BT) and (both.targets_BT[:2, 5:] == IGNORED).all()
    assert both.mask_BT.sum(dim=1).tolist() == [5, 5, 32, 32, 32, 32]
    assert both.labels_BT.shape == (6, 32)
    assert join([long, batch_of(X)]).mask_BT is None and join([long, batch_of(X)]).labels_BT is None
    assert join([long]) is long


def test_select_keeps_the_first_rows_and_positions():
    batch = batch_of({"input_ids": X, "labels": X, "position_ids": torch.arange(32)})
    part = select(batch, 2, 5)
    assert torch.equal(part.ids_BT, X[:2, :5]) and torch.equal(part.targets_BT, batch.targets_BT[:2, :5])
    assert part.labels_BT.shape == part.position_ids_BT.shape == (2, 5)
    assert part.notes == ("only 2 of 4 rows and 5 of 32 positions are used",)
    assert select(batch, None, None) is batch and select(batch, 99, 99) is batch


def test_select_does_not_count_columns_that_are_padding_in_every_row():
    mask_BT = torch.ones(4, 32)
    mask_BT[:, :10] = 0
    part = select(batch_of({"input_ids": X, "attention_mask": mask_BT}), None, 4)
    assert part.ids_BT.shape == (4, 14) and int(part.mask_BT.sum()) == 16


@given(st.lists(st.integers(-1, 6)))
def test_without_rows_keeps_the_others_in_order(rows):
    batch = batch_of((X, Y))
    kept = [row for row in range(4) if row not in rows]
    if not kept:
        with pytest.raises(ProbeError) as caught:
            without_rows(batch, rows)
        assert caught.value.exit_code == 4
        return
    assert torch.equal(without_rows(batch, rows).ids_BT, X[kept])
    assert torch.equal(without_rows(batch, rows).targets_BT, Y[kept])
