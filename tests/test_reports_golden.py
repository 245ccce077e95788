"""Finished reports, character by character. `UPDATE_GOLDEN=1 pytest tests/test_reports_golden.py` writes them anew."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stability_probe.reports import render
from stability_probe.schema import report_from_json
from tests.report_samples import SAMPLES

GOLDEN = Path(__file__).parent / "golden"
LAYOUTS = {
    "80.txt": ("terminal", {"width": 80}),
    "120.txt": ("terminal", {"width": 120}),
    "md": ("markdown", {}),
    "json": ("json", {}),
}


@pytest.mark.parametrize("suffix", LAYOUTS)
@pytest.mark.parametrize("sample", SAMPLES)
def test_golden(sample, suffix):
    format_, layout = LAYOUTS[suffix]
    path = GOLDEN / f"{sample}.{suffix}"
    text = render(SAMPLES[sample](), format_, **layout)
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8", newline="\n")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_saved_report_renders_the_same(sample):
    report = SAMPLES[sample]()
    again = report_from_json(json.loads(render(report, "json")))
    for format_ in ("json", "markdown", "terminal"):
        assert render(again, format_) == render(report, format_)
