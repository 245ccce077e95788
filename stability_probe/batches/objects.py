"""From whatever object a run saved to the fields of a batch: mappings, pairs, rows, examples, micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stability_probe.batches.fields import IDS_KEYS, LABEL_KEYS, Fields, labels_like, of_keys, stacked
from stability_probe.batches.numbers import as_rows, as_tensor, is_array, refuse


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


def notes_on_shape(raw: Any) -> tuple[str, ...]:
    """What was made of token ids in one dimension: nobody said that they are one sequence."""
    raw = unwrapped(raw)
    if isinstance(raw, Mapping):
        raw = next((raw[key] for key in IDS_KEYS if raw.get(key) is not None), None)
    flat = isinstance(raw, (list, tuple)) and bool(raw) and not any(hasattr(item, "__len__") for item in raw)
    if not flat and not (is_array(raw) and raw.ndim == 1):
        return ()
    return (f"the token ids have one dimension: they are read as one row of {len(raw)} tokens",)


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
    return of_keys(present, ids_key)


def _of_inner_mapping(raw: Mapping[Any, Any], present: dict[str, Any], pad_id: int | None) -> Fields:
    inner = [value for item in present.values() if isinstance(value := unwrapped(item), (Mapping, tuple))]
    if len(inner) == 1:
        return fields_of(inner[0], pad_id)
    if len(present) == 1 and is_array(only := next(iter(present.values()))):
        return fields_of(only, pad_id)
    held = ", ".join(sorted(str(key)[:40] for key in raw)[:12]) or "nothing"
    raise refuse("no token ids found", f"it holds {held}", f"store the ids under one of {', '.join(IDS_KEYS)}")


def _of_sequence(raw: Sequence[Any], pad_id: int | None) -> Fields:
    items = [unwrapped(item) for item in raw]
    if not any((is_array(item) and item.ndim) or isinstance(item, (Mapping, list, tuple)) for item in items):
        return Fields(as_rows(list(items), "the list"), text_slice=None)
    if isinstance(items[0], Mapping) and len(items) > 1 and not isinstance(items[1], Mapping):
        return _titan_pair(items[0], items[1], pad_id)
    if _is_pair(raw, items):
        return _pair(items)
    return stacked([fields_of(item, pad_id) for item in items], pad_id)


def _titan_pair(inputs: Mapping[Any, Any], labels: Any, pad_id: int | None) -> Fields:
    fields = _of_mapping({key: value for key, value in inputs.items() if key not in LABEL_KEYS}, pad_id)
    labels_BT = labels_like(labels, "labels", fields.ids_BT)
    return replace(fields, labels_BT=labels_BT, hint="shifted", hint_reason="a pair (inputs, labels)", text_slice=False)


def _is_pair(raw: Sequence[Any], items: list[Any]) -> bool:
    """(X, Y) or (X, Y, state), as opposed to rows or micro-batches that happen to be two."""
    if len(items) not in (2, 3) or not (_is_numbers(items[0]) and _is_numbers(items[1])):
        return False
    if len(items) == 3 and _is_numbers(items[2]):
        return _depth(items[0]) == 2 and (any(map(_is_zero_one, items[1:])) or _looks_aligned(items[0], items[1]))
    if _depth(items[0]) == 1:
        same_length = len(items[0]) == len(items[1])
        return same_length and (isinstance(raw, tuple) or _looks_aligned(items[0], items[1]))
    return True


def _pair(items: list[Any]) -> Fields:
    others = [item for item in items[1:] if _is_numbers(item)]
    mask = next((item for item in others if _is_zero_one(item)), None)
    if mask is not None and not _is_zero_one(items[0]):  # a TensorDataset of what a tokenizer returns, in any order
        labels = next((item for item in others if item is not mask), None)
        return _of_mapping({"input_ids": items[0], "attention_mask": mask, "labels": labels}, None)
    ids_BT = as_rows(items[0], "inputs")
    labels_BT = labels_like(items[1], "targets", ids_BT)
    return Fields(ids_BT, labels_BT, hint="shifted", hint_reason="a pair (inputs, targets)")


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
    return numbers.numel() > 0 and bool(((numbers == 0) | (numbers == 1)).all())


def _looks_aligned(inputs: Any, targets: Any) -> bool:
    """Half of the tokens reappear in the other at the same place or one step on, as no two texts do."""
    ids_BT, labels_BT = as_rows(inputs, "inputs"), as_rows(targets, "targets")
    if ids_BT.shape != labels_BT.shape or ids_BT.shape[1] < 2:
        return False
    same, following = (ids_BT == labels_BT), (ids_BT[:, 1:] == labels_BT[:, :-1])
    return max(float(same.double().mean()), float(following.double().mean())) >= 0.5
