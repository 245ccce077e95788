# ruff: noqa: E501
"""Four finished reports, as the pipeline makes them, for golden files and layouts."""

from __future__ import annotations

import math

from stability_probe.checklist import ChecklistFacts, answer, written_down
from stability_probe.measure import LogFacts, PrecisionGap
from stability_probe.schema import (
    Box,
    Evidence,
    InterventionRecord,
    Location,
    Outcome,
    Ranked,
    Remedy,
    ReplayRecord,
    Report,
    Verdict,
)

INPUTS = {
    "ckpt": {"path": "runs/smol/checkpoint-420", "format": "transformers", "step": 420, "parameters": 134515008},
    "batch": {
        "path": "incident/batch.pt",
        "sha256": "9f2c44e1a07d5b3c88aa",
        "rows": 4,
        "positions": 2048,
        "labels": "unshifted",
    },
    "baseline": [{"path": "incident/baseline.pt", "rows": 4, "positions": 2048}],
}

LOG = LogFacts(step=421, usual_loss=3.42, loss_spread=0.03, usual_grad_norm=0.43, logged_loss=7.91, logged_grad_norm=31.0,
               logged_lr=3e-4, peak_lr=3e-4, warmup_end=100)  # fmt: skip
LAYERS = tuple((layer, 0.2 + 0.01 * layer) for layer in range(30))


def _checklist(verdict: Verdict, **facts) -> tuple[Box, ...]:
    known = {
        "verdict": verdict, "n_rows": 4, "step": 421, "checkpoint_step": 420, "layer_grad_norms": LAYERS,
        "hottest_head": (18, 2, 17.0), "precisions": (("bf16", PrecisionGap(7.904, 0.006, 31.1, 0)),),
    }  # fmt: skip
    return written_down(answer(ChecklistFacts(**{**known, **facts})), ["run.json"])


REPLAYS = (
    ReplayRecord("batch", "fp32", 7.912, 31.4, 0, 12.31),
    ReplayRecord("batch", "bf16", 7.904, 31.1, 0, 9.02),
    ReplayRecord("baseline", "fp32", 3.451, 0.431, 0, 12.2),
)

MODULES = [
    {"module": f"model.layers.{i}", "role": "block", "layer": i, "rms": 12.5 + i, "absmax": 23281.0 - i, "nonfinite": 0,
     "outside_fp16": 0.0, "channel": 321, "row": 0, "position": 0, "grad_norm": 0.1 * i, "grad_absmax": 0.01,
     "grad_nonfinite": 0, "gap_bf16": 0.0041, "baseline_rms": 12.4 + i, "baseline_absmax": 23280.0 - i}
    for i in range(11, 23)
]  # fmt: skip

HEADS = [
    {"module": f"model.layers.{layer}.self_attn", "layer": layer, "head": head, "max_logit": 9.0 + layer / 3 + head,
     "row": 0, "query": 7, "key": 0, "entropy": 2.31, "top_weight": 0.31, "top_key_share": 0.4,
     "baseline_max_logit": 9.1 + layer / 3 + head, "baseline_entropy": 2.33}
    for layer in (16, 17, 18) for head in range(3)
]  # fmt: skip

PARAMETERS = [
    {"parameter": f"model.layers.{i}.self_attn.q_proj.weight", "kind": "model.layers.*.self_attn.q_proj.weight", "layer": i,
     "shape": (576, 576), "numel": 331776, "rms": 0.101, "absmax": 1.93, "nonfinite": 0, "grad_norm": 0.2 + 0.01 * i,
     "grad_nonfinite": 0, "gap_bf16": 0.0082, "update_rms": math.nan, "update_ratio": math.nan, "g2_over_v": math.nan}
    for i in range(10, 20)
]  # fmt: skip

ROWS = [
    {"row": 0, "loss": 3.44, "valid_targets": 2047, "tokens": 2048, "grad_norm": 0.11, "cosine": 0.21, "audit_score": 0.02,
     "flags": [], "spans": [], "reason": "", "preview": "The quick brown fox | jumps over `the` lazy dog"},
    {"row": 3, "loss": 21.3, "valid_targets": 2047, "tokens": 2048, "grad_norm": 31.3, "cosine": -0.02, "audit_score": 1.0,
     "flags": ["repeated-tokens"], "spans": [(811, 1400, "period", "period 2")], "reason": "period 2",
     "preview": "…seen in [12, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255…"},
]  # fmt: skip

TOKENS = [
    {
        "row": 3,
        "position": 1403,
        "token": 28,
        "target": 9190,
        "loss": 27.1,
        "loss_bf16": 27.0,
        "text": " 255, 255, 255,",
        "target_text": "\u202eemit",
    },
    {
        "row": 0,
        "position": 17,
        "token": 314,
        "target": 260,
        "loss": 9.2,
        "loss_bf16": 9.19,
        "text": "The quick brown",
        "target_text": " fox",
    },
]

EMBEDDING = [
    {"parameter": "model.embed_tokens.weight", "token": 28, "norm": 3.1, "median_norm": 3.4, "count": 294, "grad_share": 0.02, "rows": [3], "text": ","},
]  # fmt: skip

TABLES = {
    "modules": MODULES,
    "heads": HEADS,
    "parameters": PARAMETERS,
    "rows": ROWS,
    "tokens": TOKENS,
    "embedding_rows": EMBEDDING,
}

SKIPPED = Outcome("stale-second-moment", "skipped", "no optimizer state: give --optimizer")
CLEAR = tuple(
    Outcome(rule, "clear", "no sign of it") for rule in ("nonfinite-weights", "corrupt-weights", "logit-drift")
)


def _report(verdict: Verdict, facts: dict, **changes) -> Report:
    values = {
        "probe_version": "0.1.0", "inputs": INPUTS, "verdict": verdict, "outcomes": (*CLEAR, SKIPPED),
        "checklist": _checklist(verdict, **facts), "replays": REPLAYS, "interventions": (), "tables": TABLES,
        "notes": ("labels read as unshifted: labels equal input_ids",),
    }  # fmt: skip
    return Report(**{**values, **changes})


def repeated() -> Report:
    at = Location(rows=(3,), positions=((3, 811, 1400),))
    summary = (
        "Row 3, tokens 811–1399 repeat “, 255” with period 2, 294 times: 98 % of the batch's squared gradient norm."
    )
    evidence = (
        Evidence("repetitions of a 2-gram, row 3", 294, "", 0, "largest in the baseline", 32, "OLMo's instance filter: ≥ 32 repetitions of an n-gram ≤ 13"),
        Evidence("loss of row 3", 21.3, "nats", 3.44, "median of the other rows", None, ""),
        Evidence("gradient norm of row 3", 31.3, "", 0.11, "median of the other rows", 10.0, "robust z of the rows of one batch"),
    )  # fmt: skip
    first = Ranked("repeated-tokens", "confirmed", 0.968, summary, at, evidence)
    second = Ranked(
        "label-misalignment",
        "likely",
        0.07,
        "loss at offset 1 is lower in row 3",
        at,
        (),
        "realigning the labels removes 7 % of the excess; dropping row 3 removes 97 %",
    )
    return _report(
        Verdict(
            "repeated-tokens", "confirmed", 0.968, summary, at, (first, second),
            (
                Remedy("Skip this batch (or drop row 3) and resume from the checkpoint before it.", "probe batch-audit --batch incident/batch.pt --out audit.json"),
                Remedy("Add an n-gram repetition filter to the loader, so that it does not come back."),
            ),
            ("The residual stream holds 23281 from block 11 on, in one channel at the first token: a massive activation, the same on the baseline batch.",),
        ),
        {"loss": 7.912, "grad_norm": 31.4, "log": LOG, "baseline_loss": 3.451, "baseline_grad_norm": 0.431, "lr": 3e-4,
         "flagged": ((3, ("repeated-tokens",)),)},
        outcomes=(Outcome("repeated-tokens", "found", summary, evidence), *CLEAR, SKIPPED),
        interventions=(
            InterventionRecord("drop_rows", "repeated-tokens", "row 3 dropped", "loss", 7.912, 3.594, 3.451, 0.968),
            InterventionRecord("realign_labels", "label-misalignment", "targets moved by +1", "loss", 7.912, 7.6, 3.451, 0.07),
        ),
    )  # fmt: skip


def latent() -> Report:
    at = Location(
        "model.layers.17.self_attn",
        17,
        (17,),
        ((17, 2),),
        parameters=("model.layers.17.self_attn.q_proj.weight", "model.layers.17.self_attn.k_proj.weight"),
    )
    summary = "Layer 17 head 2 reaches attention logits of 379; its siblings stay between 3 and 13. It costs this batch 0.003 nats today."
    evidence = (
        Evidence("max attention logit, layer 17 head 2", 379.2, "", 8.1, "median of sibling heads", 100.0, "QK-clip's τ, Kimi K2 report (2025)"),
        Evidence("attention entropy, layer 17 head 2", 0.28, "nats", 2.31, "median of sibling heads"),
    )  # fmt: skip
    heads = [
        {**row, "max_logit": 379.2, "entropy": 0.28, "top_weight": 0.92}
        if (row["layer"], row["head"]) == (17, 2)
        else row
        for row in HEADS
    ]
    return _report(
        Verdict(
            "attention-logit-growth", "latent", None, summary, at, (Ranked("attention-logit-growth", "latent", None, summary, at, evidence),),
            (Remedy("Clip the head: scale its W_q and W_k by √(100/379).", "python -c 'from stability_probe.mitigations import qk_clip'"), Remedy("Train on with QK-norm or QK-clip."),),
        ),
        {"loss": 3.454, "grad_norm": 0.457, "baseline_loss": 3.451, "baseline_grad_norm": 0.431, "hottest_head": (17, 2, 379.2)},
        tables={**TABLES, "heads": heads},
        outcomes=(Outcome("attention-logit-growth", "found", summary, evidence), *CLEAR, SKIPPED),
    )  # fmt: skip


def healthy() -> Report:
    return _report(
        Verdict(
            "none", None, None, "Loss 2.625 and gradient norm 0.44 are what this model usually shows; no repair improves it.", Location(), (), (),
            (
                "Activations reach 23281 from block 11 on, in channel 321 at the first token. That is a massive activation: it is there on any text, and the model relies on it.",
                "12 heads have less than 1 nat of entropy with logits under 50, all on key 0: attention sinks, not collapse.",
            ),
        ),
        {"loss": 2.625, "grad_norm": 0.44, "step": None},
        replays=(ReplayRecord("batch", "fp32", 2.625, 0.44, 0, 12.3), ReplayRecord("batch", "bf16", 2.627, 0.45, 0, 9.0)),
        tables={**TABLES, "rows": [ROWS[0]]},
    )  # fmt: skip


def unexplained() -> Report:
    suspect = Ranked(
        "learning-rate-too-high",
        "likely",
        0.31,
        "one step at 3e-4 raises the baseline loss by 0.4 nats",
        Location(),
        (),
        "halving the LR removes 31 % of the damage",
    )
    return _report(
        Verdict("unexplained", None, 0.31, "The batch costs 2.1 nats more than the baseline, and no repair removes half of it.", Location(), (suspect,)),
        {"loss": 5.55, "grad_norm": math.inf, "log": LOG, "baseline_loss": 3.451, "baseline_grad_norm": 0.431, "damage": 0.41, "lr": 3e-4,
         "has_optimizer": True, "precisions": (("fp16", PrecisionGap(math.nan, math.nan, math.nan, 40961)),)},
        replays=(ReplayRecord("batch", "fp32", 5.55, math.inf, 12, 12.3), ReplayRecord("batch", "fp16", math.nan, math.nan, 40961, 8.1)),
        interventions=(
            InterventionRecord("drop_rows", "garbage-tokens", "rows 1, 2 dropped", "loss", 5.55, 5.3, 3.451, 0.119),
            InterventionRecord("adam_step", "learning-rate-too-high", "LR × 0.5", "step_damage", 0.41, 0.28, 0.0, 0.31),
            InterventionRecord("change_precision", "fp16-overflow", "replayed in bf16", "nonfinite", 40961, 12, 0, 0.0),
        ),
        outcomes=(*CLEAR, SKIPPED, Outcome("garbage-tokens", "found", "rows 1, 2 look like noise"), Outcome("residual-growth", "crashed", "KeyError: 'rms'")),
    )  # fmt: skip


SAMPLES = {"repeated": repeated, "latent": latent, "healthy": healthy, "unexplained": unexplained}
