"""What a data-set audit has finished, line by line, so that a killed run goes on where it stopped.

Every unit is one line that holds both its counts and its flagged rows. A line that a kill cut short is thrown away
and its unit is done again: nothing is counted twice and nothing is lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stability_probe.audit.blocks import Unit, UnitResult


class Journal:
    """The finished units of one run; `signature` names the inputs and options that must be the same to go on."""

    def __init__(self, path: Path, signature: str) -> None:
        self.path = path
        self.done: set[str] = set()
        self.rows = self.tokens = self.flagged = 0
        good_bytes = self._read(signature)
        self._file = path.open("r+b" if good_bytes else "wb")
        if good_bytes:
            self._file.truncate(good_bytes)
            self._file.seek(good_bytes)
        else:
            self._file.write(json.dumps({"signature": signature}).encode() + b"\n")

    def _read(self, signature: str) -> int:
        """Take over the lines of an earlier run. Returns the length of the good part, 0 where there is none."""
        good = 0
        try:
            with self.path.open("rb") as file:
                if json.loads(file.readline() or b"{}").get("signature") != signature:
                    return 0
                good = file.tell()
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._count(json.loads(line))
                    good += len(line)
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return good
        return good

    def _count(self, entry: dict[str, Any]) -> None:
        rows, tokens, flagged = int(entry["rows"]), int(entry["tokens"]), len(entry["flagged"])
        if entry["unit"] not in self.done:
            self.done.add(entry["unit"])
            self.rows, self.tokens, self.flagged = self.rows + rows, self.tokens + tokens, self.flagged + flagged

    def has(self, unit: Unit) -> bool:
        return unit.key in self.done

    def add(self, result: UnitResult) -> None:
        """Write one unit; on disk before the next is begun."""
        entry = {"unit": result.unit.key, "rows": result.rows, "tokens": result.tokens, "flagged": result.flagged}
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._count(entry)

    def records(self) -> Iterator[dict[str, Any]]:
        """The flagged rows of all finished units, read from disk one unit at a time."""
        self._file.flush()
        with self.path.open("rb") as file:
            file.readline()
            for line in file:
                yield from json.loads(line)["flagged"]

    def close(self, delete: bool) -> None:
        self._file.close()
        if delete:
            self.path.unlink(missing_ok=True)
