"""Memory that the C library has been given back, and keeps."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable


def give_back_free_memory() -> None:
    """Hand free pages of the heap back to the system; does nothing where the C library is not glibc.

    Activations that are freed between others that live on leave holes, and a replay with measurements leaves other
    holes than one without: resident memory grows by half over a few rows (benchmarks/compare_precision.py).
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
