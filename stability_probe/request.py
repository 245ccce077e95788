"""What the user asked for: the options of `probe replay`, and those that an incident folder supplies."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stability_probe.errors import ProbeError, nearest

FILE_NAME = "incident.json"
LABELS = ("auto", "shifted", "unshifted")
RUN_PRECISIONS = ("fp32", "bf16", "bf16-true", "fp16", "fp16-true")
_PATH_KEYS = {"ckpt": "ckpt", "batch": "batch", "config": "config", "optimizer": "optimizer", "tokenizer": "tokenizer"}
_LIST_KEYS = {"baseline": "baselines", "log": "logs"}
_KEYS = (*_PATH_KEYS, *_LIST_KEYS, "step", "model", "labels", "lr", "grad_clip", "precision", "source")


@dataclass(frozen=True)
class Request:
    """The options of `probe replay`; None, () and "auto" mean 'not given'.

    Attributes:
        step: the step that consumed the batch.
        run_precision: what the run trained in, one of `RUN_PRECISIONS`.
        microbatch: sequences in one forward.
        model_from_folder: `model` is named by an incident folder, which is somebody else's code.
        source: where the batch came from, as the incident folder says.
    """

    ckpt: Path | None = None
    batch: Path | None = None
    baselines: tuple[Path, ...] = ()
    logs: tuple[Path, ...] = ()
    step: int | None = None
    model: str | None = None
    config: Path | None = None
    optimizer: Path | None = None
    tokenizer: Path | None = None
    labels: str = "auto"
    lr: float | None = None
    grad_clip: float | None = None
    run_precision: str | None = None
    precisions: tuple[str, ...] = ()
    device: str = "auto"
    microbatch: int = 1
    max_rows: int | None = None
    max_positions: int | None = None
    confirm: bool = True
    trust_code: bool = False
    model_from_folder: bool = False
    source: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def request_from_folder(folder: Path | str, overrides: Request | None = None) -> Request:
    """The request that `incident.json` describes, with what the user typed in its place.

    Args:
        folder: an incident folder; every path that it names is relative to it.
        overrides: the options given on the command line.

    Raises:
        ProbeError: exit code 3, for a missing or malformed `incident.json`, a path or symbolic link that leaves the
            folder, or a `model` named by the folder without `trust_code`.
    """
    folder, overrides = Path(folder), overrides or Request()
    stored = _read(folder)
    _refuse_escaping_links(folder)
    values: dict[str, Any] = {
        ours: _inside(folder, stored[key], key) for key, ours in _PATH_KEYS.items() if key in stored
    }
    values |= {ours: _all_inside(folder, stored[key], key) for key, ours in _LIST_KEYS.items() if key in stored}
    values |= {key: _positive(stored[key], key) for key in ("lr", "grad_clip") if key in stored}
    values |= {key: check(stored[key]) for key, check in _CHECKS.items() if key in stored}
    values["run_precision"] = values.pop("precision", None)
    given = {name: value for name, value in vars(overrides).items() if value not in (None, (), {}) and name in values}
    if given.get("labels") == "auto":
        del given["labels"]
    model = _model(folder, stored.get("model"), overrides)
    unknown = tuple(
        f"{FILE_NAME}: unknown key {key[:40]!r} is not used ({nearest(key, _KEYS)})"
        for key in stored
        if key not in _KEYS
    )
    return replace(overrides, **{**values, **given, **model}, notes=(*overrides.notes, *unknown))


def _read(folder: Path) -> dict[str, Any]:
    path = folder / FILE_NAME
    if not path.is_file():
        why = f"it holds no {FILE_NAME}" if folder.is_dir() else "there is no such folder"
        hint = "give an incident folder, or --ckpt and --batch"
        raise ProbeError(f"cannot read the incident {folder}", why, hint)
    try:
        stored = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ProbeError(f"cannot read {path}", str(error), "write it as one JSON object") from error
    if not isinstance(stored, dict):
        raise ProbeError(f"cannot read {path}", "it is not a JSON object", 'write {"ckpt": …, "batch": …}')
    return {key: value for key, value in stored.items() if value is not None}


def _refuse_escaping_links(folder: Path) -> None:
    """Readers also open what lies beside the named files (an optimizer, a tokenizer): no link may lead outside."""
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(where, name)
            if path.is_symlink():
                _resolved_inside(folder, path, path.relative_to(folder).as_posix())


def _inside(folder: Path, value: Any, key: str) -> Path:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise _bad(key, f"{key} is {_short(value)}", "write a path relative to the folder")
    return _resolved_inside(folder, folder / value, value)


def _resolved_inside(folder: Path, path: Path, told: str) -> Path:
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise ProbeError(f"cannot follow {told[:200]} in {folder}", str(error), "put the file itself there") from error
    if not inside:
        why = "it leads out of the incident folder"
        raise ProbeError(f"refused the path {told[:200]} in {folder}", why, "copy the file into the folder")
    return path


def _all_inside(folder: Path, value: Any, key: str) -> tuple[Path, ...]:
    return tuple(_inside(folder, item, key) for item in (value if isinstance(value, list) else [value]))


def _model(folder: Path, named: Any, overrides: Request) -> dict[str, Any]:
    if overrides.model is not None or named is None:
        return {"model": overrides.model, "model_from_folder": False}
    if not isinstance(named, str):
        raise _bad("model", f"model is {_short(named)}", "write FILE.py:FUNCTION or MODULE:FUNCTION")
    if not overrides.trust_code:
        why = f"it names code to run, {named[:200]}, which came with the folder"
        raise ProbeError(
            f"did not load the incident {folder}", why, "read that code, then give --trust-code or --model"
        )
    where, separator, function = named.rpartition(":")
    if where.endswith(".py"):
        where = str(_inside(folder, where, "model"))
    return {"model": f"{where}{separator}{function}", "model_from_folder": True}


def _positive(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise _bad(key, f"{key} is {_short(value)}", "write a positive number")
    return float(value)


def _step(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _bad("step", f"step is {_short(value)}", "write the step that consumed the batch, 0 or more")
    return value


def _choice(key: str, choices: tuple[str, ...]) -> Any:
    def check(value: Any) -> str:
        if value not in choices:
            raise _bad(key, f"{key} is {_short(value)}", f"write one of {', '.join(choices)}")
        return str(value)

    return check


def _source(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"source": value}


_CHECKS = {
    "step": _step,
    "labels": _choice("labels", LABELS),
    "precision": _choice("precision", RUN_PRECISIONS),
    "source": _source,
}


def _short(value: Any) -> str:
    return repr(value)[:80]


def _bad(key: str, why: str, hint: str) -> ProbeError:
    return ProbeError(f"cannot use {key!r} of {FILE_NAME}", why, hint)
