"""A comparison as JSON, text and Markdown: pure functions of one value, the same facts in each."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from stability_probe._version import __version__
from stability_probe.compare.result import Comparison, ModuleError, PrecisionResult
from stability_probe.reports.safe_text import clean, code, prose, shorten
from stability_probe.reports.words import number, percent
from stability_probe.schema import SCHEMA_VERSION, plain

WORST_MODULES, WORST_PARAMETERS, WORST_TOKENS, BEST_ISOLATED = 12, 6, 5, 8


@dataclass(frozen=True)
class Table:
    """Rows of text; the first column holds names from the model or the file."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """A heading, sentences, and tables; `level` 1 is the report's own title."""

    heading: str
    level: int = 2
    lines: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()


def to_json(found: Comparison) -> str:
    """Strict JSON by INTERFACE's `compare-precision`, with everything else that was measured beside it."""
    values = plain(found)
    for result in values["precisions"].values():
        del result["name"]
    head = {"schema_version": SCHEMA_VERSION, "probe_version": __version__, "command": "compare-precision"}
    return json.dumps({**head, **values}, indent=2, ensure_ascii=True, allow_nan=False, default=str) + "\n"


def sections(found: Comparison) -> Iterator[Section]:
    """The report in reading order: the sentence, one line for each precision, then the details of each."""
    yield Section("Precision compared with fp32", 1, (found.summary, *_setting(found)), (_overview(found),))
    for result in found.precisions.values():
        yield from _precision(result)
    if found.updates:
        rows = tuple(
            (u.source, percent(u.lost), percent(u.progress), percent(u.progress_stochastic), "100 %")
            for u in found.updates
        )
        headings = ("update", "elements that do not move", "progress, nearest", "stochastic", "fp32 master")
        told = "What is left of one optimizer step where weights are stored in bf16:"
        yield Section("Updates", 2, (told,), (Table(headings, rows),))
    if found.notes:
        yield Section("Notes", 2, found.notes)


def _setting(found: Comparison) -> tuple[str, ...]:
    told = [f"fp32: loss {number(found.loss)} nats, gradient norm {number(found.global_grad_norm)}"]
    if found.baseline_loss is not None:
        told.append(f"baseline loss {number(found.baseline_loss)}")
    if not math.isnan(found.max_attention_logit):
        told.append(f"largest attention logit {number(found.max_attention_logit)}")
    return (", ".join(told) + ".",)


def _overview(found: Comparison) -> Table:
    headings = ("precision", "loss", "gap", "per token", "gradient", "cosine", "non-finite", "computed")
    return Table(
        headings,
        tuple(
            (
                r.name,
                number(r.loss),
                f"{r.loss_gap:+.2g}" if math.isfinite(r.loss_gap) else number(r.loss_gap),
                number(r.token_gap),
                percent(r.grad_relative_error) if math.isfinite(r.grad_relative_error) else "∞",
                f"{r.grad_cosine:.4f}",
                str(r.nonfinite),
                "emulated" if r.emulated else "by the device",
            )
            for r in found.precisions.values()
        ),
    )


def _precision(r: PrecisionResult) -> Iterator[Section]:
    tables = [_modules(r), _parameters(r), _ranges(r), _tokens(r)]
    lines = [r.sentence, f"{r.name}: {r.summary}.", *_medians(r), _output(r)]
    if r.loss_scale_needed is not None:
        lines.append(f"Loss scale that keeps the gradients: 2^{int(math.log2(r.loss_scale_needed))}.")
    yield Section(r.name, 2, tuple(lines), tuple(t for t in tables if t.rows))
    if r.isolated:
        kept = ", ".join(r.keep_fp32)
        told = f"Keep in fp32: {kept}." if kept else "No eight modules bring the gap to a quarter: the error is spread."
        rows = tuple(
            (" + ".join(i.modules), percent(i.removed_loss), percent(i.removed_grad))
            for i in r.isolated[:BEST_ISOLATED]
        )
        table = Table(("kept in fp32", "token gap removed", "gradient error removed"), rows)
        yield Section(f"{r.name}: sensitivity", 3, (told,), (table,))
    yield Section(f"{r.name}: notes", 3, r.notes)


def _medians(r: PrecisionResult) -> Iterator[str]:
    """One sentence forward, one backward: the sizes that people compare with other runs."""
    errors = [(m.relative_error, m.module) for m in r.modules if math.isfinite(m.relative_error)]
    if errors:
        worst = max(errors)
        logits = next((m.relative_error for m in reversed(r.modules) if m.module == "(model)"), math.nan)
        middle = median(error for error, _ in errors)
        yield (
            f"Module error: median {_share(middle)}, worst {_share(worst[0])} ({worst[1]}), logits {_share(logits)}."
        )
    grads = [(p.grad_relative_error, p.parameter) for p in r.parameters if math.isfinite(p.grad_relative_error)]
    if grads:
        worst = max(grads)
        middle = median(error for error, _ in grads)
        yield f"Gradient error by parameter: median {_share(middle)}, worst {_share(worst[0])} ({worst[1]})."
    flows = [(m.grad_relative_error, m.module) for m in r.modules if math.isfinite(m.grad_relative_error)]
    if flows:
        worst = max(flows)
        middle = median(error for error, _ in flows)
        yield f"Gradient that reaches the blocks: median error {_share(middle)}, worst {_share(worst[0])} ({worst[1]})."


def _output(r: PrecisionResult) -> str:
    o = r.output
    return (
        f"Output: {o.format} spacing at the largest logit {number(o.spacing)}; the two likeliest tokens are closer "
        f"than that in {percent(o.unresolved)} of positions; total variation {number(o.variation)}, of which rounding "
        f"the logits alone makes {number(o.rounding_variation)}."
    )


def _modules(r: PrecisionResult) -> Table:
    headings = ("module", "error", "introduced", "siblings", "baseline", "excess", "bias", "out of range", "gradient")
    worst = sorted(r.modules, key=_badness, reverse=True)[:WORST_MODULES]
    return Table(
        headings,
        tuple(
            (
                ("! " if m.stands_out or m.grad_stands_out or m.nonfinite else "") + m.module,
                _share(m.relative_error),
                _share(m.introduced_error),
                _share(m.sibling_error),
                _share(m.baseline_error),
                f"{m.excess:.3g}×" if math.isfinite(m.excess) else "–",
                f"{m.bias:+.2f}" if abs(m.bias) >= 0.005 else "0",
                percent(m.outside_range),
                _share(m.grad_relative_error),
            )
            for m in worst
        ),
    )


def _badness(m: ModuleError) -> tuple[Any, ...]:
    return m.nonfinite > 0, m.stands_out or m.grad_stands_out, _or_zero(m.excess), _or_zero(m.introduced_error)


def _parameters(r: PrecisionResult) -> Table:
    worst = sorted(r.parameters, key=lambda p: (p.nonfinite, _or_zero(p.grad_relative_error)), reverse=True)
    return Table(
        ("parameter", "gradient error", "introduced", "cosine", "norm", "norm in fp32"),
        tuple(
            (
                p.parameter,
                _share(p.grad_relative_error),
                _share(p.grad_introduced_error),
                f"{p.grad_cosine:.4f}" if math.isfinite(p.grad_cosine) else "–",
                number(p.grad_norm),
                number(p.grad_norm_fp32),
            )
            for p in worst[:WORST_PARAMETERS]
        ),
    )


def _ranges(r: PrecisionResult) -> Table:
    return Table(
        ("values", "format", "overflow", "underflow", "subnormal", "largest", "bits to the limit"),
        tuple(
            (
                v.what,
                v.format,
                percent(v.overflow),
                percent(v.underflow),
                percent(v.subnormal),
                number(v.absmax),
                number(v.headroom_bits),
            )
            for v in r.ranges
        ),
    )


def _tokens(r: PrecisionResult) -> Table:
    return Table(
        ("row, position", "token", "target", "loss in fp32", f"in {r.name}"),
        tuple(
            (
                f"{t['row']}, {t['position']}",
                str(t["token"]),
                str(t["target"]),
                number(t["loss_fp32"]),
                number(t["loss"]),
            )
            for t in r.tokens[:WORST_TOKENS]
        ),
    )


def _token(row: dict[str, Any], key: str) -> str:
    """Id and text of a token, where a tokenizer was found."""
    text = row.get(f"{key}_text")
    return str(row[key]) if text is None else f"{row[key]} {shorten(clean(text), 16)!r}"


def _share(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{100 * value:.2g} %" if math.isfinite(value) else "∞"


def _or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def to_text(found: Comparison, width: int = 100) -> str:
    """For a terminal: aligned columns, sentences wrapped to `width`."""
    out: list[str] = []
    for section in sections(found):
        if section.level > 1:
            out += ["", clean(section.heading), "─" * min(width, len(section.heading))]
        for line in section.lines:
            out += textwrap.wrap(clean(line).replace("`", ""), width, break_long_words=False) or [""]
        for table in section.tables:
            out += ["", *_aligned(table)]
    return "\n".join(out) + "\n"


def _aligned(table: Table) -> Iterator[str]:
    grid = [table.headings, *(tuple(clean(cell) for cell in row) for row in table.rows)]
    widths = [max(len(row[i]) for row in grid) for i in range(len(table.headings))]
    for row in grid:
        first, rest = row[0].ljust(widths[0]), (cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))
        yield "  ".join((first, *rest)).rstrip()


def to_markdown(found: Comparison) -> str:
    """For an issue: headings, tables, names as code."""
    out: list[str] = []
    for section in sections(found):
        out += [f"{'#' * section.level} {prose(section.heading)}", ""]
        for index, line in enumerate(section.lines):
            told = _with_code(line)
            out += [f"**{told}**" if section.level == 1 and index == 0 else told, ""]
        for table in section.tables:
            out += [*_piped(table), ""]
    return "\n".join(out)


def _with_code(line: str) -> str:
    """Names between backticks stay code; everything else is text."""
    return "".join(code(part) if index % 2 else prose(part) for index, part in enumerate(line.split("`")))


def _piped(table: Table) -> Iterator[str]:
    yield "| " + " | ".join(table.headings) + " |"
    yield "| --- |" + " ---: |" * (len(table.headings) - 1)
    for row in table.rows:
        yield "| " + " | ".join((code(row[0]), *(prose(cell) for cell in row[1:]))) + " |"


RENDERERS: dict[str, Callable[..., str]] = {"json": to_json, "markdown": to_markdown, "terminal": to_text}
EXTENSIONS = {".json": "json", ".md": "markdown"}
