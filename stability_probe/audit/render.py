"""One audit, told three ways: JSON, terminal, Markdown. Everything that came from a file passes `safe_text`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stability_probe.audit.legend import CANDIDATE, DETECTORS, NUMBERS
from stability_probe.reports.safe_text import clean, code, prose, shorten
from stability_probe.schema import plain

if TYPE_CHECKING:
    from rich.console import Console

    from stability_probe.audit.result import RowAudit

MOST_LINES = 40
_WORD_STYLE = {"SKIP": "bold red", "DROP ROWS": "bold yellow", "KEEP": "bold green"}
_STYLE = {"critical": "bold red", "high": "red", "medium": "yellow", "info": "dim"}


def row_json(file: str, row: RowAudit) -> dict[str, Any]:
    """One row as INTERFACE's `batch-audit` wants it."""
    record: dict[str, Any] = plain(row)
    for note in record["notes"]:
        note["spans"] = [dict(span) for span in note["spans"]]
    return {"file": file, **record}


def _worst(row: dict[str, Any]) -> str:
    return str(row["notes"][0]["severity"]) if row["notes"] else ""


def _shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Flagged rows, worst first; then those worth a look."""
    noted = [row for row in rows if _worst(row) not in ("", "info")]
    return sorted(noted, key=lambda row: -row["score"])[:MOST_LINES]


def _detectors(rows: list[dict[str, Any]]) -> list[str]:
    seen = {note["detector"] for row in rows for note in row["notes"]}
    return sorted(seen & DETECTORS.keys(), key=lambda name: int(name[1:]))


def counts_line(report: dict[str, Any]) -> str:
    total, flagged = report["rows_total"], report["rows_flagged"]
    return f"{_rows(total)}, {report['tokens_total']} tokens, {_rows(flagged)} flagged"


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


def verdict_word(report: dict[str, Any]) -> str:
    """A batch is kept or skipped as a whole; of a data set, rows are filtered."""
    if report["skip"]:
        return "SKIP"
    return "DROP ROWS" if report["rows_flagged"] else "KEEP"


def terminal(report: dict[str, Any], console: Console) -> None:
    """Verdict first, then the rows, then what the numbers mean."""
    from rich.table import Table
    from rich.text import Text

    word = verdict_word(report)
    console.print(Text.assemble((word, _WORD_STYLE[word]), " ", clean(report["reason"])))
    console.print(Text(counts_line(report), style="dim"))
    shown = _shown(report["rows"])
    if shown:
        table = Table(show_edge=False, pad_edge=False)
        for name in ("row", "score", "H", "dup", "ref"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("finding", overflow="fold", ratio=1)
        for row in shown:
            cells = [str(row["row"]), f"{row['score']:.2f}", f"{row['unigram_entropy_bits']:.1f}"]
            cells += [f"{row['duplicate_ngram_fraction']:.2f}", f"{row['reference_score']:.2f}"]
            finding = Text()
            if report["files"] > 1:
                finding.append(shorten(clean(row["file"]), 48) + "\n", style="dim")
            for note in row["notes"]:
                if note["severity"] != "info":
                    finding.append(f"{note['severity']} {note['slug']} ", style=_STYLE[note["severity"]])
                    finding.append(f"{note['detector']}: {clean(note['detail'])}\n")
            for preview in row.get("previews", ()):
                finding.append(f"“{clean(preview)}”\n", style="italic")
            finding.rstrip()
            table.add_row(*(Text(cell) for cell in cells), finding)
        console.print(table)
    for name, meaning in NUMBERS.items():
        if shown and (name != "p" or any(row.get("p_value") is not None for row in shown)):
            console.print(Text(f"  {name:6s} {meaning}", style="dim"))
    for name in _detectors(shown):
        console.print(Text(f"  {name:6s} {DETECTORS[name]}", style="dim"))
    if shown:
        console.print(Text(CANDIDATE, style="dim"))
    for note in report["notes"]:
        console.print(Text(clean(note), style="dim"))


def plain_text(report: dict[str, Any]) -> str:
    """The terminal's report without colour, 120 columns wide."""
    import io

    from rich.console import Console

    stream = io.StringIO()
    terminal(report, Console(file=stream, width=120, no_color=True, force_terminal=False))
    return stream.getvalue()


def markdown(report: dict[str, Any]) -> str:
    """The same for an issue."""
    title = f"## Token audit: {verdict_word(report).lower()}"
    lines = [title, "", prose(report["reason"]), "", counts_line(report)]
    shown = _shown(report["rows"])
    if shown:
        lines += ["", "| file | row | score | H | dup | ref | finding | text |"]
        lines += ["| --- | ---: | ---: | ---: | ---: | ---: | --- | --- |"]
        lines += [f"| {' | '.join(_cells(row))} |" for row in shown]
        lines += ["", *(f"- {name}: {meaning}" for name, meaning in NUMBERS.items())]
        lines += [f"- {name}: {DETECTORS[name]}" for name in _detectors(shown)]
        lines += ["", CANDIDATE]
    if report["notes"]:
        lines += ["", *(f"- {prose(note)}" for note in report["notes"])]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    findings = "; ".join(
        f"{note['severity']} {note['slug']} {note['detector']}: {prose(note['detail'])}"
        for note in row["notes"]
        if note["severity"] != "info"
    )
    cells = [code(shorten(row["file"], 60)), str(row["row"]), f"{row['score']:.2f}"]
    cells += [f"{row['unigram_entropy_bits']:.1f}", f"{row['duplicate_ngram_fraction']:.2f}"]
    return [*cells, f"{row['reference_score']:.2f}", findings, " ".join(map(code, row.get("previews", ())))]
