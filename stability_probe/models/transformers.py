"""Architectures of the transformers library, by the `model_type` of the configuration alone.

Nothing is fetched and no code of the checkpoint runs: the class comes from the installed library, and settings
that would make it load kernels, quantizers or other files are taken out of the configuration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stability_probe.checkpoints.base import Checkpoint, KeyReport
from stability_probe.checkpoints.tensors import few
from stability_probe.errors import ProbeError, nearest
from stability_probe.models.base import LoadedModel, ready, refuse_other_architecture, vocabulary
from stability_probe.models.fit import repair, same_values

# Settings that reach beyond the architecture: remote code, kernels from a hub, fusion, parallel plans, other files, and
# a classifier's labels (transformers makes a name for each: 10⁹ of them take the machine's memory).
_FOREIGN = (
    "auto_map",
    "_attn_implementation",
    "_attn_implementation_internal",
    "attn_implementation",
    "_experts_implementation",
    "experts_implementation",
    "kernel_config",
    "fusion_config",
    "distributed_config",
    "transformers_weights",
    "adapter_config",
    "custom_pipelines",
    "name_or_path",
    "_name_or_path",
    "_commit_hash",
    "num_labels",
    "id2label",
    "label2id",
)


def accepts(checkpoint: Checkpoint) -> bool:
    return isinstance((checkpoint.config or {}).get("model_type"), str)


def load(checkpoint: Checkpoint) -> LoadedModel:
    """The model exactly as `AutoModelForCausalLM.from_pretrained` would load it in fp32.

    Weights that the file lacks get the library's own initial values, from seed 0.

    Raises:
        ProbeError: transformers is not installed or does not know the architecture, the weights are quantized,
            or they belong to another architecture.
    """
    stored_config = dict(checkpoint.config or {})
    if stored_config.get("quantization_config"):
        raise ProbeError(
            f"cannot replay {checkpoint.path}",
            "its weights are quantized (quantization_config): they have no gradients",
            "give the checkpoint that training wrote",
        )
    config = _build_config(checkpoint, stored_config)
    model_class = _model_class(checkpoint, config)
    module, keys = _load(checkpoint, model_class, config)
    name = f"{model_class.__name__} ({_millions(module)})"
    refuse_other_architecture(keys, len(list(module.parameters())), model_class.__name__)
    embedding = module.get_input_embeddings()
    rows = getattr(embedding, "num_embeddings", None) or vocabulary(module, stored_config)
    return LoadedModel(ready(module), name, "transformers", keys, stored_config, int(rows), _notes(config))


def _without_foreign(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_foreign(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in _FOREIGN
    }


def _build_config(checkpoint: Checkpoint, stored: dict[str, Any]) -> Any:
    try:
        from transformers import AutoConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise ProbeError(
            f"cannot build the model of {checkpoint.path}",
            f"model_type {stored['model_type']!r} is one of transformers' architectures, and it is not installed",
            "pip install 'stability-probe[hf]'",
        ) from error
    settings = _without_foreign(stored)
    model_type = settings.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        own_code = " (its auto_map names code of its own, which is never run)" if "auto_map" in stored else ""
        why = f"the installed transformers does not know model_type {model_type!r}{own_code}"
        hint = f"{nearest(model_type, CONFIG_MAPPING)}; or --model FILE.py:FUNCTION"[:300]
        raise ProbeError(f"cannot build the model of {checkpoint.path}", why, hint)
    try:
        config = AutoConfig.for_model(model_type).from_dict(settings)
    except Exception as error:
        raise _no_model(checkpoint, error) from error
    config.use_cache = False
    return config


def _no_model(checkpoint: Checkpoint, error: Exception) -> ProbeError:
    why = f"transformers refuses the configuration or the weights ({type(error).__name__}: {str(error)[:300]})"
    return ProbeError(f"cannot build the model of {checkpoint.path}", why, "correct it with --config FILE.json")


def _model_class(checkpoint: Checkpoint, config: Any) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError as error:
        raise ProbeError(
            f"cannot replay {checkpoint.path}",
            f"model_type {config.model_type!r} is no language model that predicts the next token",
            "give a causal language model, or --model FILE.py:FUNCTION",
        ) from error


def attention_for(model_class: Any, config: Any) -> str:
    """ "sdpa", or "eager" where the class lacks it or caps its attention logits, which SDPA cannot."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "sdpa" if getattr(model_class, "_supports_sdpa", False) and not capped else "eager"


def _load(checkpoint: Checkpoint, model_class: Any, config: Any) -> tuple[Any, KeyReport]:
    tensors = dict(checkpoint.tensors)
    attention = attention_for(model_class, config)
    module, keys = _from_tensors(checkpoint, model_class, config, attention, tensors)
    if len(keys.missing) * 2 > len(list(module.parameters())):
        shapes = {name: tuple(item.shape) for name, item in module.state_dict().items()}
        repaired, renamed = repair(tensors, shapes)
        if renamed:
            module, keys = _from_tensors(checkpoint, model_class, config, attention, repaired, renamed)
    return module, keys


def _from_tensors(
    checkpoint: Checkpoint,
    model_class: Any,
    config: Any,
    attention: str,
    tensors: dict[str, Tensor],
    renamed: tuple[str, ...] = (),
) -> tuple[nn.Module, KeyReport]:
    with _quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            module, found = model_class.from_pretrained(
                None,
                config=config,
                state_dict=dict(tensors),
                attn_implementation=attention,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                local_files_only=True,
                **_fp32(),
            )
        except Exception as error:
            raise _no_model(checkpoint, error) from error
    names = set(module.state_dict())
    misshaped = sorted((name, tuple(stored), tuple(wanted)) for name, stored, wanted in found["mismatched_keys"])
    return module, KeyReport(
        missing=tuple(sorted(set(found["missing_keys"]) & names - {name for name, _, _ in misshaped})),
        unexpected=tuple(sorted(found["unexpected_keys"])),
        misshaped=tuple(misshaped),
        untied=tuple(_untied(module, config, tensors)),
        uninitialised=tuple(sorted(name for name, item in module.state_dict().items() if item.is_meta)),
        renamed=renamed,
    )


def _untied(module: Any, config: Any, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """The embedding and the head, where the configuration ties them and the file holds different values."""
    if not getattr(config.get_text_config(), "tie_word_embeddings", False):
        return
    source, target = module.get_input_embeddings(), module.get_output_embeddings()
    if source is None or target is None:
        return
    names = {id(child): name for name, child in module.named_modules()}
    pair = (f"{names[id(source)]}.weight", f"{names[id(target)]}.weight")
    if all(name in tensors for name in pair) and not same_values(tensors[pair[0]], tensors[pair[1]]):
        yield pair


def _fp32() -> dict[str, torch.dtype]:
    """The keyword for the dtype: `dtype` since transformers 4.56, `torch_dtype` before."""
    import transformers

    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    return {"dtype" if (major, minor) >= (4, 56) else "torch_dtype": torch.float32}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's own loading report and progress bar: the key report says the same."""
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _millions(module: nn.Module) -> str:
    return f"{sum(parameter.numel() for parameter in module.parameters()) / 1e6:,.1f} M parameters"


def _notes(config: Any) -> tuple[str, ...]:
    dropped = [name for name in ("attention_dropout", "resid_pdrop", "embd_pdrop") if getattr(config, name, 0)]
    return (f"dropout switched off for the replay ({few(dropped)})",) if dropped else ()
