"""torchlens: the first operation that is not finite, else the first that strays from fp64 in the run's precision.

Read like this: a stray operation: bf16-precision-loss (fp16-overflow where the run is in fp16), at its module. Not
finite: as for the overflow debugger, by where it was born; a parameter that holds it is visible beside the operation.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from benchmarks.peers.material import Material, Saying, WithLoss

NAME = "torchlens' bisect tools"
NEEDS = "torchlens"


def ask(material: Material) -> Saying:
    from torchlens import debug

    measured, inputs = material.with_loss(), material.inputs
    found = debug.find_nan(measured, [], input_kwargs=inputs)
    if found.found:
        module = (found.module_address or "").removeprefix("model").lstrip(".")
        return Saying(found.message, frozenset({_cause(measured, module)}), (module,), alarm=True)
    low = torch.float16 if material.loaded.run_precision.startswith("fp16") else torch.bfloat16
    lowered = copy.deepcopy(measured).to(low)
    strayed = debug.bisect_precision(lowered, [], inputs)
    if not strayed.found:
        return Saying(strayed.message)
    place = (_module(lowered, inputs, strayed.label or ""),)
    cause = "fp16-overflow" if low is torch.float16 else "bf16-precision-loss"
    return Saying(strayed.message, frozenset({cause}), place, alarm=True)


def _cause(measured: WithLoss, module: str) -> str:
    part = measured.model.get_submodule(module) if module else None
    if part is not None and any(not tensor.isfinite().all() for tensor in part.parameters()):
        return "nonfinite-weights"
    if "attn" in module or "attention" in module:
        return "fully-masked-rows"
    return "corrupt-weights" if module else "no-valid-labels"


def _module(measured: WithLoss, inputs: dict[str, Any], label: str) -> str:
    """The module of an operation: the bisection gives its label, and a trace of the same model the module."""
    import torchlens

    trace = torchlens.trace(measured, [], inputs)
    try:
        operation = trace[label]
    except (KeyError, ValueError):
        return ""
    address = str(getattr(operation, "module_address", None) or getattr(operation, "module", None) or "")
    return address.removeprefix("model").lstrip(".").split(":")[0]
