"""datatrove's `.ds`: tokens of 2 or 4 bytes, with the documents' ends in `.ds.index` (uint64) beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from stability_probe.audit.shards.base import Encode, Row, mapped, stream_rows, stream_units


def accepts(path: Path) -> bool:
    return path.suffix == ".ds"


def _tokens(path: Path) -> NDArray[Any]:
    """The token width is where the last document's end meets the file's size; 2 bytes where there is no index."""
    index = path.with_name(path.name + ".index")
    width = 2
    if index.is_file():
        ends = mapped(index, "<u8")
        if len(ends) and int(ends[-1]) * 4 == path.stat().st_size:
            width = 4
    return mapped(path, f"<u{width}")


def units(path: Path, row_tokens: int) -> list[tuple[int, int]]:
    return stream_units(len(_tokens(path)), row_tokens)


def rows(path: Path, start: int, stop: int, row_tokens: int, encode: Encode | None) -> Iterator[Row]:
    return stream_rows(_tokens(path), start, stop, row_tokens)
