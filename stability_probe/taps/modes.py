"""Measurements outside the dispatch modes of a precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch.utils._python_dispatch import _disable_current_modes

Function = TypeVar("Function", bound=Callable[..., Any])


def without_modes(function: Function) -> Function:
    """Measurements run outside the dispatch modes of a precision: they need none, and each costs time per operation."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]
