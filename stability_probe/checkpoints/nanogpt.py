"""nanoGPT's `ckpt.pt`: model, optimizer, model_args, iter_num, best_val_loss, config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stability_probe.checkpoints.base import Checkpoint
from stability_probe.checkpoints.safe import load_pickle_safely
from stability_probe.checkpoints.tensors import without_wrappers
from stability_probe.checkpoints.wrapped import optimizer_of, step_of, weights_of
from stability_probe.errors import ProbeError

ORDER = 20

ARGUMENTS = ("n_layer", "n_head", "n_embd", "block_size")


def accepts(path: Path) -> bool:
    """A file of `torch.save` whose model_args are nanoGPT's."""
    if not path.is_file() or path.suffix == ".safetensors":
        return False
    try:
        saved = load_pickle_safely(path)
    except ProbeError:  # the reader of last resort says what is wrong with the file
        return False
    arguments = saved.get("model_args") if isinstance(saved, Mapping) else None
    return isinstance(arguments, Mapping) and all(name in arguments for name in ARGUMENTS)


def read(path: Path) -> Checkpoint:
    """The step is `iter_num`: nanoGPT saves before it counts the update that follows."""
    saved = load_pickle_safely(path)
    tensors, notes = without_wrappers(weights_of(saved, path))
    return Checkpoint(path, "nanogpt", tensors, step_of(saved), dict(saved["model_args"]), optimizer_of(saved), notes)
