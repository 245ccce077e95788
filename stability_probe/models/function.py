"""Models that somebody's own function builds: `--model FILE.py:FUNCTION` or `MODULE:FUNCTION`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from stability_probe.checkpoints.base import Checkpoint
from stability_probe.errors import ProbeError, nearest, said
from stability_probe.models.base import LoadedModel, ready, refuse_other_architecture, vocabulary
from stability_probe.models.fit import fit

_CONFIG_NAMES = ("config", "cfg", "conf", "args", "model_args", "params", "hparams")


def load(checkpoint: Checkpoint, spec: str) -> LoadedModel:
    """Builds the model with the named function and loads the checkpoint's weights into it.

    The function runs under seed 0, so that what the checkpoint lacks is the same every time. Consent to run it
    is the caller's business.

    Raises:
        ProbeError: nothing of that name, the function fails or returns no module, or the weights do not fit.
    """
    config = dict(checkpoint.config or {})
    module = build(spec, config)
    left = [name for name, item in module.state_dict().items() if item.is_meta]
    if left:
        why = f"it returns a model on the meta device, without memory for {left[0]}"
        raise ProbeError(f"cannot use the model of {spec}", why, "build it on the CPU")
    lazy = [name for name, item in module.named_parameters() if torch.nn.parameter.is_lazy(item)]
    if lazy:
        why = f"{lazy[0]} has no shape before the first forward"
        raise ProbeError(f"cannot use the model of {spec}", why, "run one forward in the function, or give the sizes")
    keys = fit(module, checkpoint.tensors)
    name = type(module).__name__
    refuse_other_architecture(keys, len(list(module.parameters())), f"{name} of {spec}")
    return LoadedModel(ready(module.cpu()), name, "function", keys, config, vocabulary(module, config))


def build(spec: str, config: Mapping[str, Any]) -> nn.Module:
    """The module that the function returns for this configuration."""
    where, separator, name = spec.rpartition(":")
    if not separator or not where or not name:
        raise ProbeError(f"cannot use --model {spec}", "it names no function", "write FILE.py:FUNCTION")
    with _importable(where), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        function = _function(_import(where), name, spec)
        try:
            module = _call(function, config)
        except ProbeError:
            raise
        except (Exception, SystemExit) as error:
            hint = "correct it" if config else "it may need a configuration: --config FILE.json"
            raise ProbeError(f"the function of --model {spec} failed", said(error), hint) from error
    if not isinstance(module, nn.Module):
        why = f"it returned {type(module).__name__}, not an nn.Module"
        raise ProbeError(f"cannot use --model {spec}", why, "return the model itself")
    return _unwrapped(module)


def _unwrapped(module: nn.Module) -> nn.Module:
    """The model inside torch.compile and DataParallel wrappers, which hide its forward's signature and its parts."""
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return _unwrapped(module.module)
    inner = getattr(module, "_orig_mod", None)
    return _unwrapped(inner) if isinstance(inner, nn.Module) else module


@contextlib.contextmanager
def _importable(where: str) -> Iterator[None]:
    """The folder of the file (the working folder for a module) comes first in the search path."""
    folder = str(Path(where).resolve().parent if where.endswith(".py") else Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the code may have taken it out itself
            sys.path.remove(folder)


def _import(where: str) -> ModuleType:
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        if not Path(where).is_file():
            raise ProbeError(f"cannot read {where}", "there is no such file", "check the path given to --model")
        spec = importlib.util.spec_from_file_location(f"_probe_model_{Path(where).stem}", where)
        assert spec is not None and spec.loader is not None  # always so for a path that ends in .py
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up there
        spec.loader.exec_module(module)
        return module
    except ProbeError:
        raise
    except (Exception, SystemExit) as error:
        raise ProbeError(f"cannot import {where}", said(error), "correct it, or install what it needs") from error


def _function(module: ModuleType, name: str, spec: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if callable(found):
        return found
    known = [key for key, item in vars(module).items() if callable(item) and not key.startswith("_")]
    raise ProbeError(f"cannot use --model {spec}", f"there is no function {name}", nearest(name, known))


def _call(function: Callable[..., Any], config: Mapping[str, Any]) -> Any:
    """By the keywords that it names from the configuration, else with the configuration, else with nothing."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind in kinds]
    keywords = {p.name: config[p.name] for p in parameters if p.name in config}
    if keywords:
        return function(**keywords)
    takes_config = [p for p in parameters if p.default is p.empty or p.name in _CONFIG_NAMES]
    return function(dict(config)) if takes_config else function()
