"""From records under a log's own names to the one table that the rest reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from stability_probe.errors import ProbeError

# Usual names, most trusted first; compared in lower case with "-" and " " as "_".
STEP_NAMES = (
    *("step", "global_step", "train/global_step", "trainer/global_step", "iteration", "iter", "iter_num"),
    *("train/step", "_step"),  # W&B's own counter grows with every call, not with every optimizer step: last resort
)
LOSS_NAMES = (
    *("loss", "train_loss", "train/loss", "training_loss", "lm_loss", "train/lm_loss", "train/ce_loss"),
    *("loss_metrics/global_avg_loss", "loss/train", "train.loss"),
)
GRAD_NORM_NAMES = (
    *("grad_norm", "gradient_norm", "train/grad_norm", "train/gradient_norm", "global_grad_norm"),
    *("optim/total_grad_norm", "gradnorm", "train.grad_norm"),
)
LR_NAMES = (
    *("lr", "learning_rate", "train/learning_rate", "train/lr", "optim/lr", "optim/learning_rate"),
    *("optim/learning_rate_group0", "lr/group_0", "train.lr"),
)
COLUMNS = ("step", "loss", "grad_norm", "lr", "segment", "nonfinite")


def to_table(records: Iterable[Mapping[str, Any]], bad: int, path: Path) -> pd.DataFrame:
    """The table of `read_log`. Records without a step, or with neither loss nor gradient norm, are left out."""
    rows: list[tuple[int, float, float, float, int, bool]] = []
    seen: dict[str, None] = {}
    segment = 0
    for named in _merged({_plain_name(key): value for key, value in record.items()} for record in records):
        seen.update(dict.fromkeys(named))
        row = _row(named)
        if row is not None:
            segment += bool(rows) and row[0] < rows[-1][0]
            rows.append((*row[:4], segment, row[4]))
    if not rows:
        found = ", ".join(name[:40] for name in list(seen)[:20]) or "nothing"
        hint = "name them step and loss (also read: global_step, train/loss, lm loss, grad_norm, lr…)"
        raise ProbeError(f"no step with a loss in the log {path}", f"its columns are: {found}", hint)
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    notes = [f"{path.name}: {bad} unreadable line{'s' * (bad > 1)} skipped"] if bad else []
    if segment:
        notes.append(f"{path.name}: the step goes back {segment} time{'s' * (segment > 1)} (a rollback or restart)")
    table.attrs["notes"] = tuple(notes)
    return table


def _merged(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Neighbours of one step that do not contradict each other, as one: some loggers write each value by itself."""
    held: dict[str, Any] = {}
    for record in records:
        # The Trainer's closing record holds the mean over the whole run under train_loss.
        if "train_runtime" in record:
            continue
        same_step = _step(_first(held, STEP_NAMES)) == _step(_first(record, STEP_NAMES)) is not None
        if same_step and all(held[name] == record[name] for name in held.keys() & record.keys()):
            held = {**held, **record}
            continue
        if held:
            yield held
        held = record
    if held:
        yield held


def _plain_name(key: Any) -> str:
    return str(key).strip().lower().replace("-", "_").replace(" ", "_")


def _row(named: Mapping[str, Any]) -> tuple[int, float, float, float, bool] | None:
    step = _step(_first(named, STEP_NAMES))
    if step is None:
        return None
    # JSON has no NaN, so careful writers put null: a null loss was not finite, a null gradient norm was not measured.
    loss_given = any(name in named for name in LOSS_NAMES)
    loss = _number(_first(named, LOSS_NAMES))
    grad_norm_stored = _first(named, GRAD_NORM_NAMES)
    if not loss_given and grad_norm_stored is None:
        return None
    grad_norm = _number(grad_norm_stored)
    nonfinite = (loss_given and not math.isfinite(loss)) or (
        grad_norm_stored is not None and not math.isfinite(grad_norm)
    )
    return step, loss, grad_norm, _number(_first(named, LR_NAMES)), nonfinite


def _first(named: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((named[name] for name in names if named.get(name) is not None), None)


def _step(value: Any) -> int | None:
    number = _number(value)
    # Beyond 2^53 a float no longer counts in ones; no run has so many steps.
    return int(number) if math.isfinite(number) and number == int(number) and abs(number) < 2**53 else None


def _number(value: Any) -> float:
    """A float; NaN for everything that is not a number, true and false included."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan
