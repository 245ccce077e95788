"""Progress: silent in pipes and short work, there for a person who waits, gone afterwards."""

from __future__ import annotations

import io
import sys
import time

import pytest

from stability_probe.progress import Bars, Silent, open_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


def test_silent_where_nobody_watches(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with open_progress() as progress:
        assert isinstance(progress, Silent)
        with progress.stage("replay", total=3) as advance:
            advance()
            advance(2)
    assert sys.stderr.getvalue() == ""


def test_silent_when_asked(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal)
    with open_progress(quiet=True) as progress:
        assert isinstance(progress, Silent)


def test_work_under_a_second_shows_nothing(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal)
    with open_progress() as progress, progress.stage("replay", total=1) as advance:
        advance()
    assert isinstance(progress, Bars)
    assert "replay" not in terminal.getvalue()


def test_longer_work_shows_stage_and_progress_even_inside_one_stage(terminal):
    with (
        Bars(terminal, patience_seconds=0.05) as progress,
        progress.stage("replay [1] of the batch", total=4) as advance,
    ):
        advance(2)
        time.sleep(0.4)
    shown = terminal.getvalue()
    assert "replay [1] of the batch" in shown and "left" in shown
    assert "\x1b[2K" in shown.split("\n")[-1]  # the line is erased at the end


def test_errors_pass_through_and_the_display_ends(terminal):
    bars = Bars(terminal, patience_seconds=0.01)
    with pytest.raises(ValueError, match="boom"), bars as progress, progress.stage("replay"):
        time.sleep(0.1)
        raise ValueError("boom")
    length = len(terminal.getvalue())
    time.sleep(0.3)
    assert len(terminal.getvalue()) == length


def test_stages_may_nest(terminal):
    with Bars(terminal, patience_seconds=0.01) as progress, progress.stage("outer", 1), progress.stage("inner", 1):
        time.sleep(0.3)
    assert "outer" in terminal.getvalue() and "inner" in terminal.getvalue()
