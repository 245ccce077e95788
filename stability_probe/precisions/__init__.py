"""Precisions by name. One file per family: each module that defines PRECISIONS is found by itself."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import pkgutil
from typing import Any

from stability_probe.errors import ProbeError, nearest
from stability_probe.precisions.base import Precision

USAGE = 2


@functools.cache
def all_precisions() -> dict[str, Precision]:
    """Every precision by the name that users type."""
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    found = [precision for module in modules for precision in getattr(module, "PRECISIONS", ())]
    return {precision.name: precision for precision in sorted(found, key=lambda p: p.name)}


def get_precision(name: str) -> Precision:
    """The precision called `name`, which may be followed by options.

    "bf16:fp32=model.layers.3.mlp+lm_head" keeps the listed modules in fp32, "nvfp4:bf16=model.layers.29" keeps their
    matrix products in bf16, and "fp16:scale=1024" scales the loss.

    Raises:
        ProbeError: no precision or option of that name (exit code 2).
    """
    stem, *options = name.strip().split(":")
    known = all_precisions()
    if stem not in known:
        raise ProbeError(f"unknown precision {stem!r}", "no precision has that name", nearest(stem, known), USAGE)
    changes = dict(_option(name, option) for option in options)
    return dataclasses.replace(known[stem], name=name.strip(), **changes) if changes else known[stem]


def _option(name: str, option: str) -> tuple[str, Any]:
    key, _, value = option.partition("=")
    if key in ("fp32", "bf16") and value:
        return f"keep_{key}", tuple(value.split("+"))
    try:
        scale = float(value) if key == "scale" else 0.0
    except ValueError:
        scale = 0.0
    if not 0 < scale < math.inf:
        hint = "use fp32=MODULE+MODULE, bf16=MODULE+MODULE or scale=NUMBER"
        raise ProbeError(f"cannot read the precision {name!r}", f"{option!r} is no option of a precision", hint, USAGE)
    return "loss_scale", scale
