"""One file with a state dict, bare or wrapped: `.pt`, `.pth`, `.bin`, `.safetensors`."""

from __future__ import annotations

from pathlib import Path

from stability_probe.checkpoints.base import Checkpoint
from stability_probe.checkpoints.safe import read_json
from stability_probe.checkpoints.tensors import open_weights, without_wrappers
from stability_probe.checkpoints.wrapped import config_of, optimizer_beside, optimizer_of, step_of, weights_of

ORDER = 90  # takes any file, so every other format is asked first


def accepts(path: Path) -> bool:
    return path.is_file()


def read(path: Path) -> Checkpoint:
    """Weights, and the configuration, optimizer and step where the file or its folder holds them."""
    saved = open_weights(path)
    tensors, notes = without_wrappers(weights_of(saved, path))
    config, optimizer = config_of(saved), optimizer_of(saved)
    beside = path.parent / "config.json"
    if config is None and beside.is_file() and isinstance(found := read_json(beside), dict):
        config, notes = found, (*notes, f"configuration taken from {beside}")
    if optimizer is None:
        optimizer, trouble = optimizer_beside(path.parent)
        notes += trouble or ((f"optimizer taken from {path.parent}",) if optimizer is not None else ())
    return Checkpoint(path, "plain", tensors, step_of(saved), config, optimizer, notes)
