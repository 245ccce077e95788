"""The one path by which a pickle is read: nothing that a file says is ever imported or called.

`torch.load(weights_only=True)` refuses every global that it does not know, and training runs save many:
argument namespaces, paths, DeepSpeed classes, tokenizer outputs. Each unknown global of a file is therefore
answered by an inert class that only remembers what it was given. numpy's arrays and scalars are rebuilt here from
raw bytes, because numpy's own unpickling trusts the dtype and the object pointers that the file claims.
"""

from __future__ import annotations

import _compat_pickle  # the renames of Python 2 modules that every unpickler applies
import json
import pickle
import pickletools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from stability_probe.errors import ProbeError

_ZIP_MAGIC = b"PK\x03\x04"
_PLAIN_KINDS = "biufcSU"  # bool, integers, floats, complex, bytes, text: no object pointers


class InertObject:
    """Stands for an object of a class that was not imported.

    Attributes:
        inert_name: dotted name of the class or function in the file.
        args: what the file passed to it.
        state: the attributes that the file gave the object (usually a dict), None where it gave none.
    """

    inert_name = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> InertObject:
        inert = super().__new__(cls)
        inert.args, inert.state = args, None
        return inert

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"<{self.inert_name}, not loaded>"


def load_pickle_safely(path: Path) -> Any:
    """What `torch.save` wrote to `path`, without running anything that the file asks for.

    Tensors of zip files (torch ≥ 1.6) are mapped, not read. Objects of foreign classes come back as
    `InertObject`, or as a dict where the class is filled by keys; numpy arrays and scalars as themselves;
    deque, defaultdict and paths as list, dict and text.

    Raises:
        ProbeError: the file is missing, truncated, not written by `torch.save`, or asks for something that
            cannot be represented without running code.
    """
    path = Path(path)
    if not path.is_file():
        raise ProbeError(f"cannot read {path}", "there is no such file", "check the path")
    try:
        is_zip = _first_bytes(path, 4) == _ZIP_MAGIC
        foreign = _globals_of_zip(path) if is_zip else _globals_of_legacy(path)
        try:
            return _load(path, is_zip, foreign, _inert_class)
        except Exception as error:
            # Subclasses of dict (EasyDict, ConfigDict…) are filled by key, which torch allows for real dicts only.
            if "SETITEM" not in str(error):
                raise
            return _load(path, is_zip, foreign, _inert_dict)
    except Exception as error:  # noqa: BLE001  a hostile or broken file may fail in any way
        _refuse(path, error)


def read_json(path: Path) -> Any:
    """Parsed JSON file; ProbeError where it is missing or malformed."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ProbeError(f"cannot read {path}", f"{error}", "give a JSON file in UTF-8") from error


def _refuse(path: Path, error: Exception) -> NoReturn:
    # torch's own text advises to switch the safety off; the error that it wraps says what was wrong.
    cause = error.__context__ if isinstance(error.__context__, pickle.UnpicklingError) else error
    first_line = (str(cause).strip().splitlines() or [""])[0][:200]
    raise ProbeError(
        f"cannot read {path}",
        f"it is damaged, was not written by torch.save, or would run code ({type(cause).__name__}: {first_line})",
        "save it again with torch.save as plain tensors, dicts, lists and numbers, or as safetensors",
    ) from error


def _first_bytes(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)


def _globals_of_zip(path: Path) -> list[str]:
    return list(torch.serialization.get_unsafe_globals_in_checkpoint(path))


def _globals_of_legacy(path: Path) -> list[str]:
    """Globals of the pickles that torch < 1.6 wrote one after the other: magic, protocol, system, object, storages."""
    names: set[str] = set()
    with path.open("rb") as file:
        for _ in range(5):
            for opcode, argument, _ in pickletools.genops(file):
                if opcode.name == "GLOBAL":
                    names.add(_current_name(*str(argument).split(" ", 1)))
    return sorted(names)  # torch prefers its own meaning of the names that it knows


def _current_name(module: str, name: str) -> str:
    module, name = _compat_pickle.NAME_MAPPING.get(
        (module, name), (_compat_pickle.IMPORT_MAPPING.get(module, module), name)
    )
    return f"{module}.{name}"


def _load(path: Path, is_zip: bool, foreign: list[str], inert: Callable[[str], Any]) -> Any:
    stubs = [(inert(name), name) for name in foreign if name not in _REBUILT]
    stubs += [(rebuild, name) for name, rebuild in _REBUILT.items()]
    with warnings.catch_warnings(), torch.serialization.safe_globals(stubs):  # type: ignore[arg-type]
        warnings.simplefilter("ignore")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)


def _inert_class(name: str) -> type[InertObject]:
    return type("InertObject", (InertObject,), {"inert_name": name})


def _inert_dict(name: str) -> Any:
    class FilledByKey:
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return OrderedDict()

    return FilledByKey


class _Dtype:
    """A numpy dtype as the file describes it; only plain kinds become a real one."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code, self.order = str(code), "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1] if state[1] in ("<", ">") else "="

    def real(self) -> np.dtype[Any]:
        dtype = np.dtype(self.code)
        if dtype.kind not in _PLAIN_KINDS:
            raise ValueError(f"numpy dtype {self.code!r} is not plain numbers or text")
        return dtype.newbyteorder(self.order)  # type: ignore[arg-type]


class _Array(np.ndarray[Any, Any]):
    """An ndarray that fills itself from plain bytes only."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, raw = state
        real = dtype.real()
        raw = raw.encode("latin1") if isinstance(raw, str) else raw
        if not isinstance(raw, bytes) or len(raw) != real.itemsize * int(np.prod(shape, dtype=np.int64)):
            raise ValueError("numpy array whose bytes do not fill its shape")
        super().__setstate__((1, shape, real, is_fortran, raw))


def _empty_array(*_: Any) -> _Array:
    return np.empty(0, dtype=np.int8).view(_Array)


def _scalar(dtype: _Dtype, raw: bytes) -> Any:
    return np.frombuffer(raw, dtype=dtype.real(), count=1)[0]


def _text_of_path(*parts: Any) -> str:
    return str(Path(*(str(part) for part in parts)))


def _list(items: Any = (), *_: Any) -> list[Any]:
    return list(items)


def _dict(*_: Any) -> dict[Any, Any]:
    return {}


def _no_bytes(*_: Any) -> bytes:
    return b""  # the only bytes that protocol 2 writes as a call


def _rebuilt() -> Iterator[tuple[str, Any]]:
    for core in ("numpy.core", "numpy._core"):  # numpy 1 and numpy 2 wrote different homes of the same functions
        yield f"{core}.multiarray._reconstruct", _empty_array
        yield f"{core}.multiarray.scalar", _scalar
    yield "numpy.ndarray", _Array
    yield "numpy.dtype", _Dtype
    for flavour in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"):
        yield f"pathlib.{flavour}", _text_of_path
    yield "collections.deque", _list
    yield "collections.defaultdict", _dict
    yield "builtins.slice", slice
    yield "builtins.bytes", _no_bytes


_REBUILT: dict[str, Any] = dict(_rebuilt())
