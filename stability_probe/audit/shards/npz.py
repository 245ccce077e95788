"""`.npz`: the array called input_ids, tokens or ids, else the only one. The archive is read whole."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stability_probe.audit.shards.base import IDS, Encode, Row, array_rows, array_units, unreadable, usable


def accepts(path: Path) -> bool:
    return path.suffix == ".npz"


def _tokens(path: Path) -> NDArray[Any]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            name = next((name for name in (*IDS, "arr_0") if name in archive.files), None)
            name = archive.files[0] if name is None and len(archive.files) == 1 else name
            if name is None:
                raise unreadable(path, f"it holds {', '.join(archive.files[:6])}, none of them called input_ids")
            return usable(path, archive[name])
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise unreadable(path, str(error)) from error


def units(path: Path, row_tokens: int) -> list[tuple[int, int]]:
    return array_units(_tokens(path), row_tokens)


def rows(path: Path, start: int, stop: int, row_tokens: int, encode: Encode | None) -> Iterator[Row]:
    return array_rows(_tokens(path), start, stop, row_tokens)
