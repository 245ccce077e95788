"""How a checkpoint becomes a module that can be replayed."""

from __future__ import annotations

from stability_probe.checkpoints.base import Checkpoint
from stability_probe.errors import ProbeError
from stability_probe.models import function, own, transformers
from stability_probe.models.base import LoadedModel, refuse_larger_vocabulary, refuse_more_layers

__all__ = ["LoadedModel", "load_model"]


def load_model(checkpoint: Checkpoint, model_spec: str | None = None) -> LoadedModel:
    """The checkpoint's model with its weights: fp32, eval mode, gradients required and absent.

    Args:
        model_spec: `FILE.py:FUNCTION` or `MODULE:FUNCTION`, run without further question; None where the
            checkpoint's configuration says what the model is.

    Raises:
        ProbeError: no model can be built, or the weights belong to another architecture.
    """
    if model_spec is not None:
        return function.load(checkpoint, model_spec)
    refuse_more_layers(checkpoint)
    refuse_larger_vocabulary(checkpoint)
    if own.accepts(checkpoint):
        return own.load(checkpoint)
    if transformers.accepts(checkpoint):
        return transformers.load(checkpoint)
    config = checkpoint.config
    why = "it holds no configuration" if config is None else "its configuration has no model_type"
    raise ProbeError(
        f"cannot tell which model {checkpoint.path} belongs to",
        why,
        "give --model FILE.py:FUNCTION, or --config with the model's config.json",
    )
