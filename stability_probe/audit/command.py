"""`probe batch-audit`: saved batches and token shards in, one report out."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stability_probe._version import __version__
from stability_probe.errors import ProbeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stability_probe.audit.baseline import Baseline
    from stability_probe.audit.result import AuditResult, RowAudit
    from stability_probe.audit.vocabulary import Vocabulary
    from stability_probe.batches.base import Batch

BATCH_SUFFIXES = (".pt", ".pth", ".safetensors", ".npz")
LARGEST_BATCH_BYTES = 64 * 2**20  # above, a .npz or .safetensors is a shard of a data set, read as a stream
BASELINE_TOKENS = 8_000_000  # enough for unigrams and quantiles; more only costs time
PREVIEW_TOKENS = 24


def run_batch_audit(
    paths: Sequence[str | Path],
    *,
    baseline: Sequence[str | Path] = (),
    tokenizer: str | Path | None = None,
    labels: str = "auto",
    vocab_size: int | None = None,
    out: Sequence[str | Path] = (),
    format: str = "terminal",
    quiet: bool = False,
) -> int:
    """Audit, print in `format` on standard output, and write every `out` by its suffix.

    `.json` and `.md` are reports; `.csv` and `.parquet` hold the flagged rows by shard and offset.

    Returns:
        0: a report was made, whatever it says.

    Raises:
        ProbeError: an input that cannot be read, an output that cannot be written.
    """
    from stability_probe.audit import shards, table_files
    from stability_probe.progress import open_progress

    outputs = [Path(one) for one in out]
    _check_outputs(outputs)
    vocabulary = _load_vocabulary(tokenizer)
    healthy = _load_baseline(baseline, labels, vocabulary) if baseline else None
    files = shards.expand([str(path) for path in _existing(paths)])
    tables = [path for path in outputs if path.suffix in table_files.SUFFIXES]
    batches = [path for path in files if _is_batch(path)]
    report = _empty(len(files))
    with open_progress(quiet) as progress:
        _audit_batches(report, batches, labels, vocab_size, vocabulary, healthy, progress)
        rest = [path for path in files if path not in batches]
        if rest:
            _audit_shards(report, rest, vocab_size, vocabulary, healthy, tables, progress)
    if not rest:
        for table in tables:
            table_files.write_table((_as_record(row) for row in report["rows"] if row["flags"]), table)
    _conclude(report)
    _deliver(report, [path for path in outputs if path not in tables], format, quiet)
    return 0


def _existing(paths: Sequence[str | Path]) -> list[str]:
    if not paths:
        raise ProbeError("nothing to audit", "no path was given", "probe batch-audit --batch PATH")
    return [str(path) for path in paths]


def _check_outputs(outputs: list[Path]) -> None:
    known = (".json", ".md", ".txt", ".csv", ".parquet")
    for path in outputs:
        if path.suffix not in known:
            raise ProbeError(
                f"cannot write {path}", "its suffix names no format", f"use {', '.join(known)}", exit_code=2
            )


def _is_batch(path: Path) -> bool:
    return path.suffix in (".pt", ".pth") or (
        path.suffix in BATCH_SUFFIXES and path.stat().st_size < LARGEST_BATCH_BYTES
    )


def _load_vocabulary(tokenizer: str | Path | None) -> Vocabulary | None:
    if tokenizer is None:
        return None
    from stability_probe.audit.vocabulary import Vocabulary

    return Vocabulary.load(tokenizer)


def _load_baseline(paths: Sequence[str | Path], labels: str, vocabulary: Vocabulary | None) -> Baseline:
    from stability_probe.audit import shards
    from stability_probe.audit.baseline import Baseline

    parts: list[tuple[Any, Any]] = []
    tokens = 0
    for path in shards.expand([str(one) for one in paths]):
        if tokens >= BASELINE_TOKENS:
            break
        own = [_batch_arrays(path, labels)] if _is_batch(path) else _shard_arrays(path, vocabulary, tokens)
        tokens += sum(ids.size for ids, _ in own)
        parts.extend(own)
    return Baseline.of(parts, None if vocabulary is None else vocabulary.pad_id)


def _batch_arrays(path: Path, labels: str) -> tuple[Any, Any]:
    batch = _read_batch(path, labels)
    return batch.ids_BT.numpy(), None if batch.mask_BT is None else batch.mask_BT.numpy()


def _shard_arrays(path: Path, vocabulary: Vocabulary | None, tokens: int) -> list[tuple[Any, Any]]:
    import numpy as np

    from stability_probe.audit import shards
    from stability_probe.audit.dataset import ROW_TOKENS

    module = shards.format_of(path)
    encode = None if vocabulary is None else vocabulary.encode
    found = []
    for start, stop in module.units(path, ROW_TOKENS):
        for _, ids in module.rows(path, start, stop, ROW_TOKENS, encode):
            found.append((np.array(ids)[None, :], None))
            tokens += len(ids)
        if tokens >= BASELINE_TOKENS:
            break
    return found


def _read_batch(path: Path, labels: str) -> Batch:
    from stability_probe.batches import read_batch

    return read_batch(path, labels)


def _empty(files: int) -> dict[str, Any]:
    report: dict[str, Any] = {"schema_version": 1, "probe_version": __version__, "command": "batch-audit"}
    return report | {
        "rows": [], "skip": False, "reason": "", "drop_rows": [], "notes": [],
        "files": files, "rows_total": 0, "rows_flagged": 0, "tokens_total": 0, "reasons": [],
    }  # fmt: skip


def _audit_batches(
    report: dict[str, Any],
    paths: list[Path],
    labels: str,
    vocab_size: int | None,
    vocabulary: Vocabulary | None,
    healthy: Baseline | None,
    progress: Any,
) -> None:
    with progress.stage("auditing batches", len(paths)) as advance:
        for path in paths:
            _audit_batch(report, path, labels, vocab_size, vocabulary, healthy)
            advance()


def _audit_batch(
    report: dict[str, Any],
    path: Path,
    labels: str,
    vocab_size: int | None,
    vocabulary: Vocabulary | None,
    healthy: Baseline | None,
) -> None:
    from stability_probe.audit.render import row_json
    from stability_probe.audit.rows import audit_rows

    batch = _read_batch(path, labels)
    declared: Any = labels if labels != "auto" or batch.convention == "absent" else "auto"
    result: AuditResult = audit_rows(
        batch.ids_BT,
        labels_BT=batch.labels_BT,
        mask_BT=batch.mask_BT,
        labels=declared,
        vocab_size=vocab_size,
        tokenizer=vocabulary,
        baseline=healthy,
    )
    ids = batch.ids_BT.numpy()
    rows = [_with_previews(row, ids[row.row].tolist(), vocabulary) for row in result.rows]
    report["rows"].extend(row_json(str(path), row) for row in rows)
    report["rows_total"] += len(rows)
    report["tokens_total"] += sum(row.tokens for row in rows)
    report["rows_flagged"] += len(result.drop_rows)
    report["skip"] = report["skip"] or result.skip
    report["reasons"].append((str(path), result.reason))
    report["notes"].extend((*batch.notes, *result.notes))
    if batch.convention_reason:
        report["notes"].append(f"labels: {batch.convention}, {batch.convention_reason}")


def _with_previews(row: RowAudit, ids: list[int], vocabulary: Vocabulary | None) -> RowAudit:
    if not row.flags:
        return row
    start = row.spans[0].start if row.spans else 0
    return replace(row, previews=(preview(ids[start : start + PREVIEW_TOKENS], vocabulary),))


def preview(ids: list[int], vocabulary: Vocabulary | None) -> str:
    """A few tokens as text, or as ids without a tokenizer; nothing in it acts on a terminal."""
    from stability_probe.reports.safe_text import clean

    if vocabulary is None:
        return " ".join(map(str, ids))
    import numpy as np

    return clean(vocabulary.decode(np.array([token for token in ids if 0 <= token < 2**31], np.int32)))


def _audit_shards(
    report: dict[str, Any],
    paths: list[Path],
    vocab_size: int | None,
    vocabulary: Vocabulary | None,
    healthy: Baseline | None,
    tables: list[Path],
    progress: Any,
) -> None:
    from stability_probe.audit.blocks import Settings
    from stability_probe.audit.dataset import ROW_TOKENS, audit_dataset

    settings = Settings(
        row_tokens=ROW_TOKENS,
        vocab_size=vocab_size or (None if vocabulary is None else vocabulary.size),
        eos_id=None if vocabulary is None else vocabulary.eos_id,
        pad_id=None if vocabulary is None else vocabulary.pad_id,
        vocabulary=vocabulary,
        baseline=healthy,
    )
    for table in tables[1:]:
        report["notes"].append(f"{table} is not written: one table a run")
    found = audit_dataset(paths, settings, tables[0] if tables else None, progress=progress)
    report["rows"].extend(
        {
            "file": record["shard"],
            "row": record["offset"],
            **{key: value for key, value in record.items() if key not in ("shard", "offset", "ids", "row", "previews")},
            "previews": [preview(record["ids"], vocabulary)],
        }
        for record in found.records
    )
    report["rows_total"] += found.rows
    report["tokens_total"] += found.tokens
    report["rows_flagged"] += found.flagged
    if found.flagged > len(found.records):
        report["notes"].append(f"only the first {len(found.records)} flagged rows are listed; --out x.csv has all")
    if found.resumed_units:
        report["notes"].append(f"{found.resumed_units} finished units of an earlier run were taken over")
    shards = "1 shard" if len(paths) == 1 else f"{len(paths)} shards"
    todo = "; drop them by shard and offset (--out x.csv lists all)" if found.flagged else ""
    report["reasons"].append(("", f"{found.flagged} of {found.rows} rows of {shards} are flagged{todo}"))


def _as_record(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "shard": row["file"], "offset": row["row"]}


def _conclude(report: dict[str, Any]) -> None:
    reasons = report.pop("reasons")
    several = len(reasons) > 1
    report["reason"] = "; ".join(
        f"{Path(path).name}: {text}" if several and path else text for path, text in reasons[:8]
    )
    report["drop_rows"] = [[row["file"], row["row"]] for row in report["rows"] if row["flags"]]


def _deliver(report: dict[str, Any], outputs: list[Path], format: str, quiet: bool) -> None:
    from stability_probe.audit import render
    from stability_probe.schema import plain

    as_json = json.dumps(plain(report), indent=1, ensure_ascii=True)
    for path in outputs:
        text = {".json": lambda: as_json + "\n", ".txt": lambda: render.plain_text(report)}
        _write(path, text.get(path.suffix, lambda: render.markdown(report))())
    if quiet:
        return
    if format == "json":
        sys.stdout.write(as_json + "\n")
    elif format == "markdown":
        sys.stdout.write(render.markdown(report))
    else:
        from rich.console import Console

        render.terminal(report, Console())


def _write(path: Path, text: str) -> None:
    scratch = path.with_name(path.name + ".tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise ProbeError(
            f"cannot write {path}", error.strerror or str(error), "free some space, or choose another place"
        ) from error
