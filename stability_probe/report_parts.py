"""What a report tells beside the verdict: the inputs it was made from, and the tables with words in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from stability_probe.batches.base import Batch
from stability_probe.incident import Incident
from stability_probe.measure import Measurements
from stability_probe.previews import decoder, with_previews
from stability_probe.schema import Remedy, Verdict

# Nats: from here on the interventions of the verdict cannot be told from what the seed does (confirm.LOSS_NOISE).
SEED_MATTERS = 0.02
# Nats of one token: sums in another order move it by about 1e-5 (thresholds of nondeterministic-replay).
SEED_SHOWS = 1e-3
SWITCH_OFF = Remedy(
    "Switch off what draws random numbers in the forward (dropout with training=True, added noise), and replay again."
)


def with_randomness(verdict: Verdict, m: Measurements) -> Verdict:
    """The verdict with the first thing that must be known of it: two replays of the same batch differ.

    Both were seeded alike, so no rule has seen a difference; what they measured is one draw of many.
    """
    if m.seed_gap is None or m.seed_gap < SEED_SHOWS:
        return verdict
    change = abs(m.seed_loss_change or 0.0)
    doubtful = verdict.cause in ("none", "unexplained")
    if not doubtful and change < SEED_MATTERS:
        return verdict
    told = (
        "Two replays of this batch with different seeds differ: its forward draws random numbers "
        f"(loss by {change:.3g} nats, a token's by up to {m.seed_gap:.3g}). "
    )
    remedies = (SWITCH_OFF, *verdict.remedies) if doubtful else verdict.remedies
    return replace(verdict, summary=told + verdict.summary, remedies=remedies)


def inputs_of(incident: Incident) -> dict[str, Any]:
    checkpoint, batch = incident.checkpoint, incident.batch
    parameters = sum(parameter.numel() for parameter in incident.model.module.parameters())
    return {
        "ckpt": {
            "path": str(checkpoint.path),
            "format": checkpoint.format,
            "step": checkpoint.step,
            "parameters": parameters,
            "model": incident.model.name,
        },
        "batch": _batch_facts(batch),
        "baseline": [_batch_facts(baseline) for baseline in incident.baselines],
        "log": [str(path) for path in incident.log_paths],
        "step": incident.request.step,
        "lr": incident.lr,
        "grad_clip": incident.grad_clip,
        "run_precision": incident.run_precision,
        "device": incident.device,
        "torch": torch.__version__,
        "source": dict(incident.source),
    }


def _batch_facts(batch: Batch) -> dict[str, Any]:
    rows, positions = batch.ids_BT.shape
    return {
        "path": str(batch.path),
        "sha256": batch.sha256,
        "rows": rows,
        "positions": positions,
        "labels": batch.convention,
        "labels_reason": batch.convention_reason,
    }


def report_tables(m: Measurements, incident: Incident) -> dict[str, list[dict[str, Any]]]:
    decode = decoder(incident.tokenizer)
    frames = {
        "modules": m.modules,
        "heads": m.heads,
        "parameters": m.parameters,
        "rows": m.rows,
        "tokens": m.tokens,
        "embedding_rows": m.embedding_rows,
    }
    records = {name: frame.to_dict("records") for name, frame in frames.items()}
    return with_previews(records, incident.batch.ids_BT.tolist(), decode)
