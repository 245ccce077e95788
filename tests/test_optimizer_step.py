"""The simulated step against torch.optim.AdamW, and what it does to memory."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stability_probe.checkpoints.base import OptimizerGroup, OptimizerState
from stability_probe.optimizer_step import (
    StepSetting,
    adamw_update,
    clip_factor,
    impossible_share,
    moment_bound,
    stepped,
    tensor_steps,
)

GROUP = OptimizerGroup(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def trained(steps=5):
    """A small layer after some steps of torch's own AdamW, its optimizer, and the gradient of the next step."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(
        layer.parameters(), lr=GROUP.lr, betas=GROUP.betas, eps=GROUP.eps, weight_decay=GROUP.weight_decay
    )
    for _ in range(steps):
        optimizer.zero_grad()
        (layer(torch.randn(16, 6)).square().mean() + layer.weight.sum()).backward()
        optimizer.step()
    optimizer.zero_grad()
    (layer(torch.randn(16, 6)).square().mean() * 7).backward()
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters()}
    return layer, optimizer, gradients


def state_of(layer, optimizer):
    named = dict(layer.named_parameters())
    return OptimizerState(
        kind="adamw",
        exp_avg={n: optimizer.state[p]["exp_avg"].clone() for n, p in named.items()},
        exp_avg_sq={n: optimizer.state[p]["exp_avg_sq"].clone() for n, p in named.items()},
        step={n: int(optimizer.state[p]["step"]) for n, p in named.items()},
        groups=(GROUP,),
        group_of=dict.fromkeys(named, 0),
        naming="test",
    )


def test_the_step_is_torchs_step():
    layer, optimizer, gradients = trained()
    state = state_of(layer, optimizer)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    with stepped(layer, gradients, state, StepSetting()):
        simulated = {name: p.detach().clone() for name, p in layer.named_parameters()}
    assert all(torch.equal(p, before[name]) for name, p in layer.named_parameters())
    optimizer.step()
    for name, parameter in layer.named_parameters():
        assert torch.allclose(simulated[name], parameter, rtol=1e-5, atol=1e-7), name


def test_the_weights_come_back_after_an_exception():
    layer, optimizer, gradients = trained()
    before = {name: p.data_ptr() for name, p in layer.named_parameters()}
    with pytest.raises(KeyError), stepped(layer, gradients, state_of(layer, optimizer), StepSetting()):
        raise KeyError
    assert {name: p.data_ptr() for name, p in layer.named_parameters()} == before


def test_clipping_and_lr_factor_scale_the_step():
    layer, optimizer, gradients = trained()
    state = state_of(layer, optimizer)
    whole = tensor_steps(layer, gradients, state, StepSetting())
    half = tensor_steps(layer, gradients, state, StepSetting(lr_factor=0.5))
    clipped = tensor_steps(layer, gradients, state, StepSetting(clip_factor=0.1))
    assert half["weight"].update_rms == pytest.approx(whole["weight"].update_rms / 2, rel=1e-5)
    assert clipped["weight"].g2_over_v == pytest.approx(whole["weight"].g2_over_v / 100, rel=1e-5)


def test_a_stale_second_moment_makes_a_large_step_and_refreshing_it_does_not():
    layer, optimizer, gradients = trained()
    state = state_of(layer, optimizer)
    state.exp_avg_sq["weight"].mul_(1e-6)
    stale = tensor_steps(layer, gradients, state, StepSetting())["weight"]
    fresh = tensor_steps(layer, gradients, state, StepSetting(refresh=frozenset({"weight"})))["weight"]
    assert stale.g2_over_v > 1e4
    assert stale.update_rms > 2 * fresh.update_rms


def test_the_update_never_passes_its_bound_with_cold_momentum():
    """(1−β₁)/√(1−β₂) times the LR: 0.45 at β₂ 0.95, when exp_avg is still zero and t is large."""
    weight, grad = torch.zeros(3), torch.tensor([1e-6, 1.0, 1e6])
    group = OptimizerGroup(lr=1.0, betas=(0.9, 0.95), eps=0.0, weight_decay=0.0)
    update = adamw_update(weight, grad, torch.zeros(3), torch.zeros(3), 10_000, group, lr=1.0)
    assert torch.allclose(update.abs(), torch.full((3,), 0.1 / math.sqrt(0.05)), rtol=1e-4)


@pytest.mark.parametrize("changed", [{"lr": 1e308}, {"weight_decay": 1e308}, {"lr": 1e30, "weight_decay": 1e30}])
def test_settings_that_fp32_cannot_hold_are_a_step_to_infinity(changed):
    """Not an error: a stored group may hold anything, and the rest of the report must not suffer."""
    group = OptimizerGroup(**{**vars(GROUP), **changed})
    one = torch.ones(2)
    assert not adamw_update(one, one, one, one, 3, group, lr=group.lr).isfinite().any()


def test_clip_factor():
    assert clip_factor(5.0, 1.0) == pytest.approx(0.2)
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(5.0, None) == 1.0
    assert clip_factor(math.nan, 1.0) == 1.0


def test_share_of_elements_at_the_floor_of_epsilon():
    layer, optimizer, gradients = trained()
    state = state_of(layer, optimizer)
    state.exp_avg_sq["bias"].fill_(1e-20)
    assert tensor_steps(layer, gradients, state, StepSetting())["bias"].eps_share == 1.0
    assert tensor_steps(layer, gradients, state, StepSetting())["weight"].eps_share == 0.0


def moments(gradients, betas):
    """Twin: Adam's recursion, uncorrected, in double precision."""
    m = v = 0.0
    for g in gradients:
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
    return torch.tensor([m], dtype=torch.float64), torch.tensor([v], dtype=torch.float64)


@given(
    st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60),
    st.sampled_from([(0.9, 0.95), (0.9, 0.999), (0.0, 0.9), (0.95, 0.95)]),
)
def test_no_gradients_make_impossible_moments(gradients, betas):
    assert impossible_share(*moments(gradients, betas), betas) == 0.0


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
def test_the_bound_on_moments_is_reached(betas):
    """Cauchy and Schwarz hold with equality where gradients grow by β₂/β₁ a step."""
    m, v = moments([(betas[1] / betas[0]) ** k for k in range(400)], betas)
    assert (m.square() / v).item() == pytest.approx(moment_bound(betas), rel=1e-3)


def test_moments_of_two_runs_are_told_and_refreshed_ones_step_as_far_as_they_may():
    layer, optimizer, gradients = trained()
    state = state_of(layer, optimizer)
    whole = {name: step.impossible_share for name, step in tensor_steps(layer, gradients, state, StepSetting()).items()}
    assert whole == dict.fromkeys(whole, 0.0)
    for values in state.exp_avg_sq.values():
        values.mul_(1e-7)
    torn = tensor_steps(layer, gradients, state, StepSetting())
    refreshed = tensor_steps(layer, gradients, state, StepSetting(refresh=frozenset(gradients)))
    most = GROUP.lr * math.sqrt(moment_bound(GROUP.betas)) / (1 - GROUP.betas[0] ** 6) + 1e-3
    for name in gradients:
        assert torn[name].impossible_share > 0.5
        assert torn[name].update_rms > 2 * refreshed[name].update_rms
        assert refreshed[name].update_rms < most


def test_without_a_bound_nothing_is_impossible():
    assert math.isnan(impossible_share(torch.ones(2), torch.zeros(2), (0.99, 0.95)))
