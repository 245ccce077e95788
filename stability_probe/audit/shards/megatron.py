"""Megatron's `.idx/.bin` pairs: one sequence a row."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stability_probe.audit.shards.base import UNIT_TOKENS, Encode, Row, mapped, unreadable

MAGIC = b"MMIDIDX\x00\x00"
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_HEADER_BYTES = 34


def accepts(path: Path) -> bool:
    return path.suffix == ".idx" or (path.suffix == ".bin" and path.with_suffix(".idx").exists())


@dataclass(frozen=True)
class _Index:
    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]


def _index(path: Path) -> _Index:
    path = path.with_suffix(".idx")
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from error
    if len(head) < _HEADER_BYTES or head[:9] != MAGIC:
        raise unreadable(path, "it does not start with MMIDIDX", "only the index of an mmap data set can be read")
    version, code, sequences, _ = struct.unpack("<QBQQ", head[9:])
    if version != 1 or code not in DTYPES:
        raise unreadable(path, f"version {version} with dtype code {code} does not hold token ids")
    whole = mapped(path, "u1")
    if _HEADER_BYTES + 12 * sequences > len(whole):
        raise unreadable(path, f"it is too short for {sequences} sequences", "it may be cut off")
    middle = _HEADER_BYTES + 4 * sequences
    lengths = whole[_HEADER_BYTES:middle].view("<i4")
    pointers = whole[middle : middle + 8 * sequences].view("<i8")
    if sequences and (int(lengths.min()) < 0 or int(pointers.min()) < 0):
        raise unreadable(path, "it holds negative lengths or offsets")
    return _Index(np.dtype(DTYPES[code]), lengths, pointers)


def units(path: Path, row_tokens: int) -> list[tuple[int, int]]:
    lengths = _index(path).lengths
    if not len(lengths):
        return []
    bounds = np.searchsorted(np.cumsum(lengths, dtype=np.int64), np.arange(UNIT_TOKENS, lengths.sum(), UNIT_TOKENS))
    edges = sorted({0, *(bounds + 1).tolist(), len(lengths)})
    return [(low, high) for low, high in itertools.pairwise(edges) if high <= len(lengths)]


def rows(path: Path, start: int, stop: int, row_tokens: int, encode: Encode | None) -> Iterator[Row]:
    index = _index(path)
    data = mapped(path.with_suffix(".bin"), "u1")
    for row in range(start, stop):
        low = int(index.pointers[row])
        high = low + int(index.lengths[row]) * index.dtype.itemsize
        if high > len(data):
            raise unreadable(path.with_suffix(".bin"), f"sequence {row} ends past the file", "it may be cut off")
        yield row, np.frombuffer(data[low:high].tobytes(), index.dtype)
