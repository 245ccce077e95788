"""Changes to attention, positions, mixing, routers and the step: they do what they say, and nothing is left."""

import dataclasses
import importlib
import math

import pytest
import torch
import torch.nn.functional as F

from fixtures.lagged_language import MIXTRAL, experts, sequences
from stability_probe.batches.base import Batch
from stability_probe.interventions import cap_logits, realign_labels, replace_elements, rescale_logits, rescale_tensor
from stability_probe.interventions.bench import CannotRun, swapped, tried
from stability_probe.interventions.cap_logits import without_cap
from stability_probe.interventions.change_rotary import reordered, with_theta
from stability_probe.interventions.clamp_largest_input import clamped_largest_input
from stability_probe.interventions.constrain_mixing import doubly_stochastic, unit_norm
from stability_probe.interventions.recentre_router import recentred
from stability_probe.interventions.rescale_logits import rescaled
from stability_probe.interventions.set_positions import plain_positions
from stability_probe.interventions.unmask_queries import see_itself
from stability_probe.measure import StepProgress
from stability_probe.mitigations import softcap
from stability_probe.models.decoder import rotary_angles, rotate
from stability_probe.replay import Subject, replay
from stability_probe.step_progress import step_progress
from stability_probe.tables_positions import rotary_settings
from stability_probe.taps.attention_change import AttentionChange, attention
from stability_probe.taps.router import RouterTap, find_routers
from tests.rule_tables import measurements_from
from tests.test_interventions import bench_of, snapshot, step_of
from tests.test_replay import batch_of, decoder


def trial(name, bench, **arguments):
    return tried(importlib.import_module(f"stability_probe.interventions.{name}"), bench, arguments)


CHANGES = {
    "rescale_logits": {"factor": 9.0},
    "cap_logits": {"cap": 0.05},
    "change_rotary": {"theta": 3.0},
    "rescale_tensors": {"factors": {"blocks.0.mlp.up_proj.weight": 3.0, "blocks.1.mlp.down_proj.weight": 0.5}},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_moves_the_loss_and_leaves_no_trace(name):
    model = decoder("llama")
    bench = bench_of(model)
    before, config = snapshot(model), model.config
    reading = trial(name, bench, **CHANGES[name])
    assert reading["loss"] != bench.trace.loss
    after = snapshot(model)
    assert all(after[n][0] == before[n][0] and torch.equal(after[n][1], before[n][1]) for n in before)
    assert model.config is config
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert replay(bench.subject, bench.batch, detail=False).loss == bench.trace.loss


@pytest.mark.parametrize("style", ["gpt2", "llama", "gemma2"])
def test_rescaled_logits_are_scaled_in_every_head_of_every_layer(style):
    model, batch = decoder(style, attention_softcap=None, n_layer=1), batch_of()
    subject = Subject.of(model)
    before = replay(subject, batch).heads[0]
    bench = bench_of(model, batch)
    sites = [site.name for site in subject.anatomy.attention]
    with torch.no_grad():  # the same scaling by hand, on all of W_q
        model.blocks[0].attn.q_proj.weight.mul_(0.25)
        if model.blocks[0].attn.q_proj.bias is not None:
            model.blocks[0].attn.q_proj.bias.mul_(0.25)
    want = replay(subject, batch)
    assert torch.allclose(want.heads[0].max_logit, before.max_logit / 4, rtol=1e-4)
    with torch.no_grad():
        model.blocks[0].attn.q_proj.weight.mul_(4)
        if model.blocks[0].attn.q_proj.bias is not None:
            model.blocks[0].attn.q_proj.bias.mul_(4)
    assert trial("rescale_logits", bench, factor=0.25)["loss"] == pytest.approx(want.loss, rel=1e-5)
    assert sites


@pytest.mark.parametrize("causal", [True, False])
def test_unchanged_attention_is_sdpa(causal):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 150, 8, generator=generator) for heads in (4, 2, 2))
    mask = None if causal else torch.rand(2, 1, 150, 150, generator=generator) < 0.5
    got = attention(lambda logits, _: logits, query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=True)
    want = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=True)
    assert torch.allclose(got, want, atol=1e-5)


def test_rescaling_leaves_masks_alone():
    for fill in (-math.inf, torch.finfo(torch.float32).min, -1e4):
        logits = torch.tensor([[[[2.0, fill], [1.0, 3.0]]]])
        assert torch.equal(rescaled(8.0)(logits, 0), torch.tensor([[[[16.0, fill], [8.0, 24.0]]]]))


def test_capping_the_attention_is_what_a_capped_model_does():
    capped = decoder("llama", attention_softcap=0.02)
    want = replay(Subject.of(capped), batch_of(), detail=False).loss
    bench = bench_of(decoder("llama"))
    assert trial("cap_logits", bench, cap=0.02, where="attention")["loss"] == pytest.approx(want, rel=1e-6)
    assert want != bench.trace.loss


def test_capping_the_output_is_what_a_capped_model_does_and_can_be_undone():
    capped, plain = decoder("llama", output_softcap=0.3), decoder("llama")
    want = replay(Subject.of(capped), batch_of(), detail=False).loss
    assert trial("cap_logits", bench_of(plain), cap=0.3)["loss"] == pytest.approx(want, rel=1e-6)
    undone = trial("cap_logits", bench_of(capped), cap=0.3, remove=True)["loss"]
    assert undone == pytest.approx(bench_of(plain).trace.loss, rel=1e-4)


def test_a_cap_taken_away_gives_the_logits_back():
    logits = torch.linspace(-80, 80, 41)
    assert torch.allclose(without_cap(softcap(logits, 30.0), 30.0), logits, rtol=1e-2)
    assert without_cap(torch.tensor([30.0, -30.0]), 30.0).isfinite().all()


def test_a_blind_query_sees_itself_and_no_other_changes():
    hidden = torch.tensor([[True, True, False], [False, False, True], [True, True, True]])
    logits = torch.arange(9.0).reshape(3, 3).masked_fill(hidden, -math.inf)[None, None]
    got = see_itself(logits, 0)
    want = logits.clone()
    want[..., 2, 2] = 0.0
    assert torch.equal(got, want)
    assert torch.equal(see_itself(logits[..., 2:, :], 2), want[..., 2:, :])


def test_unmasking_makes_a_hard_mask_finite():
    model = decoder("llama")
    subject, batch = Subject.of(model), batch_of()
    sites = [site.name for site in subject.anatomy.attention]

    def blind(logits, start):
        return logits.masked_fill(torch.arange(logits.shape[-2])[:, None] + start < 3, -math.inf)

    def both(logits, start):
        return see_itself(blind(logits, start), start)

    seen = replay(subject, batch, extra=lambda: AttentionChange(both).on(model, sites))
    assert math.isfinite(seen.loss) and seen.loss != replay(subject, batch).loss
    assert trial("unmask_queries", bench_of(model, batch))["loss"] == pytest.approx(
        replay(subject, batch).loss, rel=1e-5
    )


def test_unmasked_rows_count_as_real():
    mask = torch.ones(3, 17, dtype=torch.bool)
    mask[1] = False
    whole = batch_of()
    bench = bench_of(decoder("llama"), dataclasses.replace(whole, mask_BT=mask))
    assert trial("unmask_queries", bench, rows=[1])["loss"] == pytest.approx(
        replay(bench.subject, whole, detail=False).loss, rel=1e-5
    )


def test_positions_are_counted_from_the_first_real_token():
    ids = torch.zeros(2, 5, dtype=torch.long)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]]).bool()
    assert plain_positions(Batch(ids, ids)).tolist() == [[0, 1, 2, 3, 4]] * 2
    assert plain_positions(Batch(ids, ids, mask_BT=mask)).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]


def test_setting_positions_undoes_stored_ones():
    plain = batch_of()
    odd = dataclasses.replace(plain, position_ids_BT=(torch.arange(17) * 3 + 1).expand(3, -1).contiguous())
    bench = bench_of(decoder("gpt2"), odd)
    want = replay(bench.subject, plain, detail=False).loss
    assert bench.trace.loss != want
    assert trial("set_positions", bench)["loss"] == pytest.approx(want, rel=1e-6)


def test_another_theta_is_another_model():
    model = decoder("llama")
    want = replay(Subject.of(decoder("llama", rope_theta=50.0)), batch_of(), detail=False).loss
    assert trial("change_rotary", bench_of(model), theta=50.0)["loss"] == pytest.approx(want, rel=1e-6)


def test_theta_is_changed_in_the_buffers_of_transformers_and_restored():
    model = experts(MIXTRAL)
    old = rotary_settings(model)
    assert old == pytest.approx((1e6, 1.0), rel=1e-3) or old == pytest.approx((1e4, 1.0), rel=1e-3)
    with with_theta(model, 777.0):
        assert rotary_settings(model) == pytest.approx((777.0, 1.0), rel=1e-3)
    with with_theta(model, 777.0, stretch=8.0):
        assert rotary_settings(model) == pytest.approx((777.0, 8.0), rel=1e-3)
    assert rotary_settings(model) == old


def test_stretched_positions_need_frequencies_in_a_buffer():
    with pytest.raises(CannotRun):  # the package's own decoder makes its angles as it goes
        trial("change_rotary", bench_of(decoder("llama")), theta=10_000.0, stretch=2.0)
    model = experts(MIXTRAL)
    bench = bench_of(model, Batch(sequences(2), sequences(2).roll(-1, 1)))
    theta, _ = rotary_settings(model)
    assert trial("change_rotary", bench, theta=theta)["loss"] == pytest.approx(bench.trace.loss, abs=1e-5)
    assert trial("change_rotary", bench, theta=theta, stretch=8.0)["loss"] != pytest.approx(bench.trace.loss, abs=1e-3)


def test_an_input_that_stands_out_is_held_and_the_hook_leaves():
    model = decoder("llama")
    bench = bench_of(model)
    name = "blocks.1.mlp.down_proj"
    with torch.no_grad():
        for side in ("gate_proj", "up_proj"):
            model.get_parameter(f"blocks.1.mlp.{side}.weight")[3] *= 1000.0
    seen, part = [], model.get_submodule(name)
    with clamped_largest_input(part):
        handle = model.get_submodule(name).register_forward_hook(
            lambda _m, args, _out: seen.append(args[0].abs().amax((0, 1)))
        )
        hurt = replay(bench.subject, bench.batch, detail=False, backward=False).loss
        handle.remove()
    assert all(channels[3] <= channels.sort().values[channels.numel() // 2] for channels in seen)
    assert not part._forward_pre_hooks
    assert trial("clamp_largest_input", bench, module=name)["loss"] == hurt
    with clamped_largest_input(part):
        assert part(torch.zeros(0, part.in_features)).shape == (0, part.out_features)  # an expert without tokens


def test_a_model_without_rotary_positions_has_no_theta_to_change():
    with pytest.raises(CannotRun), with_theta(decoder("gpt2"), 100.0):
        pass


def test_pairs_and_halves_are_two_orders_of_one_rotation():
    """Rotating neighbouring pairs is what the halved rotation does to reordered weights."""
    model = decoder("llama", n_layer=1)
    site = Subject.of(model).anatomy.attention
    x = torch.randn(1, 6, 32)
    query = model.blocks[0].attn.q_proj
    angles = rotary_angles(torch.arange(6)[None], 8, 10_000.0)
    paired = query(x).unflatten(-1, (-1, 8)).transpose(1, 2).unflatten(-1, (-1, 2))
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    first, second = paired[..., 0], paired[..., 1]
    want = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    weight = reordered(model, site, "halves")["blocks.0.attn.q_proj.weight"]
    assert torch.allclose(rotate((x @ weight.T).unflatten(-1, (-1, 8)).transpose(1, 2), angles), want, atol=1e-5)


def test_reordering_there_and_back_changes_nothing():
    model = decoder("llama")
    site = Subject.of(model).anatomy.attention
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for layout in ("halves", "pairs"):
            for name, value in reordered(model, site, layout).items():
                model.get_parameter(name).copy_(value)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_constrained_mixing_matrices():
    matrix = torch.eye(4) + 0.3 * torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    made = doubly_stochastic(matrix.exp())
    assert torch.allclose(made.sum(0), torch.ones(4), atol=1e-3) and torch.allclose(
        made.sum(1), torch.ones(4), atol=1e-3
    )
    assert torch.linalg.matrix_norm(unit_norm(matrix * 5), 2).item() == pytest.approx(1.0, rel=1e-5)
    assert torch.equal(unit_norm(matrix * 0.01), matrix * 0.01)


def test_constraining_undoes_an_amplification():
    model = decoder("hyper", norm_placement="pre")
    want = bench_of(model).trace.loss
    with torch.no_grad():
        for block in model.blocks:
            block.stream_mix.mul_(4.0)
    bench = bench_of(model)
    names = [f"blocks.{i}.stream_mix" for i in range(len(model.blocks))]
    assert bench.trace.loss != pytest.approx(want, abs=1e-6)
    for how in ("norm", "sinkhorn"):
        assert trial("constrain_mixing", bench, parameters=names, how=how)["loss"] == pytest.approx(want, rel=1e-5)


def test_a_recentred_router_gives_every_expert_the_same_mean_logit():
    model = experts(MIXTRAL)
    subject = Subject.of(model)
    router = model.model.layers[0].mlp.gate
    own = router.weight.detach().clone()
    seen = []
    with recentred(router):
        handle = router.register_forward_hook(lambda _m, _i, out: seen.append(out[0].detach()))
        model(sequences(1))
        handle.remove()
    (logits,) = seen
    assert torch.allclose(logits.mean(0), logits.mean(0).mean().expand(4), atol=1e-5)
    assert torch.equal(router.weight, own) and not router._forward_hooks and not router._forward_pre_hooks
    with recentred(router, limit=0.01):
        handle = router.register_forward_hook(lambda _m, _i, out: seen.append(out[0].detach()))
        model(sequences(1))
        handle.remove()
    assert seen[1].abs().max().item() == pytest.approx(0.01, rel=1e-4)
    assert len(find_routers(model, subject.anatomy)) == 2


def test_the_router_tap_counts_what_the_router_chooses():
    model = experts(MIXTRAL)
    subject = Subject.of(model)
    tap, chosen = RouterTap(find_routers(model, subject.anatomy)), []
    handle = model.model.layers[1].mlp.gate.register_forward_hook(lambda _m, _i, out: chosen.append(out[2]))
    with tap.on(model):
        for row in sequences(3):
            model(row[None])
    handle.remove()
    counts = torch.bincount(torch.cat(chosen).flatten(), minlength=4).double()
    share = counts[counts > 0] / counts.sum()
    record = tap.table()[1]
    assert (record["layer"], record["experts"], record["top_k"], record["tokens"]) == (1, 4, 1, 192)
    assert record["load_entropy"] == pytest.approx(-(share * share.log()).sum().item())
    assert record["idle"] == int((counts == 0).sum())
    assert not any(part._forward_hooks for part in model.modules())


def lagging_step(model, trace, eps):
    step = step_of(model, trace)
    group = dataclasses.replace(step.state.groups[0], eps=eps)
    return dataclasses.replace(step, state=dataclasses.replace(step.state, groups=(group,)))


@pytest.mark.parametrize(("eps", "in_bf16", "lr"), [(1.0, False, 1e-3), (1e-8, True, 1e-6), (1e-8, False, 1e-3)])
def test_lost_progress_comes_back(eps, in_bf16, lr):
    model = decoder()
    bench = bench_of(model)
    step = lagging_step(model, bench.trace, eps)
    step = dataclasses.replace(step, setting=dataclasses.replace(step.setting, lr=lr))
    known = step_progress(model, step.gradients, step.state, step.setting, in_bf16, "test")
    assert isinstance(known, StepProgress)
    bench = bench_of(model, step=step, measurements=dataclasses.replace(measurements_from({}), step_progress=known))
    whole = trial("simulated_progress", bench)["lost_progress"]
    assert whole == pytest.approx(known.lost, abs=1e-6)
    assert trial("simulated_progress", bench, in_fp32=True, tiny_eps=True)["lost_progress"] == pytest.approx(
        0, abs=1e-6
    )
    assert (known.lost > 0.5) is (eps == 1.0 or in_bf16)
    assert trial("simulated_progress", bench, in_fp32=True)["lost_progress"] == pytest.approx(
        known.lost_to_epsilon, abs=1e-6
    )
    assert trial("simulated_progress", bench, tiny_eps=True)["lost_progress"] == pytest.approx(
        known.lost_to_rounding, abs=1e-6
    )
    assert (known.vanish_share > 0.9) is in_bf16


def test_progress_without_an_optimizer_cannot_run():
    with pytest.raises(CannotRun, match="--optimizer"):
        trial("simulated_progress", bench_of(decoder()))


@pytest.mark.parametrize(("channel", "held"), [(2, [False, False, True, False]), (None, [True] * 4)])
def test_a_clamp_holds_one_channel_or_all(channel, held):
    from stability_probe.interventions.clamp_channel import clamped

    part = torch.nn.Identity()
    with clamped(part, channel, 1.0):
        found = part(torch.full((2, 3, 4), 9.0))
    assert ((found == 1.0).all((0, 1))).tolist() == held
    assert bool((part(torch.full((1, 4), 9.0)) == 9.0).all())


def test_repairs_are_held_on_top_of_each_other():
    model = decoder("llama")
    bench = bench_of(model)
    before = snapshot(model)
    held = cap_logits.repaired(rescale_logits.repaired(bench, 0.5), 2.0)
    trace = replay(
        bench.subject, bench.batch, detail=False, backward=False, change_logits=lambda x: softcap(x, 2.0),
        extra=lambda: AttentionChange(rescaled(0.5)).on(model, [s.name for s in bench.subject.anatomy.attention]),
    )  # fmt: skip
    assert held.read()["loss"] == trace.loss
    undone = cap_logits.repaired(held, 2.0, remove=True).read()["loss"]
    assert undone == pytest.approx(rescale_logits.repaired(bench, 0.5).read()["loss"], abs=1e-5)
    after = snapshot(model)
    assert all(after[n][0] == before[n][0] and torch.equal(after[n][1], before[n][1]) for n in before)


@pytest.mark.parametrize(("offset", "rows"), [(-1, None), (2, [1]), (0, None)])
def test_moved_targets_cost_what_the_offset_sums_say(offset, rows):
    bench = bench_of(decoder("llama"))
    summed = realign_labels.trial(bench, offset, rows)["loss"]
    assert realign_labels.repaired(bench, offset, rows).read()["loss"] == pytest.approx(summed, abs=1e-5)


def test_repairs_of_one_tensor_build_on_each_other():
    model = decoder("llama")
    bench, name = bench_of(model), "blocks.0.mlp.up_proj.weight"
    tensor = model.get_parameter(name)
    with torch.no_grad():
        tensor[1, 2] = 500.0
    both = replace_elements.repaired(rescale_tensor.repaired(bench, name, 0.5), name, [(1, 2)]).read()["loss"]
    by_hand = tensor.detach() * 0.5
    by_hand[1, 2] = by_hand.flatten().nanmedian()
    assert both == bench.holding(lambda: swapped(model, {name: by_hand})).read()["loss"]


def test_a_second_change_of_the_attention_logits_cannot_run():
    once = rescale_logits.repaired(bench_of(decoder("llama")), 0.5)
    with pytest.raises(CannotRun, match="changed already"):
        rescale_logits.repaired(once, 0.5)
    assert cap_logits.repaired(once, 5.0).read()["loss"] != once.read()["loss"]  # those of the output may be


def test_only_the_inputs_of_projections_are_held():
    with pytest.raises(CannotRun, match="no projection"):
        trial("clamp_largest_input", bench_of(decoder("llama")), module="embed")
