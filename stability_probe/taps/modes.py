"""Measurements outside the modes of torch that a precision or a tap has entered."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

Function = TypeVar("Function", bound=Callable[..., Any])


def without_modes(function: Function) -> Function:
    """Measurements run outside the modes of precisions and taps: they need none, and each costs time per operation."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]
