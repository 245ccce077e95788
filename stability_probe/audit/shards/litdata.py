"""litdata chunks written for the TokensLoader: one stream of tokens per `.bin`, described by `index.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from stability_probe.audit.shards.base import Encode, Row, mapped, stream_rows, stream_units, unreadable

# litdata numbers torch's integer dtypes so; 20 on are newer releases' unsigned types, which it does not write.
DTYPES = {11: "u1", 12: "i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8"}


def accepts(path: Path) -> bool:
    return path.suffix == ".bin" and _index(path) is not None


def _index(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads((path.parent / "index.json").read_text("utf-8"))
        return data if any(chunk["filename"] == path.name for chunk in data["chunks"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _tokens(path: Path) -> NDArray[Any]:
    index = _index(path)
    try:
        if index is None:
            raise ValueError("index.json does not name it")
        (chunk,) = [chunk for chunk in index["chunks"] if chunk["filename"] == path.name]
        name, _, code = str(index["config"]["data_format"][0]).partition(":")
        if name not in ("no_header_tensor", "no_header_numpy") or index["config"].get("compression"):
            raise ValueError(f"format {name[:40]} or its compression is not a plain token stream")
        dtype, start = DTYPES[int(code)], (1 + int(chunk["chunk_size"]) + 1) * 4
        if start < 0:
            raise ValueError("a negative chunk size")
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise unreadable(path, f"litdata's index does not describe tokens: {error}") from error
    return mapped(path, dtype, start)


def units(path: Path, row_tokens: int) -> list[tuple[int, int]]:
    return stream_units(len(_tokens(path)), row_tokens)


def rows(path: Path, start: int, stop: int, row_tokens: int, encode: Encode | None) -> Iterator[Row]:
    return stream_rows(_tokens(path), start, stop, row_tokens)
