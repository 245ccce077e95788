"""Arrays in, content out: padding removed, rows left-aligned, ids as int32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stability_probe.errors import ProbeError

Ints = NDArray[np.integer]


@dataclass(frozen=True)
class Content:
    """The rows without their padding.

    Attributes:
        ids_BW: int32, content left-aligned. Behind it stand negative fillers, different at every position of
            a row, so that no fill ever equals a token or another fill of its row.
        lengths_B: content tokens per row.
        positions_BW: position in the row as given of each content token; None where it is the same position.
    """

    ids_BW: NDArray[np.int32]
    lengths_B: NDArray[np.int64]
    positions_BW: NDArray[np.int64] | None = None

    def place(self, row: int, start: int, end: int) -> tuple[int, int]:
        """A content span as a half-open span of the row as given."""
        if self.positions_BW is None:
            return start, end
        return int(self.positions_BW[row, start]), int(self.positions_BW[row, end - 1]) + 1


def as_numpy(values: Any, name: str) -> NDArray[Any]:
    """A numpy view of an array, a CPU or CUDA tensor, or a list, as a (B, T) matrix; 1-D becomes one row.

    Raises:
        ProbeError: not integers, or more than two dimensions.
    """
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype == bool:
        array = array.view(np.uint8)
    if array.dtype.kind == "f" and bool(np.all(array == np.floor(array))):
        array = array.astype(np.int64)
    if array.ndim > 2 or array.dtype.kind not in "iu":
        raise ProbeError(
            f"cannot audit {name}",
            f"it has shape {array.shape} and dtype {array.dtype}; a (rows, positions) matrix of integers is needed",
            "pass token ids, not embeddings or logits",
        )
    return np.atleast_2d(array)


def kept_BT(ids_BT: Ints, mask_BT: Ints | None, labels_BT: Ints | None, pad_id: int | None) -> NDArray[np.bool_] | None:
    """True on content, or None where nothing is padding.

    With a mask, padding is what the mask hides. Else it is the run at either edge of the row that repeats one id
    and whose labels are ignored; else the trailing run of `pad_id`.
    """
    if mask_BT is not None:
        kept = mask_BT != 0
        return None if kept.all() else kept
    B, T = ids_BT.shape
    lead, trail = np.zeros(B, np.int64), np.zeros(B, np.int64)
    if labels_BT is not None and T:
        # One ignored label at the edge is the label shift itself, not padding.
        some = np.flatnonzero((labels_BT[:, :2] < 0).all(axis=1) | (labels_BT[:, -2:] < 0).all(axis=1))
        ids, ignored = ids_BT[some], labels_BT[some] < 0
        first = np.minimum(_leading(ignored), _leading(ids == ids[:, :1]))
        last = np.minimum(_leading(ignored[:, ::-1]), _leading((ids == ids[:, -1:])[:, ::-1]))
        whole = ignored.all(axis=1)  # a row without any target keeps its content: it is judged as such
        lead[some] = np.where(whole | (first < 2), 0, first)
        trail[some] = np.where(whole | (last < 2), 0, last)
    if pad_id is not None and T and (ids_BT[:, -1] == pad_id).any():
        trail = np.maximum(trail, _leading((ids_BT == pad_id)[:, ::-1]))
    if not lead.any() and not trail.any():
        return None
    where = np.arange(T)
    return (where >= lead[:, None]) & (where < (T - trail)[:, None])


def _leading(true_BT: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Length of the run of True at the start of each row."""
    B, T = true_BT.shape
    if T == 0:
        return np.zeros(B, np.int64)
    first_false = np.argmin(true_BT, axis=1)
    return np.where(true_BT.all(axis=1), T, first_false).astype(np.int64)


def content(ids_BT: Ints, kept: NDArray[np.bool_] | None) -> Content:
    """Left-align the kept tokens; ids beyond int32 are folded (the range check reads the originals)."""
    B, T = ids_BT.shape
    narrow = np.ascontiguousarray(ids_BT).astype(np.int32, copy=False)
    if narrow.size and int(narrow.min()) < 0:
        narrow = narrow & np.int32(0x7FFFFFFF)
    if kept is None:
        return Content(narrow, np.full(B, T, np.int64))
    lengths = np.count_nonzero(kept, axis=1).astype(np.int64)
    W = int(lengths.max(initial=0))
    order = np.argsort(~kept, axis=1, kind="stable")[:, :W]
    ids = np.take_along_axis(narrow, order, axis=1)
    behind = np.arange(W) >= lengths[:, None]
    ids = np.where(behind, -1 - np.arange(W, dtype=np.int32), ids)
    return Content(ids, lengths, order.astype(np.int64))
