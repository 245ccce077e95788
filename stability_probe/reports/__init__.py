"""Reports: pure functions of one `Report`. One file per renderer, found by its FORMAT and EXTENSION."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import secrets
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType

from stability_probe.errors import REPLAY_FAILED, ProbeError, nearest
from stability_probe.schema import Report

WRONG_USAGE = 2


@cache
def _renderers() -> dict[str, ModuleType]:
    """The modules of this package that render, by format name."""
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    return {module.FORMAT: module for module in modules if hasattr(module, "FORMAT")}


def formats() -> list[str]:
    """The names that `render` and `--format` take."""
    return sorted(_renderers())


def render(report: Report, format: str, **layout: int | bool) -> str:
    """The report in one format.

    Args:
        layout: `width` (columns) and `colour`, for the terminal format only.

    Raises:
        ProbeError: exit code 2 for an unknown format.
    """
    if format not in _renderers():
        raise ProbeError(
            f"there is no report format {format!r}", "it is not one of ours", nearest(format, formats()), WRONG_USAGE
        )
    return _renderers()[format].render(report, **layout)


def write(report: Report, path: Path | str) -> None:
    """Write the report in the format that the file's extension names, whole or not at all.

    Raises:
        ProbeError: exit code 2 for an extension without a renderer, 4 where the file cannot be written.
    """
    write_text(Path(path), _renderer_for(Path(path)).render(report))


def check_destination(path: Path | str) -> None:
    """Refuse a file that could not be written, before an hour of replay is spent on its contents.

    Raises:
        ProbeError: exit code 2: no renderer for the extension, or no such folder.
    """
    path = Path(path)
    _renderer_for(path)
    if not path.resolve().parent.is_dir():
        raise ProbeError(f"cannot write {path}", "its folder does not exist", f"mkdir -p {path.parent}", WRONG_USAGE)
    if path.is_dir():
        raise ProbeError(f"cannot write {path}", "it is a folder", "give a file name", WRONG_USAGE)


def _renderer_for(path: Path) -> ModuleType:
    by_extension = {module.EXTENSION: module for module in _renderers().values()}
    extension = path.suffix.lower()
    if extension in by_extension:
        return by_extension[extension]
    why = (
        "HTML reports are not available yet in this version"
        if extension == ".html"
        else "the extension names no format"
    )
    known = ", ".join(sorted(by_extension))
    raise ProbeError(f"cannot write a report to {path}", why, f"use one of {known}", WRONG_USAGE)


def deliver(report: Report, out: Iterable[Path | str], format: str, quiet: bool = False, **layout: int | bool) -> None:
    """Write the files, then print the report: a closed pipe must not cost the files.

    Raises:
        ProbeError: as `write` and `render`.
    """
    for path in out:
        write(report, path)
        if not quiet:
            sys.stderr.write(f"report written to {path}\n")
    sys.stdout.write(render(report, format, **layout))
    sys.stdout.flush()


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, whole or not at all: a temporary file beside it, synced to disk, then renamed.

    Raises:
        ProbeError: exit code 4 where the system refuses (full disk, no permission); nothing is left behind
            and an older file of that name is untouched.
    """
    target = path.resolve()  # a link stays a link: its target is replaced
    temporary = target.parent / f".probe-{secrets.token_hex(6)}.tmp"
    try:
        if target.exists() and not target.is_file():  # a device or a pipe must not become a file
            target.write_text(text, encoding="utf-8")
            return
        with open(temporary, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise ProbeError(
            f"cannot write the report to {path}",
            error.strerror or str(error),
            "free some space or name another place with --out; no partial report was left",
            REPLAY_FAILED,
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
