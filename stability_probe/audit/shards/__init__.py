"""Token shards: one module per format, found by its `accepts`. A new format is a new file."""

from __future__ import annotations

import glob
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

from stability_probe.audit.shards.base import unreadable
from stability_probe.errors import ProbeError

# litdata's and Megatron's `.bin` are told from a bare one by the index beside them.
_FIRST = ("litdata", "megatron")


def formats() -> list[ModuleType]:
    names = [info.name for info in pkgutil.iter_modules(__path__)]
    ordered = [*_FIRST, *(name for name in names if name not in _FIRST)]
    modules = (importlib.import_module(f"{__name__}.{name}") for name in ordered)
    return [module for module in modules if hasattr(module, "accepts")]


def format_of(path: Path) -> ModuleType:
    """The module that reads this file.

    Raises:
        ProbeError: no format accepts it.
    """
    for module in formats():
        if module.accepts(path):
            return module
    known = "npy, npz, bin, idx, mds, ds, parquet, jsonl, safetensors"
    raise unreadable(path, f"{path.suffix or 'a file without suffix'} is no token shard", f"known: {known}")


def expand(patterns: list[str]) -> list[Path]:
    """Files behind paths, folders and globs, sorted, each once; `.idx` stands for its pair.

    Raises:
        ProbeError: a pattern that matches nothing.
    """
    found: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            inside = sorted(one for one in path.rglob("*") if one.is_file() and any(f.accepts(one) for f in formats()))
        elif path.exists():
            inside = [path]
        else:
            inside = [Path(one) for one in sorted(glob.glob(pattern, recursive=True)) if Path(one).is_file()]
        if not inside:
            raise ProbeError(
                f"nothing to audit at {pattern}", "no such file, or no token shard in it", "check the path"
            )
        found.extend(one.with_suffix(".bin") if one.suffix == ".idx" else one for one in inside)
    return list(dict.fromkeys(found))
