"""The published tables that this package's own functions must give back, number for number.

Each test sets up the experiment with the same random draws as the document and asks our functions for the result.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from stability_probe import mitigations as m
from stability_probe.precisions.formats import BF16
from stability_probe.precisions.rounding import nvfp4, nvfp4_square
from stability_probe.probabilities import total_variation


@pytest.mark.parametrize(("shift", "spacing", "distance"), [(0, 0.008, 0.006), (50, 0.250, 0.030), (500, 2.0, 0.232)])
def test_bf16_logits_after_a_shift(shift: int, spacing: float, distance: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(32_000) * 3
    assert round(BF16.spacing(max(shift, 1)), 3) == spacing
    assert round(total_variation(logits, (logits + shift).bfloat16()).item(), 3) == distance


def test_z_loss_pulls_where_cross_entropy_does_not() -> None:
    torch.manual_seed(0)
    logits = (torch.randn(32_000) * 3 + 20).requires_grad_()
    (pull,) = torch.autograd.grad(m.z_loss(logits), logits)
    (none,) = torch.autograd.grad(F.cross_entropy(logits[None], torch.tensor([7])), logits)
    assert f"{logits.logsumexp(-1).item():.1f}" == "34.8"
    assert f"{pull.sum().item():+.1e}" == "+7.0e-03"
    assert f"{abs(none.sum().item()):.4f}" == "0.0000"


@pytest.mark.parametrize("tensor_scale", [1.0, None])
def test_nvfp4_loses_small_gradients_without_stochastic_rounding(tensor_scale: float | None) -> None:
    grad = torch.full((1024,), 0.1)
    grad[::16] = 6.0
    noise = torch.Generator().manual_seed(1)
    nearest = nvfp4(grad, tensor_scale=tensor_scale)
    drawn = torch.stack([nvfp4(grad, noise, tensor_scale) for _ in range(1000)]).mean(0)
    small = grad < 1
    assert f"{nearest[small].mean().item():.3f}" == "0.000"
    assert f"{drawn[small].mean().item():.3f}" == "0.100"


def test_nvfp4_weights_before_and_after_transposition() -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 512)
    # The document stores the block scales without a scale of the whole tensor.
    rows = nvfp4(weight, tensor_scale=1.0) != nvfp4(weight.T, tensor_scale=1.0).T
    squares = nvfp4_square(weight, tensor_scale=1.0) != nvfp4_square(weight.T, tensor_scale=1.0).T
    assert f"{rows.float().mean().item():.0%}" == "76%"
    assert f"{squares.float().mean().item():.0%}" == "0%"
    assert torch.equal(nvfp4_square(weight), nvfp4_square(weight.T).T)


def test_products_of_mixing_matrices() -> None:
    torch.manual_seed(0)

    def free() -> torch.Tensor:
        return torch.eye(4) + 0.15 * torch.randn(4, 4)

    def norms(draw) -> list[float]:  # type: ignore[no-untyped-def]
        product, found = torch.eye(4), []
        for layer in range(1, 61):
            product = draw() @ product
            if layer in (10, 30, 60):
                found.append(torch.linalg.matrix_norm(product, ord=2).item())
        return found

    assert [f"{norm:.3g}" for norm in norms(free)] == ["1.42", "6.31", "23.2"]
    assert [f"{norm:.3g}" for norm in norms(lambda: m.sinkhorn(free().exp()))] == ["1", "1", "1"]


def test_qk_clip_on_four_heads() -> None:
    torch.manual_seed(0)
    H, K, D, T = 4, 32, 128, 256
    x_TD = torch.randn(T, D)
    query_HDK, key_HDK = torch.randn(H, D, K) / math.sqrt(D), torch.randn(H, D, K) / math.sqrt(D)
    query_HDK[1] *= 6
    key_HDK[1] *= 5
    query_HDK[3] *= 3
    key_HDK[3] *= 2.5

    def peaks(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return ((x_TD @ query) @ (x_TD @ key).mT / math.sqrt(K)).amax((1, 2))

    before = peaks(query_HDK, key_HDK)
    query, key, gamma = m.qk_clip(query_HDK, key_HDK, before, tau=100.0)
    table = [tuple(f"{v:.1f}" for v in pair) for pair in zip(before.tolist(), peaks(query, key).tolist(), strict=True)]
    assert table == [("5.6", "5.6"), ("167.0", "100.0"), ("4.2", "4.2"), ("36.3", "36.3")]
    assert [f"{g:.3f}" for g in gamma.tolist()] == ["1.000", "0.599", "1.000", "1.000"]


def test_adam_amplifies_a_sudden_gradient() -> None:
    usual = m.adam_update_size(lr=4e-4, beta1=0.9, grad=0.02, v_sqrt=0.02)
    spike = m.adam_update_size(lr=4e-4, beta1=0.9, grad=0.5, v_sqrt=0.02)
    clipped = m.adam_update_size(lr=4e-4, beta1=0.9, grad=0.5 * m.clip_factor(5.0, 1.0), v_sqrt=0.02)
    assert [usual, spike, clipped] == pytest.approx([4e-5, 1e-3, 2e-4])
    assert [spike / usual, clipped / usual] == pytest.approx([25, 5])
