"""`.npy`: one stream of tokens, or one row per line of a matrix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stability_probe.audit.shards.base import Encode, Row, array_rows, array_units, unreadable, usable


def accepts(path: Path) -> bool:
    return path.suffix == ".npy"


def _tokens(path: Path) -> NDArray[Any]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise unreadable(path, str(error)) from error
    return usable(path, array)


def units(path: Path, row_tokens: int) -> list[tuple[int, int]]:
    return array_units(_tokens(path), row_tokens)


def rows(path: Path, start: int, stop: int, row_tokens: int, encode: Encode | None) -> Iterator[Row]:
    return array_rows(_tokens(path), start, stop, row_tokens)
