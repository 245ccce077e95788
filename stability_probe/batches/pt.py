"""`torch.save` files: `.pt`, `.pth`."""

from __future__ import annotations

from pathlib import Path


def accepts(path: Path) -> bool:
    return path.suffix.lower() in {".pt", ".pth"}


def read(path: Path) -> object:
    """The stored object; foreign classes arrive as inert stubs, and nothing in the file runs."""
    from stability_probe.checkpoints.safe import load_pickle_safely

    return load_pickle_safely(path)
