"""Make a parameter a copy of another one that it should share."""

from __future__ import annotations

from stability_probe.interventions.bench import Bench, CannotRun, swapped

OF_THE_DATA = False


def repaired(bench: Bench, parameter: str, source: str) -> Bench:
    """The bench with `parameter` equal to `source`.

    Raises:
        CannotRun: the two do not both exist with one shape.
    """
    known = dict(bench.subject.module.named_parameters())
    if parameter not in known or source not in known or known[parameter].shape != known[source].shape:
        raise CannotRun(f"{parameter} and {source} are not two parameters of one shape")
    return bench.holding(lambda: swapped(bench.subject.module, {parameter: known[source].detach()}))
