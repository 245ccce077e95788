"""`probe demo`: plant a fault in the tiny model's run, diagnose it, and only then say what was planted."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stability_probe.schema import Report

# The first one is what `probe demo` shows.
DEMOS: dict[str, str] = {
    "repeated-tokens": "one row of the batch is a single token, over and over",
    "attention-logit-growth": "the query and key weights of one head have grown",
    "label-misalignment": "labels shifted by the loader, and once more by the loss",
    "corrupt-weights": "one exponent bit of one weight has flipped",
    "stale-second-moment": "an oversized Adam step: one layer's second moment lags far behind its gradients",
    "healthy": "nothing is wrong, and the report has to say so",
}


def run_demo(name: str, out: Iterable[Path] = (), format: str = "terminal", quiet: bool = False) -> Report:
    """Make the incident in a temporary folder, diagnose it as `probe replay FOLDER` would, print the report.

    Args:
        name: a key of `DEMOS`.
        out: files to write the report to as well.
        format: of what goes to standard output. What was planted follows there too for "terminal", and goes to
            standard error for formats that a program may read.
        quiet: no progress, and nothing on standard error.
    """
    from stability_probe.checklist import written_down
    from stability_probe.demo_incidents import make_incident
    from stability_probe.incident import request_from_folder
    from stability_probe.pipeline import run
    from stability_probe.progress import open_progress
    from stability_probe.reports import deliver

    out = list(out)
    temporary = tempfile.TemporaryDirectory(prefix="probe-demo-")
    with temporary as scratch, _one_thread(), open_progress(quiet) as progress:
        folder = Path(scratch) / name
        with progress.stage("Making the incident"):
            planted = make_incident(name, folder)
        report = run(request_from_folder(folder), progress)
    report = dataclasses.replace(report, checklist=written_down(report.checklist, out))
    deliver(report, out, format, quiet=quiet, **_layout(format))
    if format == "terminal":
        sys.stdout.write(f"\nplanted: {planted}\n")
    elif not quiet:
        sys.stderr.write(f"planted: {planted}\n")
    return report


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """A model this small only makes threads wait for each other: on two busy cores they cost four times the CPU."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _layout(format: str) -> dict[str, Any]:
    from stability_probe.cli import layout

    return layout() if format == "terminal" else {}
