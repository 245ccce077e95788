"""The fixes as functions: laws that hold for any input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stability_probe import mitigations as m


@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=8), st.floats(0, 1))
def test_qk_clip_brings_every_head_to_tau_at_most(peaks: list[float], alpha: float) -> None:
    gamma, q, k = m.qk_clip_factors(torch.tensor(peaks), 100.0, alpha)
    torch.testing.assert_close(q * k, gamma)
    assert (torch.tensor(peaks) * q * k <= 100.0 * (1 + 1e-6)).all()


def test_qk_clip_leaves_shared_keys_alone() -> None:
    q, k = torch.ones(4 * 2, 3), torch.ones(2 * 2, 3)
    new_q, new_k, gamma = m.qk_clip(q, k, torch.tensor([400.0, 1.0, 2.0, 200.0]))
    assert gamma.tolist() == [0.25, 1.0, 1.0, 0.5]
    assert torch.equal(new_k, k)
    assert new_q[:, 0].tolist() == [0.25, 0.25, 1, 1, 1, 1, 0.5, 0.5]


def test_z_loss_and_recentre() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 50) + 40
    assert m.z_loss(logits).shape == (2, 3)
    centred = m.recentre(logits)
    torch.testing.assert_close(centred.logsumexp(-1), torch.zeros(2, 3), atol=1e-4, rtol=0)
    torch.testing.assert_close(centred.softmax(-1), logits.softmax(-1))


@given(st.floats(-1e6, 1e6), st.floats(1.0, 100.0))
def test_softcap_is_bounded_and_odd(value: float, cap: float) -> None:
    capped = m.softcap(torch.tensor([value, -value]), cap)
    assert capped.abs().max() <= cap
    assert capped[0] == -capped[1]


def test_softcap_hardly_touches_small_logits() -> None:
    assert m.softcap(torch.tensor(1.0), 50.0).item() == pytest.approx(1.0, abs=2e-4)


def test_sinkhorn_is_doubly_stochastic() -> None:
    torch.manual_seed(0)
    result = m.sinkhorn(torch.rand(5, 4, 4) + 0.05)
    torch.testing.assert_close(result.sum(-1), torch.ones(5, 4), atol=1e-5, rtol=0)
    torch.testing.assert_close(result.sum(-2), torch.ones(5, 4), atol=1e-5, rtol=0)


def test_clip_embedding_norm_touches_only_long_rows() -> None:
    table = torch.tensor([[3.0, 4.0], [30.0, 40.0], [0.0, 0.0]])
    clipped = m.clip_embedding_norm(table, 5.0)
    torch.testing.assert_close(clipped, torch.tensor([[3.0, 4.0], [3.0, 4.0], [0.0, 0.0]]))
    assert torch.equal(clipped[0], table[0])


def test_a_small_update_survives_stochastic_rounding_only() -> None:
    weight, update = torch.full((50_000,), 1.0).bfloat16(), torch.full((50_000,), 1e-4)
    assert torch.equal((weight + update).bfloat16(), weight)
    moved = m.stochastic_bf16_update(weight, update, torch.Generator().manual_seed(0))
    assert moved.dtype is torch.bfloat16
    assert (moved.double().mean().item() - 1) == pytest.approx(1e-4, rel=0.15)


def test_clip_factor() -> None:
    assert m.clip_factor(5.0, 1.0) == 0.2
    assert m.clip_factor(0.5, 1.0) == 1.0
    assert not math.isnan(m.clip_factor(0.0, 1.0))
