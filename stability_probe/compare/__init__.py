"""`compare-precision`: where rounding enters a forward and backward, who makes it, and what it costs."""

from __future__ import annotations

from stability_probe.compare.command import compare_files, run_compare_precision

__all__ = ["compare_files", "run_compare_precision"]
