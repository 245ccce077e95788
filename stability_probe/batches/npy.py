"""numpy files of one array."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stability_probe.errors import ProbeError


def accepts(path: Path) -> bool:
    return path.suffix.lower() == ".npy"


def read(path: Path) -> object:
    try:
        # Mapped: a header that claims a huge shape costs nothing before the shape is checked, and objects are refused.
        return np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a damaged header fails in many ways
        hint = "save it again as one integer array (np.save); object arrays are pickles and are not read"
        raise ProbeError(f"cannot read the batch {path}", str(error), hint) from error
