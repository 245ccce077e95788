"""Every intervention changes what it says, and nothing is left of it afterwards."""

import dataclasses
import importlib
import math
import pkgutil

import pytest
import torch

from stability_probe import interventions
from stability_probe.interventions.bench import Bench, CannotRun, StepBench, tried
from stability_probe.interventions.change_precision import in_fp32
from stability_probe.interventions.clamp_channel import clamped
from stability_probe.interventions.clip_gains import clipped_gains
from stability_probe.interventions.clip_heads import clipped_heads
from stability_probe.interventions.drop_rows import grad_norm_of
from stability_probe.models.anatomy import with_heads
from stability_probe.optimizer_step import StepSetting
from stability_probe.replay import Subject, replay
from tests.rule_tables import measurements_from
from tests.test_optimizer_step import GROUP
from tests.test_replay import batch_of, decoder


def bench_of(model, batch=None, **changes):
    batch = batch or batch_of()
    subject = Subject.of(model)
    trace = replay(subject, batch, sketches=True)
    fields = {
        "subject": subject, "batch": batch, "trace": trace, "measurements": measurements_from({}), "reduced": {},
        "healthy": None, "step": None,
    }  # fmt: skip
    return Bench(**{**fields, **changes})


def trial(name, bench, **arguments):
    return tried(importlib.import_module(f"stability_probe.interventions.{name}"), bench, arguments)


def snapshot(model):
    return {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}


def parameter_of(model, part):
    return next(name for name, p in model.named_parameters() if part in name and p.dim() == 2)


CHANGES = {
    "replace_elements": lambda m: {"parameter": parameter_of(m, "mlp"), "indices": [(0, 1), (2, 3)]},
    "rescale_tensor": lambda m: {"parameter": parameter_of(m, "mlp"), "factor": 3.0},
    "replace_rows": lambda m: {"parameter": "embed.weight", "rows": [3, 5]},
    "clamp_channel": lambda m: {"module": "blocks.0", "channel": 2, "limit": 1e-4},
    "clip_heads": lambda m: {"gammas": {(1, 2): 9.0}},
    "change_precision": lambda m: {"precision": "bf16", "modules": []},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_moves_the_loss_and_leaves_no_trace(name):
    model = decoder("llama")
    bench = bench_of(model)
    before = snapshot(model)
    reading = trial(name, bench, **CHANGES[name](model))
    assert reading["loss"] != bench.trace.loss
    after = snapshot(model)
    assert all(after[n][0] == before[n][0] and torch.equal(after[n][1], before[n][1]) for n in before)
    assert not any(m._forward_hooks or "forward" in m.__dict__ for m in model.modules())
    assert replay(bench.subject, bench.batch, detail=False).loss == bench.trace.loss


def test_every_intervention_says_whether_it_changes_the_data():
    for info in pkgutil.iter_modules(interventions.__path__):
        if info.name != "bench":
            kind = importlib.import_module(f"stability_probe.interventions.{info.name}")
            assert isinstance(kind.OF_THE_DATA, bool)
            assert info.name in (interventions.__doc__ or "")


def sites_of(subject):
    return {site.layer: site for site in subject.anatomy.attention}


def test_heads_that_the_class_does_not_count_are_counted_by_the_tap():
    model = decoder("llama")
    site, _ = Subject.of(model).anatomy.attention
    unknown = dataclasses.replace(site, n_heads=None, n_kv_heads=None, head_width=None)
    assert with_heads(model, unknown, 4) == site


@pytest.mark.parametrize("style", ["gpt2", "llama", "gemma2"])
def test_clipping_a_head_scales_its_largest_logit_and_no_other(style):
    model = decoder(style, attention_softcap=None)
    subject, batch = Subject.of(model), batch_of()
    before = replay(subject, batch).heads[0].max_logit
    with clipped_heads(model, sites_of(subject), {(0, 1): 0.25}):
        after = replay(subject, batch).heads[0].max_logit
    want = before.clone()
    want[1] *= 0.25
    assert torch.allclose(after, want, rtol=1e-4)


def test_clipping_a_query_head_leaves_the_shared_key_head_alone():
    model = decoder("llama")
    sites = sites_of(Subject.of(model))
    keys = {name: p.detach().clone() for name, p in model.named_parameters() if "k_proj" in name}
    with clipped_heads(model, sites, {(0, 0): 0.5}):
        assert all(torch.equal(model.get_parameter(name), key) for name, key in keys.items())


def test_clipping_gains_scales_every_head_of_the_layer_under_qk_norm():
    model = decoder("qwen3")
    subject, batch = Subject.of(model), batch_of()
    before = replay(subject, batch).heads[0].max_logit
    with clipped_gains(model, subject.anatomy, {0: 0.25}):
        assert torch.allclose(replay(subject, batch).heads[0].max_logit, before / 4, rtol=1e-4)


def test_gains_are_not_there_without_qk_norm():
    model = decoder("llama")
    with pytest.raises(CannotRun), clipped_gains(model, Subject.of(model).anatomy, {0: 0.5}):
        pass


def test_dropping_rows_is_a_replay_without_them():
    model, batch = decoder(), batch_of(B=4, T=33)
    bench = bench_of(model, batch)
    reading = trial("drop_rows", bench, rows=[1])
    kept = torch.tensor([0, 2, 3])
    rest = replay(bench.subject, type(batch)(batch.ids_BT[kept], batch.targets_BT[kept]))
    assert reading["loss"] == pytest.approx(rest.loss, rel=1e-6)
    assert reading["grad_norm"] == pytest.approx(rest.global_grad_norm, rel=0.05)
    assert grad_norm_of(bench.trace, [0, 1, 2, 3]) == pytest.approx(bench.trace.global_grad_norm, rel=0.05)


def test_dropping_every_row_needs_a_baseline():
    model = decoder()
    bench = bench_of(model)
    with pytest.raises(CannotRun, match="--baseline"):
        trial("drop_rows", bench, rows=[0, 1, 2])
    healthy = batch_of(seed=9)
    bench = bench_of(model, healthy=(healthy, replay(bench.subject, healthy)))
    assert trial("drop_rows", bench, rows=[0, 1, 2]) == trial("swap_baseline", bench)


def test_realigning_one_row_is_replaying_it_realigned():
    bench = bench_of(decoder(), batch_of(B=2, T=12))
    reading = trial("realign_labels", bench, offset=-1, rows=[1])
    targets = bench.batch.targets_BT.clone()
    targets[1] = -100
    targets[1, 1:] = bench.batch.targets_BT[1, :-1]
    want = replay(bench.subject, type(bench.batch)(bench.batch.ids_BT, targets), detail=False).loss
    assert reading["loss"] == pytest.approx(want, rel=1e-5)


def test_ignoring_targets_takes_their_losses_out():
    bench = bench_of(decoder(), batch_of(B=2, T=12))
    reading = trial("ignore_targets", bench, spans=[(0, 4, 9)])
    targets = bench.batch.targets_BT.clone()
    targets[0, 3:8] = -100
    want = replay(bench.subject, type(bench.batch)(bench.batch.ids_BT, targets), detail=False).loss
    assert reading["loss"] == pytest.approx(want, rel=1e-5)


def test_clamping_holds_one_channel():
    model = decoder()
    with clamped(model.blocks[0], 3, 0.01):
        out = model.blocks[0](torch.randn(1, 5, 32), None, None)
    assert out[..., 3].abs().max() <= 0.01
    assert out[..., 2].abs().max() > 0.01


def test_a_module_in_fp32_ignores_autocast():
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(2, 8)).dtype == torch.bfloat16
        with in_fp32(layer, ["0"]):
            assert layer(torch.randn(2, 8)).dtype == torch.float32
        assert layer(torch.randn(2, 8)).dtype == torch.bfloat16


def step_of(model, trace, v_scale=1.0):
    from stability_probe.checkpoints.base import OptimizerState

    names = list(trace.gradients.total)
    square = {name: grad.square() * v_scale + 1e-12 for name, grad in trace.gradients.total.items()}
    state = OptimizerState(
        kind="adamw",
        exp_avg={name: grad.clone() for name, grad in trace.gradients.total.items()},
        exp_avg_sq=square,
        step=dict.fromkeys(names, 1000),
        groups=(GROUP,),
        group_of=dict.fromkeys(names, 0),
        naming="test",
    )
    return StepBench(trace.gradients.total, state, StepSetting(lr=0.3), batch_of(), trace.loss, "this batch")


def test_a_simulated_step_at_a_lower_lr_does_less_damage():
    model = decoder()
    bench = bench_of(model)
    bench = bench_of(model, step=step_of(model, bench.trace, 1e-4))
    before = snapshot(model)
    whole = trial("simulated_step", bench)["step_damage"]
    quarter = trial("simulated_step", bench, lr_factor=0.01)["step_damage"]
    refreshed = trial("simulated_step", bench, refresh=list(bench.step.gradients))["step_damage"]
    assert whole > quarter
    assert whole > refreshed
    assert all(torch.equal(p, before[name][1]) for name, p in model.named_parameters())


def test_a_step_without_optimizer_state_cannot_run():
    with pytest.raises(CannotRun, match="--optimizer"):
        trial("simulated_step", bench_of(decoder()))


def test_recentring_needs_logits_that_bf16_cannot_resolve():
    bench = bench_of(decoder(), measurements=dataclasses.replace(measurements_from({}), precisions={}))
    with pytest.raises(CannotRun):
        trial("recentre_logits", bench)


def test_a_nan_among_the_elements_does_not_become_the_median():
    model = decoder()
    name = parameter_of(model, "mlp")
    with torch.no_grad():
        model.get_parameter(name)[0, 0] = math.nan
    reading = trial("replace_elements", bench_of(model), parameter=name, indices=[(0, 0)])
    assert math.isfinite(reading["loss"])


def test_a_head_without_what_its_rows_share_gives_the_same_probabilities():
    model = decoder()
    name = Subject.of(model).anatomy.head
    with torch.no_grad():
        model.get_submodule(name).weight += 40.0 * torch.randn(1, model.get_submodule(name).in_features)
    bench = bench_of(model)
    before = snapshot(model)
    in_fp32 = trial("centre_head", bench, module=name, precision="fp32")
    assert in_fp32["loss"] == pytest.approx(bench.trace.loss, abs=1e-3)
    whole = trial("change_precision", bench, precision="bf16")["precision_gap"]
    assert trial("centre_head", bench, module=name)["precision_gap"] < 0.2 * whole
    assert all(torch.equal(p, before[key][1]) for key, p in model.named_parameters())
    with pytest.raises(CannotRun, match="linear head"):
        trial("centre_head", bench, module=Subject.of(model).anatomy.final_norm)


def test_a_head_that_is_called_by_keyword_is_centred_too():
    class Keyworded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64)

        def forward(self, input_ids):
            return self.head(input=self.embed(input_ids))

    bench = bench_of(Keyworded().eval())
    centred = trial("centre_head", bench, module="head", precision="fp32")
    assert centred["loss"] == pytest.approx(bench.trace.loss, abs=1e-4)
