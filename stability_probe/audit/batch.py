"""The audit inside a training loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stability_probe.audit.result import AuditResult
from stability_probe.audit.rows import audit_rows

_IDS = ("input_ids", "ids", "tokens", "idx", "inputs", "input", "text")
_LABELS = ("labels", "targets", "label_ids")
_MASKS = ("attention_mask", "input_mask", "mask")


def audit_batch(batch: Any, labels: Any = None, attention_mask: Any = None, **options: Any) -> AuditResult:
    """Audit the batch of this step: no I/O, CPU or CUDA tensors.

    Args:
        batch: a (rows, positions) tensor of ids; a mapping with `input_ids` (and `labels`, `attention_mask`); or
            an (inputs, targets) pair.
        options: as in `audit_rows` (`vocab_size`, `eos_id`, `pad_id`, `labels`, `baseline`…). The label
            convention is called `labels` there; here it is `convention`.
    """
    if isinstance(batch, Mapping):
        labels = _first(batch, _LABELS) if labels is None else labels
        attention_mask = _first(batch, _MASKS) if attention_mask is None else attention_mask
        batch = _first(batch, _IDS)
    elif isinstance(batch, (tuple, list)) and len(batch) >= 2 and getattr(batch[0], "ndim", 0) == 2:
        labels = batch[1] if labels is None else labels
        batch = batch[0]
    convention = options.pop("convention", "auto")
    return audit_rows(batch, labels_BT=labels, mask_BT=attention_mask, labels=convention, **options)


def should_skip_batch(batch: Any, labels: Any = None, attention_mask: Any = None, **options: Any) -> bool:
    """True where `audit_batch` says to skip: more than a tenth of the rows flagged, or a fault of the whole batch."""
    return audit_batch(batch, labels, attention_mask, **options).skip


def _first(batch: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((batch[name] for name in names if batch.get(name) is not None), None)
