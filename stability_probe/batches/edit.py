"""Changes to a batch, each a new value: fewer rows, fewer positions, other targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stability_probe.batches.base import IGNORED, Batch
from stability_probe.batches.ragged import below, below_if_all, mask_or_all
from stability_probe.errors import ProbeError

# Most plausible first: where repeated text fits several offsets equally well, the earlier one is meant.
OFFSETS = (1, 0, 2, -1, 3)
FITS_FROM = (
    0.95  # of the targets; the rest leaves room for a few labels changed on purpose (a masked or corrected token)
)


def select(batch: Batch, max_rows: int | None = None, max_positions: int | None = None) -> Batch:
    """The first rows and positions. Positions keep their index: leading columns of padding alone come on top."""
    rows, width = batch.ids_BT.shape
    keep_rows = rows if max_rows is None else min(rows, max(1, max_rows))
    start = _first_used_column(batch, keep_rows)
    keep_width = width if max_positions is None else min(width, start + max(1, max_positions))
    if (keep_rows, keep_width) == (rows, width):
        return batch
    note = f"only {keep_rows} of {rows} rows and {keep_width} of {width} positions are used"
    return replace(apply(batch, lambda x: x[:keep_rows, :keep_width]), notes=(*batch.notes, note))


def without_rows(batch: Batch, rows: Iterable[int]) -> Batch:
    """The batch without these rows; the others keep their order.

    Raises:
        ProbeError: exit code 4, where no row would be left.
    """
    dropped = set(rows)
    kept = [row for row in range(batch.ids_BT.shape[0]) if row not in dropped]
    if not kept:
        raise ProbeError("cannot drop every row of the batch", "nothing would be left to replay", "drop fewer rows", 4)
    return apply(batch, lambda x: x[kept])


def join(batches: Sequence[Batch]) -> Batch:
    """Rows of all batches below each other, shorter ones padded on the right; what one of them lacks is left out.

    Path and digest are those of the first. Padding has mask False, id 0, and no target.
    """
    first, *others = batches
    if not others:
        return first
    width = max(batch.ids_BT.shape[1] for batch in batches)
    masked = any(batch.mask_BT is not None or batch.ids_BT.shape[1] != width for batch in batches)
    masks = [mask_or_all(batch.mask_BT, batch.ids_BT) if masked else None for batch in batches]

    return replace(
        first,
        ids_BT=below([batch.ids_BT for batch in batches], width, 0),
        targets_BT=below([batch.targets_BT for batch in batches], width, IGNORED),
        labels_BT=below_if_all([batch.labels_BT for batch in batches], width, IGNORED),
        mask_BT=below_if_all(masks, width, 0),
        position_ids_BT=below_if_all([batch.position_ids_BT for batch in batches], width, 0),
        notes=tuple(dict.fromkeys(note for batch in batches for note in batch.notes)),
    )


def with_target_offset(batch: Batch, k: int) -> Batch:
    """Every position predicts what the position k further on was declared to predict; k = 0 changes nothing.

    Holds whatever the declared labels are: right ones become ids[t + 1 + k], twice-shifted ones ids[t + 2 + k].
    Targets that come from outside the row, and those of padding positions, are IGNORED.
    """
    if k == 0:
        return batch
    return replace(batch, targets_BT=_only_real(moved(batch.targets_BT, k), batch.mask_BT))


def realigned(batch: Batch) -> Batch:
    """Position t predicts ids[t + 1] wherever it had a target and neither token is padding."""
    targets_BT = moved(batch.ids_BT, 1)
    keep_BT = (batch.targets_BT != IGNORED) & (targets_BT >= 0)
    if batch.mask_BT is not None:
        keep_BT &= batch.mask_BT & moved(batch.mask_BT.to(torch.int64), 1).eq(1)
    return replace(batch, targets_BT=targets_BT.masked_fill(~keep_BT, IGNORED))


def declared_offset(batch: Batch) -> int | None:
    """The s in −1…3 for which targets[t] = ids[t + s] at 95 % or more of the valid targets; None where none fits.

    1 is right; 0 asks a position for its own token; 2 is what a second shift leaves. Targets whose ids[t + s] would
    lie outside the row are not counted.
    """
    shares = [(share, s) for s in OFFSETS if (share := _share_at(batch, s)) is not None and share >= FITS_FROM]
    return max(shares, key=lambda pair: (pair[0], -OFFSETS.index(pair[1])))[1] if shares else None


def moved(values_BT: Tensor, k: int, fill: int = IGNORED) -> Tensor:
    """out[b, t] = values[b, t + k], `fill` where t + k lies outside the row."""
    width = values_BT.shape[1]
    out_BT = torch.full_like(values_BT, fill)
    if abs(k) < width:
        out_BT[:, max(0, -k) : width - max(0, k)] = values_BT[:, max(0, k) : width - max(0, -k)]
    return out_BT


def _share_at(batch: Batch, s: int) -> float | None:
    width = batch.ids_BT.shape[1]
    position_T = torch.arange(width)
    counted_BT = (batch.targets_BT != IGNORED) & ((position_T + s >= 0) & (position_T + s < width))
    if not bool(counted_BT.any()):
        return None
    return float((moved(batch.ids_BT, s) == batch.targets_BT)[counted_BT].double().mean())


def _first_used_column(batch: Batch, rows: int) -> int:
    if batch.mask_BT is None:
        return 0
    used_T = batch.mask_BT[:rows].any(dim=0)
    return int(used_T.to(torch.int8).argmax()) if bool(used_T.any()) else 0


def _only_real(targets_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
    return targets_BT if mask_BT is None else targets_BT.masked_fill(~mask_BT, IGNORED)


def apply(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with every tensor that it holds changed alike."""

    def changed(values: Tensor | None) -> Tensor | None:
        return None if values is None else change(values)

    return replace(
        batch,
        ids_BT=change(batch.ids_BT),
        targets_BT=change(batch.targets_BT),
        labels_BT=changed(batch.labels_BT),
        mask_BT=changed(batch.mask_BT),
        position_ids_BT=changed(batch.position_ids_BT),
    )
