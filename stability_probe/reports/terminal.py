"""The report in a terminal: the verdict first, then the reasons, then the tables.

Colours are the sixteen that every terminal has, so the reader's own palette applies; nothing is said by colour alone.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from stability_probe.reports import sections, tables, words
from stability_probe.reports.safe_text import clean
from stability_probe.schema import Box, Report

FORMAT = "terminal"
EXTENSION = ".txt"
MAX_ROWS = 8  # of each long table: a screenful in all; the JSON report holds every row
MAX_EVIDENCE = 12
MAX_VALUE = 20  # columns of a value; a value in words stands beside its name instead

_MARKS = {"pass": ("✓", "green"), "fail": ("✗", "red"), "unknown": ("?", "yellow"), "n.a.": ("–", "dim")}


def render(report: Report, width: int = 100, colour: bool = False) -> str:
    """The whole report as text of at most `width` columns, with ANSI colours or without any escape at all."""
    return print_to_text(Group(*_parts(report)), width, colour)


def print_to_text(content: RenderableType, width: int, colour: bool) -> str:
    """Lay out any rich content; lines carry no trailing blanks, so that a saved report diffs cleanly."""
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        no_color=not colour,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    with console.capture() as captured:
        console.print(content)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n") + "\n"


def _parts(report: Report) -> Iterator[RenderableType]:
    yield _verdict_panel(report)
    yield from _healthy(report)
    yield from _location(report)
    yield from _evidence(report)
    yield from _rivals(report)
    yield from _remedies(report)
    yield from _alarming(report)
    yield from _checklist(report)
    yield from _replays(report)
    yield from _interventions(report)
    for view in tables.views(report, MAX_ROWS):
        yield from _view(view)
    yield from _footer(report)


# --- the five seconds at 3 AM -------------------------------------------------------------------


def _tone(report: Report) -> str:
    verdict = report.verdict
    if verdict.cause == "none":
        return "green" if sections.is_compared(report) and not sections.is_reserved(report) else "yellow"
    return "red" if verdict.status in ("decisive", "confirmed") and verdict.cause != "unexplained" else "yellow"


def _verdict_panel(report: Report) -> RenderableType:
    verdict = report.verdict
    tone = _tone(report)
    action, command = sections.do_now(report)
    heading = Text.assemble(
        (words.title(clean(verdict.cause)), f"bold {tone}"), "  ", (clean(verdict.cause), "dim"), overflow="fold"
    )
    sure = Text(sections.sure(report), style=tone)
    facts = _grid()
    facts.add_column(style="bold", no_wrap=True, min_width=6)
    facts.add_column(overflow="fold")
    where = words.where(verdict.location)
    if where:
        facts.add_row("where", _text(where))
    lacking = sections.lacking(report)
    if lacking:
        facts.add_row("lacks", _text(lacking))
    facts.add_row("now", _text(action))
    if command:
        facts.add_row("", _command(command))
    return Panel(
        Group(heading, sure, Text(), _text(verdict.summary), Text(), facts),
        title=Text("verdict", style="bold"),
        title_align="left",
        border_style=tone,
        box=box.ROUNDED,
        padding=(0, 1),
    )


# --- the reasons --------------------------------------------------------------------------------


def _healthy(report: Report) -> Iterator[RenderableType]:
    if report.verdict.cause == "none":
        yield from _notes("Why this is healthy", report.verdict.healthy_notes)


def _location(report: Report) -> Iterator[RenderableType]:
    facets = words.places(report.verdict.location)
    if facets:
        yield _heading("Location")
        grid = _grid()
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, text in facets:
            grid.add_row(name, _text(text))
        yield _indented(grid)


def _evidence(report: Report) -> Iterator[RenderableType]:
    items = sections.evidence(report)
    if not items:
        return
    yield _heading("Evidence")
    table = _table("measured", "value", "reference", "limit", numbers=(1, 3), ratios=(5, 0, 3, 0))
    for item in items[:MAX_EVIDENCE]:
        value, is_long = words.with_unit(item.value, item.unit), len(str(item.value)) > MAX_VALUE
        source = sections.limit_source(item)
        table.add_row(
            _two_lines(f"{item.what}: {value}" if is_long else item.what, f"limit: {source}" if source else ""),
            Text("" if is_long else clean(value), style="bold", overflow="fold"),
            _two_lines(words.number(item.reference), item.reference_name),
            _text(words.number(item.threshold)),
        )
    yield table


def _rivals(report: Report) -> Iterator[RenderableType]:
    rivals = sections.rivals(report)
    if not rivals:
        return
    yield _heading("What was tried" if report.verdict.cause == "unexplained" else "Rivals, and why they lost")
    table = _table("cause", "explained", "why", numbers=(1,), ratios=(0, 0, 1))
    for rival in rivals:
        table.add_row(_text(rival.cause), _text(rival.explained), _text(rival.why))
    yield table


def _remedies(report: Report) -> Iterator[RenderableType]:
    remedies = sections.more_remedies(report)
    if not remedies:
        return
    yield _heading("What to do")
    for i, (action, command) in enumerate(remedies, start=1):
        yield _item(f"{i}", action)
        if command:
            yield Padding(_command(command), (0, 0, 0, 4))


def _alarming(report: Report) -> Iterator[RenderableType]:
    if report.verdict.cause != "none":
        yield from _notes("Alarming, but healthy", report.verdict.healthy_notes)


def _notes(heading: str, notes: tuple[str, ...]) -> Iterator[RenderableType]:
    if notes:
        yield _heading(heading)
        yield from (_item("✓", note, "green") for note in notes)


def _checklist(report: Report) -> Iterator[RenderableType]:
    steps = sections.steps(report)
    if steps:
        yield _heading(f"Checklist: {sections.tally(report)}")
    for name, boxes in steps:
        yield Text(f" {name}", style="bold")
        grid = _grid()
        grid.expand = True  # so that the answers of all six steps stand in one column
        grid.add_column(width=1)
        grid.add_column(ratio=5, overflow="fold")
        grid.add_column(ratio=6, overflow="fold")
        for item in boxes:
            mark, tone = _MARKS[sections.mark(item)]
            grid.add_row(Text(mark, style=f"bold {tone}"), _text(item.item), _answer(item))
        yield Padding(grid, (0, 0, 0, 3), expand=True)


def _answer(item: Box) -> Text:
    measured, needs = clean(item.measured), clean(item.needs)
    return Text.assemble(
        measured, "\n" if measured and needs else "", (f"needs {needs}" if needs else "", "yellow"), overflow="fold"
    )


# --- the tables ---------------------------------------------------------------------------------


def _replays(report: Report) -> Iterator[RenderableType]:
    if not report.replays:
        return
    yield _heading("Replays")
    table = _table("replay", "precision", "loss", "grad norm", "non-finite", "seconds", numbers=(2, 3, 4, 5))
    for run in report.replays:
        numbers = (words.number(value) for value in (run.loss, run.global_grad_norm, run.nonfinite))
        table.add_row(_text(run.name), _text(run.precision), *numbers, f"{run.seconds:.1f}")
    yield table


def _interventions(report: Report) -> Iterator[RenderableType]:
    if not report.interventions:
        return
    yield _heading("Interventions: changed in memory, then replayed")
    table = _table(
        "change", "measure", "before → after", "should be", "explained", numbers=(2, 3, 4), ratios=(1, 0, 0, 0, 0)
    )
    for record in report.interventions:
        table.add_row(
            _two_lines(record.change or record.name, f"for {record.cause}"),
            _text(record.measure),
            f"{words.number(record.before)} → {words.number(record.after)}",
            words.number(record.baseline),
            Text(words.percent(record.explained), style="bold" if (record.explained or 0) >= 0.5 else ""),
        )
    yield table


def _view(view: tables.View) -> Iterator[RenderableType]:
    shown = len(view.cells)
    yield _heading(view.heading + (f" ({shown} of {view.total})" if shown < view.total else ""))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("", width=1)
    for column in view.columns:
        table.add_column(
            column.heading,
            justify="right" if column.is_number else "left",
            overflow="fold",
        )
    for cells, guilty in zip(view.cells, view.guilty, strict=True):
        table.add_row(
            Text("▶" if guilty else "", style="red"), *(_text(cell, "bold" if guilty else "") for cell in cells)
        )
    yield table


def _footer(report: Report) -> Iterator[RenderableType]:
    inputs = sections.inputs(report)
    if inputs:
        yield _heading("Inputs")
        grid = _grid()
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, text in inputs:
            grid.add_row(_text(name), _text(text))
        yield _indented(grid)
    unanswered = sections.unanswered(report)
    if report.notes or unanswered:
        yield _heading("Notes")
        yield from (_item("·", note) for note in report.notes)
        yield from (_item("·", f"{', '.join(group.rules)} {group.status}: {group.reason}") for group in unanswered)
    said = ". ".join(part for part in (sections.coverage(report), f"stability_probe {report.probe_version}") if part)
    yield Text(f"\n {clean(said)}", style="dim")


# --- pieces -------------------------------------------------------------------------------------


def _text(value: object, style: str = "") -> Text:
    return Text(clean(value), style=style, overflow="fold")


def _two_lines(first: object, second: str) -> Text:
    """A cell with what it says, and under it, dimmed, what that is about."""
    return Text.assemble(clean(first), (f"\n{clean(second)}" if second else "", "dim"), overflow="fold")


def _heading(words_: str) -> RenderableType:
    return Group(Text(), Rule(Text(words_, style="bold"), align="left", style="dim", characters="─"))


def _item(mark: str, words_: str, tone: str = "dim") -> RenderableType:
    grid = _grid()
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(mark, style=tone), _text(words_))
    return _indented(grid)


def _command(command: str) -> Text:
    return Text("$ " + clean(command, keep_newlines=True), style="cyan", overflow="fold")


def _grid() -> Table:
    return Table.grid(padding=(0, 2, 0, 0), pad_edge=False)


def _indented(content: RenderableType) -> RenderableType:
    return Padding(content, (0, 0, 0, 1))


def _table(*headings: str, numbers: tuple[int, ...] = (), ratios: tuple[int, ...] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", expand=any(ratios))
    for i, heading in enumerate(headings):
        table.add_column(
            heading,
            justify="right" if i in numbers else "left",
            ratio=(ratios[i] or None) if ratios else None,
            # Where some columns share what is left, no other may take all of it.
            min_width=12 if ratios and ratios[i] else None,
            max_width=26 if ratios and not ratios[i] else None,
            overflow="fold",
        )
    return table
