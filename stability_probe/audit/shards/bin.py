"""`.bin` without an `.idx` beside it: llm.c (a header of 256 int32) or nanoGPT (uint16 from the first byte)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from stability_probe.audit.shards.base import Encode, Row, mapped, stream_rows, stream_units, unreadable

HEADER_BYTES = 256 * 4
GPT2_MAGIC, LLAMA_MAGIC = 20240520, 20240801  # llm.c: uint16 tokens of GPT-2, uint32 tokens of Llama 3


def accepts(path: Path) -> bool:
    return path.suffix == ".bin" and not path.with_suffix(".idx").exists()


def _tokens(path: Path) -> NDArray[Any]:
    try:
        with path.open("rb") as file:
            head = file.read(12)
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from error
    magic, _, count = struct.unpack("<iii", head) if len(head) == 12 else (0, 0, 0)
    if magic not in (GPT2_MAGIC, LLAMA_MAGIC):
        return mapped(path, "<u2")
    tokens = mapped(path, "<u2" if magic == GPT2_MAGIC else "<u4", HEADER_BYTES)
    if len(tokens) < count:
        raise unreadable(path, f"its header says {count} tokens, the file holds {len(tokens)}", "it may be cut off")
    return tokens[:count]


def units(path: Path, row_tokens: int) -> list[tuple[int, int]]:
    return stream_units(len(_tokens(path)), row_tokens)


def rows(path: Path, start: int, stop: int, row_tokens: int, encode: Encode | None) -> Iterator[Row]:
    return stream_rows(_tokens(path), start, stop, row_tokens)
