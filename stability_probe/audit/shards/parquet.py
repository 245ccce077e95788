"""Parquet with a column of ids (input_ids, tokens, ids) or text: one record a row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stability_probe.audit.shards.base import IDS, TEXT, Encode, Row, needs_tokenizer, unreadable

BATCH = 256


def accepts(path: Path) -> bool:
    return path.suffix in (".parquet", ".pq")


def _file(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise unreadable(path, "the pyarrow library is not installed", "pip install pyarrow") from error
    try:
        return pyarrow.parquet.ParquetFile(path, memory_map=False)
    except (OSError, pyarrow.ArrowException) as error:
        raise unreadable(path, str(error)) from error


def _column(path: Path, file: Any) -> str:
    names = file.schema_arrow.names
    column = next((name for name in (*IDS, *TEXT) if name in names), None)
    if column is None:
        raise unreadable(path, f"its columns are {', '.join(names)[:200]}; none of {', '.join((*IDS, *TEXT))}")
    return column


def units(path: Path, row_tokens: int) -> list[tuple[int, int]]:
    """One unit a row group, in records."""
    file = _file(path)
    _column(path, file)
    edges = [0]
    for group in range(file.num_row_groups):
        edges.append(edges[-1] + file.metadata.row_group(group).num_rows)
    return [(low, high) for low, high in itertools.pairwise(edges) if high > low]


def rows(path: Path, start: int, stop: int, row_tokens: int, encode: Encode | None) -> Iterator[Row]:
    file = _file(path)
    column = _column(path, file)
    if column in TEXT and encode is None:
        raise needs_tokenizer(path)
    group = [low for low, _ in units(path, row_tokens)].index(start)
    full = [i for i in range(file.num_row_groups) if file.metadata.row_group(i).num_rows]
    at = start
    for batch in file.iter_batches(BATCH, row_groups=[full[group]], columns=[column]):
        values = batch.column(0)
        if column in TEXT and encode is not None:
            found = encode([str(value or "") for value in values.to_pylist()])
        else:
            try:
                found = [np.asarray(value.values if value.is_valid else [], np.int64) for value in values]
            except (ValueError, TypeError, AttributeError) as error:
                raise unreadable(path, f"column {column} does not hold lists of ids: {error}") from error
        for ids in found:
            yield at, ids
            at += 1
