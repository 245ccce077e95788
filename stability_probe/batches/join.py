"""Several batches as one, for a baseline that is kept in several files."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stability_probe.batches.base import IGNORED, Batch


def join(batches: Sequence[Batch]) -> Batch:
    """The rows of all batches, padded on the right to the longest; labels are not kept."""
    if len(batches) == 1:
        return batches[0]
    T = max(batch.ids_BT.shape[1] for batch in batches)

    def stacked(tensors: list[Tensor], fill: int) -> Tensor:
        padded = [torch.nn.functional.pad(tensor, (0, T - tensor.shape[1]), value=fill) for tensor in tensors]
        return torch.cat(padded)

    masks = [torch.ones_like(b.ids_BT, dtype=torch.bool) if b.mask_BT is None else b.mask_BT for b in batches]
    positions = [b.position_ids_BT for b in batches if b.position_ids_BT is not None]
    return Batch(
        ids_BT=stacked([b.ids_BT for b in batches], 0),
        targets_BT=stacked([b.targets_BT for b in batches], IGNORED),
        mask_BT=stacked(masks, False),
        position_ids_BT=stacked(positions, 0) if len(positions) == len(batches) else None,
        convention=batches[0].convention,
        path=batches[0].path,
    )
