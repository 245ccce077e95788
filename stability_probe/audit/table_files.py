"""The flagged rows of a data set as CSV or parquet: shard and offset first, as a filter needs them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from stability_probe.errors import ProbeError

SUFFIXES = (".csv", ".parquet")
_NUMBERS = ("score", "unigram_entropy_bits", "duplicate_ngram_fraction", "reference_score")
COLUMNS = ("shard", "offset", "tokens", *_NUMBERS, "flags", "reason", "spans")
_AT_ONCE = 4096


def write_table(records: Iterable[dict[str, Any]], path: Path) -> None:
    """Write all records; the file appears whole or not at all.

    Raises:
        ProbeError: the file cannot be written, or pyarrow is missing for parquet.
    """
    scratch = path.with_name(path.name + ".tmp")
    try:
        (_write_csv if path.suffix == ".csv" else _write_parquet)(map(_flat, records), scratch)
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise ProbeError(
            f"cannot write {path}", error.strerror or str(error), "free some space, or choose another place"
        ) from error


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    flat = {name: record[name] for name in ("shard", "offset", "tokens", *_NUMBERS, "reason")}
    spans = [[span["start"], span["end"], span["kind"]] for span in record["spans"]]
    return {**flat, "flags": ";".join(record["flags"]), "spans": json.dumps(spans)}


def _write_csv(records: Iterator[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(records)


def _write_parquet(records: Iterator[dict[str, Any]], path: Path) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ProbeError(
            f"cannot write {path}",
            "the pyarrow library is not installed",
            'pip install "stability-probe[parquet]", or write .csv',
        ) from error
    kinds = {"offset": pyarrow.int64(), "tokens": pyarrow.int64(), **dict.fromkeys(_NUMBERS, pyarrow.float64())}
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.string())) for name in COLUMNS])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        while some := list(islice(records, _AT_ONCE)):
            writer.write_table(pyarrow.Table.from_pylist(some, schema))
