"""Pages that are made from the package's own text are current, and what the pages link to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stability_probe.judge import load_rules
from stability_probe.reports.catalogue import ANSWERS, SECTIONS
from stability_probe.reports.catalogue_markdown import render_catalogue
from tests.test_cli import invoke

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_page_of_the_causes_is_current():
    written = (ROOT / "docs" / "rules.md").read_text("utf-8")
    assert written == render_catalogue(load_rules()), "run `make docs`"


def test_the_command_prints_the_page():
    assert invoke("rules", "--format", "markdown").stdout == render_catalogue(load_rules())


def test_every_cause_and_answer_has_its_heading_and_its_remedies():
    page = render_catalogue(load_rules())
    headings = re.findall(r"^### (.+)$", page, re.M)
    assert headings == [*(rule.slug for rule in load_rules()), *ANSWERS]
    assert len(re.findall(r"^## ", page, re.M)) == len(SECTIONS)
    for rule in load_rules():
        assert all(remedy.action in page for remedy in rule.page.remedies), rule.slug


def test_a_cell_holds_no_bare_bar():
    rows = [line for line in render_catalogue(load_rules()).splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 5 for row in rows)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_links_to_is_there(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}, (
                target
            )
