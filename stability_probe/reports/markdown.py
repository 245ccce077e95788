"""The report as Markdown for an issue: verdict first, long tables folded away.

Whatever came from a file stands in a code span or is escaped, so a token cannot become a link, a mention or markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stability_probe.reports import sections, tables, words
from stability_probe.reports.safe_text import code, fence, prose
from stability_probe.schema import Box, Evidence, Report

FORMAT = "markdown"
EXTENSION = ".md"
MAX_ROWS = 20

_MARKS = {"pass": "✅", "fail": "❌", "unknown": "❔", "n.a.": "➖"}
_SIGNS = {"none": "✅", "unexplained": "❔", "not-reproduced": "❔"}


def render(report: Report) -> str:
    """The whole report as GitHub-flavoured Markdown."""
    blocks = [block for part in _PARTS for block in part(report) if block]
    return "\n\n".join(blocks) + "\n"


def _verdict(report: Report) -> Iterator[str]:
    verdict = report.verdict
    doubted = verdict.cause == "none" and not (sections.is_compared(report) and not sections.is_reserved(report))
    sign = "❔" if doubted else _SIGNS.get(verdict.cause, "❌")
    yield f"## {sign} {prose(words.title(verdict.cause))} ({code(verdict.cause)})"
    yield f"**{prose(sections.sure(report))}**"
    yield prose(verdict.summary)
    where = words.where(verdict.location)
    action, command = sections.do_now(report)
    lacking = sections.lacking(report)
    lines = [f"- **Where:** {code(where)}"] * bool(where) + [f"- **Lacks:** {prose(lacking)}"] * bool(lacking)
    yield "\n".join([*lines, f"- **Now:** {prose(action)}"])
    if command:
        yield fence(command, "sh")


def _healthy(report: Report) -> Iterator[str]:
    if report.verdict.cause == "none":
        yield from _notes("Why this is healthy", report.verdict.healthy_notes)


def _alarming(report: Report) -> Iterator[str]:
    if report.verdict.cause != "none":
        yield from _notes("Alarming, but healthy", report.verdict.healthy_notes)


def _notes(heading: str, notes: tuple[str, ...]) -> Iterator[str]:
    if notes:
        yield f"### {heading}"
        yield _bullets(prose(note) for note in notes)


def _location(report: Report) -> Iterator[str]:
    facets = words.places(report.verdict.location)
    if facets:
        yield "### Location"
        yield _bullets(f"{name}: {code(text)}" for name, text in facets)


def _evidence(report: Report) -> Iterator[str]:
    items = sections.evidence(report)
    if items:
        yield "### Evidence"
        yield _table(
            ("measured", "value", "reference", "limit", "limit comes from"),
            (
                (
                    prose(item.what),
                    f"**{prose(words.with_unit(item.value, item.unit))}**",
                    _reference(item),
                    prose(words.number(item.threshold)),
                    prose(item.source),
                )
                for item in items
            ),
            numbers=(1, 2, 3),
        )


def _reference(item: Evidence) -> str:
    value = prose(words.number(item.reference))
    return f"{value} ({prose(item.reference_name)})" if item.reference_name else value


def _rivals(report: Report) -> Iterator[str]:
    rivals = sections.rivals(report)
    if rivals:
        yield "### What was tried" if report.verdict.cause == "unexplained" else "### Rivals, and why they lost"
        rows = ((code(rival.cause), rival.explained, prose(rival.why)) for rival in rivals)
        yield _table(("cause", "explained", "why"), rows, numbers=(1,))


def _remedies(report: Report) -> Iterator[str]:
    remedies = sections.more_remedies(report)
    if remedies:
        yield "### What to do"
    for i, (action, command) in enumerate(remedies, start=1):
        yield f"{i}. {prose(action)}"
        if command:
            yield _inside_item(fence(command, "sh"))


def _inside_item(block: str) -> str:
    return "\n".join(f"   {line}" for line in block.splitlines())


def _checklist(report: Report) -> Iterator[str]:
    steps = sections.steps(report)
    if steps:
        yield f"### Checklist: {sections.tally(report)}"
    for name, boxes in steps:
        yield f"**{name}**"
        yield _bullets(_box(item) for item in boxes)


def _box(item: Box) -> str:
    measured = f" — {prose(item.measured)}" if item.measured else ""
    needs = f" *Needs:* {prose(item.needs)}" if item.needs else ""
    return f"{_MARKS[sections.mark(item)]} {prose(item.item)}{measured}{needs}"


def _replays(report: Report) -> Iterator[str]:
    if report.replays:
        yield "### Replays"
        yield _table(
            ("replay", "precision", "loss", "grad norm", "non-finite", "seconds"),
            (
                (
                    prose(run.name),
                    prose(run.precision),
                    words.number(run.loss),
                    words.number(run.global_grad_norm),
                    words.number(run.nonfinite),
                    f"{run.seconds:.1f}",
                )
                for run in report.replays
            ),
            numbers=(2, 3, 4, 5),
        )


def _interventions(report: Report) -> Iterator[str]:
    if report.interventions:
        yield "### Interventions: changed in memory, then replayed"
        yield _table(
            ("change", "for", "measure", "before", "after", "should be", "explained"),
            (
                (
                    prose(record.change or record.name),
                    code(record.cause),
                    prose(words.measure(record.measure)),
                    words.number(record.before),
                    words.number(record.after),
                    words.number(record.baseline),
                    words.percent(record.explained),
                )
                for record in report.interventions
            ),
            numbers=(3, 4, 5, 6),
        )


def _tables(report: Report) -> Iterator[str]:
    for view in tables.views(report, MAX_ROWS):
        shown = len(view.cells)
        count = f"{shown} of {view.total}" if shown < view.total else f"{shown}"
        headings = ("", *(column.heading for column in view.columns))
        rows = (
            ("▶" if guilty else "", *_cells(view.columns, cells))
            for cells, guilty in zip(view.cells, view.guilty, strict=True)
        )
        numbers = tuple(i for i, column in enumerate(view.columns, start=1) if column.is_number)
        yield _folded(f"{view.heading} ({count})", _table(headings, rows, numbers))


def _cells(columns: tuple[tables.Column, ...], cells: tuple[str, ...]) -> list[str]:
    return [prose(cell) if column.is_number else code(cell) for column, cell in zip(columns, cells, strict=True)]


def _footer(report: Report) -> Iterator[str]:
    lines = [f"{prose(name)}: {code(text)}" for name, text in sections.inputs(report)]
    lines += [prose(note) for note in report.notes]
    lines += [
        f"{', '.join(map(code, group.rules))} {group.status}: {prose(group.reason)}"
        for group in sections.unanswered(report)
    ]
    if lines:
        yield _folded(f"Inputs and notes ({len(lines)})", _bullets(lines))
    said = ". ".join(part for part in (sections.coverage(report), f"stability_probe {report.probe_version}") if part)
    yield f"<sub>{prose(said)}</sub>"


_PARTS = (
    _verdict,
    _healthy,
    _location,
    _evidence,
    _rivals,
    _remedies,
    _alarming,
    _checklist,
    _replays,
    _interventions,
    _tables,
    _footer,
)


# --- pieces -------------------------------------------------------------------------------------


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(headings: tuple[str, ...], rows: Iterable[Iterable[str]], numbers: tuple[int, ...] = ()) -> str:
    rule = ["---:" if i in numbers else "---" for i in range(len(headings))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (headings, rule, *rows))


def _folded(summary: str, content: str) -> str:
    return f"<details>\n<summary>{prose(summary)}</summary>\n\n{content}\n\n</details>"
