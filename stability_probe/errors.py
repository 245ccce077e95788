"""The one exception that users see: what could not be done, why, and what to try."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

UNREADABLE_INPUT = 3
REPLAY_FAILED = 4


class ProbeError(Exception):
    """Bad input or a failed replay, told in three parts.

    Attributes:
        problem: what could not be done, and to which file.
        why: the reason.
        hint: what to try next.
        exit_code: 3 for an input that cannot be read or does not fit, 4 for a replay that failed.
    """

    def __init__(self, problem: str, why: str, hint: str, exit_code: int = UNREADABLE_INPUT) -> None:
        super().__init__(problem)
        self.problem = problem
        self.why = why
        self.hint = hint
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.problem}\n  why: {self.why}\n  try: {self.hint}"


def nearest(wanted: str, known: Iterable[str]) -> str:
    """'did you mean …?' for a misspelt name, or the whole list where nothing is near."""
    names = sorted(known)
    close = difflib.get_close_matches(wanted, names, n=2)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"


def said(error: BaseException) -> str:
    """The kind of an exception and its message, whatever its own `__str__` does: it may be somebody else's code."""
    try:
        message = str(error)
    except Exception as broken:  # noqa: BLE001  the message is lost, the report of the failure must not be
        message = f"its message cannot be read: __str__ raised {type(broken).__name__}"
    return f"{type(error).__name__}: {message or 'no message'}"
