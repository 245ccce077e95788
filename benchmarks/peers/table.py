"""What the tools said of the same incidents, counted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers.material import Saying, false_alarm, named, pointed
from fixtures.verdict_incident import Incident
from stability_probe.judge import load_rules
from stability_probe.reports.catalogue import SECTIONS


@dataclass(frozen=True)
class Told:
    """One tool's answers, in the order of the incidents.

    Attributes:
        missing: why the tool could not be run at all.
    """

    tool: str
    sayings: tuple[Saying, ...] = ()
    missing: str = ""


HEAD = ("", "named the cause", "pointed at the place", "alarms on healthy", "causes at a time", "no answer", "seconds")


def overview(incidents: Sequence[Incident], answers: Sequence[Told]) -> list[tuple[str, ...]]:
    """One row per tool; what it could not be asked is a row that says why."""
    return [HEAD, *(_row(incidents, told) for told in answers)]


def _row(incidents: Sequence[Incident], told: Told) -> tuple[str, ...]:
    if told.missing:
        return (told.tool, f"could not be run: {told.missing}", *[""] * (len(HEAD) - 2))
    pairs = list(zip(incidents, told.sayings, strict=True))
    faults = [(incident, saying) for incident, saying in pairs if not incident.truth.healthy]
    places = [pointed(saying, incident.truth, len(incident.kinds)) for incident, saying in faults]
    asked = [place for place in places if place is not None]
    healthy = [(incident, saying) for incident, saying in pairs if incident.truth.healthy]
    sizes = [len(saying.causes) for _, saying in faults if saying.causes]
    return (
        told.tool,
        of(sum(named(saying, incident.truth) for incident, saying in faults), len(faults)),
        of(sum(asked), len(asked)),
        of(sum(false_alarm(saying, incident.truth) for incident, saying in healthy), len(healthy)),
        f"{statistics.mean(sizes):.1f}" if sizes else "–",
        str(sum(bool(saying.problem) for saying in told.sayings)),
        f"{statistics.median([saying.seconds for saying in told.sayings]):.1f}",
    )


def of(count: int, total: int) -> str:
    return f"{count} of {total}"


def by_section(incidents: Sequence[Incident], answers: Sequence[Told]) -> list[tuple[str, ...]]:
    """How many of each section of the catalogue were named, by tool."""
    ran = [told for told in answers if not told.missing]
    order = {rule.slug: rule.order // 100 for rule in load_rules()}
    rows = [("faults in", "", *(told.tool for told in ran))]
    for section, heading in SECTIONS.items():
        own = [at for at, incident in enumerate(incidents) if order.get(incident.truth.causes[0]) == section]
        if own:
            hits = (sum(named(told.sayings[at], incidents[at].truth) for at in own) for told in ran)
            rows.append((heading, str(len(own)), *(str(count) for count in hits)))
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns line up as plain text too."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in rows]
    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    return "\n".join((lines[0], rule, *lines[1:]))
