"""The catalogue as one Markdown page: the text of `probe rules` and `probe explain`, and nothing beside it."""

from __future__ import annotations

from collections.abc import Iterator

from stability_probe.judge import Page, Rule, Threshold
from stability_probe.reports import words
from stability_probe.reports.catalogue import ANSWERS, PARTS, SECTIONS
from stability_probe.schema import Remedy

INTRODUCTION = """\
# The causes

What `probe replay` can name, in causal order: where two causes explain the excess equally well, the higher one wins.
`probe explain SLUG` prints one of them. This page is made from the rules' own text by `make docs`; change the rule, not
the page."""


def render_catalogue(causes: tuple[Rule, ...]) -> str:
    """Every section's causes as a list of claims, then each cause in full; ends in a newline."""
    return "\n\n".join([INTRODUCTION, *_contents(causes), *_sections(causes)]) + "\n"


def _members(section: int, causes: tuple[Rule, ...]) -> dict[str, tuple[Page, dict[str, Threshold]]]:
    """By slug; the answers that no rule gives stand in the last section."""
    found = {cause.slug: (cause.page, cause.thresholds) for cause in causes if cause.order // 100 == section}
    if section == max(SECTIONS):
        found |= {slug: (page, {}) for slug, page in ANSWERS.items()}
    return found


def _contents(causes: tuple[Rule, ...]) -> Iterator[str]:
    for section, heading in SECTIONS.items():
        members = _members(section, causes)
        if members:
            lines = (f"- [`{slug}`](#{slug}) {page.claim}" for slug, (page, _) in members.items())
            yield "\n".join((f"**{section} {heading}**", "", *lines))


def _sections(causes: tuple[Rule, ...]) -> Iterator[str]:
    for section, heading in SECTIONS.items():
        members = _members(section, causes)
        if members:
            yield f"## {section} {heading}"
        for slug, (page, thresholds) in members.items():
            yield from _page(slug, page, thresholds)


def _page(slug: str, page: Page, thresholds: dict[str, Threshold]) -> Iterator[str]:
    yield f"### {slug}"
    yield f"*{page.title}.* {page.claim}"
    for heading, field in PARTS:
        text = getattr(page, field)
        if text:
            yield f"**{heading}.** {text}"
    if thresholds:
        yield "\n".join(("| limit | value | why | source |", "|---|---|---|---|", *map(_limit, thresholds.items())))
    if page.remedies:
        yield "\n".join(("**What to do.**", "", *(_remedy(n, one) for n, one in enumerate(page.remedies, start=1))))
    if page.references:
        yield "\n".join(("**Read more.**", "", *(f"- {reference}" for reference in page.references)))


def _limit(named: tuple[str, Threshold]) -> str:
    name, limit = named
    cells = (name, words.with_unit(limit.value, limit.unit), limit.reason, limit.source)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _remedy(number: int, remedy: Remedy) -> str:
    return f"{number}. {remedy.action}" + (f" `{remedy.command}`" if remedy.command else "")
