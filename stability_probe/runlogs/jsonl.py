"""One JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def accepts(path: Path) -> bool:
    return path.suffix.lower() in {".jsonl", ".ndjson"}


def read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The objects; lines that are not one are counted (a run that is killed leaves half a line behind)."""
    records: list[dict[str, Any]] = []
    bad = 0
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict):
                records.append(record)
            else:
                bad += 1
    return records, bad
