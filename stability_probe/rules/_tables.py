"""Small helpers that rules share to read tables. Plain Python: a rule never needs pandas itself."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from stability_probe.judge import Threshold

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

Record = dict[str, Any]

NAMED_AT_MOST = 16  # a location lists this many parameters; the summary says how many there are


def records(frame: Any) -> list[Record]:
    """The rows of a data frame as dicts of plain values."""
    return frame.to_dict("records")


def is_number(value: Any) -> bool:
    """True for a finite number; False for NaN, infinities and None."""
    return value is not None and math.isfinite(value)


def finite(values: Iterable[Any]) -> list[float]:
    return [float(value) for value in values if is_number(value)]


def median(values: Iterable[Any], default: float = math.nan) -> float:
    """Median of the finite values, `default` where there are none."""
    kept = finite(values)
    return statistics.median(kept) if kept else default


def quantile(values: Iterable[Any], share: float) -> float:
    """The value below which `share` of the finite values lie (nearest rank); NaN where there are none."""
    kept = sorted(finite(values))
    return kept[min(len(kept) - 1, int(share * len(kept)))] if kept else math.nan


def times(value: float, reference: float) -> float:
    """`value / reference`; infinite where the reference is zero, NaN where either is unknown."""
    if math.isnan(value) or math.isnan(reference):
        return math.nan
    return value / reference if reference else math.inf


def layer_of(record: Record) -> int | None:
    """The block's index, None outside blocks."""
    layer = record["layer"]
    return int(layer) if is_number(layer) and layer >= 0 else None


def layers_of(rows: Iterable[Record]) -> tuple[int, ...]:
    return tuple(sorted({layer for layer in map(layer_of, rows) if layer is not None}))


def siblings(rows: Sequence[Record], record: Record) -> list[Record]:
    """The same tensor in the other blocks; empty for tensors outside blocks."""
    return [row for row in rows if row["kind"] == record["kind"] and row is not record]


def element(name: str, index: Sequence[int]) -> str:
    """`name[i, j]`, the way a location names one element."""
    return f"{name}[{', '.join(str(int(i)) for i in index)}]"


def is_trained(m: Measurements) -> bool:
    """False where every norm gain still is one constant, as at initialisation. True where there are no gains."""
    gains = [row for row in records(m.parameters) if row["norm_gain"] and row["numel"] > 1]
    return not gains or any(not is_number(row["constant"]) for row in gains)


def log_margin(m: Measurements, floor_nats: float, sigmas: float) -> float:
    """How far above its usual loss a run must be before it counts: the floor, or the run's own spread."""
    spread = m.log.loss_spread if m.log is not None and m.log.loss_spread is not None else 0.0
    return max(floor_nats, sigmas * spread)


CLEAR_NATS = Threshold(
    1, "nats over the usual loss in the log", "where a log scatters by half a nat, six of its standard deviations "
    "would excuse anything: from a nat on fewer of them will do, since the repair, tried, decides",
    "python benchmarks/healthy_ranges.py --logs docs (114 healthy batches under such logs: up to 1.24 nats above)",
)  # fmt: skip
CLEAR_SIGMAS = Threshold(
    2.5, "robust standard deviations of the logged loss", "one ordinary step in 160 lies beyond, and this one is "
    "looked at because it was odd: not enough for a verdict, enough to try a repair",
    "the tail of a normal distribution; python benchmarks/healthy_ranges.py --logs docs (up to 2.05)",
)  # fmt: skip


def clear_margin(m: Measurements, t: dict[str, Threshold], floor: str) -> float:
    """`log_margin` with the limits `floor` and `sigmas`, or with `clear` and `clear_sigmas` where these are less."""
    wide = log_margin(m, max(t[floor].value, t["clear"].value), t["clear_sigmas"].value)
    return min(log_margin(m, t[floor].value, t["sigmas"].value), wide)


def reference_loss(m: Measurements) -> tuple[float | None, str]:
    """What the loss should be: the log's usual value, else the baseline batch's. (value, its name)"""
    if m.log is not None and is_number(m.log.usual_loss):
        return m.log.usual_loss, "usual loss in the log"
    if is_number(m.baseline_loss):
        return m.baseline_loss, "baseline batch"
    return None, ""


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
