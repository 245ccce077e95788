"""Stored values as int64 ids, bool masks and two-dimensional rows, or a clear refusal."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stability_probe.errors import ProbeError

# 2^28 ids are 2 GiB as int64, sixteen times the largest published training batch (16 M tokens). A tensor stored with
# stride 0 can claim any size in a few bytes; it is refused before anything is copied.
MAX_IDS = 2**28
_WHY_IDS = "store token ids as integers of shape (rows, positions)"


def refuse(problem: str, why: str, hint: str = _WHY_IDS) -> ProbeError:
    return ProbeError(problem, why, hint)


def is_array(value: object) -> bool:
    return isinstance(value, (Tensor, np.ndarray))


def as_tensor(value: object, name: str) -> Tensor:
    """Any stored numbers as a dense CPU tensor of their own kind (unsigned integers as int64)."""
    if not is_array(value):
        value = _array_of_list(value, name)
    if isinstance(value, np.ndarray):
        return _tensor_of_array(value, name)
    assert isinstance(value, Tensor)
    _check_size(value.numel(), name)
    if value.layout != torch.strided or value.is_quantized or value.device.type == "meta" or value.is_complex():
        raise refuse(f"cannot use {name!r}", f"it is a {value.layout} {value.dtype} tensor on {value.device}")
    return value.detach().cpu()


def as_ids(value: object, name: str) -> Tensor:
    """Token ids or labels as int64, any shape. Floats are taken where every one is a whole number.

    Raises:
        ProbeError: for fractions, NaN, true/false values, text, and anything that is not numbers.
    """
    tensor = as_tensor(value, name)
    if tensor.dtype == torch.bool:
        raise refuse(f"cannot use {name!r} as token ids", "it holds true/false values, as a mask does")
    if tensor.is_floating_point():
        exact = tensor.double()
        # 2^63 is the first whole number that int64 cannot hold.
        if not bool((torch.isfinite(exact) & (exact == exact.round()) & (exact.abs() < 2.0**63)).all()):
            raise refuse(f"cannot use {name!r} as token ids", f"it is {tensor.dtype} with values that are not whole")
        tensor = exact
    # A copy, because the stored tensor may be a view of the mapped file, or claim its size by a stride of 0.
    return tensor.to(torch.int64).clone(memory_format=torch.contiguous_format)


def as_rows(value: object, name: str) -> Tensor:
    """Token ids or labels as int64 (B, T); one dimension is one row."""
    return two_dimensional(as_ids(value, name), name)


def two_dimensional(tensor: Tensor, name: str) -> Tensor:
    if tensor.dim() == 1:
        tensor = tensor[None]
    if tensor.dim() != 2:
        raise refuse(f"cannot use {name!r}", f"its shape is {tuple(tensor.shape)}, not (rows, positions)")
    return tensor


def as_valid(value: object, name: str) -> Tensor:
    """A mask as bool, True where it allows: bool, 0/1, document numbers (0 is padding), or additive (0 allows)."""
    tensor = as_tensor(value, name)
    if tensor.dtype == torch.bool:
        return tensor
    additive = tensor.is_floating_point() and tensor.numel() > 0 and bool((tensor < 0).any())
    return tensor >= 0 if additive else tensor > 0


def _array_of_list(value: object, name: str) -> object:
    if not isinstance(value, (list, tuple, int, float, np.generic)):
        kind = type(value).__name__
        raise refuse(f"cannot use {name!r}", f"it holds {'text' if isinstance(value, (str, bytes)) else kind}")
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, Tensor) for item in value):
        value = [as_tensor(item, name).tolist() for item in value]
    try:
        return np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise refuse(f"cannot use {name!r}", f"its rows do not form a rectangle of numbers ({error})") from error


def _tensor_of_array(array: np.ndarray, name: str) -> Tensor:
    _check_size(array.size, name)
    if array.size == 0 and array.dtype.kind not in "biuf":
        return torch.zeros(array.shape, dtype=torch.int64)
    if array.dtype.kind == "b":
        return torch.from_numpy(np.array(array, dtype=bool))
    if array.dtype.kind == "f":
        return torch.from_numpy(np.array(array, dtype=np.float64))
    if array.dtype.kind not in "iu":
        raise refuse(f"cannot use {name!r}", f"its values are {array.dtype}, not integers of up to 64 bits")
    return torch.from_numpy(np.array(array, dtype=np.int64))


def _check_size(count: int, name: str) -> None:
    if count > MAX_IDS:
        raise refuse(f"cannot use {name!r}", f"it claims {count:,} values, more than {MAX_IDS:,}")
