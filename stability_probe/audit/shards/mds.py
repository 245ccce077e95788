"""MDS (`index.json` version 2 with `.mds` shards): one sample a row. Pickled columns are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stability_probe.audit.shards.base import Encode, Row, cut, mapped, needs_tokenizer, unreadable

NAMES = ("tokens", "input_ids", "ids", "text")
SAMPLES = 4096
_DTYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}


def accepts(path: Path) -> bool:
    return path.suffix == ".mds"


def _info(path: Path) -> dict[str, Any]:
    index = path.parent / "index.json"
    try:
        shards = json.loads(index.read_text("utf-8"))["shards"]
        info: dict[str, Any] = next(one for one in shards if one["raw_data"]["basename"] == path.name)
        for key in ("column_names", "column_encodings", "column_sizes"):
            list(info[key])
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise unreadable(path, f"{index.name} beside it does not describe it ({type(error).__name__})") from error
    return info


def _column(path: Path, info: dict[str, Any]) -> int:
    names = list(info["column_names"])
    at = next((names.index(name) for name in NAMES if name in names), None)
    if at is None:
        raise unreadable(path, f"its columns are {', '.join(map(str, names))[:200]}, none of them tokens or text")
    if str(info["column_encodings"][at]).startswith("pkl"):
        raise unreadable(path, "the column is pickled, and reading a pickle can run code", "write it as an ndarray")
    return at


def units(path: Path, row_tokens: int) -> list[tuple[int, int]]:
    whole = mapped(path, "u1")
    _column(path, _info(path))
    return cut(int(whole[:4].view("<u4")[0]), SAMPLES) if len(whole) >= 4 else []


def rows(path: Path, start: int, stop: int, row_tokens: int, encode: Encode | None) -> Iterator[Row]:
    info = _info(path)
    at = _column(path, info)
    encoding = str(info["column_encodings"][at])
    whole = mapped(path, "u1")
    for row in range(start, stop):
        low, high = (int(x) for x in _bytes(path, whole, 4 + 4 * row, 8).view("<u4"))
        raw = _value(path, _bytes(path, whole, low, high - low), info, at)
        if encoding == "str":
            if encode is None:
                raise needs_tokenizer(path)
            yield row, encode([raw.decode("utf-8", "replace")])[0]
        else:
            yield row, _array(path, raw, encoding)


def _bytes(path: Path, whole: NDArray[Any], start: int, size: int) -> NDArray[Any]:
    if size < 0 or start + size > len(whole):
        raise unreadable(path, "a sample ends past the file", "it may be cut off")
    return np.array(whole[start : start + size])


def _value(path: Path, sample: NDArray[Any], info: dict[str, Any], at: int) -> bytes:
    """The bytes of one column: sizes of the variable columns stand first."""
    fixed = list(info["column_sizes"])
    variable = [i for i, size in enumerate(fixed) if size is None]
    head = 4 * len(variable)
    if head > len(sample):
        raise unreadable(path, "a sample is shorter than its header", "it may be cut off")
    for i, size in zip(variable, sample[:head].view("<u4").tolist(), strict=True):
        fixed[i] = int(size)
    start = head + sum(fixed[:at])
    return bytes(sample[start : start + fixed[at]])


def _array(path: Path, raw: bytes, encoding: str) -> NDArray[Any]:
    kind, _, rest = encoding.partition(":")
    dtype, _, shape = rest.partition(":")
    try:
        if kind == "bytes":  # llm-foundry writes int64 ids as plain bytes
            return np.frombuffer(raw, "<i8")
        if kind != "ndarray":
            raise ValueError(f"encoding {encoding[:40]!r}")
        at = 0
        if not dtype:
            dtype, at = _DTYPES[raw[0]], 1
        if not shape:
            at += 1 + (raw[at] >> 2) * (1 << (raw[at] & 3))
        return np.frombuffer(raw[at:], np.dtype(dtype)).ravel()
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise unreadable(path, f"a column cannot be read as token ids: {error}") from error
