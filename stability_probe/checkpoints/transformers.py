"""Folders of `save_pretrained` and of the transformers Trainer (`checkpoint-N/`)."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from stability_probe.checkpoints.base import Checkpoint
from stability_probe.checkpoints.safe import read_json
from stability_probe.checkpoints.tensors import open_weights, state_dict_in, without_wrappers
from stability_probe.checkpoints.wrapped import optimizer_beside
from stability_probe.errors import ProbeError

ORDER = 10

SINGLE = ("model.safetensors", "pytorch_model.bin")
INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def accepts(path: Path) -> bool:
    """A folder with a shard index, or with `config.json` beside a weight file."""
    has_index = any((path / name).is_file() for name in INDEX)
    return has_index or ((path / "config.json").is_file() and any((path / name).is_file() for name in SINGLE))


def read(path: Path) -> Checkpoint:
    """Weights, configuration, and what the Trainer left beside them (optimizer, step)."""
    stored: dict[str, Tensor] = {}
    for file in _weight_files(path):
        tensors = state_dict_in(open_weights(file))
        if tensors is None:
            raise ProbeError(f"cannot find weights in {file}", "it holds no tensors by name", "save the folder again")
        stored |= tensors
    tensors, notes = without_wrappers(stored)
    config = _dict_of(path / "config.json") if (path / "config.json").is_file() else None
    optimizer, trouble = optimizer_beside(path)
    step, doubt = _step(path)
    return Checkpoint(path, "transformers", tensors, step, config, optimizer, notes + trouble + doubt)


def _weight_files(folder: Path) -> list[Path]:
    """The single file, else the shards; safetensors before pickles, as transformers itself prefers."""
    for single, index in zip(SINGLE, INDEX, strict=True):
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            return _shards(folder / index)
    raise ProbeError(f"cannot find weights in {folder}", "none of the usual files is there", "check the path")


def _shards(index: Path) -> list[Path]:
    places = _dict_of(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ProbeError(f"cannot read {index}", "its weight_map does not map names to files", "save the folder again")
    files = [_inside(index, name) for name in sorted(set(places.values()))]
    lost = [file.name for file in files if not file.is_file()]
    if lost:
        raise ProbeError(f"cannot read {index.parent}", f"shards are missing: {', '.join(lost)}", "copy them again")
    return files


def _inside(index: Path, name: str) -> Path:
    """The shard's path. Judged by its name: a hub cache holds links that lead out of the folder, rightly."""
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or ":" in name:
        why = f"its shard {name!r} lies outside the folder"
        raise ProbeError(f"refused to follow {index}", why, "use a checkpoint from a source that you trust")
    return index.parent / name


def _dict_of(path: Path) -> dict[str, Any]:
    found = read_json(path)
    if not isinstance(found, dict):
        raise ProbeError(f"cannot read {path}", "it is not a JSON object", "save the folder again")
    return found


def _step(folder: Path) -> tuple[int | None, tuple[str, ...]]:
    file = folder / "trainer_state.json"
    if not file.is_file():
        return None, ()
    try:
        step = _dict_of(file).get("global_step")
    except ProbeError as error:
        return None, (f"step unknown: {error.problem}: {error.why}",)
    return (step, ()) if isinstance(step, int) else (None, (f"step unknown: {file} has no global_step",))
