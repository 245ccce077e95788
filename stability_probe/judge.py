"""Rules, and what they conclude from tables. Pure: never touches torch, never runs the model.

A rule reads `Measurements` and returns suspects. A suspect is not a verdict: it names the intervention
that would prove it, and `confirm.py` runs that intervention and measures how much of the excess it removes.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from stability_probe.schema import Evidence, Location, Outcome, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

Measure = Literal["loss", "grad_norm", "nonfinite", "precision_gap", "step_damage", "lost_progress"]


@dataclass(frozen=True)
class Threshold:
    """A limit with the reason why it stands where it stands.

    Attributes:
        source: a paper and section, a document, or the command that measures it.
    """

    value: float
    unit: str
    reason: str
    source: str


@dataclass(frozen=True)
class Plan:
    """The intervention that would confirm a suspect: a module of `interventions/` and its arguments."""

    intervention: str
    arguments: dict[str, Any] = field(default_factory=dict)
    change: str = ""


@dataclass(frozen=True)
class Suspect:
    """A cause that the tables point to.

    Attributes:
        cause: slug of the rule.
        summary: one sentence with the place and the number, for the verdict line.
        strength: how far past its threshold, for the order of confirmation only (larger first).
        plans: interventions to run; none where the fact itself is proof (`decisive`).
        measures: the excesses on which the intervention is judged; the best one counts.
        decisive: the evidence is proof (a stored NaN); no intervention is needed.
        latent: dangerous even where the batch shows no excess.
        exact: what is stored cannot be right, even where the substitute of the intervention costs more than it.
        last_resort: a statement about the batch rather than a defect: counts only where nothing else explains.
    """

    cause: str
    summary: str
    location: Location
    evidence: tuple[Evidence, ...]
    plans: tuple[Plan, ...] = ()
    strength: float = 1.0
    measures: tuple[Measure, ...] = ("loss", "grad_norm", "nonfinite")
    decisive: bool = False
    latent: bool = False
    exact: bool = False
    last_resort: bool = False
    remedies: tuple[Remedy, ...] = ()


@dataclass(frozen=True)
class Page:
    """What `probe explain SLUG` shows; every field is Markdown text without headings.

    Attributes:
        claim: what is wrong, in one sentence.
        mechanism: why it spikes the loss.
        signature: what the replay shows.
        false_alarms: what looks the same and is healthy or another cause, and what separates them.
        proof: the intervention that confirms it.
        remedies: what to do, most useful first.
        references: papers and documents.
    """

    title: str
    claim: str
    mechanism: str
    signature: str
    false_alarms: str
    proof: str
    remedies: tuple[Remedy, ...]
    references: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """An example that ships with its rule: tables, and whether the rule fires on them.

    `tables` holds the fields of `Measurements` that differ from a healthy default;
    data frames are given as lists of records.
    """

    name: str
    tables: dict[str, Any]
    fires: bool


class Skip(Exception):
    """Raised by `examine` when the rule lacks what it needs; the message says what to supply."""


@dataclass(frozen=True)
class Rule:
    """One cause, whole in its file.

    Attributes:
        slug: the file's name with hyphens, and the `verdict.cause`.
        order: place in the causal order (100 × section of the catalogue + row); a lower number wins ties.
        thresholds: by name; `examine` reads its limits from here and from nowhere else.
        examine: suspects found in the tables, strongest first; raises Skip where it cannot tell.
    """

    slug: str
    order: int
    page: Page
    thresholds: dict[str, Threshold]
    examine: Callable[[Measurements, dict[str, Threshold]], list[Suspect]]
    cases: tuple[Case, ...]


def load_rules() -> tuple[Rule, ...]:
    """Every rule of `rules/`, in causal order. One file is one rule: the module's RULE."""
    package = importlib.import_module("stability_probe.rules")
    modules = (
        importlib.import_module(f"{package.__name__}.{info.name}")
        for info in pkgutil.iter_modules(package.__path__)
        if not info.name.startswith("_")
    )
    return tuple(sorted((module.RULE for module in modules), key=lambda rule: rule.order))


def judge(rules: tuple[Rule, ...], measurements: Measurements) -> tuple[list[Suspect], list[Outcome]]:
    """Ask every rule. A rule that crashes is an outcome of its own and never hides the others."""
    suspects: list[Suspect] = []
    outcomes: list[Outcome] = []
    for rule in rules:
        try:
            found = rule.examine(measurements, rule.thresholds)
        except Skip as lacking:
            outcomes.append(Outcome(rule.slug, "skipped", str(lacking)))
        except Exception as error:  # noqa: BLE001  one broken rule must not cost the engineer the report
            outcomes.append(Outcome(rule.slug, "crashed", f"{type(error).__name__}: {error}"))
        else:
            suspects += found
            reason = found[0].summary if found else "no sign of it"
            evidence = found[0].evidence if found else ()
            outcomes.append(Outcome(rule.slug, "found" if found else "clear", reason, evidence))
    return suspects, outcomes
