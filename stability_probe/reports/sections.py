"""What a report says, before any layout: the parts that the terminal and the Markdown report share."""

from __future__ import annotations

from dataclasses import dataclass

from stability_probe.reports import words
from stability_probe.schema import Box, Evidence, InterventionRecord, Outcome, Ranked, Report

STEPS = {
    1: "Establish what happened",
    2: "Narrow it to a category",
    3: "Isolate the step",
    4: "Identify the root cause",
    5: "Mitigate and resume",
    6: "Prevent recurrence",
}


@dataclass(frozen=True)
class Rival:
    """A cause that was looked at and is not the verdict, and why it lost."""

    cause: str
    explained: str
    why: str


def evidence(report: Report) -> tuple[Evidence, ...]:
    """The numbers behind the verdict: those of its ranked entry, else of its rule's outcome."""
    cause = report.verdict.cause
    for ranked in report.verdict.ranked:
        if ranked.cause == cause and ranked.evidence:
            return ranked.evidence
    return next((outcome.evidence for outcome in report.outcomes if outcome.rule == cause), ())


def rivals(report: Report) -> list[Rival]:
    """Every other suspect: ranked ones in their order, then those whose repair was tried, then those only found."""
    verdict = report.verdict
    listed: dict[str, Rival] = {}
    for ranked in verdict.ranked:
        if ranked.cause != verdict.cause:
            listed.setdefault(ranked.cause, Rival(ranked.cause, words.percent(ranked.explained), _why_lost(ranked)))
    best = _best_repairs(report.interventions)
    for cause, record in best.items():
        if cause != verdict.cause:
            listed.setdefault(cause, Rival(cause, words.percent(record.explained), _repair_failed(record)))
    for outcome in report.outcomes:
        if outcome.status == "found" and outcome.rule != verdict.cause:
            listed.setdefault(outcome.rule, Rival(outcome.rule, "–", outcome.reason))
    return list(listed.values())


def _why_lost(ranked: Ranked) -> str:
    return ranked.why_not_first or ranked.summary


def _repair_failed(record: InterventionRecord) -> str:
    change = record.change or record.name
    before, after = words.number(record.before), words.number(record.after)
    return f"{change}: {words.measure(record.measure)} {before} → {after}"


def _best_repairs(records: tuple[InterventionRecord, ...]) -> dict[str, InterventionRecord]:
    best: dict[str, InterventionRecord] = {}
    for record in records:
        if record.cause not in best or (record.explained or 0.0) > (best[record.cause].explained or 0.0):
            best[record.cause] = record
    return best


def more_remedies(report: Report) -> tuple[tuple[str, str | None], ...]:
    """Every remedy of the verdict as (action, command)."""
    return tuple((remedy.action, remedy.command) for remedy in report.verdict.remedies)


def steps(report: Report) -> list[tuple[str, list[Box]]]:
    """The checklist by step, with each step's heading."""
    numbers = sorted({box.step for box in report.checklist})
    return [
        (f"{step}  {STEPS.get(step, '')}".rstrip(), [box for box in report.checklist if box.step == step])
        for step in numbers
    ]


def tally(report: Report) -> str:
    """ "16 pass, 3 fail, 6 unknown"."""
    counts = {status: sum(box.status == status for box in report.checklist) for status in ("pass", "fail", "unknown")}
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def inputs(report: Report) -> list[tuple[str, str]]:
    """What was replayed, one line each: the checkpoint, the batch, and whatever else was given."""
    lines: list[tuple[str, str]] = []
    for name, value in report.inputs.items():
        for item in value if isinstance(value, list) else [value]:
            if item not in (None, {}, []):
                lines.append((str(name).replace("_", " "), _described(item)))
    return lines


def _described(item: object) -> str:
    if not isinstance(item, dict):
        return str(item)
    path = [str(item["path"])] if item.get("path") else []
    facts = [
        f"{str(key).replace('_', ' ')} {words.number(value)[:12] if key == 'sha256' else words.number(value)}"
        for key, value in item.items()
        if key != "path" and value not in (None, "", [], {}) and not isinstance(value, (dict, list))
    ]
    return " · ".join(path + facts)


def unanswered(report: Report) -> list[Outcome]:
    """Rules that could not look: skipped for want of an input, or crashed."""
    return [outcome for outcome in report.outcomes if outcome.status in ("skipped", "crashed")]


def coverage(report: Report) -> str:
    """ "17 causes examined: 1 found, 14 clear, 2 skipped"."""
    counts = {
        status: sum(outcome.status == status for outcome in report.outcomes)
        for status in ("found", "clear", "skipped", "crashed")
    }
    said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return f"{len(report.outcomes)} causes examined: {said}" if said else ""
