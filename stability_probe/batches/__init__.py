"""Saved batches: one module per container format, and the conventions by which tensors become a `Batch`.

A module of this package with `accepts(path) -> bool` and `read(path) -> object` is a format: a new one is a new file.
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from stability_probe.errors import ProbeError

if TYPE_CHECKING:
    from stability_probe.batches.base import Batch

LABEL_CHOICES = ("auto", "shifted", "unshifted")


def formats() -> list[ModuleType]:
    """The container formats, by module name."""
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    return [module for module in modules if hasattr(module, "accepts")]


def read_batch(path: Path | str, labels: str = "auto", pad_id: int | None = None) -> Batch:
    """Read one saved batch, whatever its container and key names.

    Args:
        path: a `.pt`/`.pth`, `.safetensors`, `.npz` or `.npy` file. Pickles are read without running code.
        labels: "unshifted" (labels[t] belongs to ids[t]), "shifted" (labels[t] is the next token), or "auto".
        pad_id: id written where rows of unequal length are padded on the right; 0 where None.

    Returns:
        A batch of at least one row and one position, on the CPU. `convention_reason` says how labels were read.

    Raises:
        ProbeError: exit code 3, where the file is missing, is damaged, or holds no batch of token ids.
    """
    from stability_probe.batches.conventions import to_batch
    from stability_probe.batches.objects import fields_of, notes_on_shape

    path = Path(path)
    if labels not in LABEL_CHOICES:
        raise ProbeError(
            f"cannot read labels as {labels!r}", "no such convention", f"one of {', '.join(LABEL_CHOICES)}"
        )
    raw = _read_raw(path)
    try:
        fields = fields_of(raw, pad_id)
        fields = replace(fields, notes=(*fields.notes, *notes_on_shape(raw)))
    except ProbeError as error:
        raise ProbeError(f"{path}: {error.problem}", error.why, error.hint, error.exit_code) from error
    except RecursionError as error:
        raise ProbeError(f"{path}: no batch found", "its lists contain themselves", "save plain tensors") from error
    return to_batch(fields, labels, path=path, sha256=_sha256(path))


def _read_raw(path: Path) -> object:
    if not path.is_file():
        why = "it is a directory" if path.is_dir() else "there is no such file"
        raise ProbeError(f"cannot read the batch {path}", why, "give the file that holds the token ids")
    reader = next((module for module in formats() if module.accepts(path)), None)
    if reader is None:
        known = ".pt, .pth, .safetensors, .npz or .npy"
        raise ProbeError(f"cannot read the batch {path}", f"{path.suffix or 'no suffix'} is not a known format", known)
    try:
        return reader.read(path)
    except OSError as error:
        hint = "check the file's permissions and that it was copied whole"
        raise ProbeError(f"cannot read the batch {path}", str(error), hint) from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
