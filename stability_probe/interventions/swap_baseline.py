"""Put the healthy baseline batch in the place of this one."""

from __future__ import annotations

from stability_probe.interventions.bench import Bench, CannotRun, Reading, reading_of

OF_THE_DATA = True


def trial(bench: Bench) -> Reading:
    """What the baseline batch gives on the same checkpoint.

    Raises:
        CannotRun: there is no baseline batch.
    """
    if bench.healthy is None:
        raise CannotRun("give a healthy batch with --baseline")
    return reading_of(bench.healthy[1])
