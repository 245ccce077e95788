"""Sketches keep norms, differences and inner products."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stability_probe.taps.sketch import WIDTH, sketch


def test_a_sketch_is_linear():
    torch.manual_seed(0)
    x, y = torch.randn(50_000), torch.randn(50_000)
    assert torch.allclose(sketch(x) + 2 * sketch(y), sketch(x + 2 * y), atol=1e-3)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300_000), st.integers(0, 50))
def test_the_norm_is_kept_within_its_standard_error(length, seed):
    x = torch.randn(length, generator=torch.Generator().manual_seed(seed))
    # Six standard errors: 6 / √(2 · 4093) = 6.6 %. Up to WIDTH elements the sketch is exact.
    limit = 1e-5 if length <= WIDTH else 0.066
    assert abs(sketch(x, seed).norm() / x.norm() - 1) < limit


def test_a_hot_channel_does_not_spoil_the_estimate():
    torch.manual_seed(1)
    x = torch.randn(512, 576)
    x[:, 507] = 23_281.0
    y = x + 0.01 * torch.randn(512, 576) * x.abs()
    want = ((y - x).norm() / x.norm()).item()
    got = ((sketch(y) - sketch(x)).norm() / sketch(x).norm()).item()
    assert abs(got / want - 1) < 0.15


def test_inner_products_of_gradients():
    torch.manual_seed(2)
    shared = torch.randn(200_000)
    x, y = shared + torch.randn(200_000), shared + torch.randn(200_000)
    want = torch.nn.functional.cosine_similarity(x, y, dim=0).item()
    got = torch.nn.functional.cosine_similarity(sketch(x), sketch(y), dim=0).item()
    assert abs(got - want) < 0.06
