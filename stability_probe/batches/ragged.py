"""Rows of unequal length below each other, padded on the right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def below(parts: Sequence[Tensor], width: int, fill: int) -> Tensor:
    """All rows of all parts (b, t ≤ width) as one (B, width), `fill` on the right of shorter ones."""
    return torch.cat([pad(part, (0, width - part.shape[1]), value=fill) for part in parts])


def below_if_all(parts: Sequence[Tensor | None], width: int, fill: int) -> Tensor | None:
    """The same, None where a part is missing."""
    present = [part for part in parts if part is not None]
    return below(present, width, fill) if len(present) == len(parts) else None


def mask_or_all(mask_BT: Tensor | None, ids_BT: Tensor) -> Tensor:
    """The mask, or one that takes every token."""
    return torch.ones_like(ids_BT, dtype=torch.bool) if mask_BT is None else mask_BT
