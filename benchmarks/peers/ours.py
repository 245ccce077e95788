"""This package. Only the verdict counts as named, not the suspects below it."""

from __future__ import annotations

from benchmarks.peers.material import Material, Saying
from stability_probe.pipeline import run
from stability_probe.schema import Location

NAME = "probe replay"
NEEDS = "stability_probe"


def ask(material: Material) -> Saying:
    verdict = run(material.request).verdict
    cause = verdict.cause
    return Saying(
        told=f"{cause} {verdict.status or ''}: {verdict.summary}",
        causes=frozenset() if cause in ("none", "unexplained") else frozenset({cause}),
        places=places(verdict.location),
        rows=verdict.location.rows,
        alarm=cause != "none",
    )


def places(where: Location) -> tuple[str, ...]:
    if where.layer is not None:
        return (f"layers.{where.layer}",)
    named = tuple(dict.fromkeys(name.split("[")[0] for name in where.parameters))
    return named or ((where.module,) if where.module else ())
