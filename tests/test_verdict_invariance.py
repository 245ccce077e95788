"""A verdict is about weights and text; names of files, order of rows, split and numbering of tokens are neither."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from fixtures import incidents, plant
from fixtures.incidents import planted
from fixtures.tiny import Tiny, tiny
from fixtures.tiny_text import VOCABULARY, ids_of
from stability_probe.pipeline import run
from stability_probe.request import Request
from stability_probe.schema import Location, Verdict
from tests.planted import HEAD, LAYER, ROW, baseline, batch, diagnose

# One fault of a row, one of the weights, one of the batch as a whole, and none.
FAULTS = ("repeated tokens", "a grown head", "shifted labels", "healthy")
ORDERS = ((2, 0, 3, 1), (3, 2, 1, 0))


def incident(fault: str, folder) -> tuple[Tiny, plant.BatchDict]:
    """A model and a batch; the token ids come from no tokenizer, so that they may be numbered anew."""
    made, rows = tiny("decoder"), batch()
    if fault == "repeated tokens":
        rows = plant.repeated_tokens(rows, ROW, ids_of(" foo bar"), 8)
    elif fault == "shifted labels":
        rows = plant.labels_moved(rows, 1)
    elif fault == "a grown head":
        places = incidents.query_and_key("decoder", LAYER, HEAD)
        made = planted(made, folder, lambda state: plant.head_times(state, places, 8))
    return made, rows


def place(where: Location) -> tuple[object, ...]:
    """The location without an order of rows."""
    rows = (frozenset(where.rows), frozenset(where.positions))
    return (where.module, where.layer, where.layers, where.heads, where.parameters, *rows)


def judged(verdict: Verdict) -> tuple[object, ...]:
    return verdict.cause, verdict.status, place(verdict.location)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_rows_moves_the_rows_of_the_location_only(fault, order, tmp_path):
    made, rows = incident(fault, tmp_path)
    before = diagnose(made, tmp_path, rows).verdict
    moved = {name: tensor[list(order)] for name, tensor in rows.items()}
    after = diagnose(made, tmp_path, moved).verdict
    new = {old: at for at, old in enumerate(order)}
    where = replace(
        before.location,
        rows=tuple(new[row] for row in before.location.rows),
        positions=tuple((new[row], start, end) for row, start, end in before.location.positions),
    )
    assert judged(after) == (before.cause, before.status, place(where))
    if before.explained is not None:
        assert after.explained == pytest.approx(before.explained, abs=0.02)


@pytest.mark.parametrize("fault", FAULTS)
def test_how_many_rows_go_through_at_once_changes_nothing(fault, tmp_path):
    made, rows = incident(fault, tmp_path)
    alone = judged(diagnose(made, tmp_path, rows).verdict)
    for microbatch in (2, 3, 4):
        assert judged(diagnose(made, tmp_path, rows, microbatch=microbatch).verdict) == alone, microbatch


@pytest.mark.parametrize("fault", FAULTS)
def test_the_names_of_the_files_say_nothing(fault, tmp_path):
    made, rows = incident(fault, tmp_path)
    before = judged(diagnose(made, tmp_path, rows).verdict)
    elsewhere = tmp_path / "nan repeated-tokens"
    elsewhere.mkdir()
    ckpt = shutil.copy(made.ckpt, elsewhere / "healthy_step_0.pt")
    bad = incidents.saved(rows, elsewhere / "bad_garbage_padding.pt")
    base = shutil.copy(tmp_path / "baseline.pt", elsewhere / "overflow.pt")
    request = Request(ckpt=ckpt, batch=bad, baselines=(base,), model=made.model)
    assert judged(run(request).verdict) == before


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_numbering_of_tokens_is_no_evidence(fault, seed, tmp_path):
    """Ids and the rows of the embedding and of the head under one permutation: the same text, the same model."""
    made, rows = incident(fault, tmp_path / "fault")
    new = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))
    before = without_tokenizer(made, tmp_path / "before", rows, torch.arange(VOCABULARY))
    assert without_tokenizer(made, tmp_path / "after", rows, new) == before


def without_tokenizer(made: Tiny, folder, rows: plant.BatchDict, new: torch.Tensor) -> tuple[object, ...]:
    """The verdict with token t numbered new[t] everywhere, and no tokenizer beside that knows the old numbers."""

    def change(state):
        old = torch.argsort(new)
        return {name: tensor[old] if len(tensor) == VOCABULARY else tensor for name, tensor in state.items()}

    def anew(batch: plant.BatchDict) -> plant.BatchDict:
        return {name: torch.where(ids >= 0, new[ids.clamp_min(0)], ids) for name, ids in batch.items()}

    folder.mkdir()
    other = planted(made, folder, change)
    (other.folder / "tokenizer.json").unlink()
    saved = incidents.saved(anew(rows), folder / "batch.pt")
    healthy = incidents.saved(anew(baseline()), folder / "baseline.pt")
    return judged(run(Request(ckpt=other.ckpt, batch=saved, baselines=(healthy,), model=made.model)).verdict)
