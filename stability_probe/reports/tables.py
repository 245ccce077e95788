"""Which columns and rows of the big tables a person sees: the guilty first, then the worst.

Nothing is dropped from the JSON report; these are the views of the terminal and Markdown reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stability_probe.reports import words
from stability_probe.reports.safe_text import shorten
from stability_probe.schema import Location, Report

Row = dict[str, Any]
MAX_PREVIEW = 160  # characters: two lines of a wide terminal show a run of any period up to 13


@dataclass(frozen=True)
class Column:
    """`text` says what a cell shows; `name` marks columns of file text (tokens, names), set as code in Markdown."""

    heading: str
    text: Callable[[Row], str]
    is_number: bool = True


@dataclass(frozen=True)
class View:
    """A table ready for layout. `guilty[i]` is whether row i is named by the verdict."""

    name: str
    heading: str
    columns: tuple[Column, ...]
    cells: tuple[tuple[str, ...], ...]
    guilty: tuple[bool, ...]
    total: int


def views(report: Report, most: int) -> list[View]:
    """Every non-empty table, at most `most` rows each."""
    made = (_view(name, report.tables.get(name, []), report.verdict.location, most) for name in _SPECS)
    return [view for view in made if view is not None]


@dataclass(frozen=True)
class _Spec:
    heading: str
    columns: tuple[Column, ...]
    badness: Callable[[Row], tuple[float, ...]]
    guilty: Callable[[Row, Location], bool]
    guilty_first: bool = True


def _view(name: str, rows: list[Row], location: Location, most: int) -> View | None:
    if not rows:
        return None
    spec = _SPECS[name]

    def order(row: Row) -> tuple[float, ...]:
        return (float(spec.guilty_first and spec.guilty(row, location)), *spec.badness(row))

    worst = sorted(rows, key=order, reverse=True)[:most]
    grid = [[column.text(row) for column in spec.columns] for row in worst]
    # A column that says nothing in any row (no baseline, no optimizer state) is left out.
    told = [i for i in range(len(spec.columns)) if i == 0 or any(line[i] not in ("", "–") for line in grid)]
    return View(
        name,
        spec.heading,
        tuple(spec.columns[i] for i in told),
        tuple(tuple(line[i] for i in told) for line in grid),
        tuple(spec.guilty(row, location) for row in worst),
        len(rows),
    )


# --- cells --------------------------------------------------------------------------------------


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _number(key: str, heading: str, nan_when: str = "") -> Column:
    """A number; NaN means "not measured" unless the count in column `nan_when` says that it was measured."""

    def text(row: Row) -> str:
        value = row.get(key)
        if not _is_missing(value):
            return words.number(value)
        return "NaN" if nan_when and (_rank(row.get(nan_when)) > 0) else "–"

    return Column(heading, text)


def _count(key: str, heading: str) -> Column:
    """A count or share that is only worth a column where it is not zero."""
    return Column(heading, lambda row: "–" if _is_missing(row.get(key)) or not row[key] else words.number(row[key]))


def _name(key: str, heading: str) -> Column:
    return Column(heading, lambda row: str(row.get(key, "")), is_number=False)


def _rank(value: Any) -> float:
    """For sorting: what is not a number is last, what is infinite first."""
    if not isinstance(value, (int, float)) or (isinstance(value, float) and math.isnan(value)):
        return -math.inf
    return float(max(-(10**300), min(value, 10**300))) if isinstance(value, int) else value


def _by(*keys: str) -> Callable[[Row], tuple[float, ...]]:
    return lambda row: tuple(_rank(row.get(key)) for key in keys)


def _row_badness(row: Row) -> tuple[float, ...]:
    return (float(len(_listed(row.get("flags")))), _rank(row.get("loss")), _rank(row.get("grad_norm")))


def _row_findings(row: Row) -> str:
    """Flags and where they are: "repeated-tokens: tokens 811–1399"."""
    flags = ", ".join(str(flag) for flag in _listed(row.get("flags")))
    found = [(start, end) for _, start, end in words.merged(tuple((0, *pair) for pair in _spans(row)))]
    spans = ", ".join(words.span(start, end) for start, end in found[:2])
    more = f" and {len(found) - 2} more" if len(found) > 2 else ""
    return ": ".join(part for part in (flags, spans + more) if part) or str(row.get("reason") or "")


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _spans(row: Row) -> list[tuple[int, int]]:
    """(start, end) of every span; what does not look like one is passed over."""
    starts = [tuple(item[:2]) for item in _listed(row.get("spans")) if isinstance(item, (list, tuple))]
    return [pair for pair in starts if len(pair) == 2 and all(type(edge) is int for edge in pair)]


def _preview(row: Row) -> str:
    return shorten(str(row.get("preview") or ""), MAX_PREVIEW)


def _head_at(row: Row) -> str:
    keys = ("row", "query", "key")
    return "" if any(_is_missing(row.get(key)) for key in keys) else ",".join(words.number(row[key]) for key in keys)


# --- which table shows what ---------------------------------------------------------------------

_SPECS: dict[str, _Spec] = {
    "modules": _Spec(
        "Layers and modules, largest activations first",
        (
            _name("module", "module"),
            _number("absmax", "absmax"),
            _number("baseline_absmax", "base"),
            _number("rms", "rms"),
            _number("baseline_rms", "base"),
            _count("nonfinite", "non-finite"),
            _count("outside_fp16", "> fp16"),
            _number("grad_norm", "grad norm", nan_when="grad_nonfinite"),
            _number("gap_bf16", "bf16 gap"),
        ),
        _by("nonfinite", "absmax"),
        lambda row, at: at.module is not None and row.get("module") == at.module,
    ),
    "heads": _Spec(
        "Attention heads, largest logits first",
        (
            _number("layer", "layer"),
            _number("head", "head"),
            _number("max_logit", "max logit"),
            _number("baseline_max_logit", "base"),
            _number("entropy", "entropy"),
            _number("baseline_entropy", "base"),
            _number("top_weight", "weight"),
            _number("top_key_share", "sink"),
            Column("row,query,key", _head_at),
        ),
        _by("max_logit"),
        lambda row, at: (row.get("layer"), row.get("head")) in at.heads,
    ),
    "parameters": _Spec(
        "Parameters, largest gradients first",
        (
            _name("parameter", "parameter"),
            _number("grad_norm", "grad norm", nan_when="grad_nonfinite"),
            _count("grad_nonfinite", "grad NaN/Inf"),
            _number("rms", "rms"),
            _number("absmax", "absmax"),
            _count("nonfinite", "non-finite"),
            _number("gap_bf16", "bf16 gap"),
            _number("update_ratio", "update ratio"),
            _number("g2_over_v", "g²/v̂"),
        ),
        _by("nonfinite", "grad_nonfinite", "grad_norm"),
        lambda row, at: any(str(name).split("[")[0] == row.get("parameter") for name in at.parameters),
    ),
    "rows": _Spec(
        "Rows of the batch, flagged and highest loss first",
        (
            _number("row", "row"),
            _number("loss", "loss"),
            _number("grad_norm", "grad norm"),
            _number("cosine", "cosine"),
            _number("valid_targets", "targets"),
            Column("found", _row_findings, is_number=False),
            Column("text", _preview, is_number=False),
        ),
        _row_badness,
        lambda row, at: row.get("row") in at.rows or any(row.get("row") == span[0] for span in at.positions),
    ),
    "tokens": _Spec(
        "Tokens, highest loss first",
        (
            _number("row", "row"),
            _number("position", "position"),
            _number("target", "target"),
            _number("loss", "loss"),
            _number("loss_bf16", "loss bf16"),
            Column("after", lambda row: shorten(str(row.get("text") or ""), 40), is_number=False),
            Column("expected", lambda row: shorten(str(row.get("target_text") or ""), 24), is_number=False),
        ),
        _by("loss"),
        lambda row, at: any(
            row.get("row") == span[0] and span[1] <= _rank(row.get("position")) < span[2] for span in at.positions
        ),
        guilty_first=False,  # a long span would crowd out the worst predictions
    ),
    "embedding_rows": _Spec(
        "Embedding rows out of line, largest share of the gradient first",
        (
            _number("token", "token"),
            Column("text", lambda row: shorten(str(row.get("text") or ""), 24), is_number=False),
            _number("norm", "norm"),
            _number("median_norm", "median norm"),
            _number("count", "uses"),
            _number("grad_share", "grad share"),
            _name("parameter", "parameter"),
        ),
        _by("grad_share", "norm"),
        lambda row, at: any(
            str(name).startswith(f"{row.get('parameter')}[{row.get('token')}") for name in at.parameters
        ),
    ),
}
