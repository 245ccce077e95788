"""safetensors files: tensors by name."""

from __future__ import annotations

from pathlib import Path

from stability_probe.errors import ProbeError


def accepts(path: Path) -> bool:
    return path.suffix.lower() == ".safetensors"


def read(path: Path) -> object:
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except Exception as error:  # a damaged header fails in many ways
        hint = "save the batch again, or copy it again: the file may be cut short"
        raise ProbeError(f"cannot read the batch {path}", str(error), hint) from error
