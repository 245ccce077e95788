"""`Measurements` built from the plain tables of a rule's case: whatever is not given is healthy."""

from __future__ import annotations

from typing import Any

import pandas as pd

from stability_probe.checkpoints.base import KeyReport
from stability_probe.measure import (
    BlindQueries,
    LogFacts,
    Measurements,
    PositionFacts,
    PrecisionGap,
    StepEffect,
    StepProgress,
)
from stability_probe.rules import _cases

NAN = float("nan")

EMBEDDING_ROW = {
    "parameter": "model.embed_tokens.weight", "token": 17, "norm": 0.4, "median_norm": 0.4, "count": 3,
    "grad_share": 0.01, "rows": [0],
}  # fmt: skip
TOKEN = {"row": 0, "position": 10, "token": 17, "target": 18, "loss": 6.0, "loss_bf16": 6.0}
STEP_EFFECT = {
    "measured_on": "baseline batch", "damage": -0.01, "damage_by_lr": {0.5: -0.006, 0.25: -0.003},
    "damage_refreshed": None, "lr": 3e-4, "grad_clip": 1.0, "clip_factor": 1.0,
}  # fmt: skip
STEP_PROGRESS = {"expected": 0.02, "lost": 0.0, "lost_to_rounding": 0.0, "lost_to_epsilon": 0.0}
BF16 = {"loss": 3.41, "token_gap": 0.01, "global_grad_norm": 1.01, "nonfinite": 0, "rounding_gap": 0.004,
        "recentred_gap": 0.003, "grad_relative_error": 0.02}  # fmt: skip


def _frame(given: list[dict[str, Any]], columns: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame([{**columns, **record} for record in given], columns=list(columns))


def measurements_from(tables: dict[str, Any]) -> Measurements:
    """The healthy little model of `rules/_cases.py` with the case's tables in place of its own."""
    tables = dict(tables)
    frames = {
        "modules": _frame(tables.pop("modules", _cases.modules()), _cases.modules()[0]),
        "heads": _frame(tables.pop("heads", _cases.heads()), _cases.heads()[0]),
        "parameters": _frame(tables.pop("parameters", _cases.parameters()), _cases.parameters()[0]),
        "rows": _frame(tables.pop("rows", _cases.rows()), _cases.rows()[0]),
        "embedding_rows": _frame(tables.pop("embedding_rows", []), EMBEDDING_ROW),
        "tokens": _frame(tables.pop("tokens", []), TOKEN),
    }
    if "keys" in tables:
        tables["keys"] = KeyReport(**tables["keys"])
    if "log" in tables:
        tables["log"] = LogFacts(**tables["log"])
    if "step_effect" in tables:
        tables["step_effect"] = StepEffect(**{**STEP_EFFECT, **tables["step_effect"]})
    if "step_progress" in tables:
        tables["step_progress"] = StepProgress(**{**STEP_PROGRESS, **tables["step_progress"]})
    if "positions" in tables:
        tables["positions"] = PositionFacts(**tables["positions"])
    if "blind" in tables:
        tables["blind"] = BlindQueries(**tables["blind"])
    gaps = tables.pop("precisions", {"bf16": {}})
    healthy = {
        "vocab_size": _cases.VOCAB,
        "n_layers": _cases.LAYERS,
        "loss": 3.4,
        "global_grad_norm": 1.0,
        "valid_targets": _cases.ROWS * (_cases.LENGTH - 1),
        "offset_losses": {-1: 8.1, 0: 3.4, 1: 6.6, 2: 6.9, 3: 7.0},
        "unigram_entropy": 4.6,
        "log_z_mean": 9.0,
        "log_z_std": 1.5,
        "logit_absmax": 16.0,
        "final_norm_rms": 1.4,
        "repeat_differs": False,
    }
    return Measurements(
        **frames,
        **{**healthy, **tables},
        precisions={name: PrecisionGap(**{**BF16, **gap}) for name, gap in gaps.items()},
    )
