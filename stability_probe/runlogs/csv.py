"""Comma- or tab-separated values with a header, charts exported from W&B among them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from stability_probe.errors import ProbeError


def accepts(path: Path) -> bool:
    return path.suffix.lower() in {".csv", ".tsv"}


def read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows under the header's names; empty cells are left out, rows longer than the header are counted as bad."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        lines = (line.replace("\0", "") for line in file)  # csv refuses NUL bytes, which a crashed machine leaves
        rows = csv.DictReader(lines, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        try:
            parsed = list(rows)
        except csv.Error as error:
            hint = "export the log again as comma-separated values with one header line"
            raise ProbeError(f"cannot read the log {path}", str(error), hint) from error
    whole = [row for row in parsed if None not in row]
    return [_without_empty(row) for row in whole], len(parsed) - len(whole)


def _without_empty(row: dict[str, Any]) -> dict[str, Any]:
    # W&B names a chart's columns "run name - metric", and adds the spread as "…__MIN" and "…__MAX".
    return {name.rsplit(" - ", 1)[-1]: cell for name, cell in row.items() if cell is not None and cell.strip()}
