"""The orders in which training scripts hand a model's parameters to their optimizer."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from torch import nn

# Names that transformers' Trainer never decays, in lower case (Trainer.get_decay_parameter_names, transformers 5.24)
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def candidate_orders(model: nn.Module, sizes: tuple[int, ...]) -> Iterator[tuple[str, list[list[str]]]]:
    """Names by group, likeliest first, with the rule in words; a tied parameter appears once.

    Args:
        sizes: parameters in each stored group. Empty groups (a split that left nothing) stay empty.
    """
    names = [name for name, _ in model.named_parameters()]
    splits = {
        "the Trainer's weight-decay split": _trainer_decayed(model),
        "matrices and vectors apart": {name for name, parameter in model.named_parameters() if parameter.dim() >= 2},
        "linear weights and the rest apart": _linear_weights(model),
    }
    filled = [index for index, size in enumerate(sizes) if size]
    if len(filled) == 2:
        # minGPT and nanoGPT before 2023 sorted the names; some scripts put the undecayed group first.
        for (order, listed), (rule, first), swap in itertools.product(
            (("the model's order", names), ("alphabetical order", sorted(names))), splits.items(), (False, True)
        ):
            halves = [[name for name in listed if name in first], [name for name in listed if name not in first]]
            words = f"{rule}, in {order}{', undecayed first' if swap else ''}"
            yield words, _placed(halves[::-1] if swap else halves, filled, len(sizes))
    if sum(sizes) == len(names):
        rest = iter(names)
        yield "the model's order", [list(itertools.islice(rest, size)) for size in sizes]


def _placed(halves: list[list[str]], filled: list[int], n_groups: int) -> list[list[str]]:
    groups: list[list[str]] = [[] for _ in range(n_groups)]
    for index, half in zip(filled, halves, strict=True):
        groups[index] = half
    return groups


def _trainer_decayed(model: nn.Module) -> set[str]:
    in_layer_norm = {
        f"{name}.{own}"
        for name, module in model.named_modules()
        if isinstance(module, nn.LayerNorm)
        for own, _ in module.named_parameters()
    }
    return {
        name
        for name, _ in model.named_parameters()
        if name not in in_layer_norm and not _UNDECAYED.search(name.lower())
    }


def _linear_weights(model: nn.Module) -> set[str]:
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
