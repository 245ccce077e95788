"""JSON lines with ids (input_ids, tokens, ids) or text: one line a row, its offset in bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stability_probe.audit.shards.base import IDS, TEXT, UNIT_BYTES, Encode, Row, cut, needs_tokenizer, unreadable


def accepts(path: Path) -> bool:
    return path.suffix in (".jsonl", ".ndjson")


def units(path: Path, row_tokens: int) -> list[tuple[int, int]]:
    try:
        return cut(path.stat().st_size, UNIT_BYTES)
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from error


def rows(path: Path, start: int, stop: int, row_tokens: int, encode: Encode | None) -> Iterator[Row]:
    """The lines that start in [start, stop)."""
    with path.open("rb") as file:
        if start:
            file.seek(start - 1)
            file.readline()  # the line that straddles the border belongs to the unit before
        while (at := file.tell()) < stop:
            line = file.readline()
            if line.strip():
                yield at, _ids(path, at, line, encode)


def _ids(path: Path, at: int, line: bytes, encode: Encode | None) -> np.ndarray:
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError("the line is not an object")
        found = next((record[name] for name in IDS if name in record), None)
        if found is not None:
            ids = np.array(found)
            if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
                raise ValueError("the ids are not a list of integers")
            return ids.astype(np.int64)
        text = next((record[name] for name in TEXT if isinstance(record.get(name), str)), None)
    except (ValueError, OverflowError, RecursionError) as error:
        raise unreadable(path, f"line at byte {at}: {error}") from error
    if text is None:
        raise unreadable(path, f"line at byte {at} has neither {', '.join(IDS)} nor {', '.join(TEXT)}")
    if encode is None:
        raise needs_tokenizer(path)
    return encode([text])[0]
