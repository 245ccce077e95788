"""The words around a span: what an engineer recognises before any number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Decode = Callable[[Sequence[int]], str]
# Enough tokens for a line of text, half of it before the span.
WINDOW = 24


def decoder(tokenizer: Any) -> Decode:
    """Token ids to text; without a tokenizer, the ids themselves."""

    def decode(ids: Sequence[int]) -> str:
        if tokenizer is not None:
            try:
                return str(tokenizer.decode([token for token in ids if token >= 0], skip_special_tokens=False))
            except Exception:  # noqa: BLE001  a tokenizer of another model must not cost the report
                pass
        return " ".join(map(str, ids))

    return decode


def with_previews(
    records: dict[str, list[dict[str, Any]]], ids: Sequence[Sequence[int]], decode: Decode
) -> dict[str, list[dict[str, Any]]]:
    """The tables with a `preview` in `rows` (around the first span) and `text` in `tokens` (up to the target)."""
    for record in records.get("rows", []):
        row = ids[int(record["row"])]
        start = int(record["spans"][0][0]) if record["spans"] else 0
        begin = max(0, start - WINDOW // 4)
        record["preview"] = decode(row[begin : begin + WINDOW])
    for record in records.get("tokens", []):
        row, position = ids[int(record["row"])], int(record["position"])
        record["text"] = decode(row[max(0, position - 7) : position + 1])
        record["target_text"] = decode([int(record["target"])])
    for record in records.get("embedding_rows", []):
        record["text"] = decode([int(record["token"])])
    return records
