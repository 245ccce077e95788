"""Facts about positions: what the batch stores, what the rotary frequencies are, how the loss runs over the row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stability_probe.batches.base import Batch
from stability_probe.measure import BlindQueries, PositionFacts
from stability_probe.replay import Subject, Trace

LISTED = 200
# Below this many positions a bucket is not halved again.
SMALLEST_BUCKET = 4


def position_facts(subject: Subject, batch: Batch, trace: Trace, eos_id: int | None) -> PositionFacts:
    """The `positions` of `Measurements`."""
    stored = batch.position_ids_BT
    first, breaks, at_documents = 0, [], 1.0
    theta, stretch = rotary_settings(subject.module) or (None, 1.0)
    if stored is not None:
        first = first_position(batch)
        breaks = position_breaks(batch)
        at_documents = share_at_documents(batch, breaks, eos_id)
    return PositionFacts(
        stored=stored is not None,
        taken="position_ids" in subject.takes,
        first=first,
        breaks=tuple(breaks[:LISTED]),
        broken_rows=tuple(sorted({row for row, _ in breaks})),
        at_documents=at_documents,
        rotary_theta=theta,
        rotary_stretch=stretch,
        losses=losses_by_position(trace),
    )


def first_position(batch: Batch) -> int:
    """The smallest stored id of a row's first real token."""
    ids = batch.position_ids_BT
    if ids is None or not ids.numel():
        return 0
    if batch.mask_BT is None:
        return int(ids[:, 0].min())
    real = batch.mask_BT.any(1)
    start = batch.mask_BT.int().argmax(1, keepdim=True)
    return int(ids.gather(1, start)[real].min()) if bool(real.any()) else 0


def position_breaks(batch: Batch) -> list[tuple[int, int]]:
    """(row, position) of every real token whose position id is not one more than that of the real token before it."""
    ids = batch.position_ids_BT
    if ids is None:
        return []
    uneven = torch.zeros_like(ids, dtype=torch.bool)
    uneven[:, 1:] = ids[:, 1:] != ids[:, :-1] + 1
    if batch.mask_BT is not None:
        uneven[:, 1:] &= batch.mask_BT[:, 1:] & batch.mask_BT[:, :-1]
    return [(row, position) for row, position in uneven.nonzero().tolist()]


def share_at_documents(batch: Batch, breaks: list[tuple[int, int]], eos_id: int | None) -> float:
    """Share of the breaks that go back to 0 right after a separator: how packed documents count.

    The separator is the end-of-text id; where it is unknown, a token that precedes or begins every one of the breaks.
    """
    ids = batch.position_ids_BT
    if not breaks or ids is None:
        return 1.0
    back = [(row, at) for row, at in breaks if int(ids[row, at]) == 0]
    before = [int(batch.ids_BT[row, at - 1]) for row, at in back]
    begins = [int(batch.ids_BT[row, at]) for row, at in back]
    if eos_id is not None:
        found = sum(eos_id in pair for pair in zip(before, begins, strict=True))
    else:
        found = len(back) if len(back) > 1 and (len(set(before)) == 1 or len(set(begins)) == 1) else 0
    return found / len(breaks)


def rotary_settings(module: nn.Module) -> tuple[float, float] | None:
    """(base θ, stretch) of rotary frequencies, from the buffers or from the package's own configuration."""
    for name, buffer in module.named_buffers():
        if name.rsplit(".", 1)[-1] == "inv_freq":
            return settings_of(buffer)
    config = getattr(module, "config", None)
    theta = getattr(config, "rope_theta", None)
    return (float(theta), 1.0) if theta and getattr(config, "positions", "") == "rotary" else None


def settings_of(inv_freq: Tensor) -> tuple[float, float] | None:
    """(θ, s) of frequencies θ^(−2i/d) / s, i = 0 … d/2 − 1; None where they are scaled in another way."""
    width = 2 * inv_freq.numel()
    if inv_freq.dim() != 1 or width < 4 or not bool((inv_freq > 0).all()):
        return None
    frequencies = inv_freq.double().cpu()
    theta = float((frequencies[1] / frequencies[0]) ** (-width / 2))
    plain = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    known = torch.allclose(frequencies / frequencies[0], plain, rtol=1e-3)
    return (theta, 1 / float(frequencies[0])) if known else None


def losses_by_position(trace: Trace) -> tuple[tuple[int, int, float, int], ...]:
    """(start, end, mean loss, targets): the first position alone, then buckets that double up to the later half."""
    end = trace.token_loss_BT.shape[1]
    edges = []
    while end > SMALLEST_BUCKET:
        edges.append((end // 2, end))
        end //= 2
    found: list[tuple[int, int, float, int]] = []
    for start, stop in [(0, 1), *((max(start, 1), stop) for start, stop in reversed([*edges, (0, end)]))]:
        valid = trace.has_target_BT[:, start:stop]
        if bool(valid.any()):
            loss = trace.token_loss_BT[:, start:stop][valid].double().mean().item()
            found.append((start, stop, loss, int(valid.sum())))
    return tuple(found)


def blind_queries(batch: Batch, trace: Trace) -> BlindQueries:
    """The `blind` of `Measurements`: by the stored mask, and by what the attention calls showed."""
    padding = 0
    rows: tuple[int, ...] = ()
    padded: tuple[int, ...] = ()
    if batch.mask_BT is not None:
        empty = ~batch.mask_BT.any(1) | _inverted(batch.ids_BT, batch.mask_BT)
        rows = tuple(int(row) for row in empty.nonzero().flatten())
        before_B = batch.mask_BT.int().argmax(1).masked_fill(empty, 0)
        padding = int(before_B.sum())
        padded = tuple(int(row) for row in before_B.nonzero().flatten())
    counted = {layer: blind_count(totals) for layer, totals in sorted(trace.heads.items())}
    return BlindQueries(padding, rows, tuple((layer, count) for layer, count in counted.items() if count), padded)


# Distinct ids under a mask from which on they are text: padding has one, with separators and end marks a few more.
TEXT_IDS = 8


def _inverted(ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(B,) bool: rows whose mask keeps a run of one id alone, padding, and leaves the text out."""
    found = []
    for ids_T, kept_T in zip(ids_BT, mask_BT, strict=True):
        one = int(kept_T.sum()) > 1 and len(ids_T[kept_T].unique()) == 1
        found.append(one and len(ids_T[~kept_T].unique()) >= TEXT_IDS)
    return torch.tensor(found)


def blind_count(totals: Any) -> int:
    """Blind queries of one layer: the same in every head unless heads are masked differently."""
    return int(totals.blind.max())
