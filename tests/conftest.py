"""What every test may rely on."""

import pytest


@pytest.fixture(autouse=True)
def no_terminal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """A width that the shell or the test runner exports must not reach the reports under test."""
    monkeypatch.delenv("COLUMNS", raising=False)
