"""The run that `probe demo` investigates: a checkpoint, its next batches and its log, with one fault planted.

The run is real: fixtures/train_demo_model.py trained the model, and the rows are the next that it would have drawn.
Here the demo plays that run's next step, so that the log shows what a log would have shown.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from stability_probe.models.decoder import Decoder, DecoderConfig

DATA = Path(__file__).with_name("demo_data")
# Where faults are planted: not the first of anything, which a wrong tool would name by default.
LAYER, HEAD, ROW = 3, 2, 5


@dataclass
class Run:
    """The run as its last checkpoint left it, before and after the fault.

    Attributes:
        ids_BT, labels_BT: the next batch, int64; labels as the loss gets them before it shifts.
        baseline_BT, later_BT: two batches of healthy text.
        moments: "exp_avg" and "exp_avg_sq" by parameter name.
        settings: steps, grad_clip, betas, weight_decay.
    """

    model: Decoder
    config: DecoderConfig
    ids_BT: Tensor
    labels_BT: Tensor
    baseline_BT: Tensor
    later_BT: Tensor
    moments: dict[str, dict[str, Tensor]]
    settings: dict[str, Any]
    log: list[dict[str, Any]]

    @property
    def step(self) -> int:
        return int(self.settings["steps"])


def make_incident(name: str, folder: Path) -> str:
    """Write the incident folder; returns what was planted, in words."""
    run = load_run()
    planted = _FAULTS[name](run)
    folder.mkdir(parents=True)
    save(run, folder)
    return planted


def load_run() -> Run:
    """The run that ships with the package, healthy."""
    config = DecoderConfig.from_dict(json.loads((DATA / "config.json").read_text()))
    model = Decoder(config)
    weights = {name: tensor.float() for name, tensor in load_file(DATA / "model.safetensors").items()}
    tied = {"head.weight": weights["embed.weight"]} if config.tied else {}
    model.load_state_dict({**weights, **tied})
    batches_NBT = load_file(DATA / "rows.safetensors")["input_ids"].long()
    batch, baseline, later, *history = batches_NBT
    settings = json.loads((DATA / "run.json").read_text())
    log = [json.loads(line) for line in (DATA / "log.jsonl").read_text().splitlines()]
    moments = moments_on(model, history, settings["betas"])
    return Run(model, config, batch, batch.clone(), baseline, later, moments, settings, log)


def moments_on(model: Decoder, batches: Sequence[Tensor], betas: tuple[float, float]) -> dict[str, dict[str, Tensor]]:
    """AdamW's moments as these batches leave them in this state: averages with the bias corrected."""
    averages = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    for ids_BT in batches:
        _, gradients = loss_and_gradients(model, ids_BT, ids_BT)
        for name, (mean, square) in averages.items():
            mean.lerp_(gradients[name], 1 - betas[0])
            square.lerp_(gradients[name].square(), 1 - betas[1])
    first, second = (1 - beta ** len(batches) for beta in betas)
    return {name: {"exp_avg": mean / first, "exp_avg_sq": square / second} for name, (mean, square) in averages.items()}


def loss_and_gradients(model: Decoder, ids_BT: Tensor, labels_BT: Tensor) -> tuple[float, dict[str, Tensor]]:
    """The training loss (labels shifted here, nats) and the gradient of every parameter."""
    logits_BTV = model(ids_BT)[:, :-1]
    loss = F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten())
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), dict(zip((name for name, _ in model.named_parameters()), gradients, strict=True))


# --- the faults ---------------------------------------------------------------------------------


def repeated_tokens(run: Run) -> str:
    start, token = 12, 461  # "ry": the end of many words, and never followed by itself
    run.ids_BT[ROW, start:] = token
    run.labels_BT = run.ids_BT.clone()
    end = run.ids_BT.shape[1]
    return f"row {ROW} of the batch, positions {start} to {end - 1}: token {token}, {end - start} times"


def attention_logit_growth(run: Run) -> str:
    rows = slice(HEAD * run.config.head_dim, (HEAD + 1) * run.config.head_dim)
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            run.model.get_parameter(f"blocks.{LAYER}.attn.{name}.weight")[rows] *= 8
    return f"W_q and W_k of layer {LAYER} head {HEAD} times 8, so its attention logits times 64"


def label_misalignment(run: Run) -> str:
    run.labels_BT = F.pad(run.ids_BT[:, 1:], (0, 1), value=-100)
    return "labels[t] is already token t + 1, and the loss shifts again: every target is one token too far"


def corrupt_weights(run: Run) -> str:
    name, index = f"blocks.{LAYER}.mlp.up_proj.weight", (17, 40)
    weight = run.model.get_parameter(name)
    before = weight[index].item()
    with torch.no_grad():
        weight.view(torch.int32)[index] ^= 1 << 30
    return f"the top exponent bit of {name}[{index[0]}, {index[1]}]: {before:.3g} became {weight[index].item():.3g}"


def stale_second_moment(run: Run) -> str:
    for name, moments in run.moments.items():
        if name.startswith(f"blocks.{LAYER}."):
            moments["exp_avg_sq"] *= 1e-6
    return f"exp_avg_sq of layer {LAYER} times 1e-6, as if its gradients had been a thousand times smaller until now"


def healthy(run: Run) -> str:
    return "nothing"


_FAULTS: dict[str, Callable[[Run], str]] = {
    "repeated-tokens": repeated_tokens,
    "attention-logit-growth": attention_logit_growth,
    "label-misalignment": label_misalignment,
    "corrupt-weights": corrupt_weights,
    "stale-second-moment": stale_second_moment,
    "healthy": healthy,
}


# --- the folder ---------------------------------------------------------------------------------


def save(run: Run, folder: Path) -> None:
    """Checkpoint, tokenizer, batches, log and `incident.json`, as a training script would leave them."""
    optimizer = {
        "state": {name: {**moments, "step": torch.tensor(float(run.step))} for name, moments in run.moments.items()},
        "param_groups": [
            {
                "params": list(run.moments),
                "lr": run.log[-1]["lr"],
                "betas": tuple(run.settings["betas"]),
                "eps": 1e-8,
                "weight_decay": run.settings["weight_decay"],
            }
        ],
    }
    saved = {
        "model": run.model.state_dict(),
        "config": run.config.to_dict(),
        "optimizer": optimizer,
        "step": run.step,
    }
    torch.save(saved, folder / "ckpt.pt")
    shutil.copy(DATA / "tokenizer.json", folder / "tokenizer.json")
    torch.save({"input_ids": run.ids_BT, "labels": run.labels_BT}, folder / "batch.pt")
    torch.save({"input_ids": run.baseline_BT, "labels": run.baseline_BT}, folder / "baseline.pt")
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in run.log + next_steps(run)))
    incident = {
        "ckpt": "ckpt.pt",
        "batch": "batch.pt",
        "baseline": ["baseline.pt"],
        "log": ["log.jsonl"],
        "step": run.step,
        "labels": "unshifted",
        "grad_clip": run.settings["grad_clip"],
        "precision": "fp32",
        "source": {"shard": "pydoc_data.topics and the standard library", "batch": run.step},
    }
    (folder / "incident.json").write_text(json.dumps(incident, indent=1))


def next_steps(run: Run) -> list[dict[str, Any]]:
    """What the run logged on the batch, and one step later: `run.model` is changed by the step between."""
    lr, clip = run.log[-1]["lr"], run.settings["grad_clip"]
    loss, gradients = loss_and_gradients(run.model, run.ids_BT, run.labels_BT)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    records = [{"step": run.step, "loss": loss, "grad_norm": norm, "lr": lr}]
    take_step(run, {name: gradient * min(1.0, clip / (norm + 1e-6)) for name, gradient in gradients.items()}, lr)
    loss, gradients = loss_and_gradients(run.model, run.later_BT, run.later_BT)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    return [*records, {"step": run.step + 1, "loss": loss, "grad_norm": norm, "lr": lr}]


def take_step(run: Run, gradients: dict[str, Tensor], lr: float) -> None:
    """One step of AdamW from averages whose bias is already corrected."""
    beta1, beta2 = run.settings["betas"]
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            mean = run.moments[name]["exp_avg"].lerp(gradients[name], 1 - beta1)
            square = run.moments[name]["exp_avg_sq"].lerp(gradients[name].square(), 1 - beta2)
            parameter.mul_(1 - lr * run.settings["weight_decay"]).sub_(lr * mean / (square.sqrt() + 1e-8))
