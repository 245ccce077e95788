"""What every batch format is read into."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100
Convention = Literal["shifted", "unshifted", "absent"]


@dataclass(frozen=True)
class Batch:
    """Token ids and what each position should predict, on the CPU, padding still in place.

    Attributes:
        ids_BT: int64 token ids as stored (out-of-range ids included; padding of ragged rows is `pad_id`).
        targets_BT: int64; `targets_BT[b, t]` is what position t predicts (the next token), IGNORED where
            there is none. The last position of an unshifted row is IGNORED.
        labels_BT: int64 labels as stored, or None; only the label checks of the audit read them.
        mask_BT: bool, True on real tokens; None where the batch stored no mask and no row was padded.
        position_ids_BT: int64 or None.
        convention: how the labels were read; `convention_reason` says why.
        sha256: of the file.
    """

    ids_BT: Tensor
    targets_BT: Tensor
    labels_BT: Tensor | None = None
    mask_BT: Tensor | None = None
    position_ids_BT: Tensor | None = None
    convention: Convention = "absent"
    convention_reason: str = ""
    path: Path | None = None
    sha256: str = ""
    notes: tuple[str, ...] = ()
