"""What a report says, before any layout: the parts that the terminal and the Markdown report share."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from dataclasses import dataclass

from stability_probe.reports import words
from stability_probe.schema import Box, Evidence, InterventionRecord, Ranked, Report

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


MAX_SOURCE = 60  # characters: one line beside the numbers; the Markdown and JSON reports hold the whole source


def limit_source(item: Evidence) -> str:
    """Where a limit comes from, in a few words; empty where no limit was applied or its source is a file of ours."""
    first = re.split(r"[;:(]", item.source, maxsplit=1)[0].strip()
    if item.threshold is None or first.startswith("stability_probe/"):
        return ""
    return textwrap.shorten(first, MAX_SOURCE, placeholder=" …")


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


def mark(box: Box) -> str:
    """Its status; "n.a." where the question does not arise, which the schema holds as `unknown` without needs."""
    return box.status if box.applies else "n.a."


def tally(report: Report) -> str:
    """ "13 pass, 3 fail, 6 unknown, 3 n.a."."""
    marks = [mark(box) for box in report.checklist]
    counts = {
        name: marks.count(name) for name in ("pass", "fail", "unknown", "n.a.") if name != "n.a." or name in marks
    }
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


@dataclass(frozen=True)
class Unanswered:
    """Rules that could not look, all for the same reason."""

    rules: tuple[str, ...]
    status: str
    reason: str


def unanswered(report: Report) -> list[Unanswered]:
    """Rules that could not look, skipped for want of an input or crashed: one entry for each reason."""
    rules: dict[tuple[str, str], list[str]] = {}
    for outcome in report.outcomes:
        if outcome.status in ("skipped", "crashed"):
            rules.setdefault((outcome.status, outcome.reason), []).append(outcome.rule)
    return [Unanswered(tuple(names), status, reason) for (status, reason), names in rules.items()]


def is_compared(report: Report) -> bool:
    """Whether anything outside the batch says what is usual: a baseline or the run's log."""
    return bool(report.inputs.get("baseline") or report.inputs.get("log"))


def is_reserved(report: Report) -> bool:
    """Whether a verdict of no fault asks for something all the same; its summary then says why."""
    return report.verdict.cause == "none" and bool(report.verdict.remedies)


def sure(report: Report) -> str:
    """How sure the verdict is, in one line."""
    verdict = report.verdict
    if verdict.cause == "none" and not is_compared(report):
        return "no excess seen, but nothing was given to compare with"
    if is_reserved(report):
        return "no excess seen, with a reservation"
    return words.certainty(verdict.cause, verdict.status, verdict.explained)


def do_now(report: Report) -> tuple[str, str | None]:
    """The first thing to do, and its command."""
    if report.verdict.cause == "none" and not is_compared(report) and not is_reserved(report):
        return (
            "Replay once more with --baseline (a healthy batch) and --log (the run's log): until then this is no "
            "proof of health.",
            None,
        )
    return words.do_now(report)


def lacking(report: Report) -> str:
    """What a verdict of no fault could not look at, and the options that would let it; else empty."""
    if report.verdict.cause != "none":
        return ""
    alone = "" if is_compared(report) else "No baseline and no log: nothing says what is usual for this run. "
    options = ", ".join(f"{option} ({causes})" for option, causes in _options_asked_for(report))
    skipped = [outcome for outcome in report.outcomes if outcome.status == "skipped"]
    waiting = [outcome.rule for outcome in skipped if _OPTION.search(outcome.reason)]
    if not waiting:
        return alone.strip()
    would = f"; what would check them: {options}" if options else f": {', '.join(waiting)} (see the notes)"
    return f"{alone}{len(waiting)} of {len(report.outcomes)} causes could not be checked{would}."


_OPTION = re.compile(r"--[a-z][a-z-]+")


def _options_asked_for(report: Report) -> list[tuple[str, int]]:
    """(option, number of skipped causes whose reason names it), without what was given, most wanted first."""
    given = {f"--{name}" for name in ("baseline", "log", "step") if report.inputs.get(name) not in (None, [], "")}
    named = Counter(
        option
        for outcome in report.outcomes
        if outcome.status == "skipped"
        for option in sorted(set(_OPTION.findall(outcome.reason)) - given)
    )
    return named.most_common()


def coverage(report: Report) -> str:
    """ "17 causes examined: 1 found, 14 clear, 2 skipped"."""
    counts = {
        status: sum(outcome.status == status for outcome in report.outcomes)
        for status in ("found", "clear", "skipped", "crashed")
    }
    said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return f"{len(report.outcomes)} causes examined: {said}" if said else ""
