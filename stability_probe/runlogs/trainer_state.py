"""`trainer_state.json`, which the transformers Trainer keeps in every checkpoint, and JSON lists of records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stability_probe.errors import ProbeError


def accepts(path: Path) -> bool:
    return path.suffix.lower() == ".json"


def read(path: Path) -> tuple[list[dict[str, Any]], int]:
    try:
        state = json.loads(path.read_text(encoding="utf-8-sig", errors="replace"))
    except (ValueError, RecursionError) as error:
        hint = "the file may be cut short: give the trainer_state.json of another checkpoint"
        raise ProbeError(f"cannot read the log {path}", str(error), hint) from error
    history = state.get("log_history") if isinstance(state, dict) else state
    if not isinstance(history, list):
        why = "it is neither a Trainer's state (no list under log_history) nor a list of records"
        raise ProbeError(f"cannot read the log {path}", why, "give trainer_state.json, or the log as .jsonl or .csv")
    records = [record for record in history if isinstance(record, dict)]
    return records, len(history) - len(records)
