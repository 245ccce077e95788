"""The values that pass between stages, and their JSON form (schema 1). Nothing here imports torch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_VERSION = 1

Status = Literal["decisive", "confirmed", "likely", "latent", "unconfirmed"]
OutcomeStatus = Literal["found", "clear", "skipped", "crashed"]
BoxStatus = Literal["pass", "fail", "unknown"]


@dataclass(frozen=True)
class Location:
    """Where a cause sits. Empty tuples mean 'not applicable'.

    Attributes:
        module: dotted name of the module to look at first, as in `named_modules()`.
        layer: index of the main block; `layers` holds all of them.
        heads: pairs (layer, head).
        rows: indices of the rows (sequences) of the batch.
        positions: half-open spans (row, start, end) in the rows as given, padding included.
        parameters: names as in `named_parameters()`, with "[i, j]" appended where one element is meant.
    """

    module: str | None = None
    layer: int | None = None
    layers: tuple[int, ...] = ()
    heads: tuple[tuple[int, int], ...] = ()
    rows: tuple[int, ...] = ()
    positions: tuple[tuple[int, int, int], ...] = ()
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """One measured number beside what it is judged against.

    Attributes:
        what: name of the quantity, with the place where it was measured.
        value: the measurement (a number or a short string).
        unit: "nats", "x rms", ""…
        reference: the baseline, sibling or logged value of the same quantity, if there is one.
        reference_name: what the reference is ("baseline batch", "median of sibling layers"…).
        threshold: the limit that the rule applied.
        source: where the limit comes from.
    """

    what: str
    value: float | int | str
    unit: str = ""
    reference: float | int | str | None = None
    reference_name: str = ""
    threshold: float | int | str | None = None
    source: str = ""


@dataclass(frozen=True)
class Remedy:
    action: str
    command: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What one rule concluded: every rule has exactly one outcome in a report."""

    rule: str
    status: OutcomeStatus
    reason: str
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True)
class Ranked:
    """One named cause with how sure we are of it."""

    cause: str
    status: Status
    explained: float | None
    summary: str
    location: Location = field(default_factory=Location)
    evidence: tuple[Evidence, ...] = ()
    why_not_first: str = ""


@dataclass(frozen=True)
class Verdict:
    """`cause` is a slug of the catalogue, `unexplained`, `not-reproduced` or `none`."""

    cause: str
    status: Status | None
    explained: float | None
    summary: str
    location: Location = field(default_factory=Location)
    ranked: tuple[Ranked, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    healthy_notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReplayRecord:
    """One forward and backward over a batch. `precision` is a name of `precisions/`."""

    name: str
    precision: str
    loss: float
    global_grad_norm: float | None
    nonfinite: int
    seconds: float


@dataclass(frozen=True)
class InterventionRecord:
    """One change made in memory and replayed.

    Attributes:
        name: the intervention ("drop rows", "QK-clip heads"…).
        cause: the suspect that asked for it.
        change: what was changed, in words.
        measure: which excess it was judged on ("loss", "grad_norm", "nonfinite", "precision_gap", "step_damage",
            "lost_progress").
        before, after, baseline: the measure without the change, with it, and where it should be.
        explained: (before − after) / (before − baseline), clipped to [0, 1]; None where there is no excess.
    """

    name: str
    cause: str
    change: str
    measure: str
    before: float
    after: float
    baseline: float | None
    explained: float | None


@dataclass(frozen=True)
class Box:
    """One line of the six-step debugging checklist, answered."""

    step: int
    item: str
    status: BoxStatus
    measured: str
    needs: str = ""

    @property
    def applies(self) -> bool:
        """Whether the question arises here; False for an `unknown` box that nothing could answer."""
        return self.status != "unknown" or bool(self.needs)


@dataclass(frozen=True)
class Report:
    """One finished run of `probe replay`: saved as JSON, rendered many ways."""

    probe_version: str
    inputs: dict[str, Any]
    verdict: Verdict
    outcomes: tuple[Outcome, ...]
    checklist: tuple[Box, ...]
    replays: tuple[ReplayRecord, ...]
    interventions: tuple[InterventionRecord, ...]
    tables: dict[str, list[dict[str, Any]]]
    notes: tuple[str, ...] = ()
    command: str = "replay"


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain JSON values; numbers that are not finite become "nan", "inf", "-inf"."""
    return {"schema_version": SCHEMA_VERSION, **plain(report)}


def plain(value: Any) -> Any:
    """Dataclasses, tuples and numpy scalars as dicts, lists, and numbers that JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):  # numpy and torch scalars
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def report_from_json(data: dict[str, Any]) -> Report:
    """The inverse of `to_json`, for rendering a saved run again.

    Raises:
        ValueError: the file was written by another schema version.
    """
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"schema version {data.get('schema_version')!r}, expected {SCHEMA_VERSION}")
    verdict = data["verdict"]
    return Report(
        probe_version=data["probe_version"],
        command=data["command"],
        inputs=data["inputs"],
        verdict=Verdict(
            **{
                **verdict,
                "location": _location(verdict["location"]),
                "ranked": tuple(_ranked(item) for item in verdict["ranked"]),
                "remedies": tuple(Remedy(**item) for item in verdict["remedies"]),
                "healthy_notes": tuple(verdict["healthy_notes"]),
            }
        ),
        outcomes=tuple(Outcome(**{**item, "evidence": _evidence(item["evidence"])}) for item in data["outcomes"]),
        checklist=tuple(Box(**item) for item in data["checklist"]),
        replays=tuple(ReplayRecord(**numbers(item)) for item in data["replays"]),
        interventions=tuple(InterventionRecord(**numbers(item)) for item in data["interventions"]),
        tables={name: [numbers(row) for row in rows] for name, rows in data["tables"].items()},
        notes=tuple(data["notes"]),
    )


_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    """A row of JSON values with "nan", "inf", "-inf" as numbers again."""
    return {key: _NOT_FINITE.get(item, item) if isinstance(item, str) else item for key, item in row.items()}


def _location(data: dict[str, Any]) -> Location:
    return Location(
        module=data["module"],
        layer=data["layer"],
        layers=tuple(data["layers"]),
        heads=tuple((layer, head) for layer, head in data["heads"]),
        rows=tuple(data["rows"]),
        positions=tuple((row, start, end) for row, start, end in data["positions"]),
        parameters=tuple(data["parameters"]),
    )


def _evidence(items: list[dict[str, Any]]) -> tuple[Evidence, ...]:
    return tuple(Evidence(**numbers(item)) for item in items)


def _ranked(data: dict[str, Any]) -> Ranked:
    return Ranked(**{**data, "location": _location(data["location"]), "evidence": _evidence(data["evidence"])})
