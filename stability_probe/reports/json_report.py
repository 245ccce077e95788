"""The report as JSON, schema 1: everything that was measured, for scripts and for `probe report`."""

from __future__ import annotations

import json

from stability_probe.schema import Report, to_json

FORMAT = "json"
EXTENSION = ".json"


def render(report: Report) -> str:
    """Strict JSON in ASCII: a control character, a lone surrogate or a bidi mark from a token stays an escape."""
    return json.dumps(to_json(report), indent=2, ensure_ascii=True, allow_nan=False, default=str) + "\n"
