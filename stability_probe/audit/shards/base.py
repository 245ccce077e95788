"""What every shard format gives: units that can be read on their own, and the rows of a unit.

A format is a module with
    accepts(path) -> bool
    units(path, row_tokens) -> list[(start, stop)]            in the format's own coordinate
    rows(path, start, stop, row_tokens, encode) -> iterator   of (offset, ids)
The coordinate is rows where the file is one stream of tokens, documents where it has documents, bytes for lines.
`offset` is in the same coordinate: with the file's name it is what a filter needs to find the row again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stability_probe.errors import ProbeError

Row = tuple[int, NDArray[Any]]
Encode = Callable[[list[str]], list[NDArray[Any]]]
UNIT_TOKENS = 2**21  # two million tokens: a tenth of a second of audit, 8 MB of int32, little lost at a kill
UNIT_BYTES = 2**24
IDS = ("input_ids", "tokens", "ids")  # names of a column or array of ids …
TEXT = ("text", "content")  # … and of text


def cut(total: int, step: int) -> list[tuple[int, int]]:
    """[0, total) in pieces of `step`."""
    return [(low, min(total, low + step)) for low in range(0, total, max(1, step))]


def stream_units(tokens: int, row_tokens: int) -> list[tuple[int, int]]:
    """Units of whole rows; the last row of a file may be shorter than the others."""
    return cut(-(-tokens // row_tokens), max(1, UNIT_TOKENS // row_tokens))


def stream_rows(tokens: NDArray[Any], start: int, stop: int, row_tokens: int) -> Iterator[Row]:
    """Rows of one long array of tokens."""
    tokens = np.asarray(tokens)  # slicing a memmap itself costs a microsecond or two a row
    for row in range(start, stop):
        yield row, tokens[row * row_tokens : (row + 1) * row_tokens]


def mapped(path: Path, dtype: Any, byte_offset: int = 0) -> NDArray[Any]:
    """The file from `byte_offset` on as an array that is read as it is touched.

    Raises:
        ProbeError: the file cannot be opened, or does not hold a whole number of values.
    """
    kind = np.dtype(dtype)
    try:
        size = path.stat().st_size - byte_offset
        if size < 0 or size % kind.itemsize:
            raise ProbeError(
                f"cannot read {path} as {kind.name} tokens",
                f"its {size} bytes are no whole number of {kind.itemsize}-byte values",
                "the file may be cut off or of another format",
            )
        if size == 0:
            return np.zeros(0, kind)
        return np.memmap(path, kind, mode="r", offset=byte_offset)
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from error


def unreadable(path: Path, why: str, hint: str = "check the file, or leave it out of --batch") -> ProbeError:
    return ProbeError(f"cannot read {path}", why[:300], hint)


def needs_tokenizer(path: Path) -> ProbeError:
    return unreadable(path, "it holds text, not token ids", "give --tokenizer PATH, so that the text becomes ids")


def usable(path: Path, array: NDArray[Any]) -> NDArray[Any]:
    """Raise where the array holds no token ids."""
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise unreadable(path, f"it holds {array.dtype} values of shape {array.shape}, not token ids")
    return array


def array_units(array: NDArray[Any], row_tokens: int) -> list[tuple[int, int]]:
    if array.ndim == 1:
        return stream_units(len(array), row_tokens)
    return cut(len(array), max(1, UNIT_TOKENS // max(1, array.shape[1])))


def array_rows(array: NDArray[Any], start: int, stop: int, row_tokens: int) -> Iterator[Row]:
    if array.ndim == 1:
        yield from stream_rows(array, start, stop, row_tokens)
    else:
        whole = np.asarray(array)
        yield from ((row, whole[row]) for row in range(start, stop))
