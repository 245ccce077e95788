"""The comparison's numbers against the obvious way: keep everything from both runs, and subtract."""

import math

import pytest
import torch
from torch import Tensor, nn

from stability_probe.batches.base import IGNORED, Batch
from stability_probe.compare.calls import CallWatcher
from stability_probe.compare.reference import Fingerprint, Range, cosine, position_stride, relative_error
from stability_probe.compare.rounding_tap import ErrorSums
from stability_probe.compare.session import compare_precisions, rows_together
from stability_probe.compare.updates import survival
from stability_probe.models.decoder import Decoder, DecoderConfig
from stability_probe.precisions import get_precision
from stability_probe.precisions.formats import BF16, E4M3, FP16
from stability_probe.probabilities import head_variation, likeliest, spacing_at, total_variation, unresolved
from stability_probe.replay import Subject, replay
from stability_probe.taps.sketch import sketch

CONFIG = DecoderConfig(
    vocab_size=61, n_layer=2, n_head=2, d_model=32, positions="rotary", norm="rmsnorm", mlp="swiglu", qk_norm=True
)


@pytest.fixture
def decoder() -> nn.Module:
    torch.manual_seed(0)
    model = Decoder(CONFIG).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1]))
    return model


def small_batch(rows: int = 2) -> Batch:
    ids = torch.randint(0, 61, (rows, 20), generator=torch.Generator().manual_seed(0))
    return Batch(ids, torch.cat([ids[:, 1:], torch.full((rows, 1), IGNORED)], 1))


def counted(values: Tensor) -> Tensor:
    return values[:, :: position_stride(values.shape[0] * values.shape[1])] if values.dim() == 3 else values


def kept(model: nn.Module, precision: str, rows: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Twin: module outputs (at the positions that are counted) and parameter gradients of one replay, simply kept."""
    outputs: dict[str, list[Tensor]] = {}
    handles = [
        part.register_forward_hook(
            lambda _m, _i, out, name=name: outputs.setdefault(name, []).append(counted(out.detach().float()))
        )
        for name, part in model.named_modules()
        if name
    ]
    trace = replay(Subject.of(model), small_batch(rows), precision, detail=False)
    for handle in handles:
        handle.remove()
    assert trace.gradients is not None
    grads = {name: total.float() for name, total in trace.gradients.total.items()}
    return {name: torch.cat([t.flatten() for t in parts]) for name, parts in outputs.items()}, grads


# One row in bf16-true: the replay adds rows in the parameters' dtype, the sketches of rows are added in fp32.
@pytest.mark.parametrize(("precision", "rows"), [("bf16", 2), ("bf16-true", 1)])
def test_errors_of_modules_and_gradients(decoder: nn.Module, precision: str, rows: int) -> None:
    found = compare_precisions(Subject.of(decoder), small_batch(rows), [precision]).precisions[precision]
    (low, low_grads), (high, high_grads) = kept(decoder, precision, rows), kept(decoder, "fp32", rows)
    for m in found.modules:
        if m.module == "(model)":
            continue
        expected = ((low[m.module] - high[m.module]).norm() / high[m.module].norm()).item()
        # Small tensors are sketched without a collision; the rest within a few standard errors of 1.1 %.
        assert m.relative_error == pytest.approx(expected, rel=0.05, abs=1e-6), m.module
        if expected > 1e-3:
            expected_cosine = torch.cosine_similarity(low[m.module], high[m.module], dim=0).item()
            assert 1 - m.cosine == pytest.approx(1 - expected_cosine, rel=0.2, abs=1e-6), m.module
    for p in found.parameters:
        expected = ((low_grads[p.parameter] - high_grads[p.parameter]).norm() / high_grads[p.parameter].norm()).item()
        assert p.grad_relative_error == pytest.approx(expected, rel=0.05), p.parameter


def test_introduced_error_of_one_linear(decoder: nn.Module) -> None:
    """Twin: the layer's inputs are kept, and the layer is applied to every fourth of them in fp32 afterwards."""
    layer = decoder.blocks[1].mlp.up_proj  # type: ignore[union-attr,index]
    seen: list[tuple[Tensor, Tensor]] = []
    handle = layer.register_forward_hook(lambda _m, args, out: seen.append((args[0].detach(), out.detach())))
    replay(Subject.of(decoder), small_batch(), "bf16", detail=False)
    handle.remove()
    fp32 = [layer(x.float())[:, ::4] for x, _ in seen]
    gaps = [(out[:, ::4].float() - exact, exact) for (_, out), exact in zip(seen, fp32, strict=True)]
    error, size = (torch.cat([pair[i].flatten() for pair in gaps]).norm() for i in (0, 1))
    found = compare_precisions(Subject.of(decoder), small_batch(), ["bf16"]).precisions["bf16"]
    m = next(m for m in found.modules if m.module == "blocks.1.mlp.up_proj")
    assert m.introduced_error == pytest.approx((error / size).item(), rel=1e-4)


def test_the_comparison_does_not_disturb_what_it_measures(decoder: nn.Module) -> None:
    together = rows_together(small_batch())
    bare = replay(Subject.of(decoder), small_batch(), "bf16", detail=False, microbatch=together)
    found = compare_precisions(Subject.of(decoder), small_batch(), ["bf16"]).precisions["bf16"]
    assert found.loss == bare.loss
    assert found.global_grad_norm == pytest.approx(bare.global_grad_norm, rel=1e-14)  # summed in another order
    assert all(not part._forward_hooks and "forward" not in part.__dict__ for part in decoder.modules())
    assert all(p.grad is None and not p._backward_hooks for p in decoder.parameters())


def test_fp32_against_itself_is_exact(decoder: nn.Module) -> None:
    found = compare_precisions(Subject.of(decoder), small_batch(), ["fp32"]).precisions["fp32"]
    assert found.loss_gap == 0 and found.grad_relative_error == 0
    # Fewer positions at once may be summed in another order.
    assert max(m.introduced_error for m in found.modules) < 1e-6
    assert max(m.relative_error for m in found.modules) == 0


def test_fingerprints_measure_distance_and_angle() -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 200)
    y = x + 0.01 * torch.randn(300, 200)
    prints = []
    for values in (x, y):
        prints.append(Fingerprint())
        prints[-1].add(sketch(values), values)
    exact = ((y - x).norm() / x.norm()).item()
    assert relative_error(prints[1], prints[0]) == pytest.approx(exact, rel=0.04)
    angle = 1 - torch.cosine_similarity(x.flatten(), y.flatten(), dim=0).item()
    assert 1 - cosine(prints[1], prints[0]) == pytest.approx(angle, rel=0.1, abs=1e-6)
    assert math.isnan(relative_error(None, prints[0]))


def test_mask_fills_and_nonfinite_values_do_not_count() -> None:
    reference = torch.tensor([1.0, 2.0, torch.finfo(torch.float32).min, -math.inf, 3.0])
    low = torch.tensor([1.0, 2.2, torch.finfo(torch.bfloat16).min, -math.inf, math.nan])
    sums = ErrorSums()
    sums.add(low, reference)
    assert sums.count == 2
    assert sums.relative == pytest.approx(0.2 / math.sqrt(5), rel=1e-5)
    nothing = ErrorSums()
    nothing.add(torch.tensor([math.nan]), torch.tensor([1.0]))
    assert math.isnan(nothing.relative)


def test_large_activations_are_no_fills() -> None:
    sums = ErrorSums()
    sums.add(torch.tensor([23_300.0, 1.0]), torch.tensor([23_281.0, 1.0]))
    assert sums.count == 2 and sums.relative == pytest.approx(19 / 23_281, rel=1e-4)


def test_bias_of_truncation_and_of_rounding() -> None:
    torch.manual_seed(0)
    x = 1 + torch.rand(100_000)
    x = x * (torch.randint(0, 2, x.shape) * 2 - 1)
    cut, rounded = ErrorSums(), ErrorSums()
    cut.add((x.view(torch.int32) & ~0xFFFF).view(torch.float32), x)
    rounded.add(x.bfloat16(), x)
    mean, z = cut.bias("outward")
    assert mean == pytest.approx(-math.sqrt(3) / 2, abs=0.01) and z < -100
    assert abs(cut.bias("signed")[0]) < 0.02
    assert abs(rounded.bias("outward")[0]) < 0.02


def test_ranges_count_as_a_loop_does() -> None:
    values = torch.tensor([[1.0, 1e-9, 1e5], [2.0, 3e-6, 0.0]])
    r = Range()
    r.add(values, FP16, scaled=False)
    assert (r.share("overflow"), r.share("underflow"), r.share("subnormal")) == pytest.approx((1 / 6, 1 / 6, 1 / 6))
    scaled = Range()
    scaled.add(values[1:], E4M3, scaled=True)
    assert scaled.share("overflow") == 0


def test_head_variation_is_a_lower_bound_and_exact_with_all_tokens() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(5, 40) * 3, torch.randn(5, 40) * 3
    whole = total_variation(a, b)
    for k in (3, 40):
        bound = head_variation(likeliest(a, a.logsumexp(-1), k), b, b.logsumexp(-1))
        assert (bound <= whole + 1e-6).all()
    torch.testing.assert_close(bound, whole, atol=1e-6, rtol=0)


def test_spacing_and_ties() -> None:
    values = torch.tensor([1.0, 50.0, -500.0, 127.9])
    assert spacing_at(values, BF16).tolist() == [BF16.spacing(v) for v in values.tolist()]
    logits = torch.tensor([[100.0, 99.8, 0.0], [100.0, 98.0, 0.0]])
    assert unresolved(logits, BF16).tolist() == [True, False]


def test_what_is_left_out_does_not_depend_on_the_layout() -> None:
    low, reference = torch.randn(4, 6, 70), torch.randn(4, 6, 70)
    low[1, 2, 7] = math.inf
    sums, turned = ErrorSums(), ErrorSums()
    sums.add(low, reference)
    turned.add(low.transpose(0, 1).contiguous().transpose(0, 1), reference)
    assert math.isfinite(sums.outward) and turned.outward == pytest.approx(sums.outward)
    assert turned.relative == pytest.approx(sums.relative)


def test_update_survival_against_a_loop() -> None:
    torch.manual_seed(0)
    weight, update = torch.randn(500), torch.full((500,), 1e-3)
    moving, lost, size, nearest, drawn = survival(weight, update, torch.Generator().manual_seed(0))
    stored = weight.bfloat16()
    stays = sum(bool((s.float() + u).bfloat16() == s) for s, u in zip(stored, update, strict=True))
    assert (moving, lost) == (500, stays)
    assert 0 < nearest / size < 1.5 and drawn / size == pytest.approx(1, abs=0.3)


class Shared(nn.Module):
    """One layer used twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


def test_calls_are_followed_and_hooks_leave_on_errors() -> None:
    model = Shared()
    seen: list[tuple[str, int, int]] = []
    watcher = CallWatcher(lambda call: seen.append((call.name, call.depth, watcher.seed(call, 0, 0))))
    with pytest.raises(RuntimeError), watcher.on(model):
        model(torch.ones(2, 4))
        model(torch.ones(2, 5))
    assert [name for name, _, _ in seen] == ["layer", "layer", ""]
    assert seen[0][2] != seen[1][2] and seen[2][1] == 1
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_kept_in_fp32_shrinks_the_gap(decoder: nn.Module) -> None:
    everything = "bf16:fp32=" + "+".join(f"blocks.{i}" for i in range(2)) + "+head+embed"
    assert get_precision(everything).keep_fp32
    found = compare_precisions(Subject.of(decoder), small_batch(), ["bf16", everything]).precisions
    assert found[everything].token_gap < 0.05 * found["bf16"].token_gap


def test_many_positions_are_looked_at_at_every_fourth() -> None:
    assert [position_stride(positions) for positions in (20, 255, 256, 4096)] == [2, 2, 4, 4]
    decoder_256 = Decoder(DecoderConfig(61, n_layer=2, n_head=2, d_model=16, max_positions=256)).eval()
    ids = torch.randint(0, 61, (1, 256), generator=torch.Generator().manual_seed(0))
    long = Batch(ids, torch.cat([ids[:, 1:], torch.full((1, 1), IGNORED)], 1))
    layer = decoder_256.blocks[1].mlp.up_proj  # type: ignore[union-attr,index]
    seen: list[tuple[Tensor, Tensor]] = []
    handle = layer.register_forward_hook(lambda _m, args, out: seen.append((args[0].detach(), out.detach())))
    replay(Subject.of(decoder_256), long, "bf16", detail=False)
    handle.remove()
    (given, low), exact = seen[0], layer(seen[0][0].float())
    assert given.shape[1] == 256
    error = (low[:, ::8].float() - exact[:, ::8]).norm() / exact[:, ::8].norm()
    found = compare_precisions(Subject.of(decoder_256), long, ["bf16"]).precisions["bf16"]
    m = next(m for m in found.modules if m.module == "blocks.1.mlp.up_proj")
    assert m.introduced_error == pytest.approx(error.item(), rel=1e-4)


def test_a_bias_is_seen_beside_a_position_of_massive_activations() -> None:
    x = torch.randn(1, 64, 700, generator=torch.Generator().manual_seed(3))
    x[:, 0] *= 1e4
    truncated = (x.view(torch.int32) & ~0xFFFF).view(torch.float32)
    toward_zero, nearest = ErrorSums(), ErrorSums()
    toward_zero.add(truncated, x)
    nearest.add(x.bfloat16().float(), x)
    assert toward_zero.bias("outward")[0] < -0.6 and toward_zero.bias("outward")[1] < -20
    assert abs(nearest.bias("outward")[0]) < 0.05
