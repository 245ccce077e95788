"""Every precision: what it does to a forward and backward, and that nothing is left behind."""

import inspect
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stability_probe.errors import ProbeError
from stability_probe.precisions import all_precisions, get_precision
from stability_probe.precisions.base import fp32_inside
from stability_probe.precisions.casting import AccumulateInFloat32, PureFloat32

NAMES = sorted(all_precisions())
# Relative gradient error that the coarsest format of each family allows on this model, measured, times two.
WORST = {"fp32": 0.0, "bf16": 0.03, "fp16": 0.01, "fp8": 0.25, "mxfp8": 0.15, "nvfp4": 0.7}


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("gain", torch.full((32,), 1.1))
        self.register_buffer("angles", torch.linspace(0, 1, 32), persistent=False)
        self.seen: list[torch.dtype] = []

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x)))) * self.gain
        self.seen.append(x.dtype)
        return self.head(x)


@pytest.fixture
def tiny() -> Iterator[Tiny]:
    torch.manual_seed(0)
    model = Tiny().eval()
    nn.init.normal_(model.embed.weight, std=0.3)
    yield model


IDS = torch.arange(48).reshape(2, 24) % 50


def run(model: nn.Module, name: str) -> tuple[float, dict[str, Tensor]]:
    with get_precision(name).apply(model):
        logits = model(IDS).float()
        loss = F.cross_entropy(logits.flatten(0, 1), IDS.roll(-1, 1).flatten())
        loss.backward()
    grads = {key: p.grad.float() for key, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return loss.item(), grads


def fingerprint(model: nn.Module) -> dict[str, tuple[int, int, torch.dtype, bytes]]:
    stored = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {k: (id(t), t.data_ptr(), t.dtype, t.detach().numpy().tobytes()) for k, t in stored.items()}


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_as_before_on_exit_and_on_error(tiny: Tiny, name: str) -> None:
    before, signature = fingerprint(tiny), inspect.signature(tiny.forward)
    with torch.no_grad():
        fresh = tiny(IDS)
    hooks = [len(p._backward_hooks or {}) for p in tiny.parameters()]
    with pytest.raises(RuntimeError, match="stop"), get_precision(name).apply(tiny):
        assert inspect.signature(tiny.forward) == signature
        tiny(IDS)
        raise RuntimeError("stop")
    assert fingerprint(tiny) == before
    assert [len(p._backward_hooks or {}) for p in tiny.parameters()] == hooks
    assert all("forward" not in part.__dict__ for part in tiny.modules())
    assert not torch.is_autocast_enabled("cpu")
    with torch.no_grad():
        assert torch.equal(tiny(IDS), fresh)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_near_those_of_fp32_and_repeat(tiny: Tiny, name: str) -> None:
    _, expected = run(tiny, "fp32")
    loss, grads = run(tiny, name)
    again, same = run(tiny, name)
    assert loss == again and all(torch.equal(grads[k], same[k]) for k in grads)
    error = torch.cat([(grads[k] - expected[k]).flatten() for k in expected]).norm()
    size = torch.cat([g.flatten() for g in expected.values()]).norm()
    family = next(f for f in sorted(WORST, key=len, reverse=True) if name.startswith(f))
    assert error / size <= WORST[family]
    assert name == "fp32" or error > 0


def test_what_is_cast_and_what_is_not(tiny: Tiny) -> None:
    parameter = tiny.up.weight
    with get_precision("bf16-true").apply(tiny):
        assert tiny.up.weight is parameter and parameter.dtype is torch.bfloat16
        assert tiny.gain.dtype is torch.bfloat16 and tiny.angles.dtype is torch.float32
        assert tiny.head.weight is tiny.embed.weight
        with fp32_inside(tiny.up):
            assert tiny.up.weight.dtype is torch.float32 and tiny.down.weight.dtype is torch.bfloat16
        assert parameter.dtype is torch.bfloat16
    with get_precision("bf16").apply(tiny):
        assert parameter.dtype is torch.float32
        assert tiny(IDS).dtype is torch.bfloat16


@pytest.mark.parametrize("name", [n for n in NAMES if n != "fp32"])
def test_fp32_inside_and_kept_modules_compute_as_fp32_does(tiny: Tiny, name: str) -> None:
    x = torch.randn(3, 32)
    with torch.no_grad():
        expected = tiny.up(x)
        with get_precision(name).apply(tiny), fp32_inside(tiny.up):
            assert torch.equal(tiny.up(x), expected)
        with get_precision(f"{name}:fp32=up+head").apply(tiny):
            inner = tiny.up(x).float()
    assert torch.allclose(inner, expected, rtol=0.01, atol=0.02)
    if "true" not in name:
        assert torch.equal(inner, expected)


def test_small_gradients_underflow_in_fp16_unless_the_loss_is_scaled(tiny: Tiny) -> None:
    def gradients(name: str) -> Tensor:
        with get_precision(name).apply(tiny):
            (tiny(IDS).float().mean() * 1e-6).backward()
        grad, tiny.down.weight.grad = tiny.down.weight.grad, None
        tiny.zero_grad(set_to_none=True)
        assert grad is not None
        return grad

    expected = gradients("fp32")
    assert gradients("fp16").norm() < 0.3 * expected.norm()
    torch.testing.assert_close(gradients("fp16-scaled").norm(), expected.norm(), rtol=0.01, atol=0)


def test_emulated_products_round_as_native_ones_do() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(64, 300).bfloat16(), torch.randn(300, 40).bfloat16()
    with AccumulateInFloat32():
        emulated = a @ b
    assert emulated.dtype is torch.bfloat16
    # The order of the fp32 sums differs, so that a result near a tie may land one bf16 ulp away.
    exact = a.double() @ b.double()
    assert (emulated.double() - exact).norm() / exact.norm() < 2**-8
    assert (emulated != a @ b).float().mean() < 0.02


def test_pure_fp32_undoes_casts_in_the_models_own_code() -> None:
    x = torch.randn(8, 8)
    with PureFloat32():
        assert torch.equal(x.bfloat16().float(), x)
        assert x.half().softmax(-1).dtype is torch.float32
        assert torch.equal(torch.arange(512, dtype=torch.bfloat16), torch.arange(512.0))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(x @ x, (x @ x.clone()).float())
    assert not torch.equal(x.bfloat16().float(), x)


def test_kept_in_bf16_is_not_quantised(tiny: Tiny) -> None:
    x = torch.randn(3, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = tiny.up(x)
    for name, same in (("nvfp4", False), ("nvfp4:bf16=up", True)):
        with torch.no_grad(), get_precision(name).apply(tiny), torch.autocast("cpu", torch.bfloat16):
            assert torch.allclose(tiny.up(x).float(), plain.float(), rtol=0.02, atol=0.02) is same


@pytest.mark.parametrize(
    ("name", "word"),
    [("bf61", "bf16"), ("bf16:fp23=up", "option"), ("fp16:scale=0", "option"), ("fp16:scale=x", "option")],
)
def test_unknown_names_are_refused_with_a_suggestion(name: str, word: str) -> None:
    with pytest.raises(ProbeError) as raised:
        get_precision(name)
    assert raised.value.exit_code == 2 and word in str(raised.value)


def test_a_module_that_is_not_there_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ProbeError, match="upp") as raised, get_precision("bf16:fp32=upp").apply(tiny):
        pass
    assert raised.value.exit_code == 2 and "up" in raised.value.hint


def test_loss_scale_option() -> None:
    assert get_precision("fp16:scale=1024").loss_scale == 1024
    assert math.log2(get_precision("fp16-scaled").loss_scale) == 16


class Sinusoidal(nn.Module):
    """A table of positions outside the checkpoint, as XGLM's: loaders rebuild it in the weights' own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11)
        self.register_buffer("table", torch.arange(32.0).reshape(4, 8).sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(ids) + self.table))


@pytest.mark.parametrize("name", ["bf16-true", "fp16-true"])
def test_a_table_in_fp32_is_no_reason_to_refuse_a_norm(name: str) -> None:
    """The residual stream is promoted to fp32 by the table; torch's layer norm takes one dtype alone."""
    model, ids = Sinusoidal(), torch.arange(4)[None]
    expected = model(ids)
    with get_precision(name).apply(model):
        found = model(ids)
    assert found.dtype in (torch.bfloat16, torch.float16)
    assert (found.float() - expected).norm() < 0.02 * expected.norm()
    assert all(not part._forward_pre_hooks for part in model.modules())
