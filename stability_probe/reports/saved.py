"""Reading a saved report back: JSON of schema 1, which may come from anywhere."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

from stability_probe.errors import ProbeError
from stability_probe.schema import Report, report_from_json


def load(path: Path | str) -> Report:
    """The report saved in `path`.

    Raises:
        ProbeError: exit code 3 for a file that cannot be read, is not JSON, or does not hold a report.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is not a UTF-8 text file"
        raise ProbeError(f"cannot read the report {path}", why, "give a .json file that probe replay wrote") from error
    try:
        report = report_from_json(json.loads(text))
        _check(report, Report, "report")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        hint = "give a .json file that `probe replay --out RUN.json` wrote"
        raise ProbeError(f"{path} does not hold a report of probe replay", why, hint) from error
    return report


def _check(value: Any, wanted: Any, where: str) -> None:
    """Raise TypeError where `value` is not of the annotated type, at any depth."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is Any:
        return
    if origin in (typing.Union, types.UnionType):
        if not any(_fits(value, option, where) for option in arguments):
            raise TypeError(f"{where} is {type(value).__name__}")
    elif origin is typing.Literal:
        if value not in arguments:
            raise TypeError(f"{where} is {value!r}")
    elif origin is tuple and arguments[-1] is not Ellipsis:
        if not isinstance(value, tuple) or len(value) != len(arguments):
            raise TypeError(f"{where} is not a group of {len(arguments)}")
        for item, kind in zip(value, arguments, strict=True):
            _check(item, kind, where)
    elif origin in (tuple, list, dict):
        if not isinstance(value, origin):
            raise TypeError(f"{where} is {type(value).__name__}, not {origin.__name__}")
        for item in value.values() if origin is dict else value:
            _check(item, arguments[-1] if origin is dict else arguments[0], where)
    elif dataclasses.is_dataclass(wanted):
        if not isinstance(value, wanted):  # type: ignore[arg-type]
            raise TypeError(f"{where} is {type(value).__name__}")
        for name, kind in typing.get_type_hints(wanted).items():
            _check(getattr(value, name), kind, f"{where}.{name}")
    elif not _is_plain(value, wanted):
        raise TypeError(f"{where} is {type(value).__name__}, not {getattr(wanted, '__name__', wanted)}")


def _is_plain(value: Any, wanted: type) -> bool:
    if wanted is float:  # JSON's integers have no bound, a float has
        return isinstance(value, float) or (type(value) is int and abs(value) < 10**300)
    if wanted is int:
        return type(value) is int
    return isinstance(value, wanted)


def _fits(value: Any, wanted: Any, where: str) -> bool:
    try:
        _check(value, wanted, where)
    except TypeError:
        return False
    return True
