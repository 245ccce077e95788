"""Weights by name: safetensors mapped lazily, and the prefixes of training wrappers taken off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stability_probe.checkpoints.safe import load_pickle_safely
from stability_probe.errors import ProbeError

# torch.compile, (Distributed)DataParallel, FSDP1, activation checkpointing, Lightning and Fabric strategies
WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")


def canonical(name: str) -> str:
    """The name without the components that wrappers insert: `module._orig_mod.head.weight` → `head.weight`."""
    *path, leaf = name.split(".")
    return ".".join([part for part in path if part not in WRAPPERS] + [leaf])


def without_wrappers(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Tensors by canonical name, and a note for the report where a name changed.

    Names stay as they are where two of them would become one.
    """
    renamed = {canonical(name): tensor for name, tensor in tensors.items()}
    if len(renamed) < len(tensors):
        return dict(tensors), ("wrapper prefixes were kept: without them two keys would have the same name",)
    gone = sorted({part for name in tensors for part in name.split(".")[:-1] if part in WRAPPERS})
    return renamed, tuple(f"prefix '{part}.' removed from the stored keys" for part in gone)


def open_safetensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file, mapped: memory is used when (and where) they are written or copied.

    Raises:
        ProbeError: missing, truncated or malformed.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        hint = "copy the file again, or use the previous checkpoint" if Path(path).exists() else "check the path"
        raise ProbeError(f"cannot read {path}", f"not a whole safetensors file: {error}", hint) from error


def open_weights(path: Path) -> Any:
    """What a weight file holds: tensors by name for safetensors, the saved object for anything else."""
    return open_safetensors(path) if path.suffix == ".safetensors" else load_pickle_safely(path)


def state_dict_in(saved: Any) -> dict[str, Tensor] | None:
    """The tensors of a state dict; None where `saved` is not one."""
    if not isinstance(saved, Mapping):
        return None
    tensors = {name: item.detach() for name, item in saved.items() if isinstance(name, str) and is_tensor(item)}
    return tensors or None


def is_tensor(item: Any) -> bool:
    return isinstance(item, Tensor) and item.layout == torch.strided


def few(names: Iterable[str], limit: int = 4) -> str:
    """The first names of a list, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
