"""numpy archives: arrays by name, or in order where `np.savez` numbered them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from stability_probe.errors import ProbeError

# Room for four int64 arrays of the largest batch that `numbers.py` takes; an archive that claims more is a bomb.
MAX_BYTES = 8 * 2**30


def accepts(path: Path) -> bool:
    return path.suffix.lower() == ".npz"


def read(path: Path) -> object:
    try:
        _refuse_bombs(path)
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # a damaged or lying archive fails in many ways, out of memory among them
        hint = "save it again with np.savez and integer arrays; object arrays are pickles and are not read"
        raise ProbeError(f"cannot read the batch {path}", str(error), hint) from error
    return _in_order(arrays)


def _refuse_bombs(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        claimed = sum(member.file_size for member in archive.infolist())
    if claimed > MAX_BYTES:
        raise ValueError(f"it unpacks to {claimed:,} bytes, more than any batch holds")


def _in_order(arrays: dict[str, np.ndarray]) -> object:
    numbered = [f"arr_{index}" for index in range(len(arrays))]
    if set(arrays) != set(numbered):
        return arrays
    return arrays[numbered[0]] if len(arrays) == 1 else tuple(arrays[name] for name in numbered)
