"""Checkpoints of this package's own classes: the decoder, and nanoGPT's layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from stability_probe.checkpoints.base import Checkpoint
from stability_probe.errors import ProbeError
from stability_probe.models.base import LoadedModel, ready, refuse_larger, refuse_other_architecture, vocabulary
from stability_probe.models.decoder import MODEL_TYPE, Decoder, DecoderConfig
from stability_probe.models.fit import fit
from stability_probe.models.nanogpt import nanogpt_from

_NANOGPT_ARGUMENTS = {"n_layer", "n_head", "n_embd", "block_size", "vocab_size"}
_MASK_BUFFERS = (".attn.bias", ".attn.masked_bias")  # the causal mask that nanoGPT stored before it used SDPA


def accepts(checkpoint: Checkpoint) -> bool:
    """Does the configuration describe the decoder, or is it nanoGPT's model_args?"""
    config = checkpoint.config or {}
    return config.get("model_type") == MODEL_TYPE or ("model_type" not in config and set(config) >= _NANOGPT_ARGUMENTS)


def load(checkpoint: Checkpoint) -> LoadedModel:
    """The model with its weights; what the file lacks starts as in training, from seed 0.

    Raises:
        ProbeError: a configuration that makes no model, or weights of another architecture.
    """
    config = dict(checkpoint.config or {})
    try:
        with torch.device("meta"):
            refuse_larger(_build(config), checkpoint)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = _build(config)
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
        raise ProbeError(
            f"cannot build the model of {checkpoint.path}",
            f"its configuration makes none ({type(error).__name__}: {error})",
            "correct it with --config FILE.json",
        ) from error
    name = f"{'decoder' if isinstance(module, Decoder) else 'nanoGPT'} ({config['n_layer']} layers)"
    keys = fit(module, checkpoint.tensors, ignorable=_MASK_BUFFERS)
    refuse_other_architecture(keys, len(list(module.parameters())), name)
    return LoadedModel(ready(module), name, "decoder", keys, config, vocabulary(module, config))


def _build(config: Mapping[str, Any]) -> nn.Module:
    is_decoder = config.get("model_type") == MODEL_TYPE
    return Decoder(DecoderConfig.from_dict(config)) if is_decoder else nanogpt_from(config)
