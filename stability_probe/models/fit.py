"""Stored tensors into a module: which key goes where, and an honest list of what did not fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from stability_probe.checkpoints.base import KeyReport
from stability_probe.checkpoints.tensors import canonical


def fit(module: nn.Module, tensors: Mapping[str, Tensor], ignorable: tuple[str, ...] = ()) -> KeyReport:
    """Copies the tensors into the module's parameters and persistent buffers, in place.

    What the file lacks keeps the value that the module's constructor gave it. Where names share one parameter
    and the file holds different values for them, the last name in the module's order wins, as in
    `load_state_dict`.

    Args:
        ignorable: endings of stored keys that carry nothing (old causal-mask buffers).
    """
    places = module.state_dict(keep_vars=True)
    stored, renamed = repair(tensors, {name: tuple(place.shape) for name, place in places.items()})
    fitting = {name: stored[name] for name in places if name in stored and stored[name].shape == places[name].shape}
    module.load_state_dict(fitting, strict=False)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    ties = tied_names(module)
    filled_by_tie = {name for names in ties if any(name in fitting for name in names) for name in names}
    absent = set(places) - set(stored) - filled_by_tie
    return KeyReport(
        missing=tuple(sorted(absent & parameters)),
        unexpected=tuple(sorted(name for name in set(stored) - set(places) if not name.endswith(ignorable))),
        misshaped=tuple(
            (name, tuple(stored[name].shape), tuple(places[name].shape))
            for name in sorted(set(places) & set(stored) - set(fitting))
        ),
        untied=tuple(pair for names in ties for pair in disagreeing(names, fitting)),
        renamed=renamed,
    )


def tied_names(module: nn.Module) -> list[list[str]]:
    """Groups of names (in the module's order) that share one parameter."""
    names_by_parameter: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_by_parameter[id(parameter)].append(name)
    return [names for names in names_by_parameter.values() if len(names) > 1]


def disagreeing(names: list[str], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs (first name, other name) of a tie whose stored values differ; NaN equals NaN."""
    stored = [name for name in names if name in tensors]
    for name in stored[1:]:
        if not same_values(tensors[stored[0]], tensors[name]):
            yield stored[0], name


def same_values(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return a.data_ptr() == b.data_ptr() or torch.allclose(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)


def repair(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Stored tensors under the model's names.

    A prefix is taken off or put on only where that makes more keys fit in name and shape; wrapper components
    in the model's own names are matched as if they were absent.

    Returns:
        the tensors by name, and what was done, in words.
    """
    plain_names = {canonical(name): name for name in shapes}
    changes = [("", ""), *((prefix, "") for prefix in _prefixes(tensors)), *(("", p) for p in _prefixes(plain_names))]

    def fits(key: str, renamed: str) -> bool:
        name = plain_names.get(renamed)
        return name is not None and shapes[name] == tuple(tensors[key].shape)

    def score(change: tuple[str, str]) -> int:
        return sum(fits(key, key) or fits(key, _changed(key, *change)) for key in tensors)

    removed, added = max(changes, key=score)
    stored: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        changed = _changed(key, removed, added)
        name = changed if fits(key, changed) and not fits(key, key) else key
        stored[plain_names.get(name, name)] = tensor
    words = [f"prefix '{removed}' removed"] * bool(removed) + [f"prefix '{added}' added"] * bool(added)
    return stored, tuple(words)


def _changed(key: str, removed: str, added: str) -> str:
    return added + key.removeprefix(removed)


def _prefixes(names: Iterable[str]) -> list[str]:
    """Dotted beginnings of one to three words without a block's index, the shortest first."""
    paths = [name.split(".")[:-1] for name in names]
    starts = {".".join(path[:n]) + "." for path in paths for n in (1, 2, 3) if n <= len(path)}
    return sorted(
        (start for start in starts if not any(map(str.isdigit, start.split(".")))), key=lambda s: (s.count("."), s)
    )
