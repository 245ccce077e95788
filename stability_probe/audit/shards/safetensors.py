"""`.safetensors`: the tensor called input_ids, tokens or ids, else the only one; read slice by slice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stability_probe.audit.shards.base import IDS, UNIT_TOKENS, Encode, Row, cut, stream_units, unreadable


def accepts(path: Path) -> bool:
    return path.suffix == ".safetensors"


def _slice(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="np")
        names = list(file.keys())
        name = next((name for name in IDS if name in names), names[0] if len(names) == 1 else None)
        if name is None:
            raise unreadable(path, f"it holds {', '.join(names[:6])}, none of them called input_ids")
        found = file.get_slice(name)
    except (OSError, SafetensorError) as error:
        raise unreadable(path, str(error)) from error
    if found.get_dtype() not in ("I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64"):
        raise unreadable(path, f"{name} holds {found.get_dtype()} values, not token ids")
    if len(found.get_shape()) not in (1, 2):
        raise unreadable(path, f"{name} has shape {found.get_shape()}, not rows of ids")
    return found


def units(path: Path, row_tokens: int) -> list[tuple[int, int]]:
    shape = _slice(path).get_shape()
    if len(shape) == 1:
        return stream_units(shape[0], row_tokens)
    return cut(shape[0], max(1, UNIT_TOKENS // max(1, shape[1])))


def rows(path: Path, start: int, stop: int, row_tokens: int, encode: Encode | None) -> Iterator[Row]:
    found = _slice(path)
    if len(found.get_shape()) == 2:
        block = np.asarray(found[start:stop])
        yield from ((start + i, block[i]) for i in range(len(block)))
        return
    block = np.asarray(found[start * row_tokens : stop * row_tokens])
    for i in range(stop - start):
        yield start + i, block[i * row_tokens : (i + 1) * row_tokens]
