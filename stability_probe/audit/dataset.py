"""The audit of a data set: shards as a stream, over all cores, resumable, in constant memory."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from stability_probe.audit.blocks import Settings, Unit, UnitResult, audit_unit
from stability_probe.audit.journal import Journal
from stability_probe.audit.shards import format_of
from stability_probe.audit.table_files import write_table
from stability_probe.errors import ProbeError
from stability_probe.progress import Progress, Silent

ROW_TOKENS = 2048
MOST_RECORDS = 10_000  # flagged rows kept for the report; the table file holds all of them
QUEUED_PER_WORKER = 2


@dataclass(frozen=True)
class DatasetAudit:
    """Counts over all shards, and the first flagged rows (`flagged` counts all of them)."""

    rows: int
    tokens: int
    flagged: int
    records: list[dict[str, Any]]
    resumed_units: int


def audit_dataset(
    paths: list[Path],
    settings: Settings,
    table: Path | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> DatasetAudit:
    """Audit every shard.

    Args:
        table: `.csv` or `.parquet` of the flagged rows, by shard and offset. While the run lasts, `TABLE.part`
            beside it holds what is finished; the same call after a kill goes on from there.
        workers: processes; all cores that this process may use where None.

    Raises:
        ProbeError: a shard that cannot be read or a table that cannot be written.
    """
    units = [Unit(str(p), *bounds) for p in paths for bounds in format_of(p).units(p, settings.row_tokens)]
    with tempfile.TemporaryDirectory() as scratch:
        part = Path(scratch) / "journal" if table is None else table.with_name(table.name + ".part")
        journal = _open(part, _signature(paths, settings))
        resumed = len(journal.done)
        finished = False
        try:
            todo = [unit for unit in units if not journal.has(unit)]
            with (progress or Silent()).stage("auditing shards", len(units)) as advance:
                advance(len(units) - len(todo))
                for result in _results(todo, settings, workers or len(os.sched_getaffinity(0))):
                    journal.add(result)
                    advance()
            if table is not None:
                write_table(journal.records(), table)
            records = list(islice(journal.records(), MOST_RECORDS))
            finished = True
        except OSError as error:
            raise ProbeError(f"cannot write {part}", error.strerror or str(error), "free some space") from error
        finally:
            journal.close(delete=finished)
        return DatasetAudit(journal.rows, journal.tokens, journal.flagged, records, resumed)


def _open(part: Path, signature: str) -> Journal:
    try:
        return Journal(part, signature)
    except OSError as error:
        raise ProbeError(f"cannot write {part}", error.strerror or str(error), "choose another --out") from error


def _signature(paths: list[Path], settings: Settings) -> str:
    """Names, sizes and times of the shards, and every option that changes a verdict."""
    parts = [f"{path}|{path.stat().st_size}|{path.stat().st_mtime_ns}" for path in paths]
    vocabulary = None if settings.vocabulary is None else settings.vocabulary.size
    parts.append(f"{settings.row_tokens}|{settings.vocab_size}|{settings.eos_id}|{settings.pad_id}|{vocabulary}")
    parts.append("" if settings.baseline is None else str(settings.baseline.id_counts.sum()))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


_settings: Settings | None = None


def _start_worker(settings: Settings) -> None:
    global _settings
    _settings = settings
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core already


def _work(unit: Unit) -> UnitResult:
    if _settings is None:
        raise RuntimeError("the worker was not started with settings")
    return audit_unit(unit, _settings)


def _results(units: list[Unit], settings: Settings, workers: int) -> Iterator[UnitResult]:
    """Results as they are ready; never more than two units a worker are waiting, so memory stays flat."""
    workers = min(workers, len(units))
    if workers <= 1:
        yield from (audit_unit(unit, settings) for unit in units)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads and locks of numpy and torch
    with ProcessPoolExecutor(workers, context, _start_worker, (settings,)) as pool:
        waiting: set[Future[UnitResult]] = set()
        rest = iter(units)
        try:
            while True:
                waiting |= {
                    pool.submit(_work, unit) for unit in islice(rest, QUEUED_PER_WORKER * workers - len(waiting))
                }
                if not waiting:
                    return
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)
