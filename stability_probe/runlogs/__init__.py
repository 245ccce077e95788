"""Run logs: one module per file format, and one table whatever the format.

A module of this package with `accepts(path) -> bool` and `read(path) -> (records, bad)` is a format: a new one is a
new file. Records are dicts in file order under the log's own names; `bad` counts what could not be parsed.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from stability_probe.errors import ProbeError

if TYPE_CHECKING:
    import pandas as pd


def formats() -> list[ModuleType]:
    """The log formats, by module name."""
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    return [module for module in modules if hasattr(module, "accepts")]


def read_log(path: Path | str) -> pd.DataFrame:
    """Read the log of one run.

    Args:
        path: a `.jsonl`, `.csv` or `trainer_state.json` file, or a folder that holds the latter.

    Returns:
        One row per logged step, in file order: step (int), loss (nats), grad_norm, lr (floats, NaN where absent),
        segment (int, grows where the step goes back, so that a rollback hides nothing) and nonfinite (bool: a loss or
        gradient norm was logged that is not a finite number). `attrs["notes"]` says what was left out.

    Raises:
        ProbeError: exit code 3, where the file is missing, of no known format, or holds no step with a loss.
    """
    from stability_probe.runlogs.table import to_table

    path = Path(path)
    path = path / "trainer_state.json" if path.is_dir() else path
    if not path.is_file():
        raise ProbeError(f"cannot read the log {path}", "there is no such file", "give the file that the run wrote")
    reader = next((module for module in formats() if module.accepts(path)), None)
    if reader is None:
        known = ".jsonl, .csv or trainer_state.json"
        raise ProbeError(f"cannot read the log {path}", f"{path.suffix or 'no suffix'} is not a known format", known)
    try:
        records, bad = reader.read(path)
    except OSError as error:
        raise ProbeError(f"cannot read the log {path}", str(error), "check the file's permissions") from error
    return to_table(records, bad, path)
