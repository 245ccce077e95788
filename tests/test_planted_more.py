"""Faults planted in trained tiny models are named by the whole pipeline; the same models without them are healthy."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch

from fixtures import lagged_language as language
from stability_probe.interventions.change_rotary import reordered
from stability_probe.pipeline import run
from stability_probe.replay import Subject
from stability_probe.request import Request
from stability_probe.schema import Report

STEPS, ROWS = 120, 4


@pytest.fixture(scope="module")
def sound():
    """The trained decoder, its optimizer's state, its log."""
    return language.cached("decoder", language.decoder(), STEPS)


@pytest.fixture(scope="module")
def experts():
    return language.cached("experts", language.experts(), STEPS)


@pytest.fixture
def model(sound):
    return copy.deepcopy(sound[0])


def batch(folder: Path, **more: torch.Tensor) -> Path:
    return language.save_batch(folder / "batch.pt", language.sequences(ROWS, seed=3), **more)


def diagnosed(folder: Path, ckpt: Path, log=None, **options) -> Report:
    if "batch" not in options:
        options["batch"] = batch(folder)
    logs = (language.save_log(folder / "log.jsonl", log[-20:]),) if log else ()
    return run(Request(ckpt=ckpt, logs=logs, device="cpu", **options))


def named(report: Report) -> tuple[str, str | None]:
    return report.verdict.cause, report.verdict.status


@pytest.mark.parametrize("with_log", [True, False])
def test_the_trained_decoder_is_healthy(tmp_path, sound, with_log):
    model, optimizer, log = sound
    ckpt = language.save_decoder(tmp_path / "ckpt.pt", model, optimizer)
    report = diagnosed(tmp_path, ckpt, log if with_log else None)
    assert named(report) == ("none", None), report.verdict.summary
    assert not [outcome for outcome in report.outcomes if outcome.status == "crashed"]


def test_the_trained_experts_are_healthy(tmp_path, experts):
    model, _, log = experts
    model.save_pretrained(tmp_path / "ckpt")
    report = diagnosed(tmp_path, tmp_path / "ckpt", log)
    assert named(report) == ("none", None), report.verdict.summary
    (router,) = [outcome for outcome in report.outcomes if outcome.rule == "router-collapse"]
    assert router.status == "clear"


def test_another_rotary_base_in_the_configuration(tmp_path, model, sound):
    ckpt = language.save_decoder(tmp_path / "ckpt.pt", model, rope_theta=500_000.0)
    report = diagnosed(tmp_path, ckpt, sound[2])
    assert named(report) == ("position-encoding", "confirmed"), report.verdict.summary
    best = max((r for r in report.interventions if r.name == "change rotary"), key=lambda r: r.explained or 0)
    assert "10000" in best.change


def test_weights_in_the_other_rotary_order(tmp_path, model, sound):
    with torch.no_grad():
        for name, value in reordered(model, Subject.of(model).anatomy.attention, "pairs").items():
            model.get_parameter(name).copy_(value)
    report = diagnosed(tmp_path, language.save_decoder(tmp_path / "ckpt.pt", model), sound[2])
    assert named(report) == ("position-encoding", "confirmed"), report.verdict.summary
    best = max((r for r in report.interventions if r.name == "change rotary"), key=lambda r: r.explained or 0)
    assert "halves" in best.change


def test_position_ids_that_start_again_inside_texts(tmp_path, model):
    ids = (torch.arange(language.LENGTH) % 4).expand(ROWS, -1).contiguous()
    report = diagnosed(
        tmp_path, language.save_decoder(tmp_path / "ckpt.pt", model), batch=batch(tmp_path, position_ids=ids)
    )
    assert named(report) == ("position-encoding", "confirmed"), report.verdict.summary
    assert report.verdict.location.rows == tuple(range(ROWS))


def test_positions_that_are_shifted_do_not_matter_to_rotary_attention(tmp_path, model):
    ids = (torch.arange(language.LENGTH) + 100).expand(ROWS, -1).contiguous()
    report = diagnosed(
        tmp_path, language.save_decoder(tmp_path / "ckpt.pt", model), batch=batch(tmp_path, position_ids=ids)
    )
    assert named(report) == ("none", None), report.verdict.summary


def test_a_cap_that_the_model_was_not_trained_with(tmp_path, model, sound):
    ckpt = language.save_decoder(tmp_path / "ckpt.pt", model, output_softcap=2.0)
    report = diagnosed(tmp_path, ckpt, sound[2])
    assert named(report) == ("softcap-mismatch", "confirmed"), report.verdict.summary


def test_logits_that_are_scaled_down_twice(tmp_path, model, sound):
    factor = language.CONFIG.head_dim**0.5
    with torch.no_grad():  # what a second division does to the logits
        for block in model.blocks:
            block.attn.q_proj.weight.div_(factor)
    report = diagnosed(tmp_path, language.save_decoder(tmp_path / "ckpt.pt", model), sound[2])
    assert named(report) == ("attention-scale", "confirmed"), report.verdict.summary


@pytest.mark.parametrize("factor", [3.0, 8.0])
def test_mixing_matrices_that_amplify(tmp_path, model, sound, factor):
    with torch.no_grad():
        for block in model.blocks:
            block.stream_mix.mul_(factor)
    report = diagnosed(tmp_path, language.save_decoder(tmp_path / "ckpt.pt", model), sound[2])
    assert named(report)[0] == "residual-growth", report.verdict.summary
    assert report.verdict.status in ("confirmed", "latent")
    assert "blocks.0.stream_mix" in report.verdict.location.parameters


@pytest.mark.parametrize("std", [0.6, 1.5])
def test_weights_drawn_too_wide(tmp_path, std):
    model = language.decoder(dataclasses.replace(language.CONFIG, hyper_streams=1))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=std, generator=torch.Generator().manual_seed(1))
    report = diagnosed(tmp_path, language.save_decoder(tmp_path / "ckpt.pt", model, step=0))
    assert named(report) == ("init-scale", "confirmed"), report.verdict.summary


def test_an_untrained_decoder_is_healthy(tmp_path):
    model = language.decoder(dataclasses.replace(language.CONFIG, hyper_streams=1))
    report = diagnosed(tmp_path, language.save_decoder(tmp_path / "ckpt.pt", model, step=0))
    assert named(report) == ("none", None), report.verdict.summary


def with_settings(optimizer, dtype=torch.float32, **settings):
    changed = copy.deepcopy(optimizer)
    for group in changed["param_groups"]:
        group.update(settings)
    for entry in changed["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            entry[key] = entry[key].to(dtype)
    return changed


def test_updates_that_vanish_in_bf16(tmp_path, model, sound):
    optimizer = with_settings(sound[1], torch.bfloat16, lr=3e-6)
    report = diagnosed(
        tmp_path, language.save_decoder(tmp_path / "ckpt.pt", model.bfloat16(), optimizer), sound[2][:-1]
    )
    assert named(report) == ("bf16-update-stagnation", "confirmed"), report.verdict.summary


def test_a_bf16_checkpoint_with_fp32_moments_is_healthy(tmp_path, model, sound):
    optimizer = with_settings(sound[1], lr=3e-6)
    report = diagnosed(tmp_path, language.save_decoder(tmp_path / "ckpt.pt", model.bfloat16(), optimizer), sound[2])
    assert named(report) == ("none", None), report.verdict.summary


def test_moments_at_the_floor_of_epsilon(tmp_path, model, sound):
    optimizer = with_settings(sound[1], eps=0.1, lr=1e-4)
    report = diagnosed(tmp_path, language.save_decoder(tmp_path / "ckpt.pt", model, optimizer), sound[2])
    assert named(report) == ("epsilon-floor", "confirmed"), report.verdict.summary


def test_a_router_that_sends_everything_to_one_expert(tmp_path, experts):
    model, log = copy.deepcopy(experts[0]), experts[2]
    with torch.no_grad():
        for layer, block in enumerate(model.model.layers):
            block.mlp.router.bias += torch.tensor([-5.0, -5.0, 5.0, -5.0]).roll(layer)
    model.save_pretrained(tmp_path / "ckpt")
    report = diagnosed(tmp_path, tmp_path / "ckpt", log)
    assert report.verdict.cause == "router-collapse", report.verdict.summary
    assert set(report.verdict.location.layers) == {0, 1}


HARD_MASK = '''
import torch
from torch import nn


class Attention(nn.Module):
    """Masks with minus infinity, and lets no padded query see itself."""

    def __init__(self):
        super().__init__()
        self.n_heads, self.head_dim = 2, 8
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x, allowed):
        q, k, v = (p(x).unflatten(-1, (2, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        logits = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~allowed, float("-inf"))
        return self.o_proj((torch.softmax(logits, -1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(16), Attention()

    def forward(self, x, allowed):
        return x + self.attn(self.norm(x), allowed)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(60, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 60)

    def forward(self, input_ids, attention_mask=None):
        T = input_ids.shape[1]
        allowed = torch.ones(T, T, dtype=torch.bool).tril()
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None, :]
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(x)


def make():
    torch.manual_seed(0)
    return Model()
'''


def hard_masked(folder: Path) -> tuple[Path, str]:
    code = folder / "model.py"
    code.write_text(HARD_MASK)
    names: dict = {}
    exec(HARD_MASK, names)
    torch.save({"model": names["make"]().state_dict(), "step": 5}, folder / "ckpt.pt")
    return folder / "ckpt.pt", f"{code}:make"


def padded(folder: Path, side: str) -> Path:
    mask = torch.ones(ROWS, language.LENGTH, dtype=torch.long)
    place = slice(0, 9) if side == "left" else slice(-9, None)
    mask[2, place] = 0
    ids = language.sequences(ROWS, seed=3)
    labels = ids.masked_fill(mask == 0, -100)
    torch.save({"input_ids": ids, "labels": labels, "attention_mask": mask}, folder / "batch.pt")
    return folder / "batch.pt"


def test_left_padding_under_a_hard_mask(tmp_path):
    ckpt, spec = hard_masked(tmp_path)
    report = diagnosed(tmp_path, ckpt, model=spec, batch=padded(tmp_path, "left"))
    assert named(report) == ("fully-masked-rows", "confirmed"), report.verdict.summary


def test_right_padding_under_a_hard_mask_is_healthy(tmp_path):
    ckpt, spec = hard_masked(tmp_path)
    report = diagnosed(tmp_path, ckpt, model=spec, batch=padded(tmp_path, "right"))
    assert named(report) == ("none", None), report.verdict.summary


def test_left_padding_where_queries_see_themselves_is_healthy(tmp_path, model):
    report = diagnosed(tmp_path, language.save_decoder(tmp_path / "ckpt.pt", model), batch=padded(tmp_path, "left"))
    assert named(report) == ("none", None), report.verdict.summary


def test_a_model_that_does_not_repeat_itself(tmp_path):
    code = tmp_path / "model.py"
    counter = (
        "\n\nclass Counting(Model):\n    calls = 0\n\n    def forward(self, input_ids):\n        Counting.calls += 1\n"
    )
    counter += "        return super().forward(input_ids) * (1 + 0.2 * (Counting.calls % 7))\n"
    code.write_text(HARD_MASK + counter + "\n\ndef counting():\n    torch.manual_seed(0)\n    return Counting()\n")
    names: dict = {}
    exec(HARD_MASK, names)
    torch.save({"model": names["make"]().state_dict(), "step": 5}, tmp_path / "ckpt.pt")
    report = diagnosed(tmp_path, tmp_path / "ckpt.pt", model=f"{code}:counting")
    assert report.verdict.cause == "nondeterministic-replay", report.verdict.summary


def test_an_optimizer_that_is_not_adamw_is_skipped_by_name(tmp_path, model, sound):
    optimizer = copy.deepcopy(sound[1])
    for entry in optimizer["state"].values():
        del entry["exp_avg_sq"]
    report = diagnosed(tmp_path, language.save_decoder(tmp_path / "ckpt.pt", model, optimizer), sound[2])
    assert named(report) == ("none", None), report.verdict.summary
    skipped = {outcome.rule: outcome.reason for outcome in report.outcomes if outcome.status == "skipped"}
    assert all("lion" in skipped[rule] for rule in ("epsilon-floor", "bf16-update-stagnation", "stale-second-moment"))
