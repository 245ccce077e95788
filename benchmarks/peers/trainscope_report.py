"""trainscope: records a run, and writes a report of which of its signals rose, and which first.

It cannot look at a checkpoint afterwards, so it is given what a post-mortem does not have: a history of 45 healthy
steps of the sound run, and four more after the incident's step. From that step on the weights are the incident's, and
the stored optimizer steps once. Read like this: concentration: router-collapse; kurtosis: an outlier in the
activations, by whatever cause; gradient norm: the step. That the loss rose is the symptom, and names nothing.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import torch
from torch import nn

from benchmarks.peers.material import STEP, Material, Saying
from fixtures import tiny
from fixtures.verdict_training import optimizer_for, token_loss

NAME = "trainscope's report"
NEEDS = "trainscope"
HISTORY, AFTER = 45, 4  # its baseline is the first 40 steps, and it wants 50
READ = {
    "concentration": frozenset({"router-collapse"}),
    "kurtosis": frozenset({"activation-outlier", "corrupt-weights", "embedding-row-outlier", "residual-growth"}),
    "grad_norm": frozenset(STEP),
    "loss": frozenset[str](),
}


class Run(nn.Module):
    """Whatever model the run is at; hooks are attached again when it changes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.current = model


def ask(material: Material) -> Saying:
    from trainscope.report import build_run_report, render_run_markdown

    with tempfile.TemporaryDirectory() as folder:
        record(material, folder)
        report = asyncio.run(build_run_report(Path(folder) / "run"))
    signals = report["signal_signature"]
    # Only what rises at the incident or after it is said of the incident.
    fired = [name for name in signals["fired"] if signals["first_steps"][name] >= HISTORY]
    told = " ".join(line for line in render_run_markdown(report).splitlines() if "signal" in line or "Spike" in line)
    return Saying(told, frozenset().union(*(READ[name] for name in fired)), alarm=bool(fired))


def record(material: Material, folder: str) -> None:
    from trainscope import TrainScope
    from trainscope.core.config import TrainScopeConfig

    run = Run(material.sound())
    module = material.module
    optimizer, steps = stored_optimizer(material)
    settings = TrainScopeConfig(run_dir=folder, run_name="run", activation_metrics_every_n_steps=1, track_memory=False)
    scope = TrainScope(run, optimizer, config=settings).attach()
    try:
        for step in range(HISTORY):
            _step(scope, run.current, _loss(run.current, material.healthy_ids(step)), step)
        run.current = module
        scope.attach()
        _step(scope, module, material.with_loss()(**material.inputs), HISTORY)
        if steps:
            optimizer.step()
        for step in range(HISTORY + 1, HISTORY + 1 + AFTER):
            _step(scope, module, _loss(module, material.healthy_ids(step)), step)
    finally:
        scope.detach()


def stored_optimizer(material: Material) -> tuple[torch.optim.Optimizer, bool]:
    """The optimizer as stored, and whether it fits the model; one that does not is never stepped."""
    stored = material.loaded.checkpoint.optimizer
    try:
        return optimizer_for(material.module, stored if stored else None), bool(stored and stored.get("state"))
    except ValueError:  # a broken tie has one matrix more; some runs keep one group
        return optimizer_for(material.module), False


def _loss(module: nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
    return token_loss(tiny.logits_of(module, ids_BT)[:, :-1], ids_BT[:, 1:])


def _step(scope: object, module: nn.Module, loss: torch.Tensor, step: int) -> None:
    module.zero_grad(set_to_none=True)
    loss.backward()
    scope.step(loss.item(), batch_index=step)  # type: ignore[attr-defined]
