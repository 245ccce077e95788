"""Attention masks and positions in the forms that are saved, as (B, T)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stability_probe.batches.numbers import as_ids, as_valid, refuse

MASK_KEYS = ("attention_mask", "input_mask")


def read_mask(present: Mapping[str, Any], ids_BT: Tensor) -> tuple[Tensor | None, tuple[str, ...]]:
    """Which tokens are real, from a padding mask (B, T) or the diagonal of a mask (B, 1, T, T); and notes."""
    key = next((key for key in MASK_KEYS if key in present), None)
    if key is None:
        return None, ()
    valid = as_valid(present[key], key)
    if valid.dim() <= 2:
        return _rows_like(valid, ids_BT, key), ()
    note = f"{key} of shape {tuple(valid.shape)} was dropped: the replay is causal with padding left out"
    return _from_square(valid, ids_BT), (note,)


def read_positions(
    present: Mapping[str, Any], keys: tuple[str, ...], ids_BT: Tensor
) -> tuple[Tensor | None, tuple[str, ...]]:
    key = next((key for key in keys if key in present), None)
    if key is None:
        return None, ()
    position_ids = as_ids(present[key], key)
    if position_ids.dim() > 2:
        return None, (f"{key} of shape {tuple(position_ids.shape)} were dropped",)
    return _rows_like(position_ids, ids_BT, key), ()


def padding_of_loss_mask(loss_mask_BT: Tensor, ids_BT: Tensor, of_targets: bool) -> Tensor | None:
    """Real tokens where only a loss mask marks padding (Megatron), or None where it marks none.

    Padding is the trailing run without loss whose tokens are all the same. The position before the first pad token
    has no loss either when the mask speaks of targets.
    """
    tail_BT = loss_mask_BT.flip(1).cumsum(1).flip(1) == 0
    if of_targets:
        tail_BT = torch.cat([torch.zeros_like(tail_BT[:, :1]), tail_BT[:, :-1]], dim=1)
    uniform_B = ((ids_BT == ids_BT[:, -1:]) | ~tail_BT).all(dim=1)
    # A single token proves nothing: it may be the end of a row whose last target is unknown.
    padding_BT = tail_BT & (uniform_B & (tail_BT.sum(dim=1) > 1))[:, None]
    return ~padding_BT if bool(padding_BT.any()) else None


def _rows_like(values: Tensor, ids_BT: Tensor, name: str) -> Tensor:
    rows_BT = values[None] if values.dim() == 1 else values
    if rows_BT.dim() == 2 and rows_BT.shape[0] == 1:
        rows_BT = rows_BT.expand(ids_BT.shape[0], -1)
    if rows_BT.shape != ids_BT.shape:
        shapes = f"{tuple(values.shape)} against {tuple(ids_BT.shape)}"
        raise refuse(f"{name!r} does not fit the token ids", shapes, "store one value for every token id")
    return rows_BT


def _from_square(valid: Tensor, ids_BT: Tensor) -> Tensor | None:
    """A real token sees itself; a mask whose diagonal is all one value says nothing about padding."""
    rows, width = ids_BT.shape
    square = valid[:, 0] if valid.dim() == 4 else valid
    if square.dim() != 3 or square.shape[0] not in (1, rows) or square.shape[2] != width:
        return None
    if square.shape[1] == 1:
        mask_BT = square[:, 0]
    elif square.shape[1] == width:
        mask_BT = square.diagonal(dim1=1, dim2=2)
    else:
        return None
    return mask_BT.expand(rows, width) if bool(mask_BT.any()) and not bool(mask_BT.all()) else None
