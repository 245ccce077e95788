"""Facts on positions, blind queries, mixing matrices and a second replay, against obvious twins."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stability_probe.batches.base import Batch
from stability_probe.examination import repeat_facts, repeated
from stability_probe.replay import Subject, replay
from stability_probe.step_progress import kept_in_bf16
from stability_probe.tables_mixing import mixing_table
from stability_probe.tables_positions import (
    blind_queries,
    first_position,
    losses_by_position,
    position_breaks,
    position_facts,
    settings_of,
    share_at_documents,
)
from stability_probe.taps.attention import statistics_from_qk
from tests.test_optimizer_step import state_of, trained
from tests.test_replay import batch_of, decoder


def with_positions(rows, ids=None, mask=None):
    positions = torch.tensor(rows)
    ids = torch.ones_like(positions) if ids is None else torch.tensor(ids)
    return Batch(ids, ids, mask_BT=mask, position_ids_BT=positions)


@given(st.lists(st.lists(st.integers(0, 9), min_size=6, max_size=6), min_size=1, max_size=3))
def test_breaks_are_where_the_next_id_is_not_one_more(rows):
    want = [(b, t) for b, row in enumerate(rows) for t in range(1, 6) if row[t] != row[t - 1] + 1]
    assert position_breaks(with_positions(rows)) == want


def test_padding_breaks_nothing():
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]]).bool()
    assert position_breaks(with_positions([[1, 1, 0, 1, 2, 3]], mask=mask)) == []
    assert first_position(with_positions([[1, 1, 7, 8, 9, 10]], mask=mask)) == 7


def test_packed_documents_start_again_after_the_separator():
    batch = with_positions([[0, 1, 2, 0, 1, 0]], ids=[[5, 6, 9, 7, 9, 8]])
    breaks = position_breaks(batch)
    assert share_at_documents(batch, breaks, eos_id=9) == 1.0
    assert share_at_documents(batch, breaks, eos_id=None) == 1.0
    assert share_at_documents(batch, breaks, eos_id=3) == 0.0
    torn = with_positions([[0, 1, 2, 0, 1, 0]], ids=[[5, 6, 1, 7, 9, 8]])
    assert share_at_documents(torn, breaks, eos_id=9) == 0.5
    skipping = with_positions([[0, 1, 2, 5, 6, 7]], ids=[[5, 6, 9, 7, 9, 8]])
    assert share_at_documents(skipping, position_breaks(skipping), eos_id=9) == 0.0


@given(st.integers(1, 70))
def test_buckets_cover_every_position_once(length):
    model, batch = decoder(), batch_of(B=2, T=17)
    trace = replay(Subject.of(model), batch, backward=False, detail=False)
    trace.token_loss_BT = torch.arange(2.0 * length).reshape(2, length)
    trace.has_target_BT = torch.ones(2, length, dtype=torch.bool)
    found = losses_by_position(trace)
    covered = [at for start, stop, _, _ in found for at in range(start, stop)]
    assert covered == list(range(length))
    total = sum(loss * count for _, _, loss, count in found)
    assert total == pytest.approx(trace.token_loss_BT.sum().item())
    assert found[0][:2] == (0, 1)


def test_theta_is_read_off_plain_frequencies_only():
    plain = 777.0 ** -(torch.arange(0, 24, 2) / 24)
    assert settings_of(plain) == pytest.approx((777.0, 1.0), rel=1e-3)
    assert settings_of(plain / 8) == pytest.approx((777.0, 8.0), rel=1e-3)
    assert settings_of(torch.cat([plain[:6], plain[6:] / 8])) is None
    assert settings_of(torch.ones(1)) is None


def test_facts_of_a_batch_without_positions():
    model, batch = decoder("llama"), batch_of()
    facts = position_facts(Subject.of(model), batch, replay(Subject.of(model), batch), None)
    assert (facts.stored, facts.taken, facts.breaks, facts.first) == (False, True, (), 0)
    assert facts.rotary_theta == 10_000.0


def test_every_broken_row_is_known_however_many_breaks_are_listed():
    model, batch = decoder("llama"), batch_of()
    still = dataclasses.replace(batch, position_ids_BT=torch.zeros_like(batch.ids_BT))
    facts = position_facts(Subject.of(model), still, replay(Subject.of(model), still), None)
    assert facts.broken_rows == tuple(range(len(batch.ids_BT)))
    assert set(facts.broken_rows) >= {row for row, _ in facts.breaks}


def test_blind_queries_are_counted_by_the_mask_and_by_the_calls():
    mask = torch.ones(3, 17, dtype=torch.bool)
    mask[0, :4] = False
    mask[2] = False
    batch = dataclasses.replace(batch_of(), mask_BT=mask)
    model = decoder("llama")
    blind = blind_queries(batch, replay(Subject.of(model), batch))
    assert (blind.padding, blind.rows, blind.real, blind.padded_rows) == (4, (2,), (), (0,))
    q, k = torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4)
    strict = torch.ones(9, 9, dtype=torch.bool).tril(-1)
    assert statistics_from_qk(q, k, mask=strict).blind_BH.tolist() == [[1, 1]]
    assert statistics_from_qk(q, k, causal=True).blind_BH.tolist() == [[0, 0]]


def test_a_mask_that_keeps_the_padding_and_hides_the_text():
    model, batch = decoder("llama"), batch_of()
    T = batch.ids_BT.shape[1]
    ids, mask = batch.ids_BT.clone(), torch.ones_like(batch.ids_BT, dtype=torch.bool)
    ids[1, T - 5 :] = 0  # padded on the right
    mask[1, T - 5 :] = False
    padded = dataclasses.replace(batch, ids_BT=ids, mask_BT=mask)
    assert blind_queries(padded, replay(Subject.of(model), padded)).rows == ()
    mask = mask.clone()
    mask[1] = ~mask[1]
    inverted = dataclasses.replace(padded, mask_BT=mask)
    assert blind_queries(inverted, replay(Subject.of(model), inverted)).rows == (1,)


def test_products_of_mixing_matrices_by_depth():
    model = decoder("hyper")
    with torch.no_grad():
        for block in model.blocks:
            block.stream_mix.copy_(torch.tensor([[1.0, 0.5], [0.0, 1.0]]))
    first, second = mixing_table(model, Subject.of(model).anatomy)
    matrix = torch.tensor([[1.0, 0.5], [0.0, 1.0]])
    assert first["product_norm"] == pytest.approx(torch.linalg.matrix_norm(matrix, 2).item())
    assert second["product_norm"] == pytest.approx(torch.linalg.matrix_norm(matrix @ matrix, 2).item(), rel=1e-6)
    assert (first["parameter"], second["layer"]) == ("blocks.0.stream_mix", 1)
    assert mixing_table(decoder("llama"), Subject.of(decoder("llama")).anatomy) == ()


def test_the_same_replay_twice_is_the_same():
    model, batch = decoder("llama"), batch_of(B=10)
    subject = Subject.of(model)
    facts = repeat_facts(replay(subject, batch), repeated(subject, batch, 1))
    assert facts == {"repeat_differs": False, "repeat_gap": 0.0, "repeat_loss_change": 0.0, "repeat_rows": ()}


def test_what_differs_is_told_by_row():
    model, batch = decoder("llama"), batch_of()
    subject = Subject.of(model)
    trace, again = replay(subject, batch), repeated(subject, batch, 1)
    again.token_loss_BT[1, 3] += 0.5
    facts = repeat_facts(trace, again)
    assert facts["repeat_differs"] and facts["repeat_rows"] == (1,)
    assert facts["repeat_gap"] == pytest.approx(0.5, rel=1e-4)
    assert facts["repeat_loss_change"] == pytest.approx(0.5 / trace.valid_targets, rel=1e-3)
    again.token_loss_BT[2, 2] = math.nan
    assert repeat_facts(trace, again)["repeat_gap"] == math.inf


def test_bf16_moments_tell_that_there_is_no_fp32_copy():
    layer, optimizer, _ = trained()
    state = state_of(layer, optimizer)
    half = {name: value.bfloat16() for name, value in state.exp_avg.items()}
    stored = {name: value.bfloat16() for name, value in layer.state_dict().items()}
    assert not kept_in_bf16("bf16", stored, state)[0]
    assert kept_in_bf16("bf16", stored, dataclasses.replace(state, exp_avg=half))[0]
    assert not kept_in_bf16("bf16", layer.state_dict(), dataclasses.replace(state, exp_avg=half))[0]
    assert kept_in_bf16("bf16-true", layer.state_dict(), state)[0]
