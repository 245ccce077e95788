"""stability_probe: from a checkpoint and a batch to a ranked, confirmed cause of a loss spike."""

from __future__ import annotations

from typing import Any

from stability_probe._version import __version__

__all__ = ["__version__", "audit_batch", "should_skip_batch"]


def __getattr__(name: str) -> Any:
    """The audit for training loops, loaded on first use: importing the package stays light."""
    if name in ("audit_batch", "should_skip_batch"):
        from stability_probe.audit import batch

        return getattr(batch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
