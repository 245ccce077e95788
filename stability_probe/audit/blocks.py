"""The audit of one unit of a shard: rows in, flagged rows out. What every worker process runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stability_probe.audit.rows import flagged_rows
from stability_probe.audit.shards import format_of
from stability_probe.audit.shards.base import unreadable

if TYPE_CHECKING:
    from stability_probe.audit.baseline import Baseline
    from stability_probe.audit.vocabulary import Vocabulary

ROUND_TRIP_ROWS = 1  # of a unit's rows beside the suspicious ones: a wrong tokenizer shows in any row
BLOCK_TOKENS = 2**20


@dataclass(frozen=True)
class Settings:
    """What all units share; sent to every worker once."""

    row_tokens: int
    vocab_size: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    vocabulary: Vocabulary | None = None
    baseline: Baseline | None = None


@dataclass(frozen=True)
class Unit:
    path: str
    start: int
    stop: int

    @property
    def key(self) -> str:
        return f"{self.path}:{self.start}:{self.stop}"


@dataclass(frozen=True)
class UnitResult:
    """`flagged` holds one plain record per flagged row: what a filter needs, and nothing that cannot be JSON."""

    unit: Unit
    rows: int
    tokens: int
    flagged: list[dict[str, Any]]


def audit_unit(unit: Unit, settings: Settings) -> UnitResult:
    """Read and audit one unit.

    Raises:
        ProbeError: the shard cannot be read.
    """
    path = Path(unit.path)
    encode = None if settings.vocabulary is None else settings.vocabulary.encode
    total_rows = total_tokens = 0
    flagged: list[dict[str, Any]] = []
    waiting: dict[int, list[tuple[int, NDArray[Any]]]] = {}
    held = 0
    try:
        for offset, ids in format_of(path).rows(path, unit.start, unit.stop, settings.row_tokens, encode):
            total_rows += 1
            total_tokens += len(ids)
            held += len(ids)
            # Rows of like length go together, so that padding never more than doubles the work.
            waiting.setdefault(len(ids).bit_length(), []).append((offset, ids))
            if held >= BLOCK_TOKENS:
                flagged.extend(_audit_waiting(unit.path, waiting, settings))
                waiting, held = {}, 0
    except (OSError, UnicodeError, MemoryError) as error:
        raise unreadable(path, str(error) or type(error).__name__) from error
    flagged.extend(_audit_waiting(unit.path, waiting, settings))
    return UnitResult(unit, total_rows, total_tokens, sorted(flagged, key=lambda record: record["offset"]))


def _audit_waiting(
    path: str, waiting: dict[int, list[tuple[int, NDArray[Any]]]], settings: Settings
) -> list[dict[str, Any]]:
    found = []
    for rows in waiting.values():
        longest = max(len(ids) for _, ids in rows)
        if longest == 0:
            continue
        matrix, kept = _matrix([ids for _, ids in rows], longest)
        for row in flagged_rows(
            matrix,
            mask_BT=kept,
            vocab_size=settings.vocab_size,
            vocabulary=settings.vocabulary,
            baseline=settings.baseline,
            pad_id=settings.pad_id,
            eos_id=settings.eos_id,
            round_trip_rows=ROUND_TRIP_ROWS,
        ):
            offset, ids = rows[row.row]
            found.append({"shard": path, "offset": int(offset), "ids": _around(row.spans, ids), "audit": row})
    return [_record(one) for one in found]


def _matrix(rows: list[NDArray[Any]], longest: int) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    if all(len(ids) == longest for ids in rows):
        return np.stack(rows), None
    matrix = np.zeros((len(rows), longest), np.result_type(*(ids.dtype for ids in rows)))
    kept = np.zeros(matrix.shape, np.bool_)
    for i, ids in enumerate(rows):
        matrix[i, : len(ids)] = ids
        kept[i, : len(ids)] = True
    return matrix, kept


def _around(spans: tuple[Any, ...], ids: NDArray[Any]) -> list[int]:
    """The first tokens of the first span: enough for a preview, little to keep."""
    start = spans[0].start if spans else 0
    return [int(token) for token in ids[start : start + 24]]


def _record(found: dict[str, Any]) -> dict[str, Any]:
    from stability_probe.schema import plain

    audit = plain(found["audit"])
    return {**{key: found[key] for key in ("shard", "offset", "ids")}, **audit}
