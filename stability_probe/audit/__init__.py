"""Token audit: which rows of a batch or a data set look wrong, where in the row, and why.

The public names load on first use, so that importing the package stays light.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "AuditResult": "result",
    "RowAudit": "result",
    "audit_rows": "rows",
    "audit_batch": "batch",
    "should_skip_batch": "batch",
    "Baseline": "baseline",
    "reference_scores": "counts",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
