"""From whatever a training run saved to named tensors of one shape: which key or element holds what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from stability_probe.batches.base import IGNORED
from stability_probe.batches.masks import MASK_KEYS, read_mask, read_positions
from stability_probe.batches.numbers import as_rows, as_tensor, as_valid, is_array, refuse, two_dimensional

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


def fields_of(raw: Any, pad_id: int | None = None) -> Fields:
    """The batch inside a stored object.

    Args:
        raw: tensor, array, mapping, stub of a mapping, pair (inputs, targets), or list of rows, examples or
            micro-batches. Rows of unequal length are padded on the right with `pad_id` (0 where None) and masked.

    Raises:
        ProbeError: where no token ids are found, or shapes do not agree.
    """
    raw = unwrapped(raw)
    if isinstance(raw, Mapping):
        return _of_mapping(raw, pad_id)
    if is_array(raw):
        return Fields(as_rows(raw, "the tensor"), text_slice=None)
    if isinstance(raw, (list, tuple)):
        return _of_sequence(raw, pad_id)
    raise refuse("no batch found", f"the file holds a {type(raw).__name__}, not token ids")


def unwrapped(raw: Any) -> Any:
    """The mapping inside the inert stub of a BatchEncoding (or of any object with attributes)."""
    state = getattr(raw, "state", None)
    if not isinstance(state, Mapping):
        return raw
    data = state.get("data")
    return data if isinstance(data, Mapping) else state


def _of_mapping(raw: Mapping[Any, Any], pad_id: int | None) -> Fields:
    present = {
        str(key): value for key, value in raw.items() if value is not None and not isinstance(value, (str, bytes))
    }
    ids_key = next((key for key in IDS_KEYS if key in present), None)
    if ids_key is None:
        return _of_inner_mapping(raw, present, pad_id)
    if _is_ragged(present[ids_key]):
        count = len(present[ids_key])
        per_row = {key: value for key, value in present.items() if hasattr(value, "__len__") and len(value) == count}
        return stacked(
            [_of_mapping({key: v[row] for key, v in per_row.items()}, pad_id) for row in range(count)], pad_id
        )
    ids_BT = as_rows(present[ids_key], ids_key)
    mask_BT, mask_notes = read_mask(present, ids_BT)
    position_ids_BT, position_notes = read_positions(present, POSITION_KEYS, ids_BT)
    notes = (*mask_notes, *position_notes, *_packing_notes(present), *_unused_notes(present))
    fields = Fields(ids_BT, mask_BT=mask_BT, position_ids_BT=position_ids_BT, text_slice=ids_key == "text", notes=notes)
    return _with_loss_mask(_with_labels(fields, present, ids_key), present)


def _of_inner_mapping(raw: Mapping[Any, Any], present: dict[str, Any], pad_id: int | None) -> Fields:
    inner = [value for item in present.values() if isinstance(value := unwrapped(item), (Mapping, tuple))]
    if len(inner) == 1:
        return fields_of(inner[0], pad_id)
    if len(present) == 1 and is_array(only := next(iter(present.values()))):
        return fields_of(only, pad_id)
    held = ", ".join(sorted(str(key)[:40] for key in raw)[:12]) or "nothing"
    raise refuse("no token ids found", f"it holds {held}", f"store the ids under one of {', '.join(IDS_KEYS)}")


def _with_labels(fields: Fields, present: Mapping[str, Any], ids_key: str) -> Fields:
    keys = [key for key in LABEL_KEYS if key in present and key != ids_key]
    if not keys:
        return fields
    labels = [_labels_like(present[key], key, fields.ids_BT) for key in keys]
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


def _labels_like(value: Any, name: str, ids_BT: Tensor) -> Tensor:
    labels_BT = as_rows(value, name)
    if labels_BT.shape != ids_BT.shape:
        shapes = f"labels {tuple(labels_BT.shape)}, token ids {tuple(ids_BT.shape)}"
        raise refuse(
            f"{name!r} do not fit the token ids", shapes, "store one label for every token id, -100 where none"
        )
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


def _of_sequence(raw: Sequence[Any], pad_id: int | None) -> Fields:
    items = [unwrapped(item) for item in raw]
    if not items:
        raise refuse("the batch is empty", "the file holds an empty list", "give a batch with at least one token")
    if not any((is_array(item) and item.ndim) or isinstance(item, (Mapping, list, tuple)) for item in items):
        return Fields(as_rows(list(items), "the list"), text_slice=None)
    if isinstance(items[0], Mapping) and len(items) > 1 and not isinstance(items[1], Mapping):
        return _titan_pair(items[0], items[1], pad_id)
    if _is_pair(raw, items):
        return _pair(items)
    return stacked([fields_of(item, pad_id) for item in items], pad_id)


def _titan_pair(inputs: Mapping[Any, Any], labels: Any, pad_id: int | None) -> Fields:
    fields = _of_mapping({key: value for key, value in inputs.items() if key not in LABEL_KEYS}, pad_id)
    labels_BT = _labels_like(labels, "labels", fields.ids_BT)
    return replace(fields, labels_BT=labels_BT, hint="shifted", hint_reason="a pair (inputs, labels)", text_slice=False)


def _is_pair(raw: Sequence[Any], items: list[Any]) -> bool:
    """(X, Y) or (X, Y, state), as opposed to rows or micro-batches that happen to be two."""
    if len(items) not in (2, 3) or not (_is_numbers(items[0]) and _is_numbers(items[1])):
        return False
    if len(items) == 3 and _is_numbers(items[2]):
        return _is_zero_one(items[1]) or _looks_aligned(items[0], items[1])
    if _depth(items[0]) == 1:
        same_length = len(items[0]) == len(items[1])
        return same_length and (isinstance(raw, tuple) or _looks_aligned(items[0], items[1]))
    return True


def _pair(items: list[Any]) -> Fields:
    if _is_zero_one(items[1]) and not _is_zero_one(items[0]):  # TensorDataset(input_ids, attention_mask[, labels])
        return _of_mapping(dict(zip(("input_ids", "attention_mask", "labels"), items, strict=False)), None)
    ids_BT = as_rows(items[0], "inputs")
    labels_BT = _labels_like(items[1], "targets", ids_BT)
    return Fields(ids_BT, labels_BT, hint="shifted", hint_reason="a pair (inputs, targets)")


def stacked(parts: list[Fields], pad_id: int | None = None) -> Fields:
    """Rows of all parts below each other, padded on the right; a mask appears where one is needed or was given."""
    width = max(part.ids_BT.shape[1] for part in parts)
    with_labels = sum(part.labels_BT is not None for part in parts)
    if with_labels not in (0, len(parts)):
        why = f"{len(parts) - with_labels} of {len(parts)} examples have no labels"
        raise refuse("the examples do not fit together", why, "give labels to all of them or to none")
    ragged = any(part.ids_BT.shape[1] != width for part in parts)

    def joined(name: str, fill: int, default: int | None = None) -> Tensor | None:
        values = [getattr(part, name) for part in parts]
        if all(value is None for value in values) and not (ragged and name == "mask_BT"):
            return None
        if default is None and any(value is None for value in values):
            return None
        filled = [
            torch.full_like(part.ids_BT, default or 0) if value is None else value.to(torch.int64)
            for part, value in zip(parts, values, strict=True)
        ]
        return torch.cat([pad(value, (0, width - value.shape[1]), value=fill) for value in filled])

    mask_BT, loss_mask_BT = joined("mask_BT", 0, default=1), joined("loss_mask_BT", 0, default=1)
    ids_BT = joined("ids_BT", pad_id or 0)
    assert ids_BT is not None
    return replace(
        parts[0],
        ids_BT=ids_BT,
        labels_BT=joined("labels_BT", IGNORED),
        other_labels_BT=joined("other_labels_BT", IGNORED),
        mask_BT=None if mask_BT is None else mask_BT.bool(),
        loss_mask_BT=None if loss_mask_BT is None else loss_mask_BT.bool(),
        position_ids_BT=joined("position_ids_BT", 0),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )


def _is_ragged(value: Any) -> bool:
    """A list of rows that do not form a rectangle (or are tensors of their own)."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    rows = [(is_array(item) and item.ndim > 0) or isinstance(item, (list, tuple)) for item in value]
    return all(rows) and len({len(item) for item in value}) > 1


def _is_numbers(value: Any) -> bool:
    return (is_array(value) and value.ndim > 0) or (
        isinstance(value, (list, tuple))
        and bool(value)
        and not isinstance(value[0], (Mapping, str))
        and _depth(value) < 3
    )


def _depth(value: Any) -> int:
    if is_array(value):
        return int(value.ndim)
    depth = 0
    while isinstance(value, (list, tuple)) and depth < 4:
        depth, value = depth + 1, value[0] if value else None
    return depth + (int(value.ndim) if is_array(value) else 0)


def _is_zero_one(value: Any) -> bool:
    numbers = as_tensor(value, "the second tensor")
    return bool(((numbers == 0) | (numbers == 1)).all())


def _looks_aligned(inputs: Any, targets: Any) -> bool:
    """Half of the tokens reappear in the other at the same place or one step on, as no two texts do."""
    ids_BT, labels_BT = as_rows(inputs, "inputs"), as_rows(targets, "targets")
    if ids_BT.shape != labels_BT.shape or ids_BT.shape[1] < 2:
        return False
    same, following = (ids_BT == labels_BT), (ids_BT[:, 1:] == labels_BT[:, :-1])
    return max(float(same.double().mean()), float(following.double().mean())) >= 0.5
