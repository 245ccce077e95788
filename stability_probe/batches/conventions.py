"""How labels relate to token ids, decided from the data and the key names, and the targets that follow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from stability_probe.batches.base import IGNORED, Batch, Convention
from stability_probe.batches.edit import apply, moved
from stability_probe.batches.fields import Fields
from stability_probe.batches.masks import padding_of_loss_mask
from stability_probe.errors import ProbeError

# Right labels agree everywhere; the rest leaves room for labels changed on purpose (masked entities, corrected tokens).
AGREES_FROM = 0.95
# Below that, one convention still wins where most labels follow it and at most half as many follow the other:
# some rows of the batch are misaligned, and the others say how it was meant.
LEANS_FROM = 0.5
# A bare tensor one wider than a multiple of 64 holds T inputs and the last target: contexts are multiples of 64.
CONTEXT_MULTIPLE = 64


def to_batch(fields: Fields, labels: str, path: Path | None = None, sha256: str = "") -> Batch:
    """The batch under the declared convention ("shifted", "unshifted") or the one that fits ("auto").

    Labels on padding stay targets (that is a fault to be found); −100 and any other negative label is IGNORED.
    Without labels the targets are the next tokens, IGNORED where either token is padding.

    Raises:
        ProbeError: exit code 3, for an empty batch, or labels that fit both conventions where no key name decides.
    """
    _require_tokens(fields, path)
    fields = _choose_labels(_with_clean_padding(fields), labels)
    convention, reason = _convention(fields, labels, path)
    targets_BT = _targets(fields, convention)
    batch = Batch(
        ids_BT=fields.ids_BT,
        targets_BT=targets_BT,
        labels_BT=fields.labels_BT,
        mask_BT=fields.mask_BT,
        position_ids_BT=fields.position_ids_BT,
        convention=convention,
        convention_reason=reason,
        path=path,
        sha256=sha256,
        notes=fields.notes,
    )
    return _without_last_column(batch) if _is_text_slice(fields, labels) else batch


def agreement(ids_BT: Tensor, labels_BT: Tensor) -> tuple[float | None, float | None]:
    """Shares of the non-ignored labels that equal the token at their place, and the next one; None without any."""
    valid_BT = labels_BT >= 0
    return (
        _mean((ids_BT == labels_BT)[valid_BT]),
        _mean((ids_BT[:, 1:] == labels_BT[:, :-1])[valid_BT[:, :-1]]),
    )


def _mean(flags: Tensor) -> float | None:
    return float(flags.double().mean()) if flags.numel() else None


def _convention(fields: Fields, declared: str, path: Path | None) -> tuple[Convention, str]:
    if fields.labels_BT is None:
        return "absent", "the batch holds no labels: every position predicts the next token"
    same, following = agreement(fields.ids_BT, fields.labels_BT)
    shares = f"labels equal their own token at {_percent(same)}, the next one at {_percent(following)}"
    if declared in ("shifted", "unshifted"):
        return ("shifted" if declared == "shifted" else "unshifted"), f"declared; {shares}"
    if fields.pre_shifted:
        return "shifted", f"{fields.hint_reason} are shifted by name; {shares}"
    fitting = _fitting(same or 0.0, following or 0.0)
    if fitting is not None:
        unusual = f"; {fields.hint_reason} usually mean {fields.hint}, declare --labels if training read them so"
        return fitting, shares + (unusual if fields.hint not in (None, fitting) else "")
    if fields.hint is not None:
        return fields.hint, f"{shares}, which decides nothing; by {fields.hint_reason}: {fields.hint}"
    if same is None:
        return "unshifted", "every label is ignored"
    raise ProbeError(
        f"cannot tell how the labels of {path or 'the batch'} are shifted",
        shares,
        "give --labels unshifted (the loss shifts them, as in transformers) or shifted (they are the next tokens)",
    )


def _fitting(same: float, following: float) -> Convention | None:
    if (same >= AGREES_FROM) != (following >= AGREES_FROM):
        return "unshifted" if same >= AGREES_FROM else "shifted"
    low, high = sorted((same, following))
    if high >= LEANS_FROM and 2 * low <= high:
        return "unshifted" if same == high else "shifted"
    return None


def _percent(share: float | None) -> str:
    return "no position" if share is None else f"{share:.1%}"


def _targets(fields: Fields, convention: Convention) -> Tensor:
    if convention == "absent":
        labels_BT = _ignoring(fields.ids_BT, fields.mask_BT)
        if fields.loss_mask_of == "label":
            labels_BT = _ignoring(labels_BT, fields.loss_mask_BT)
        targets_BT = _ignoring(moved(labels_BT, 1), fields.mask_BT)
        if fields.loss_mask_of == "target":
            targets_BT = _ignoring(targets_BT, fields.loss_mask_BT)
    else:
        assert fields.labels_BT is not None
        targets_BT = fields.labels_BT if convention == "shifted" else moved(fields.labels_BT, 1)
    return targets_BT.masked_fill(targets_BT < 0, IGNORED)


def _ignoring(values_BT: Tensor, keep_BT: Tensor | None) -> Tensor:
    return values_BT if keep_BT is None else values_BT.masked_fill(~keep_BT, IGNORED)


def _choose_labels(fields: Fields, declared: str) -> Fields:
    """`labels` instead of `shift_labels` where unshifted ones are asked for; labels without loss are ignored ones."""
    if declared == "unshifted" and fields.pre_shifted and fields.other_labels_BT is not None:
        fields = replace(fields, labels_BT=fields.other_labels_BT, pre_shifted=False)
    if fields.labels_BT is None or fields.loss_mask_BT is None:
        return fields
    return replace(fields, labels_BT=_ignoring(fields.labels_BT, fields.loss_mask_BT))


def _with_clean_padding(fields: Fields) -> Fields:
    """Padding may hold anything, even −100: ids under mask 0 become 0 where they could not be looked up."""
    if fields.mask_BT is None and fields.loss_mask_BT is not None:
        of_targets = fields.loss_mask_of == "target" or fields.hint == "shifted"
        mask_BT = padding_of_loss_mask(fields.loss_mask_BT, fields.ids_BT, of_targets)
        note = ("the loss mask marks padding at row ends",) if mask_BT is not None else ()
        fields = replace(fields, mask_BT=mask_BT, notes=(*fields.notes, *note))
    if fields.mask_BT is None:
        return fields
    return replace(fields, ids_BT=fields.ids_BT.masked_fill(~fields.mask_BT & (fields.ids_BT < 0), 0))


def _require_tokens(fields: Fields, path: Path | None) -> None:
    rows, width = fields.ids_BT.shape
    if rows == 0 or width == 0:
        why = f"it has {rows} rows of {width} positions"
        raise ProbeError(f"the batch {path or ''} is empty".replace("  ", " "), why, "give a batch with tokens")


def _is_text_slice(fields: Fields, declared: str) -> bool:
    width = fields.ids_BT.shape[1]
    if fields.labels_BT is not None or width < 2 or declared == "unshifted":
        return False
    if fields.text_slice is None:
        return declared == "shifted" or (width > CONTEXT_MULTIPLE and width % CONTEXT_MULTIPLE == 1)
    return fields.text_slice


def _without_last_column(batch: Batch) -> Batch:
    reason = "rows of T + 1 tokens: the first T are inputs, each predicts the next"
    return replace(apply(batch, lambda values_BT: values_BT[:, :-1]), convention_reason=reason)
