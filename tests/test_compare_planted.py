"""Planted losses of precision: each is the top introduced error, and its inheritors are not blamed."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stability_probe.batches.base import IGNORED, Batch
from stability_probe.compare.calls import Call
from stability_probe.compare.result import Comparison, ModuleError
from stability_probe.compare.rounding_tap import RoundingTap
from stability_probe.compare.runs import FEW_BLOCKS, blocks_again
from stability_probe.compare.session import compare_precisions, rows_together
from stability_probe.replay import Subject

transformers = pytest.importorskip("transformers")


def llama(layers: int = 4, attention: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        attn_implementation=attention,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1]))
    return model


def batch(rows: int = 2, positions: int = 48) -> Batch:
    ids = torch.randint(0, 256, (rows, positions), generator=torch.Generator().manual_seed(1))
    return Batch(ids, torch.cat([ids[:, 1:], torch.full((rows, 1), IGNORED)], 1))


def compare(model: nn.Module, *precisions: str, on: Batch | None = None, **options: Any) -> Comparison:
    return compare_precisions(Subject.of(model), on or batch(), precisions, **options)


def module(found: Comparison, precision: str, name: str) -> ModuleError:
    return next(m for m in found.precisions[precision].modules if m.module == name)


class BF16Norm(nn.Module):
    """An RMSNorm whose author left out the upcast."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        h = x.bfloat16()
        return (self.weight.bfloat16() * h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class BF16Rotary(nn.Module):
    """Rotary tables from angles in bf16: positions over 256 are not told apart."""

    def __init__(self, inverse_frequency: Tensor) -> None:
        super().__init__()
        self.register_buffer("inverse_frequency", inverse_frequency.clone(), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].bfloat16() * self.inverse_frequency.bfloat16()
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def truncated(x: Tensor) -> Tensor:
    """bf16 by cutting the low bits off: rounding toward zero; the gradient passes."""
    with torch.no_grad():
        cut = (x.float().view(torch.int32) & ~0xFFFF).view(torch.float32) - x
    return x + cut


@pytest.fixture
def half_softmax(request: pytest.FixtureRequest) -> str:
    """An attention implementation whose layer 1 takes its softmax in fp16."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: Any) -> Any:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        logits = (q @ k.transpose(-1, -2)).float() * scaling
        if mask is not None:
            logits = logits.masked_fill(mask < 0, -65504.0)
        weights = logits.half().softmax(-1).float() if module.layer_idx == 1 else logits.softmax(-1)
        return (weights.to(q.dtype) @ v).transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS["half_softmax"] = attend
    ALL_MASK_ATTENTION_FUNCTIONS["half_softmax"] = eager_mask
    request.addfinalizer(lambda: ALL_ATTENTION_FUNCTIONS._global_mapping.pop("half_softmax", None))
    request.addfinalizer(lambda: ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop("half_softmax", None))
    return "half_softmax"


def test_a_healthy_model_has_no_culprit() -> None:
    found = compare(llama(3), "bf16", "bf16-true", "nvfp4", on=batch(1, 24))
    for result in found.precisions.values():
        assert result.culprits == (), result.sentence
        assert result.severity == 0, result.sentence
    assert found.summary.startswith("No fault: ")


def test_one_norm_in_bf16() -> None:
    model = llama()
    model.model.layers[2].input_layernorm = BF16Norm(model.model.layers[2].input_layernorm)
    found = compare(model, "bf16", "fp32")
    for precision in ("bf16", "fp32"):  # hard-coded: the plain fp32 replay has it too
        assert found.precisions[precision].culprits == ("model.layers.2.input_layernorm",)
    inheritor = module(found, "bf16", "model.layers.3.input_layernorm")
    assert inheritor.relative_error > 1e-3 and inheritor.introduced_error < 1e-6
    assert "`model.layers.2.input_layernorm`" in found.summary


def test_a_final_norm_in_bf16_is_compared_with_the_other_norms() -> None:
    model = llama(2)
    model.model.norm = BF16Norm(model.model.norm)
    assert compare(model, "bf16").precisions["bf16"].culprits == ("model.norm",)


def test_rotary_angles_in_bf16() -> None:
    model = llama(2)
    model.model.rotary_emb = BF16Rotary(model.model.rotary_emb.inv_freq)
    far = compare(model, "bf16", on=batch(1, 400))
    assert far.precisions["bf16"].culprits == ("model.rotary_emb",)
    assert module(far, "bf16", "model.layers.0.self_attn").relative_error > 0.03
    assert not module(far, "bf16", "model.layers.0.self_attn").stands_out


def test_a_softmax_in_fp16_near_its_limit(half_softmax: str) -> None:
    model = llama(3, half_softmax)
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        attention.q_proj.weight *= 230
        attention.k_proj.weight *= 60
    found = compare(model, "bf16", "fp32")
    assert 30_000 < found.max_attention_logit < 65_504
    for precision in ("bf16", "fp32"):
        assert found.precisions[precision].culprits[0] == "model.layers.1.self_attn"
    assert not module(found, "bf16", "model.layers.2.self_attn").stands_out


def test_queries_and_keys_times_30() -> None:
    model = llama()
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        attention.q_proj.weight *= 30
        attention.k_proj.weight *= 30
    found = compare(model, "bf16")
    assert found.precisions["bf16"].culprits == ("model.layers.1.self_attn",)
    assert found.precisions["bf16"].severity == 2 and "logits reach" in found.summary
    assert not module(found, "bf16", "model.layers.1.self_attn.q_proj").stands_out


def test_a_residual_branch_rounded_toward_zero_is_a_bias() -> None:
    model = llama()
    layer = model.model.layers[2]

    def forward(hidden_states: Tensor, **options: Any) -> Tensor:
        x = hidden_states
        added = x + layer.self_attn(hidden_states=layer.input_layernorm(x), **options)[0]
        x = truncated(added) if torch.is_autocast_enabled("cpu") else added
        return x + layer.mlp(layer.post_attention_layernorm(x))

    layer.forward = forward
    found = compare(model, "bf16")
    assert found.precisions["bf16"].culprits == ("model.layers.2",)
    assert "toward zero" in found.summary
    assert module(found, "bf16", "model.layers.2").bias < -0.6
    assert abs(module(found, "bf16", "model.layers.1.self_attn").bias) < 0.2


class Faint(nn.Module):
    """A head whose logits are so small that every gradient behind it is under fp16's smallest subnormal."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).float() * 2.0**-24


def test_gradients_that_underflow_without_loss_scaling() -> None:
    model = llama()
    model.lm_head = Faint(model.lm_head)
    found = compare(model, "fp16", "fp16:scale=16777216")
    lost, kept = found.precisions.values()
    assert lost.severity == 2 and "underflows to zero" in lost.sentence and "loss scale of 2^" in lost.sentence
    assert lost.grad_relative_error > 0.9
    assert kept.grad_relative_error < 0.05
    gradients = next(r for r in lost.ranges if r.what == "gradients")
    assert gradients.underflow > 0.5
    assert lost.loss_scale_needed is not None and lost.loss_scale_needed >= 2**20


def test_rows_together_or_apart() -> None:
    apart, together = (compare(llama(2), "bf16", microbatch=m).precisions["bf16"] for m in (1, 2))
    assert together.loss == pytest.approx(apart.loss, abs=1e-4)
    for one, other in zip(apart.modules, together.modules, strict=True):
        assert other.relative_error == pytest.approx(one.relative_error, rel=1e-4), one.module
        assert other.introduced_error == pytest.approx(one.introduced_error, rel=1e-4), one.module


@pytest.mark.parametrize(("positions", "rows"), [(64, 8), (256, 2), (300, 1), (512, 1), (2048, 1), (0, 512)])
def test_short_rows_go_through_one_forward_together(positions: int, rows: int) -> None:
    ids = torch.zeros(2, positions, dtype=torch.long)
    assert rows_together(Batch(ids, ids)) == rows


def test_rows_of_different_length_go_one_by_one() -> None:
    """Together the shorter would keep its padding, and errors there are nobody's."""
    ids = torch.zeros(2, 64, dtype=torch.long)
    targets = ids.clone()
    targets[1, 40:] = IGNORED
    assert rows_together(Batch(ids, targets, mask_BT=targets != IGNORED)) == 1


class Shifted(nn.Module):
    """An MLP that reads the position before as well."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.up_proj, self.down_proj = mlp.up_proj, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.relu(self.up_proj(x + x.roll(1, 1))))


class Keeping(nn.Module):
    """An MLP that keeps what it was given on itself."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.up_proj, self.down_proj = mlp.up_proj, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x
        return self.down_proj(torch.relu(self.up_proj(x))) + 0.1 * self.kept


def test_an_mlp_is_not_tried_in_the_middle_of_its_own_forward() -> None:
    model = llama(2)
    model.model.layers[1].mlp = Keeping(model.model.layers[1].mlp)
    found = compare(model, "bf16").precisions["bf16"]
    assert not any("could not" in note for note in found.notes)


def test_an_mlp_is_computed_again_at_fewer_positions_only_where_it_treats_them_apart(monkeypatch) -> None:
    asked = RoundingTap._is_positionwise
    found: dict[str, bool] = {}

    def noted(tap: RoundingTap, call: Call) -> bool:
        found[call.name] = asked(tap, call)
        return found[call.name]

    model = llama(2)
    model.model.layers[1].mlp = Shifted(model.model.layers[1].mlp)
    monkeypatch.setattr(RoundingTap, "_is_positionwise", noted)
    few = compare(model, "bf16").precisions["bf16"]
    assert found["model.layers.0.mlp"] and not found["model.layers.1.mlp"]
    assert not any(part for name, part in found.items() if not name.endswith("mlp"))
    monkeypatch.setattr(RoundingTap, "_is_positionwise", lambda tap, call: False)
    everywhere = compare(model, "bf16").precisions["bf16"]
    for one, other in zip(few.modules, everywhere.modules, strict=True):
        assert one.introduced_error == pytest.approx(other.introduced_error, rel=0.05), one.module


def test_identical_from_run_to_run() -> None:
    first, second = (compare(llama(2), "nvfp4").precisions["nvfp4"] for _ in range(2))
    assert repr(first.modules) == repr(second.modules)
    assert repr(first.parameters) == repr(second.parameters)


def test_isolation_ranks_and_recommends() -> None:
    model = llama(2)
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        attention.q_proj.weight *= 12
        attention.k_proj.weight *= 12
    found = compare(model, "bf16", isolated=True, on=batch(1, 32)).precisions["bf16"]
    alone = [max(i.removed_loss, i.removed_grad) for i in found.isolated if len(i.modules) == 1]
    assert alone == sorted(alone, reverse=True) and alone[0] > 0.3
    assert {"model.layers.0", "model.layers.1", "lm_head"} <= {
        i.modules[0] for i in found.isolated if len(i.modules) == 1
    }
    assert any(name.startswith("model.layers.1") for name in found.keep_fp32)
    kept = next(i for i in found.isolated if i.modules == found.keep_fp32)
    assert kept.removed_loss >= 0.75 and kept.removed_grad >= 0.75


def test_a_fault_of_the_batch_stands_out_from_the_baseline() -> None:
    """Every layer rounds alike on this batch, so siblings excuse it; the baseline does not."""
    model = llama(2)
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_hook(_rounded_where_token_zero(model))
    baseline, sick = batch(), batch()
    baseline.ids_BT.clamp_(min=1)
    sick.ids_BT[:, 0] = 0
    alone = compare(model, "bf16", on=sick).precisions["bf16"]
    beside = compare(model, "bf16", on=sick, baseline=baseline).precisions["bf16"]
    assert not any(m.stands_out for m in alone.modules if m.layer >= 0)
    assert {m.module for m in beside.modules if m.stands_out} >= {
        f"model.layers.{layer}.input_layernorm" for layer in range(2)
    }


def _rounded_where_token_zero(model: Any) -> Callable[..., Tensor]:
    seen: dict[str, bool] = {}
    model.model.embed_tokens.register_forward_pre_hook(lambda _, args: seen.update(sick=bool((args[0] == 0).any())))

    def hook(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output.bfloat16().float() if seen["sick"] and torch.is_autocast_enabled("cpu") else output

    return hook


def test_of_one_row_the_blocks_that_stand_out_are_sent_back_again() -> None:
    model = llama(layers=12)
    hurt = model.model.layers[9]
    hurt.mlp.forward = functools.partial(lambda forward, x: truncated(forward(x)), hurt.mlp.forward)
    found = compare(model, "bf16", on=batch(rows=1)).precisions["bf16"]
    again = {m.module for m in found.modules if math.isfinite(m.grad_introduced_error)}
    assert len(again) == FEW_BLOCKS and "model.layers.9" in again
    assert "gradients of 8 of 12 blocks" in found.notes[0]
    four = compare(model, "bf16", on=batch(rows=4), microbatch=1).precisions["bf16"]
    assert {f"model.layers.{i}" for i in range(12)} < {
        m.module for m in four.modules if math.isfinite(m.grad_introduced_error)
    }


@pytest.mark.parametrize(("blocks", "forwards", "done"), [(32, 1, 8), (32, 2, 16), (32, 9, 32), (80, 1, 20), (5, 1, 5)])
def test_a_quarter_of_the_backward_is_done_again(blocks: int, forwards: int, done: int) -> None:
    assert blocks_again(blocks, forwards) == done
