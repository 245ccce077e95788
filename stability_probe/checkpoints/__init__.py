"""Checkpoints in every format that people have: one file here per format.

A format is a module with `accepts(path)`, `read(path)` and `ORDER`: formats are asked from the lowest number to
the highest, the narrow ones before the ones that take almost anything.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from pathlib import Path
from typing import Any

from stability_probe.checkpoints.base import Checkpoint
from stability_probe.checkpoints.safe import read_json
from stability_probe.checkpoints.wrapped import read_optimizer
from stability_probe.errors import ProbeError

__all__ = ["Checkpoint", "read_checkpoint"]

_WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")
_NOT_WEIGHTS = ("optim", "scheduler", "scaler", "rng_state", "training_args", "random_states")


def read_checkpoint(path: Path, config: Path | None = None, optimizer: Path | None = None) -> Checkpoint:
    """The checkpoint at `path`, a file or a folder, tensors mapped lazily.

    Args:
        path: in any format of this package, or a folder that holds one such file.
        config: JSON file, or folder with `config.json`, that replaces the stored configuration.
        optimizer: file or folder whose optimizer replaces the stored one.

    Raises:
        ProbeError: nothing readable is there.
    """
    path = Path(path)
    readers = [module for module in _formats() if module.accepts(path)]
    checkpoint = readers[0].read(path) if readers else _only_file_in(path)
    if config is not None:
        checkpoint = dataclasses.replace(checkpoint, config=_read_config(Path(config)))
    if optimizer is not None:
        checkpoint = dataclasses.replace(checkpoint, optimizer=read_optimizer(Path(optimizer)))
    return checkpoint


def _formats() -> list[Any]:
    names = (f"{__name__}.{info.name}" for info in pkgutil.iter_modules(__path__))
    modules = (importlib.import_module(name) for name in names)
    return sorted((module for module in modules if hasattr(module, "accepts")), key=lambda module: module.ORDER)


def _only_file_in(folder: Path) -> Checkpoint:
    if not folder.exists():
        raise ProbeError(f"cannot read {folder}", "there is no such file or folder", "check the path")
    if not folder.is_dir():
        raise ProbeError(
            f"cannot read {folder}", "it is neither a regular file nor a folder", "give a saved checkpoint"
        )
    files = sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and file.suffix in _WEIGHT_SUFFIXES and not file.name.startswith(_NOT_WEIGHTS)
    )
    if len(files) == 1:
        return read_checkpoint(files[0])
    if files:
        why = f"it holds {len(files)} that could be one: {', '.join(file.name for file in files[:6])}"
        raise ProbeError(f"cannot choose a checkpoint in {folder}", why, "name one of the files")
    inner = sorted(child.name for child in folder.iterdir() if child.is_dir())
    why = "it holds no config.json with weights, and no .safetensors, .pt, .pth, .ckpt or .bin file"
    hint = f"name the checkpoint itself, perhaps one of: {', '.join(inner[:6])}" if inner else "check the path"
    raise ProbeError(f"no checkpoint in {folder}", why, hint)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    found = read_json(file)
    if not isinstance(found, dict):
        raise ProbeError(f"cannot read {file}", "it is not a JSON object", "give the model's config.json")
    return found
