"""Hostile text: no character acts, nothing becomes markup. Laws, by hypothesis."""

from __future__ import annotations

import dataclasses
import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.cells import cell_len

from stability_probe.reports import render
from stability_probe.reports.safe_text import clean, code, fence, prose, shorten
from stability_probe.schema import Location, Remedy
from tests.report_samples import repeated

NASTY = st.text(
    st.one_of(
        st.characters(),
        st.sampled_from(list("|`<>\\*_[]()!#@~&$=+-.:/ \n\r\t\x00\x1b\x9b\u202e\u200b\u2066\ufeff\ud800\u0300\u4e2d")),
    ),
    max_size=40,
)
PARSER = MarkdownIt("commonmark", {"html": True, "linkify": False}).enable(["table", "strikethrough"])


@given(NASTY)
def test_clean_text_only_shows(text):
    cleaned = clean(text)
    assert all(unicodedata.category(char) not in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"} for char in cleaned)
    cleaned.encode("utf-8")
    assert clean(cleaned) == cleaned


@pytest.mark.parametrize(
    "text", ["plain", "naïve café", "日本語のテスト", "Tiếng Việt", "हिन्दी", "emoji 🙂", "∇·v̂ ≪ g²"]
)
def test_ordinary_text_stays_as_it_is(text):
    assert clean(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\t\r", "a\\nb\\t\\r"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202eevil", "\\u202eevil"),
        ("\ud800", "\\ud800"),
        ("e" + "\u0301" * 6, "e" + "\u0301" * 4 + "\\u0301" * 2),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_acting_characters_are_shown_as_escapes(text, shown):
    assert clean(text) == shown


@given(NASTY, st.integers(3, 50))
def test_shorten_keeps_both_ends(text, limit):
    short = shorten(text, limit)
    assert len(short) <= limit
    assert short == text if len(text) <= limit else (short[0] == text[0] and short[-1] == text[-1])


def _cells(markdown_cell: str) -> list[list]:
    """The inline tokens of every cell of a one-row table that holds the cell in its first column."""
    tokens = PARSER.parse(f"| a | b |\n| --- | --- |\n| {markdown_cell} | end |\n")
    assert [token.type for token in tokens].count("tr_open") == 2, "one head and one row"
    inlines = [token.children or [] for token in tokens if token.type == "inline"]
    return inlines[2:]


def _shown(children: list) -> str:
    return "".join(child.content for child in children if child.type not in ("html_inline",))


@settings(max_examples=400, deadline=None)
@given(NASTY)
def test_code_spans_hold_any_text_in_a_table(text):
    first, last = _cells(code(text))
    assert {child.type for child in first} <= {"code_inline", "text", "html_inline", "text_special"}
    assert {child.content for child in first if child.type == "html_inline"} <= {"<code>", "</code>"}
    assert _shown(first).replace("\xa0", " ").strip() == clean(text).replace("\xa0", " ").strip()
    assert _shown(last) == "end"


@settings(max_examples=400, deadline=None)
@given(NASTY)
def test_prose_is_never_markup(text):
    first, last = _cells(prose(text))
    assert {child.type for child in first} <= {"text", "text_special"}
    assert _shown(first).replace("\u200b", "").strip() == clean(text).strip()
    assert _shown(last) == "end"


@settings(max_examples=400, deadline=None)
@given(NASTY)
def test_prose_starts_no_block(text):
    tokens = PARSER.parse(f"{prose(text)}\n\n- {prose(text)}\n")
    assert {token.type for token in tokens} <= {
        "paragraph_open", "paragraph_close", "inline",
        "bullet_list_open", "bullet_list_close", "list_item_open", "list_item_close",
    }  # fmt: skip
    assert sum(token.type == "bullet_list_open" for token in tokens) == 1


@pytest.mark.parametrize("text", ["see https://evil.example/x", "WWW.evil.example", "mail me@evil.example"])
def test_prose_links_nowhere(text):
    """Every `://`, `www.` and address is broken, by a backslash or a space, for autolinks not to find it."""
    assert not re.search(r"(?<!\\)://|www\.|\w@\w", prose(text), re.IGNORECASE)


def test_prose_mentions_nobody():
    assert prose("ping @team about #12 and !3") == "ping @\u200bteam about #\u200b12 and !\u200b3"


@settings(deadline=None)
@given(NASTY)
def test_fences_hold_any_command(text):
    tokens = PARSER.parse(fence(text, "sh") + "\n\nafter\n")
    assert [token.type for token in tokens] == ["fence", "paragraph_open", "inline", "paragraph_close"]


def _poisoned(text: str):
    report = repeated()
    verdict = dataclasses.replace(
        report.verdict,
        cause=text or "x",
        summary=text,
        location=Location(text, 1, (1,), ((1, 2),), (0,), ((0, 1, 2),), (text,)),
        remedies=(Remedy(text, text),),
        healthy_notes=(text,),
    )
    rows = [{"row": 0, "loss": 1.0, "flags": [text], "spans": [(0, 2, text, text)], "preview": text, "reason": text}]
    tables = {
        "rows": rows,
        "modules": [{"module": text, "absmax": 1.0}],
        "parameters": [{"parameter": text, "grad_norm": 2.0}],
    }
    inputs = {"ckpt": {"path": text, text: text}}
    return dataclasses.replace(report, verdict=verdict, tables=tables, inputs=inputs, notes=(text,), probe_version=text)


@settings(max_examples=30, deadline=None)
@given(NASTY)
def test_a_poisoned_report_neither_acts_nor_overflows(text):
    report = _poisoned(text)
    shown = render(report, "terminal", width=80)
    assert all(char == "\n" or unicodedata.category(char) not in {"Cc", "Cf", "Cs"} for char in shown)
    assert max(map(cell_len, shown.splitlines())) <= 80
    tokens = PARSER.parse(render(report, "markdown"))
    html = {token.content.strip() for token in tokens if token.type == "html_block"}
    assert all(block.startswith(("<details>\n<summary>", "</details>")) for block in html)
    inline = [child for token in tokens for child in token.children or []]
    assert {child.content for child in inline if child.type == "html_inline"} <= {
        "<code>",
        "</code>",
        "<sub>",
        "</sub>",
    }
    assert not {"link_open", "image"} & {child.type for child in inline}
    render(report, "json").encode("ascii")
