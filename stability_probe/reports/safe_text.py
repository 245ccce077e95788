"""Text from other people's files, made fit to print: tokens, parameter names, paths, log lines.

A token is whatever bytes the training data held. Printed raw it can move the cursor, recolour the terminal,
reverse the reading order of a verdict, or become markup in an issue. Everything that a report prints passes here.
"""

from __future__ import annotations

import re
import unicodedata

# Cc control, Cf format (bidi marks, zero-width, tags), Cs surrogate, Co private use, Cn unassigned,
# Zl and Zp line separators: none of them has a glyph, most of them act.
_ACTING = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_COMBINING = frozenset({"Mn", "Me", "Mc"})
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
# Vietnamese, Thai and Devanagari stack two to three marks on a letter; more is decoration that overruns lines.
_MAX_COMBINING = 4


def clean(value: object, keep_newlines: bool = False) -> str:
    """`value` as text in which every character is visible and none of them acts.

    Control, format, bidirectional, private and unassigned characters and lone surrogates are written as
    escapes (`\\x1b`, `\\u202e`); a letter keeps at most four combining marks. Other text is left as it is.
    """
    out: list[str] = []
    marks = 0
    for char in str(value):
        category = unicodedata.category(char)
        marks = marks + 1 if category in _COMBINING else 0
        if char == "\n" and keep_newlines:
            out.append(char)
        elif category in _ACTING or marks > _MAX_COMBINING or (marks and not out):
            out.append(_escape(char))
        else:
            out.append(char)
    return "".join(out)


def _escape(char: str) -> str:
    if char in _NAMED:
        return _NAMED[char]
    point = ord(char)
    return f"\\x{point:02x}" if point < 0x100 else f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters, the middle left out: both ends of a name or a path tell it apart."""
    if len(text) <= limit:
        return text
    head = (limit - 1) // 2
    return f"{text[:head]}…{text[len(text) - (limit - 1 - head) :]}"


# --- Markdown -----------------------------------------------------------------------------------

_MARKUP = re.compile(r"[\\`*\[\]<>|~&$]")
_EDGE_UNDERSCORE = re.compile(r"(?<![^\W_])_|_(?![^\W_])")
_BLOCK_START = re.compile(r"^(\s*)(?=#{1,6}(?:\s|$)|[+-](?:\s|$)|--|=)")
_ORDERED_START = re.compile(r"^(\s*\d+)(?=[.)](?:\s|$))")
_LINK = re.compile(r"://|\bwww\.", re.IGNORECASE)
_NOT_PLAIN = re.compile(r"[^\w ,;/-]")
_MENTION = re.compile(r"(?<=[@#!%])(?=\w)")


def prose(value: object) -> str:
    """`value` as one line of Markdown in which nothing is markup, a link, a mention or a reference."""
    text = _MARKUP.sub(lambda match: "\\" + match.group(), clean(value))
    text = _EDGE_UNDERSCORE.sub(r"\\_", text)
    text = _BLOCK_START.sub(r"\1\\", text)
    text = _ORDERED_START.sub(r"\1\\", text)
    text = _LINK.sub(lambda match: match.group().replace(":", "\\:").replace(".", "\\."), text)
    return _MENTION.sub("\u200b", text)  # a zero-width space: GitHub and GitLab then notify nobody


def code(value: object) -> str:
    """`value` as a Markdown code span that also holds inside a table cell.

    A code span cannot hold a pipe in a table (the cell ends there, even inside the span), so text with pipes or
    backticks becomes `<code>` with numeric entities, which no Markdown parser takes for structure.
    """
    text = clean(value)
    if not text.strip():
        return f"<code>{'&nbsp;' * len(text)}</code>" if text else ""
    if "|" in text or "`" in text:
        return f"<code>{_NOT_PLAIN.sub(lambda match: f'&#{ord(match.group())};', text)}</code>"
    padding = " " if text.startswith(" ") and text.endswith(" ") else ""  # one space at both ends would be eaten
    return f"`{padding}{text}{padding}`"


def fence(value: object, language: str = "") -> str:
    """`value` as a fenced block; the fence is longer than any run of backticks inside."""
    text = clean(value, keep_newlines=True)
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks}{language}\n{text}\n{ticks}"
