"""Memory that the C library has been given back, and keeps."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

GROWN = 1.05


@dataclass
class Heap:
    """Hands free pages of the heap back to the system, where holes made it grow; idle where the C library isn't glibc.

    Activations that are freed between others that live on leave holes, and a replay with measurements leaves other
    holes than one without: resident memory grows by half over a few rows (benchmarks/compare_precision.py). Pages that
    were handed back cost their time when they are touched again, so it is done only once resident memory is a twentieth
    above what the first forward left.
    """

    usual: int | None = None

    def tidy(self) -> None:
        """Called after every forward."""
        trim = _malloc_trim()
        if trim is None:
            return
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        if self.usual is None:
            self.usual = pages
        elif pages > GROWN * self.usual:
            trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
