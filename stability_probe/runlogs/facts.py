"""What the logs say around one step: the state that the run used to be in, and what it logged there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from stability_probe.measure import LogFacts

WINDOW = 50  # logged steps; long enough for a steady median, short against the slope of a loss curve
MAD_TO_STD = 1.4826  # of a normal distribution: 1 / Φ⁻¹(3/4)
# A spike in the log: six standard deviations over the steps before (OLMo-core skips a step there), and at least half a
# nat, because the loss of a run that has just begun falls steadily and has no spread to speak of.
SPIKE_SIGMAS = 6.0
SPIKE_NATS = 0.5
FEWEST = 10  # logged steps before a step, for their median and quartiles to mean anything
# nats. The Trainer writes 0.0 where its NaN filter met a NaN; a real loss comes to 0.0 only from values close to it.
ZERO_IS_NAN_ABOVE = 0.1


def log_facts(frames: Sequence[pd.DataFrame], step: int | None) -> LogFacts | None:
    """Medians of the steps just before `step`, and the values at it.

    The run's past at `step` is the latest segment that reaches it, continued backwards by what earlier segments hold
    before that segment's first step. Where several segments log `step` itself (a rollback), the worst one is the
    incident: a loss that is not finite, else the largest.

    Args:
        frames: tables of `read_log`, oldest first.
        step: the step that consumed the batch. Without it the window ends with the last logged step, and the
            facts about the step itself (`step`, `logged_…`) stay None.

    Returns:
        None where there are no frames.
    """
    if not frames:
        return None
    log = joined(frames)
    past = _past(log, step)
    window = past.tail(WINDOW)
    at = _worst(log[log["step"] == step]) if step is not None else None
    up_to = past["lr"] if at is None else pd.concat([past["lr"], pd.Series([at["lr"]], index=[at.name])])
    peak_lr = _finite_max(up_to)
    return LogFacts(
        step=step,
        usual_loss=_median(window["loss"]),
        loss_spread=_spread(window["step"], window["loss"]),
        usual_grad_norm=_median(window["grad_norm"]),
        logged_loss=_logged(log, at, "loss"),
        logged_grad_norm=_logged(log, at, "grad_norm"),
        logged_lr=_logged(log, at, "lr"),
        peak_lr=peak_lr,
        warmup_end=_warmup_end(log, up_to, peak_lr),
        nonfinite_steps=tuple(sorted({int(s) for s in log["step"][log["nonfinite"]]})),
        first_step=int(log["step"].min()),
        last_step=int(log["step"].max()),
        spike_steps=_spike_steps(log),
    )


def _spike_steps(log: pd.DataFrame) -> tuple[int, ...]:
    """Steps whose loss is not finite, or stands out of the up to 50 logged steps before it in its segment."""
    finite = log["loss"].where(log["loss"].map(math.isfinite))
    before = finite.groupby(log["segment"], group_keys=False).shift()
    windows = before.groupby(log["segment"], group_keys=False).rolling(WINDOW, min_periods=FEWEST)
    median = windows.median().droplevel(0)
    # The quartiles' distance in place of the MAD, which has no rolling form: 1.349 σ of a normal distribution.
    spread = (windows.quantile(0.75) - windows.quantile(0.25)).droplevel(0) / 1.349
    limit = (SPIKE_SIGMAS * spread).clip(lower=SPIKE_NATS)
    spikes = (finite - median > limit) | log["nonfinite"]
    return tuple(sorted({int(step) for step in log["step"][spikes]}))


def _warmup_end(log: pd.DataFrame, rates: pd.Series, peak_lr: float | None) -> int | None:
    """The step that reached the largest LR first; None where the log begins after it (a window, a resumed run)."""
    if peak_lr is None:
        return None
    step = int(log["step"][rates[rates == peak_lr].index[0]])
    begins = int(log["step"][rates.dropna().index[0]])
    return None if step == begins and begins > 1 else step


def joined(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """All logs below each other with segments numbered through, and losses of 0.0 that were NaN as NaN."""
    offset, numbered = 0, []
    for frame in frames:
        numbered.append(frame.assign(segment=frame["segment"] + offset))
        offset += int(frame["segment"].max()) + 1
    log = pd.concat(numbered, ignore_index=True)
    zero = log["loss"] == 0.0
    nearby = log["loss"].where(~zero).groupby(log["segment"]).transform(lambda loss: loss.ffill().bfill())
    filtered = zero & (nearby > ZERO_IS_NAN_ABOVE)
    return log.assign(loss=log["loss"].mask(filtered), nonfinite=log["nonfinite"] | filtered)


def _past(log: pd.DataFrame, step: int | None) -> pd.DataFrame:
    """Rows strictly before `step` on the way that led there, in step order."""
    before = log if step is None else log[log["step"] < step]
    if before.empty:
        return before
    reaching = log["segment"] if step is None else log["segment"][log["step"] >= step]
    # A segment that only starts after `step` reaches it without having passed through it.
    passing = before["segment"][before["segment"].isin(reaching)]
    newest = int((before["segment"] if passing.empty else passing).max())
    kept, first = [], math.inf
    for segment in range(newest, -1, -1):
        rows = before[(before["segment"] == segment) & (before["step"] < first)]
        if len(rows):
            kept.append(rows)
            first = min(first, rows["step"].min())
    return pd.concat(kept[::-1])


def _worst(rows: pd.DataFrame) -> pd.Series | None:
    if rows.empty:
        return None
    badness = rows["loss"].fillna(-math.inf).where(~rows["nonfinite"], math.inf)
    return rows.loc[badness[::-1].idxmax()]


def _logged(log: pd.DataFrame, row: pd.Series | None, column: str) -> float | None:
    """The value at the step. In a row that is not finite a missing value counts as NaN, where other rows have one:
    Megatron leaves the loss out when it is NaN.
    """
    if row is None:
        return None
    if math.isnan(row[column]) and (column == "lr" or not row["nonfinite"] or bool(log[column].isna().all())):
        return None
    return float(row[column])


def _finite(values: pd.Series) -> pd.Series:
    return values[values.map(math.isfinite)]


def _median(values: pd.Series) -> float | None:
    finite = _finite(values)
    return None if finite.empty else float(finite.median())


def _spread(steps: pd.Series, values: pd.Series) -> float | None:
    """Robust standard deviation around the line that the values follow.

    A loss that falls steadily is not one that scatters: around its median 2 nats of descent would excuse any spike.
    """
    finite = _finite(values)
    if len(finite) < 2:
        return None
    # Fewer points follow any line; one that bends within the window leaves its bend in the spread, which is safe.
    slope = _slope(steps[finite.index], finite) if len(finite) >= FEWEST else 0.0
    level = finite - slope * steps[finite.index]
    return float(MAD_TO_STD * (level - level.median()).abs().median())


def _slope(steps: pd.Series, values: pd.Series) -> float:
    """The median slope over all pairs of points (Theil 1950, Sen 1968): a quarter of them may be spikes."""
    x, y = steps.to_numpy(float), values.to_numpy(float)
    first, second = np.triu_indices(len(x), 1)
    apart = x[second] != x[first]
    first, second = first[apart], second[apart]
    return float(np.median((y[second] - y[first]) / (x[second] - x[first]))) if len(first) else 0.0


def _finite_max(values: pd.Series) -> float | None:
    finite = _finite(values)
    return None if finite.empty else float(finite.max())
