"""Named tensors of one shape, from a mapping: which key holds what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from stability_probe.batches.base import IGNORED
from stability_probe.batches.masks import MASK_KEYS, read_mask, read_positions
from stability_probe.batches.numbers import as_rows, as_valid, refuse, two_dimensional
from stability_probe.batches.ragged import below, below_if_all, mask_or_all

# Most specific first: a record may also hold its text under `text`, where GPT-NeoX holds ids.
IDS_KEYS = ("input_ids", "tokens", "input_tokens", "token_ids", "input", "inputs", "idx", "ids", "x", "X", "text")
LABEL_KEYS = ("shift_labels", "labels", "label_ids", "targets", "target", "target_tokens", "y", "Y")
LOSS_MASK_KEYS = ("loss_mask", "label_mask")
POSITION_KEYS = ("position_ids", "positions", "input_pos")
PACKING_KEYS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens", "doc_lens", "seq_idx")
_KNOWN_KEYS = {*IDS_KEYS, *LABEL_KEYS, *LOSS_MASK_KEYS, *POSITION_KEYS, *PACKING_KEYS, *MASK_KEYS}
_SHIFTED_PAIRS = {  # Megatron, nanotron, nanoGPT-style, torchtitan: the labels already are the next tokens
    *(("tokens", key) for key in ("labels", "targets")),
    *(("input_ids", key) for key in ("label_ids", "targets")),
    *((key, other) for key in ("input", "inputs", "idx", "x", "X") for other in LABEL_KEYS[1:]),
    ("input_tokens", "target_tokens"),
}

Hint = Literal["shifted", "unshifted"] | None


@dataclass(frozen=True)
class Fields:
    """The tensors of a batch under one name each, before the label convention is decided.

    Attributes:
        ids_BT, labels_BT: int64. mask_BT: bool, True on real tokens. loss_mask_BT: bool, True where the loss counts.
        loss_mask_of: whether `loss_mask_BT[t]` speaks of what position t predicts, or of the label (or token) t.
        other_labels_BT: `labels` where `shift_labels` stands beside them.
        hint: the convention that the key names suggest; `hint_reason` names them.
        pre_shifted: the key says outright that labels are shifted (`shift_labels`).
        text_slice: the row holds T + 1 tokens, of which the first T are inputs (litgpt, GPT-NeoX); None: unknown.
    """

    ids_BT: Tensor
    labels_BT: Tensor | None = None
    other_labels_BT: Tensor | None = None
    mask_BT: Tensor | None = None
    loss_mask_BT: Tensor | None = None
    loss_mask_of: Literal["target", "label"] = "label"
    position_ids_BT: Tensor | None = None
    hint: Hint = None
    hint_reason: str = ""
    pre_shifted: bool = False
    text_slice: bool | None = False
    notes: tuple[str, ...] = ()


def of_keys(present: Mapping[str, Any], ids_key: str) -> Fields:
    """The fields of a mapping whose token ids stand under `ids_key`."""
    ids_BT = as_rows(present[ids_key], ids_key)
    mask_BT, mask_notes = read_mask(present, ids_BT)
    position_ids_BT, position_notes = read_positions(present, POSITION_KEYS, ids_BT)
    notes = (*mask_notes, *position_notes, *_packing_notes(present), *_unused_notes(present))
    fields = Fields(ids_BT, mask_BT=mask_BT, position_ids_BT=position_ids_BT, text_slice=ids_key == "text", notes=notes)
    return _with_loss_mask(_with_labels(fields, present, ids_key), present)


def _with_labels(fields: Fields, present: Mapping[str, Any], ids_key: str) -> Fields:
    keys = [key for key in LABEL_KEYS if key in present and key != ids_key]
    if not keys:
        return fields
    labels = [labels_like(present[key], key, fields.ids_BT) for key in keys]
    hint: Hint = None
    if keys[0] == "shift_labels" or (ids_key, keys[0]) in _SHIFTED_PAIRS:
        hint = "shifted"
    elif (ids_key, keys[0]) == ("input_ids", "labels"):
        hint = "unshifted"
    return replace(
        fields,
        labels_BT=labels[0],
        other_labels_BT=labels[1] if len(labels) > 1 and keys[0] == "shift_labels" else None,
        hint=hint,
        hint_reason=f"keys {ids_key!r} and {keys[0]!r}",
        pre_shifted=keys[0] == "shift_labels",
        text_slice=False,
    )


def labels_like(value: Any, name: str, ids_BT: Tensor) -> Tensor:
    """Labels as int64 (B, T); ProbeError where there is not one for every token id."""
    labels_BT = as_rows(value, name)
    if labels_BT.shape != ids_BT.shape:
        shapes = f"labels {tuple(labels_BT.shape)}, token ids {tuple(ids_BT.shape)}"
        raise refuse(f"{name!r} do not fit the token ids", shapes, "store a label for every token id, -100 for none")
    return labels_BT


def _with_loss_mask(fields: Fields, present: Mapping[str, Any]) -> Fields:
    key = next((key for key in LOSS_MASK_KEYS if key in present), None)
    if key is None:
        return fields
    loss_mask_BT = two_dimensional(as_valid(present[key], key), key)
    if loss_mask_BT.shape != fields.ids_BT.shape:
        shapes = f"{tuple(loss_mask_BT.shape)} against {tuple(fields.ids_BT.shape)}"
        raise refuse(f"{key!r} does not fit the token ids", shapes, "store one value for every token id")
    # Without labels: Megatron's loss_mask weighs what a position predicts, OLMo's label_mask the token itself.
    of: Literal["target", "label"] = "target" if key == "loss_mask" and fields.labels_BT is None else "label"
    return replace(fields, loss_mask_BT=loss_mask_BT, loss_mask_of=of)


def _packing_notes(present: Mapping[str, Any]) -> tuple[str, ...]:
    keys = [key for key in PACKING_KEYS if key in present]
    packed = f"the batch is packed ({', '.join(keys)}); the replay lets documents of one row see each other"
    return (packed,) if keys else ()


def _unused_notes(present: Mapping[str, Any]) -> tuple[str, ...]:
    unused = sorted(key[:40] for key in present if key not in _KNOWN_KEYS)
    return (f"not used from the batch: {', '.join(unused[:12])}",) if unused else ()


def stacked(parts: list[Fields], pad_id: int | None = None) -> Fields:
    """Rows of all parts below each other, padded on the right with `pad_id` (0 where None) and masked where padded."""
    width = max(part.ids_BT.shape[1] for part in parts)
    without_labels = sum(part.labels_BT is None for part in parts)
    if 0 < without_labels < len(parts):
        why = f"{without_labels} of {len(parts)} examples have no labels"
        raise refuse("the examples do not fit together", why, "give labels to all of them or to none")
    if any(part.mask_BT is not None or part.ids_BT.shape[1] != width for part in parts):
        parts = [replace(part, mask_BT=mask_or_all(part.mask_BT, part.ids_BT)) for part in parts]
    if any(part.loss_mask_BT is not None for part in parts):
        parts = [replace(part, loss_mask_BT=mask_or_all(part.loss_mask_BT, part.ids_BT)) for part in parts]

    return replace(
        parts[0],
        ids_BT=below([part.ids_BT for part in parts], width, pad_id or 0),
        labels_BT=below_if_all([part.labels_BT for part in parts], width, IGNORED),
        other_labels_BT=below_if_all([part.other_labels_BT for part in parts], width, IGNORED),
        mask_BT=below_if_all([part.mask_BT for part in parts], width, 0),
        loss_mask_BT=below_if_all([part.loss_mask_BT for part in parts], width, 0),
        position_ids_BT=below_if_all([part.position_ids_BT for part in parts], width, 0),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )
