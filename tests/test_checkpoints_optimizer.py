"""Stored moments under the right names: each parameter's gradient is a number of its own, so a mix-up shows."""

import copy
import math

import pytest
import torch
from torch import nn

from stability_probe.checkpoints.base import OptimizerState
from stability_probe.checkpoints.optimizer import misfits, name_optimizer_state
from stability_probe.models.decoder import Decoder, DecoderConfig
from stability_probe.models.nanogpt import NanoGPT


def stepped(optimizer, model):
    """The state dict after one step in which the i-th parameter's gradient is i + 1 everywhere."""
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, index + 1.0)
    optimizer.step()
    return optimizer.state_dict()


def expected_moment(model, scale):
    return {name: scale * (index + 1) for index, (name, _) in enumerate(model.named_parameters())}


def assert_right(state, model, scale=0.1):
    assert isinstance(state, OptimizerState), state
    want = expected_moment(model, scale)
    assert set(state.exp_avg) == set(want)
    for name, moment in state.exp_avg.items():
        assert moment.shape == model.get_parameter(name).shape
        assert moment.flatten()[0].item() == pytest.approx(want[name], rel=1e-5), name


def nanogpt():
    return NanoGPT(n_layer=2, n_head=2, n_embd=8, block_size=16, vocab_size=11, bias=True)


def decoder(**changes):
    return Decoder(DecoderConfig(**{"vocab_size": 11, "n_layer": 2, "n_head": 2, "d_model": 8, **changes}))


def tiny_transformers(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 12, "num_key_value_heads": 1, "head_dim": 4}
    configs = {
        "gpt2": lambda: transformers.GPT2Config(vocab_size=11, n_embd=8, n_layer=2, n_head=2, n_positions=16),
        "llama": lambda: transformers.LlamaConfig(**sizes),
        "qwen3": lambda: transformers.Qwen3Config(**sizes),
        "gemma2": lambda: transformers.Gemma2Config(**sizes),
    }
    return transformers.AutoModelForCausalLM.from_config(configs[name]())


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gemma2"])
def test_the_trainers_split(name):
    from transformers import Trainer

    model = tiny_transformers(name)
    decayed = Trainer.get_decay_parameter_names(None, model)  # what the Trainer itself does
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if n in decayed], "weight_decay": 0.1},
        {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8)
    state = name_optimizer_state(stepped(optimizer, model), model)
    assert_right(state, model)
    assert "Trainer" in state.naming
    assert state.kind == "adamw" and not state.notes
    first = next(n for n, _ in named if n in decayed)
    assert state.groups[state.group_of[first]].weight_decay == 0.1
    assert {state.groups[state.group_of[n]].weight_decay for n, _ in named if n not in decayed} <= {0.0}
    assert state.groups[0].lr == 3e-4 and state.groups[0].betas == (0.9, 0.95) and state.groups[0].eps == 1e-8
    assert set(state.step.values()) == {1}


@pytest.mark.parametrize("make", [nanogpt, lambda: decoder(qk_norm=True, bias=True), lambda: decoder(tied=False)])
def test_matrices_and_vectors_apart(make):
    model = make()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    for groups in ([matrices, vectors], [vectors, matrices]):
        optimizer = torch.optim.AdamW([{"params": group} for group in groups])
        assert_right(name_optimizer_state(stepped(optimizer, model), model), model)


def test_sorted_names_of_mingpt():
    model = nanogpt()
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    named = dict(model.named_parameters())
    groups = [sorted(n for n in named if n in linear), sorted(n for n in named if n not in linear)]
    optimizer = torch.optim.AdamW([{"params": [named[n] for n in group]} for group in groups])
    state = name_optimizer_state(stepped(optimizer, model), model)
    assert_right(state, model)
    assert "alphabetical" in state.naming


def test_one_group_in_model_order_counts_a_tied_head_once():
    model = decoder(tied=True)
    state = name_optimizer_state(stepped(torch.optim.AdamW(model.parameters()), model), model)
    assert_right(state, model)
    assert "head.weight" not in state.exp_avg and "embed.weight" in state.exp_avg


def test_param_names_are_believed_over_any_order():
    model = nanogpt()
    backwards = list(model.named_parameters())[::-1]
    state = name_optimizer_state(stepped(torch.optim.AdamW(backwards), model), model)
    assert_right(state, model)
    assert state.naming == "param_names in the groups"


def test_states_keyed_by_wrapped_names():
    model = nanogpt()
    raw = stepped(torch.optim.AdamW(model.parameters()), model)
    names = [f"module._orig_mod.{name}" for name, _ in model.named_parameters()]
    raw["state"] = {names[key]: entry for key, entry in raw["state"].items()}
    raw["param_groups"][0]["params"] = names
    raw["param_groups"][0].pop("param_names", None)
    state = name_optimizer_state(raw, model)
    assert_right(state, model)
    assert state.naming == "named by the file"


@pytest.mark.parametrize(
    ("optimizer", "kind", "scale"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "sgd", 1.0),
        (lambda p: torch.optim.SGD(p, lr=0.1), None, 0.0),
        (lambda p: torch.optim.Adafactor(p), None, 0.0),
    ],
)
def test_other_optimizers_by_name(optimizer, kind, scale):
    model = nanogpt()
    state = name_optimizer_state(stepped(optimizer(list(model.parameters())), model), model)
    if kind is None:
        assert isinstance(state, str)
    else:
        assert state.kind == kind
        assert_right(state, model, scale)


def test_muon_and_lion_are_named():
    model = nanogpt()
    raw = stepped(torch.optim.AdamW(model.parameters()), model)
    lion, muon = copy.deepcopy(raw), copy.deepcopy(raw)
    for entry in lion["state"].values():
        del entry["exp_avg_sq"]
    for entry in muon["state"].values():
        if entry["exp_avg"].dim() == 2:
            entry["momentum_buffer"] = entry.pop("exp_avg")
            del entry["exp_avg_sq"]
    assert name_optimizer_state(lion, model).kind == "lion"
    assert name_optimizer_state(muon, model).kind == "muon"


def test_a_parameter_without_a_gradient_has_no_moments():
    model = nanogpt()
    optimizer = torch.optim.AdamW(model.parameters())
    frozen = "transformer.h.0.ln_1.bias"
    for name, parameter in model.named_parameters():
        parameter.grad = None if name == frozen else torch.ones_like(parameter)
    optimizer.step()
    state = name_optimizer_state(optimizer.state_dict(), model)
    assert frozen not in state.exp_avg and frozen in state.group_of
    assert len(state.exp_avg) == len(list(model.parameters())) - 1
    assert any("never got a gradient" in note for note in state.notes)


def test_a_guess_between_two_orders_is_admitted():
    # Layers 0…11 of one shape: sorted as text (0, 1, 10, 11, 2…) they fit as well as in the model's order.
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    groups = [[p for p in model.parameters() if p.dim() == 2], [p for p in model.parameters() if p.dim() == 1]]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    state = name_optimizer_state(stepped(optimizer, model), model)
    assert_right(state, model)
    assert any("alphabetical order fits as well" in note for note in state.notes)


def test_the_optimizer_of_another_model_is_refused_with_advice():
    model, other = nanogpt(), decoder(bias=True)
    answer = name_optimizer_state(stepped(torch.optim.AdamW(other.parameters()), other), model)
    assert isinstance(answer, str) and "named_parameters" in answer


def test_one_moment_of_another_shape_is_told():
    model = nanogpt()
    saved = stepped(torch.optim.AdamW(model.parameters()), model)
    at, name, parameter = next((i, n, p) for i, (n, p) in enumerate(model.named_parameters()) if p.dim() == 2)
    wrong = tuple(side + 1 for side in parameter.shape)
    saved["state"][at]["exp_avg_sq"] = torch.zeros(wrong)
    shapes = f"stored {wrong}, model {tuple(parameter.shape)}"
    assert misfits(saved, model) == (f"{name}: {shapes}",)


def test_an_embedding_of_another_vocabulary_is_told_whatever_the_groups():
    model = nanogpt()
    split = [[p for p in model.parameters() if (p.dim() >= 2) is matrix] for matrix in (True, False)]
    saved = stepped(torch.optim.AdamW([{"params": part} for part in split]), model)
    first = saved["state"][0]
    for moment in ("exp_avg", "exp_avg_sq"):
        first[moment] = first[moment][:-2]
    (told,) = misfits(saved, model)
    assert told.startswith(next(name for name, p in model.named_parameters() if p.dim() >= 2))


def _half(moment: torch.Tensor) -> torch.Tensor:
    return moment[: len(moment) // 2] if moment.dim() == 2 and len(moment) % 2 == 0 and len(moment) < 60 else moment


def test_shards_groups_and_other_models_are_no_misfits():
    model, other = nanogpt(), decoder(bias=True)
    whole = stepped(torch.optim.AdamW(model.parameters()), model)
    assert misfits(whole, model) == ()
    flat = {**whole, "state": {k: {m: v.flatten()[::2] for m, v in e.items() if m != "step"} for k, e in
                               whole["state"].items()}}  # fmt: skip
    assert misfits(flat, model) == ()
    rank = {**whole, "state": {k: {m: _half(v) for m, v in e.items() if m != "step"} for k, e in
                               whole["state"].items()}}  # fmt: skip
    assert misfits(rank, model) == ()  # tensor parallel: matrices halved but for the first, vectors whole
    names = sorted(model.named_parameters())
    assert misfits(stepped(torch.optim.AdamW([p for _, p in names]), model), model) == ()  # another order, one group
    backwards = stepped(torch.optim.AdamW([p for _, p in names[::-1]]), model)
    del backwards["state"][0]  # and one that never got a gradient
    assert misfits(backwards, model) == ()
    single = {**whole, "state": {k: {**e, "exp_avg_sq": e["exp_avg_sq"].mean()} for k, e in whole["state"].items()}}
    assert misfits(single, model) == ()  # one number a tensor
    empty = {**whole, "state": {k: {**e, "exp_avg_sq": torch.zeros(0)} for k, e in whole["state"].items()}}
    assert misfits(empty, model) == ()
    halves = [{"params": [p for _, p in names[::2]]}, {"params": [p for _, p in names[1::2]]}]
    assert misfits(stepped(torch.optim.AdamW(halves), model), model) == ()
    assert misfits(stepped(torch.optim.AdamW(other.parameters()), other), model) == ()


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"state": {}, "param_groups": []},
        {"state": {}, "param_groups": [{"params": [0]}]},
        {"state": {0: {"exp_avg": torch.ones(1)}}, "param_groups": [{}]},
        {"state": {0: 3}, "param_groups": [{"params": [0]}]},
        {"state": {0: {"state1": torch.ones(3)}}, "param_groups": [{"params": [0]}]},
        {"state": [], "param_groups": {}},
        {"state": {0: {"exp_avg": None, "exp_avg_sq": None}}, "param_groups": [{"params": [None]}]},
    ],
)
def test_a_broken_state_dict_is_answered_in_words(raw):
    assert isinstance(name_optimizer_state(raw, nanogpt()), str)
    assert misfits(raw, nanogpt()) == ()


@pytest.mark.parametrize("changed", [torch.ones(3), torch.empty(8, device="meta")])
def test_second_moments_that_do_not_fit_are_answered_in_words(changed):
    model = nanogpt()
    saved = stepped(torch.optim.AdamW(model.parameters()), model)
    for entry in saved["state"].values():
        entry["exp_avg_sq"] = changed
    assert isinstance(name_optimizer_state(saved, model), str)


@pytest.mark.parametrize("step", [math.nan, math.inf, torch.tensor(math.nan)])
def test_a_step_that_is_no_number_counts_as_unknown(step):
    model = nanogpt()
    saved = stepped(torch.optim.AdamW(model.parameters()), model)
    for entry in saved["state"].values():
        entry["step"] = step
    assert set(name_optimizer_state(saved, model).step.values()) == {0}


@pytest.mark.parametrize("step", [torch.tensor(3.0, device="meta"), 10**400, -5, "three", float("nan")])
def test_odd_steps_and_rates_are_no_end_of_the_reading(step):
    model = nanogpt()
    saved = stepped(torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95)), model)
    for entry in saved["state"].values():
        entry["step"] = step
    saved["param_groups"][0].update(lr=step, betas=(0.9, 10.0))
    state = name_optimizer_state(saved, model)
    assert set(state.step.values()) == {0} and math.isnan(state.groups[0].betas[1])


def test_sparse_and_complex_moments_are_no_moments():
    model = nanogpt()
    saved = stepped(torch.optim.AdamW(model.parameters()), model)
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].to_sparse()
    saved["state"][1]["exp_avg"] = saved["state"][1]["exp_avg"].to(torch.complex64)
    state = name_optimizer_state(saved, model)
    assert len(state.exp_avg) == len(saved["state"]) - 2
