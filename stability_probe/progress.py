"""Progress on standard error: the stage and the time left, only for a person who has waited a second."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TextIO

PATIENCE_SECONDS = 1.0  # shorter work needs no bar; a bar that flashes by is noise

Advance = Callable[..., None]


class Progress(Protocol):
    """What the stages report to."""

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[Advance]:
        """Announce a stage of `total` steps (None where it is not known); yields `advance(n=1)`."""
        ...


class Silent:
    """Says nothing: for pipes, --quiet, tests and library use."""

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[Advance]:
        return nullcontext(_ignore)


def _ignore(n: int = 1) -> None:
    return None


class Bars:
    """One line for each running stage, gone without a trace when the work is done.

    The display starts by itself once the work has lasted `PATIENCE_SECONDS`, also in the middle of a stage.
    """

    def __init__(self, stream: TextIO, patience_seconds: float = PATIENCE_SECONDS) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._live = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(file=stream),
            transient=True,
        )
        self._lock = threading.Lock()
        self._closed = False
        self._timer = threading.Timer(patience_seconds, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Bars:
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._closed = True
            self._live.stop()

    def _show(self) -> None:
        with self._lock:
            if not self._closed:
                self._live.start()

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Advance]:
        task = self._live.add_task(name, total=total)
        try:
            yield lambda n=1: self._live.advance(task, n)
        finally:
            self._live.remove_task(task)


def open_progress(quiet: bool = False) -> AbstractContextManager[Progress]:
    """Bars where a person watches standard error, silence otherwise. Use with `with`."""
    stream = sys.stderr
    if quiet or not stream.isatty():
        return nullcontext(Silent())
    return Bars(stream)
