"""Every container and every form of a saved batch, right or refused."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections import UserDict

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from stability_probe.batches import read_batch
from stability_probe.batches.base import IGNORED
from stability_probe.errors import ProbeError

STREAM = torch.randint(5, 1000, (3, 17), generator=torch.Generator().manual_seed(0))
X, Y = STREAM[:, :-1], STREAM[:, 1:]
ONES = torch.ones_like(X)
UNKNOWN_LAST = torch.cat([Y[:, :-1], torch.full((3, 1), IGNORED)], dim=1)  # what ids alone can say


class Tokenized(UserDict):
    """Stands for BatchEncoding: a UserDict whose class the reader does not know."""


def saved(folder, raw, name="batch.pt"):
    torch.save(raw, folder / name)
    return folder / name


@pytest.mark.parametrize(
    ("raw", "convention", "targets"),
    [
        (X, "absent", UNKNOWN_LAST),
        ({"input_ids": X}, "absent", UNKNOWN_LAST),
        ({"input_ids": X, "labels": X}, "unshifted", UNKNOWN_LAST),
        ({"input_ids": X, "labels": X, "shift_labels": Y}, "shifted", Y),
        (Tokenized({"input_ids": X, "labels": X}), "unshifted", UNKNOWN_LAST),
        ((X, Y), "shifted", Y),
        ([X, Y], "shifted", Y),
        ((X, Y, {"epoch": 1}), "shifted", Y),
        ({"text": STREAM}, "absent", Y),
        (({"input": X, "positions": torch.arange(16)}, Y), "shifted", Y),
        ({"tokens": X, "labels": Y, "loss_mask": torch.ones(3, 16), "cu_seqlens": torch.tensor([0, 16])}, "shifted", Y),
        ({"input_ids": X, "input_mask": ONES.bool(), "label_ids": Y, "label_mask": ONES.bool()}, "shifted", Y),
        ({"input_ids": X, "label_mask": ONES.bool(), "doc_lens": torch.tensor([[16]])}, "absent", UNKNOWN_LAST),
        ([{"input_ids": row, "labels": row.tolist()} for row in X], "unshifted", UNKNOWN_LAST),
        ([{"input_ids": X[:2]}, {"input_ids": X[2:]}], "absent", UNKNOWN_LAST),
        ([(X[:2], Y[:2]), (X[2:], Y[2:])], "shifted", Y),
        ([X, ONES, X], "unshifted", UNKNOWN_LAST),
        ((X, X, ONES), "unshifted", UNKNOWN_LAST),
        ({"batch": {"input_ids": X, "labels": X}, "step": 420}, "unshifted", UNKNOWN_LAST),
        ({"input_ids": X.numpy(), "labels": X.numpy().astype(np.uint16)}, "unshifted", UNKNOWN_LAST),
        ({"input_ids": X.tolist(), "labels": X.double()}, "unshifted", UNKNOWN_LAST),
        ({"input_ids": list(X), "labels": X.to(torch.int16)}, "unshifted", UNKNOWN_LAST),
        (X.to(torch.uint32), "absent", UNKNOWN_LAST),
    ],
)  # fmt: skip
def test_forms_of_one_batch_give_the_same_targets(tmp_path, raw, convention, targets):
    batch = read_batch(saved(tmp_path, raw))
    assert torch.equal(batch.ids_BT, X)
    assert torch.equal(batch.targets_BT, targets)
    assert batch.convention == convention
    assert batch.convention_reason


@pytest.mark.parametrize("name", ["b.npz", "b.npy", "b.safetensors", "b.pth"])
def test_containers(tmp_path, name):
    path = tmp_path / name
    if name == "b.npz":
        np.savez_compressed(path, input_ids=X.numpy(), labels=X.numpy())
    elif name == "b.npy":
        np.save(path, X.numpy().astype(">i4"))
    elif name == "b.safetensors":
        save_file({"input_ids": X.contiguous(), "labels": X.clone()}, path)
    else:
        torch.save({"input_ids": X, "labels": X}, path)
    before = path.read_bytes()
    batch = read_batch(path)
    assert torch.equal(batch.ids_BT, X) and torch.equal(batch.targets_BT, UNKNOWN_LAST)
    assert batch.path == path
    assert batch.sha256 == hashlib.sha256(before).hexdigest()
    assert path.read_bytes() == before and os.listdir(tmp_path) == [name]


def test_numbered_arrays_of_an_archive_are_a_pair(tmp_path):
    np.savez(tmp_path / "b.npz", X.numpy(), Y.numpy())
    assert torch.equal(read_batch(tmp_path / "b.npz").targets_BT, Y)
    np.savez(tmp_path / "b.npz", X.numpy())
    assert torch.equal(read_batch(tmp_path / "b.npz").ids_BT, X)


def test_a_batch_encoding_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    batch = read_batch(saved(tmp_path, transformers.BatchEncoding({"input_ids": X, "labels": X})))
    assert torch.equal(batch.targets_BT, UNKNOWN_LAST)


@pytest.mark.parametrize("raw", [X[0], X[0].tolist(), {"input_ids": X[0], "labels": X[0]}, ({"input": X[0]}, Y[0])])
def test_one_dimension_is_one_row(tmp_path, raw):
    batch = read_batch(saved(tmp_path, raw))
    assert torch.equal(batch.ids_BT, X[:1])
    assert torch.equal(batch.targets_BT[:, :-1], Y[:1, :-1])


def test_a_bare_tensor_one_wider_than_a_context_holds_the_last_target(tmp_path):
    ids = torch.arange(2 * 129).reshape(2, 129)
    batch = read_batch(saved(tmp_path, ids))
    assert torch.equal(batch.ids_BT, ids[:, :-1]) and torch.equal(batch.targets_BT, ids[:, 1:])
    assert read_batch(saved(tmp_path, ids), labels="unshifted").ids_BT.shape == (2, 129)
    assert torch.equal(read_batch(saved(tmp_path, STREAM), labels="shifted").targets_BT, Y)


@pytest.mark.parametrize("pad_id", [None, 7])
def test_examples_of_unequal_length_are_padded_on_the_right_and_masked(tmp_path, pad_id):
    examples = [
        {"input_ids": [11, 12, 13], "labels": [-100, 12, 13]},
        {"input_ids": [21], "labels": torch.tensor([21])},
    ]
    batch = read_batch(saved(tmp_path, examples), pad_id=pad_id)
    pad = pad_id or 0
    assert batch.ids_BT.tolist() == [[11, 12, 13], [21, pad, pad]]
    assert batch.mask_BT.tolist() == [[True, True, True], [True, False, False]]
    assert batch.labels_BT.tolist() == [[-100, 12, 13], [21, -100, -100]]
    assert batch.targets_BT.tolist() == [[12, 13, -100], [-100, -100, -100]]


@pytest.mark.parametrize(
    "raw",
    [
        [[11, 12, 13], [21, 22]],
        {"input_ids": [[11, 12, 13], [21, 22]]},
        {"input_ids": [[11, 12, 13], [21, 22]], "attention_mask": [[1, 1, 1], [1, 1]]},
        [torch.tensor([11, 12, 13]), torch.tensor([21, 22])],
        [{"input_ids": torch.tensor([[11, 12, 13]])}, {"input_ids": torch.tensor([[21, 22]])}],
    ],
)
def test_ragged_rows_without_labels(tmp_path, raw):
    batch = read_batch(saved(tmp_path, raw))
    assert batch.mask_BT.tolist() == [[True, True, True], [True, True, False]]
    assert batch.targets_BT.tolist() == [[12, 13, -100], [22, -100, -100]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_is_neither_input_nor_target(tmp_path, side):
    ids = [[-100, -100, 5, 6, 7], [1, 2, 3, 4, 5]] if side == "left" else [[5, 6, 7, -100, -100], [1, 2, 3, 4, 5]]
    mask = [[0, 0, 1, 1, 1], [1] * 5] if side == "left" else [[1, 1, 1, 0, 0], [1] * 5]
    batch = read_batch(saved(tmp_path, {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}))
    i = IGNORED
    assert batch.ids_BT.tolist()[0] == ([0, 0, 5, 6, 7] if side == "left" else [5, 6, 7, 0, 0])
    assert batch.targets_BT.tolist()[0] == ([i, i, 6, 7, i] if side == "left" else [6, 7, i, i, i])
    assert batch.targets_BT.tolist()[1] == [2, 3, 4, 5, i]


def test_a_negative_id_that_is_no_padding_stays_to_be_found(tmp_path):
    batch = read_batch(saved(tmp_path, {"input_ids": torch.tensor([[1, -3, 2]]), "attention_mask": torch.ones(1, 3)}))
    assert batch.ids_BT.tolist() == [[1, -3, 2]]
    assert batch.targets_BT.tolist() == [[IGNORED, 2, IGNORED]]


def test_padding_that_carries_labels_stays_a_target(tmp_path):
    ids = torch.tensor([[5, 6, 0, 0]])
    raw = {"input_ids": ids, "labels": ids, "attention_mask": torch.tensor([[1, 1, 0, 0]])}
    assert read_batch(saved(tmp_path, raw)).targets_BT.tolist() == [[6, 0, 0, IGNORED]]


def test_a_loss_mask_ignores_labels_and_marks_trailing_padding(tmp_path):
    raw = {
        "tokens": torch.tensor([[5, 6, 7, 0, 0, 0], [1, 2, 3, 4, 5, 6]]),
        "labels": torch.tensor([[6, 7, 0, 0, 0, 0], [2, 3, 4, 5, 6, 7]]),
        "loss_mask": torch.tensor([[1.0, 1, 0, 0, 0, 0], [1, 0, 1, 1, 1, 1]]),
    }
    batch = read_batch(saved(tmp_path, raw))
    i = IGNORED
    assert batch.targets_BT.tolist() == [[6, 7, i, i, i, i], [2, i, 4, 5, 6, 7]]
    assert batch.mask_BT.tolist() == [[True, True, True, False, False, False], [True] * 6]


def test_a_label_mask_speaks_of_the_token_and_a_loss_mask_of_the_prediction(tmp_path):
    ids, mask = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1]])
    i = IGNORED
    assert read_batch(saved(tmp_path, {"input_ids": ids, "label_mask": mask})).targets_BT.tolist() == [[i, 7, 8, i]]
    assert read_batch(saved(tmp_path, {"tokens": ids, "loss_mask": mask})).targets_BT.tolist() == [[i, i, 8, i]]


@pytest.mark.parametrize("form", ["bool", "additive", "row"])
def test_square_masks_tell_padding_by_their_diagonal(tmp_path, form):
    real_BT = torch.tensor([[True, True, True], [True, True, False]])
    square = torch.ones(3, 3, dtype=torch.bool).tril() & real_BT[:, None, None, :]
    masks = {
        "bool": square,
        "additive": torch.zeros(2, 1, 3, 3).masked_fill(~square, float("-inf")),
        "row": real_BT[:, None, None],
    }
    raw = {"input_ids": torch.arange(6).reshape(2, 3), "attention_mask": masks[form]}
    batch = read_batch(saved(tmp_path, raw))
    assert torch.equal(batch.mask_BT, real_BT)
    assert "was dropped" in batch.notes[0]


def test_a_square_mask_that_says_nothing_about_padding_is_dropped(tmp_path):
    inverted = torch.ones(1, 1, 3, 3, dtype=torch.bool).triu(1)  # Megatron: True means masked
    batch = read_batch(saved(tmp_path, {"tokens": torch.arange(6).reshape(2, 3), "attention_mask": inverted}))
    assert batch.mask_BT is None and "was dropped" in batch.notes[0]


def test_additive_and_document_masks(tmp_path):
    ids = torch.arange(4)[None]
    low = torch.finfo(torch.float32).min
    for mask in ([[0.0, 0.0, 0.0, low]], [[1, 1, 2, 0]], [[True, True, True, False]], [1.0, 1.0, 1.0, 0.0]):
        batch = read_batch(saved(tmp_path, {"input_ids": ids, "attention_mask": torch.tensor(mask)}))
        assert batch.mask_BT.tolist() == [[True, True, True, False]]


def test_positions_are_kept_and_odd_ones_dropped_with_a_note(tmp_path):
    batch = read_batch(saved(tmp_path, {"input_ids": X, "position_ids": torch.arange(16)}))
    assert batch.position_ids_BT.tolist() == [list(range(16))] * 3
    batch = read_batch(saved(tmp_path, {"input_ids": X, "position_ids": torch.zeros(3, 3, 16), "extra": X}))
    assert batch.position_ids_BT is None
    assert "position_ids" in batch.notes[0] and "extra" in batch.notes[1]


def test_huge_ids_are_kept(tmp_path):
    assert read_batch(saved(tmp_path, [[2**40, 3]])).ids_BT.tolist() == [[2**40, 3]]


@pytest.mark.parametrize("raw", [X[:, :1], {"input_ids": X[:, :1], "labels": X[:, :1]}])
def test_one_position_has_no_target(tmp_path, raw):
    batch = read_batch(saved(tmp_path, raw))
    assert batch.ids_BT.shape == (3, 1)
    assert (batch.targets_BT == IGNORED).all()


def test_one_position_of_shifted_labels_has_one(tmp_path):
    assert torch.equal(read_batch(saved(tmp_path, (X[:, :1], Y[:, :1]))).targets_BT, Y[:, :1])


RECURSIVE: list = []
RECURSIVE.append(RECURSIVE)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (X[:0], "0 rows"),
        (X[:, :0], "0 positions"),
        ((X[:0], Y[:0]), "0 rows"),
        ([], "0 positions"),
        ([[], []], "0 positions"),
        ({}, "nothing"),
        (X[None], "(1, 3, 16)"),
        (torch.tensor(5), "()"),
        (X + 0.5, "not whole"),
        (X * float("nan"), "not whole"),
        (X.bool(), "true/false"),
        (X.to(torch.complex64), "complex64"),
        (X.to_sparse(), "sparse"),
        (5, "int"),
        ("text", "str"),
        (["some", "text"], "not integers"),
        ({"text": "some text"}, "it holds text"),
        ({"input_ids": [[1, 2], [3, "x"]]}, "'input_ids'"),
        ({"input_ids": [[2**70, 1]]}, "64 bits"),
        ({"pixels": X, "mask": X}, "mask, pixels"),
        ({"input_ids": X, "labels": Y[:, 1:]}, "labels (3, 15), token ids (3, 16)"),
        ({"input_ids": X, "labels": X[0, :3]}, "labels (1, 3)"),
        ((X, Y[:2]), "labels (2, 16)"),
        ({"input_ids": X, "labels": torch.rand(3, 16, 4)}, "'labels'"),
        ({"input_ids": X, "attention_mask": ONES[:, 1:]}, "(3, 15) against (3, 16)"),
        ({"input_ids": X, "position_ids": ONES[:, 1:]}, "(3, 15) against (3, 16)"),
        ({"tokens": X, "loss_mask": ONES[:, 1:]}, "(3, 15) against (3, 16)"),
        ([{"input_ids": X[0], "labels": X[0]}, {"input_ids": X[1]}], "1 of 2 examples have no labels"),
        (RECURSIVE, "contain themselves"),
        (torch.zeros(1, dtype=torch.int64).expand(10**6, 10**6), "1,000,000,000,000 values"),
    ],
)
def test_what_is_no_batch_is_refused_in_three_parts(tmp_path, raw, says):
    with pytest.raises(ProbeError) as caught:
        read_batch(saved(tmp_path, raw))
    error = caught.value
    assert error.exit_code == 3
    assert says in f"{error.problem} {error.why}"
    assert error.why and error.hint and "batch.pt" in error.problem


@pytest.mark.parametrize("name", ["b.pt", "b.npz", "b.npy", "b.safetensors", "b.txt", "b"])
@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 64, b"PK\x03\x04 half an archive", b"\x93NUMPY\x01\x00\x10\x00{'descr"]
)
def test_damaged_files_are_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ProbeError) as caught:
        read_batch(tmp_path / name)
    assert caught.value.exit_code == 3 and name in caught.value.problem


def test_an_empty_array_is_said_to_be_empty(tmp_path):
    np.save(tmp_path / "b.npy", np.zeros((0, 16), dtype=np.int64))
    save_file({"input_ids": X[:0].contiguous()}, tmp_path / "b.safetensors")
    for name in ("b.npy", "b.safetensors"):
        with pytest.raises(ProbeError, match="empty"):
            read_batch(tmp_path / name)


def test_missing_files_folders_and_misspelt_conventions_are_refused(tmp_path):
    for path, labels in ((tmp_path / "none.pt", "auto"), (tmp_path, "auto"), (saved(tmp_path, X), "shfted")):
        with pytest.raises(ProbeError):
            read_batch(path, labels=labels)


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_that_would_run_code_does_not(tmp_path):
    target = tmp_path / "made"
    path = saved(tmp_path, {"input_ids": X, "extra": Payload(str(target))})
    try:
        assert torch.equal(read_batch(path).ids_BT, X)
    except ProbeError as error:
        assert error.exit_code == 3
    assert not target.exists()


@pytest.mark.parametrize("name", ["b.npy", "b.npz"])
def test_object_arrays_are_not_unpickled(tmp_path, name):
    target = tmp_path / "made"
    array = np.array([Payload(str(target))], dtype=object)
    save = np.save if name == "b.npy" else np.savez
    save(tmp_path / name, array, allow_pickle=True)
    with pytest.raises(ProbeError):
        read_batch(tmp_path / name)
    assert not target.exists()


def test_a_header_that_claims_too_much_is_refused_before_memory_is_taken(tmp_path):
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000, 1000000)}".ljust(117) + b"\n"
    claim = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    (tmp_path / "b.npy").write_bytes(claim + b"\0" * 64)
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("input_ids.npy", claim)
    for name in ("b.npy", "b.npz"):
        with pytest.raises(ProbeError):
            read_batch(tmp_path / name)
