"""What the tests of planted faults share: run the pipeline on a tiny model, and compare a verdict with the plant."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fixtures import incidents, plant
from fixtures.tiny import NAMES, Tiny
from stability_probe.pipeline import run
from stability_probe.request import Request
from stability_probe.schema import Report

LENGTH = 96  # tokens of a row: enough for 32 repetitions, quick enough for a hundred replays
LAYER, HEAD, ROW = 2, 1, 2  # where faults are planted

__all__ = ["HEAD", "LAYER", "LENGTH", "NAMES", "ROW", "Expected", "baseline", "batch", "check", "diagnose"]


@functools.cache
def _healthy(rows: int, seed: int) -> plant.BatchDict:
    return incidents.healthy_batch(("code",) * rows, LENGTH, seed)


def batch() -> plant.BatchDict:
    return _healthy(4, 0)


def baseline() -> plant.BatchDict:
    return _healthy(4, 1)


def diagnose(
    made: Tiny,
    folder: Path,
    what: plant.BatchDict | None = None,
    *,
    with_baseline: bool = True,
    with_log: bool = False,
    model: str | None = None,
    **options: Any,
) -> Report:
    """`probe replay` on the model and the batch, without the command line."""
    healthy = (incidents.saved(baseline(), folder / "baseline.pt"),) if with_baseline else ()
    return run(
        Request(
            ckpt=made.ckpt,
            batch=incidents.saved(batch() if what is None else what, folder / "batch.pt"),
            baselines=healthy,
            logs=(made.log,) if with_log else (),
            model=model or made.model,
            **options,
        )
    )


@dataclass(frozen=True)
class Expected:
    """A verdict that a planted fault must get.

    Attributes:
        where: fields of the location. Numbers must be equal, a tuple's members must all be in the location's.
        least: smallest explained share where the verdict is confirmed.
        only_rows: no other rows are named.
    """

    cause: str
    statuses: tuple[str, ...] = ("confirmed",)
    where: dict[str, Any] = field(default_factory=dict)
    least: float = 0.5
    only_rows: bool = False


def check(report: Report, expected: Expected) -> None:
    """Assert that the verdict is the expected one, at the expected place."""
    verdict = report.verdict
    told = f"{verdict.cause} {verdict.status} {verdict.explained}: {verdict.summary} {verdict.location}"
    assert verdict.cause == expected.cause, told
    assert verdict.status in expected.statuses, told
    if verdict.status == "confirmed":
        assert verdict.explained is not None and verdict.explained >= expected.least, told
    for name, wanted in expected.where.items():
        found = getattr(verdict.location, name)
        assert set(wanted) <= set(found) if isinstance(wanted, tuple) else found == wanted, f"{name}: {told}"
    if expected.only_rows:
        assert verdict.location.rows == expected.where["rows"], told
    crashed = [outcome for outcome in report.outcomes if outcome.status == "crashed"]
    assert not crashed, crashed
