"""Training scripts save a dict around the weights: where its parts usually lie."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from stability_probe.checkpoints.safe import InertObject, load_pickle_safely
from stability_probe.checkpoints.tensors import state_dict_in
from stability_probe.errors import ProbeError

WEIGHTS = ("model", "state_dict", "module", "model_state_dict")
OPTIMIZER = ("optimizer", "optimizer_state_dict")
STEP = ("step", "iter_num", "global_step", "iteration", "iter")
CONFIG = ("model_args", "model_config", "config", "hyper_parameters", "args")
OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin")


def weights_of(saved: Any, path: Path) -> dict[str, Tensor]:
    """The model's state dict, wrapped or bare.

    Raises:
        ProbeError: no tensors where weights usually lie.
    """
    if isinstance(saved, Mapping):
        for key in WEIGHTS:
            inner = state_dict_in(saved.get(key))
            if inner is not None:
                return inner
    bare = state_dict_in(saved)
    if bare is not None:
        return bare
    if isinstance(saved, InertObject):
        why = f"it holds a pickled object ({saved.inert_name}), and loading that would run its code"
    elif isinstance(saved, Mapping):
        why = f"it has no tensors at its top level, nor under {', '.join(WEIGHTS)}; its keys: {list(saved)[:8]}"
    else:
        why = f"it holds a {type(saved).__name__}, not a state dict"
    raise ProbeError(f"cannot find a model's weights in {path}", why, "save model.state_dict() with torch.save")


def step_of(saved: Any) -> int | None:
    """The run's step, None where the file does not say."""
    values = (saved[key] for key in STEP if key in saved) if isinstance(saved, Mapping) else ()
    return next((step for step in map(_whole_number, values) if step is not None), None)


def _whole_number(value: Any) -> int | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return int(value) if is_number and value == value // 1 else None


def config_of(saved: Any) -> dict[str, Any] | None:
    """The model's configuration, None where the file holds none; a namespace counts as its attributes."""
    if not isinstance(saved, Mapping):
        return None
    for key in CONFIG:
        found = saved.get(key)
        found = found.state if isinstance(found, InertObject) else found
        if isinstance(found, Mapping) and found and not state_dict_in(found):
            return {str(name): value for name, value in found.items()}
    return None


def optimizer_of(saved: Any) -> Mapping[str, Any] | None:
    """The optimizer's state dict, bare or wrapped."""
    if not isinstance(saved, Mapping):
        return None
    if "state" in saved and "param_groups" in saved:
        return saved
    return next((found for key in OPTIMIZER if (found := optimizer_of(saved.get(key))) is not None), None)


def read_optimizer(path: Path) -> Mapping[str, Any]:
    """The optimizer's state dict in a file, or in a folder that holds `optimizer.pt`.

    Raises:
        ProbeError: nothing of that kind is there.
    """
    file = next((path / name for name in OPTIMIZER_FILES if (path / name).is_file()), path) if path.is_dir() else path
    if file.is_dir():
        raise ProbeError(f"cannot find an optimizer in {path}", "it holds no optimizer.pt", "give the file itself")
    found = optimizer_of(load_pickle_safely(file))
    if found is None:
        why = f"neither the file nor its {' or '.join(OPTIMIZER)} has both 'state' and 'param_groups'"
        raise ProbeError(f"cannot find an optimizer in {file}", why, "save optimizer.state_dict() with torch.save")
    return found


def optimizer_beside(folder: Path) -> tuple[Mapping[str, Any] | None, tuple[str, ...]]:
    """The optimizer that lies in a checkpoint's folder; an unreadable one is a note, not a failure."""
    if not any((folder / name).is_file() for name in OPTIMIZER_FILES):
        return None, ()
    try:
        return read_optimizer(folder), ()
    except ProbeError as error:
        return None, (f"optimizer state left out: {error.problem}: {error.why}",)
