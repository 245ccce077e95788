"""numpy files of one array."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stability_probe.errors import ProbeError


def accepts(path: Path) -> bool:
    return path.suffix.lower() == ".npy"


def read(path: Path) -> object:
    try:
        # Mapped, so that a header which claims a huge shape costs nothing before the shape is checked.
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, TypeError, SyntaxError, OverflowError) as error:
        hint = "save it again as one integer array (np.save); object arrays are pickles and are not read"
        raise ProbeError(f"cannot read the batch {path}", str(error), hint) from error
