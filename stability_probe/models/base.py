"""What every way of building a model returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from stability_probe.checkpoints.base import Checkpoint, KeyReport
from stability_probe.checkpoints.tensors import few
from stability_probe.errors import ProbeError


@dataclass(frozen=True)
class LoadedModel:
    """A model with the checkpoint's weights, ready to be replayed.

    Attributes:
        module: on the CPU, fp32, eval mode; every parameter requires a gradient and has none yet.
        name: class and size, for reports.
        source: "transformers", "decoder" (this package's own classes, nanoGPT's too) or "function" (`--model`).
        keys: how the stored keys fitted.
        config: the configuration that the model was built from; empty where there was none.
        vocab_size: rows of the token embedding: ids from 0 to vocab_size − 1 can be looked up.
        notes: what was decided while loading, for the report.
    """

    module: nn.Module
    name: str
    source: Literal["transformers", "decoder", "function"]
    keys: KeyReport
    config: Mapping[str, Any]
    vocab_size: int
    notes: tuple[str, ...] = ()


def ready(module: nn.Module) -> nn.Module:
    """The module as the replay wants it: fp32, eval mode, gradients required and absent."""
    module = module.float().eval()
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
        parameter.grad = None
    return module


def vocabulary(module: nn.Module, config: Mapping[str, Any]) -> int:
    """Rows of the token embedding: the table of the configured size, else the first one; else the last layer's width.

    Raises:
        ProbeError: the model has neither an embedding nor a linear layer.
    """
    tables = [child.num_embeddings for child in module.modules() if isinstance(child, nn.Embedding)]
    stated = config.get("vocab_size")
    widths = [child.out_features for child in module.modules() if isinstance(child, nn.Linear)]
    if stated in tables:
        return int(stated)
    if tables or widths:
        return tables[0] if tables else widths[-1]
    raise ProbeError(
        f"cannot tell the vocabulary of {type(module).__name__}",
        "it has neither an nn.Embedding nor an nn.Linear",
        "give a --model whose function returns a language model",
    )


_LAYERS = ("n_layer", "num_hidden_layers", "num_layers", "n_layers")


def refuse_more_layers(checkpoint: Checkpoint) -> None:
    """A configuration with more layers than the file has tensors belongs to another checkpoint.

    Raises:
        ProbeError: before a model is built that would take for ever.
    """
    config = checkpoint.config or {}
    layers = next((config[name] for name in _LAYERS if isinstance(config.get(name), int)), 0)
    if layers > len(checkpoint.tensors):
        raise ProbeError(
            f"the configuration does not fit {checkpoint.path}",
            f"it has {layers} layers, and the file holds {len(checkpoint.tensors)} tensors in all",
            "check --config",
        )


_WIDTHS = ("hidden_size", "n_embd", "d_model")
# Weights (4 GiB of fp32) that an embedding may have beyond what is stored: a file that merely lacks its embedding is
# a verdict, and not refused.
_SPARE_WEIGHTS = 2**30


def refuse_larger_vocabulary(checkpoint: Checkpoint) -> None:
    """A configuration whose embedding alone is far larger than the whole file would take memory for nothing.

    Raises:
        ProbeError: before memory is taken for it.
    """
    stored = sum(tensor.numel() for tensor in checkpoint.tensors.values())
    nested = (checkpoint.config or {}).get("text_config")
    for config in (checkpoint.config or {}, nested if isinstance(nested, Mapping) else {}):
        rows = config.get("vocab_size")
        width = next((config[name] for name in _WIDTHS if isinstance(config.get(name), int)), 1)
        if isinstance(rows, (int, float)) and rows * max(width, 1) > 2 * stored + _SPARE_WEIGHTS:
            raise ProbeError(
                f"the configuration does not fit {checkpoint.path}",
                f"its vocab_size is {rows:,}, and the file holds {stored:,} weights in all",
                "check --config",
            )


def refuse_larger(skeleton: nn.Module, checkpoint: Checkpoint) -> None:
    """A model more than twice as large as what is stored would be filled by less than half.

    Args:
        skeleton: the model without memory (on the meta device).

    Raises:
        ProbeError: before memory is taken for it.
    """
    wanted = sum(parameter.numel() for parameter in skeleton.parameters())
    stored = sum(tensor.numel() for tensor in checkpoint.tensors.values())
    if wanted > 2 * stored:
        raise ProbeError(
            f"the configuration does not fit {checkpoint.path}",
            f"its model has {wanted:,} weights, and the file holds {stored:,}",
            "check --config",
        )


def refuse_other_architecture(keys: KeyReport, n_parameters: int, name: str) -> None:
    """A checkpoint that fills less than half of the model's parameters was made by another model.

    Raises:
        ProbeError: lists the first keys that did not fit.
    """
    n_filled = n_parameters - len(keys.missing) - len(keys.misshaped)
    if n_filled * 2 >= n_parameters and n_filled > 0:
        return
    shapes = [f"{key} {stored} for {wanted}" for key, stored, wanted in keys.misshaped]
    parts = {
        "missing": few(keys.missing),
        "unexpected": few(keys.unexpected),
        "of another shape": few(shapes, 2),
    }
    found = "; ".join(f"{what}: {names}" for what, names in parts.items() if names)
    raise ProbeError(
        f"the checkpoint does not fit {name}",
        f"only {max(n_filled, 0)} of {n_parameters} parameters were found ({found})",
        "check --config, or name the function that builds the model: --model FILE.py:FUNCTION",
    )
