"""Rounding functions against slower twins, and against torch's own low-precision dtypes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stability_probe.precisions import formats
from stability_probe.precisions import rounding as r

GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
moderate = st.floats(-7, 7, width=32)


def nearest_even(value: float) -> float:
    """Twin of round_to_e2m1: look at all eight values; on a tie take the one with an even code."""
    best = min(range(8), key=lambda code: (abs(GRID[code] - abs(value)), code % 2))
    return math.copysign(GRID[best], value)


@given(moderate)
def test_e2m1_takes_the_nearest_value_ties_to_even(value: float) -> None:
    assert r.round_to_e2m1(torch.tensor([value])).item() == nearest_even(value)


def test_e2m1_ties() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0])
    assert r.round_to_e2m1(ties).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert r.round_to_e2m1(-ties).tolist() == [-0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0, -6.0]


def test_the_e2m1_grid_is_what_its_four_bits_encode() -> None:
    """torch 2.13 has the dtype float4_e2m1fn_x2 but no cast, so the bits are decoded by the OCP rule."""
    values = []
    for code in range(8):
        exponent, mantissa = code >> 1, code & 1
        values.append(mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))
    assert tuple(values) == r.E2M1_GRID
    if hasattr(torch, "float4_e2m1fn_x2"):
        assert torch.tensor([0x21], dtype=torch.uint8).view(torch.float4_e2m1fn_x2).element_size() == 1


@given(moderate, st.integers(0, 2**30))
def test_stochastic_e2m1_stays_between_its_neighbours(value: float, seed: int) -> None:
    drawn = r.round_to_e2m1(torch.full((64,), value), torch.Generator().manual_seed(seed)).abs()
    size = min(abs(value), 6.0)
    below, above = max(g for g in GRID if g <= size), min(g for g in GRID if g >= size)
    assert set(drawn.tolist()) <= {below, above}


@pytest.mark.parametrize("value", [0.1, 0.9, 1.7, 2.2, 4.5, 5.9, -3.3])
def test_stochastic_e2m1_is_right_on_average(value: float) -> None:
    mean = r.round_to_e2m1(torch.full((200_000,), value), torch.Generator().manual_seed(0)).mean().item()
    assert mean == pytest.approx(value, abs=0.01)


@given(st.floats(-500, 500, width=32))
def test_e4m3_is_the_nearest_of_its_256_values(value: float) -> None:
    finite = E4M3_VALUES[E4M3_VALUES.isfinite()]
    distance = (finite - value).abs()
    assert (r.round_to_fp8(torch.tensor([value])) - value).abs().item() == distance.min().item()


def test_fp8_saturates_instead_of_nan() -> None:
    assert r.round_to_fp8(torch.tensor([1e9, -1e9])).tolist() == [448.0, -448.0]
    assert r.round_to_fp8(torch.tensor([1e9]), torch.float8_e5m2).tolist() == [57344.0]


@pytest.mark.parametrize("fmt", [formats.E4M3, formats.E5M2, formats.FP16, formats.BF16, formats.FP32])
def test_round_to_format_agrees_with_torch(fmt: formats.Format) -> None:
    dtype = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2, "fp16": torch.float16, "bf16": torch.bfloat16}
    torch.manual_seed(0)
    values = torch.randn(4096) * torch.logspace(-9, 2, 4096)
    expected = values.to(dtype.get(fmt.name, torch.float32)).float()
    assert torch.equal(r.round_to_format(values, fmt), expected)


def test_round_to_format_agrees_on_e2m1() -> None:
    values = torch.linspace(-6, 6, 1001)
    assert torch.equal(r.round_to_format(values, formats.E2M1), r.round_to_e2m1(values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_limits_and_spacing_are_those_of_the_dtype(dtype: torch.dtype) -> None:
    fmt = next(f for f in (formats.BF16, formats.FP16, formats.E4M3, formats.E5M2) if f.max == torch.finfo(dtype).max)
    one = torch.ones((), dtype=dtype)
    bits = {1: torch.uint8, 2: torch.int16}[one.element_size()]
    after_one = (one.view(bits) + 1).view(dtype).float().item()
    smallest = torch.ones((), dtype=bits).view(dtype).float().item()
    assert fmt.spacing(1.0) == after_one - 1.0
    assert fmt.smallest_subnormal == smallest == fmt.spacing(0.0)


@given(st.floats(2.0**-100, 2.0**100), st.integers(0, 2**30))
def test_bf16_stochastic_rounding_gives_a_neighbour(value: float, seed: int) -> None:
    x = torch.full((32,), value)
    drawn = r.round_to_bf16_stochastic(x, torch.Generator().manual_seed(seed))
    assert torch.equal(drawn, drawn.bfloat16().float())
    assert ((drawn - x).abs() < formats.BF16.spacing(value)).all()


def test_bf16_stochastic_rounding_is_unbiased_and_keeps_what_is_not_finite() -> None:
    generator = torch.Generator().manual_seed(0)
    mean = r.round_to_bf16_stochastic(torch.full((200_000,), 1.001), generator).double().mean().item()
    assert mean == pytest.approx(1.001, abs=3e-5)
    odd = r.round_to_bf16_stochastic(torch.tensor([math.inf, -math.inf, math.nan]), generator)
    assert odd[0] == math.inf and odd[1] == -math.inf and odd[2].isnan()


def test_nvfp4_blocks_against_a_loop() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 40)
    whole = x.abs().max() / (448 * 6)
    expected = torch.zeros_like(x)
    for i in range(3):
        for start in range(0, 40, 16):
            block = x[i, start : start + 16]
            scale = (block.abs().max() / 6 / whole).to(torch.float8_e4m3fn).float() * whole
            expected[i, start : start + 16] = torch.tensor([nearest_even((v / scale).item()) for v in block]) * scale
    torch.testing.assert_close(r.nvfp4(x), expected, rtol=1e-6, atol=0)


def test_mxfp8_blocks_against_a_loop_and_torchs_e8m0() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 80) * torch.logspace(-3, 3, 80)
    for i in range(2):
        for start in range(0, 80, 32):
            block = x[i, start : start + 32]
            scale = 2.0 ** (math.floor(math.log2(block.abs().max().item())) - 8)
            assert torch.tensor([scale]).to(torch.float8_e8m0fnu).float().item() == scale
            expected = (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
            assert torch.equal(r.mxfp8(x)[i, start : start + 32], expected)


def test_fp8_scales_per_tensor_per_tile_and_per_square() -> None:
    x = torch.tensor([[1e-4, 2e-4, 1000.0, 1.0]])
    assert r.fp8_scaled(x)[0, 0].item() == 0.0  # one scale for all: the outlier flushes the small ones
    assert r.fp8_scaled(x, block=2)[0, 0].item() == pytest.approx(1e-4, rel=0.07)
    torch.manual_seed(0)
    w = torch.randn(5, 7)
    assert torch.equal(r.fp8_square(w, 4).T, r.fp8_square(w.T.contiguous(), 4))


@pytest.mark.parametrize("quantise", [r.nvfp4, r.nvfp4_square, r.mxfp8, r.fp8_scaled, r.fp8_square])
def test_zeros_stay_zero_and_nothing_becomes_nan(quantise) -> None:  # type: ignore[no-untyped-def]
    assert torch.equal(quantise(torch.zeros(4, 50)), torch.zeros(4, 50))
    mixed = torch.zeros(40, 50)
    mixed[0, 0], mixed[20, 20] = 1e20, 1e-20
    assert quantise(mixed).isfinite().all()


def test_hadamard_spreads_an_outlier_and_keeps_products() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(3, 32), torch.randn(5, 32)
    a[0, 3] = 100.0
    mixed_a, mixed_b = (r.hadamard(v, torch.Generator().manual_seed(7)) for v in (a, b))
    torch.testing.assert_close(mixed_a @ mixed_b.T, a @ b.T, rtol=1e-4, atol=1e-4)
    assert mixed_a[0].abs().max() < 30


def test_range_shares_count_what_does_not_fit() -> None:
    x = torch.tensor([0.0, 1.0, 70_000.0, math.inf, 1e-5, 1e-8, -2.0, math.nan])
    shares = formats.range_shares(x, formats.FP16)
    assert (shares.overflow.item(), shares.underflow.item(), shares.subnormal.item()) == (3 / 8, 1 / 8, 1 / 8)
    scaled = formats.range_shares(x, formats.FP16, scale=2.0**10)
    assert scaled.underflow.item() == 0.0


def test_loss_scale_and_headroom() -> None:
    scale = formats.fp16_loss_scale(1e-3)
    assert scale * 1e-3 <= 65504 / 2 < 2 * scale * 1e-3
    assert formats.fp16_loss_scale(1e9) == 1.0
    assert formats.FP16.headroom_bits(65504 / 8) == 3
    assert formats.FP16.headroom_bits(math.inf) == -math.inf
