"""Let every query that sees no key see itself."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from stability_probe.interventions.bench import Bench, CannotRun
from stability_probe.taps.attention_change import AttentionChange, allowed

OF_THE_DATA = False


def repaired(bench: Bench, rows: list[int] | None = None) -> Bench:
    """The bench with the diagonal unmasked for queries without a key; in these rows all tokens count as real.

    Raises:
        CannotRun: the model has no attention module that is known.
    """
    sites = [site.name for site in bench.subject.anatomy.attention]
    if not sites:
        raise CannotRun("no attention module was found in this model")
    if rows and bench.batch.mask_BT is not None:
        mask = bench.batch.mask_BT.clone()
        mask[rows] = True
        bench = dataclasses.replace(bench, batch=dataclasses.replace(bench.batch, mask_BT=mask))
    return bench.holding_attention(lambda: AttentionChange(see_itself).on(bench.subject.module, sites))


def see_itself(logits: Tensor, start: int) -> Tensor:
    """Logits (…, queries, keys) with the diagonal at 0 where a query has no allowed key; `start` is its first query."""
    blind = ~allowed(logits).any(-1, keepdim=True)
    queries, keys = logits.shape[-2:]
    # With a cache there are more keys than queries: the last query sits on the last key.
    place = torch.arange(start, start + queries, device=logits.device)[:, None]
    itself = torch.arange(keys, device=logits.device) == place
    return torch.where(blind & itself, 0.0, logits)
