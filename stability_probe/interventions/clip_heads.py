"""QK-clip: scale the query and key projections of single heads (Kimi K2 report, section 2.1)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stability_probe.interventions.bench import Bench, CannotRun, swapped
from stability_probe.models.anatomy import Attention, HeadRows, head_rows, latent_head_rows, with_heads

OF_THE_DATA = False


def repaired(bench: Bench, gammas: Mapping[tuple[int, int], float]) -> Bench:
    """The bench with each head's logits × its factor.

    Raises:
        CannotRun: the layout of the projections is not known.
    """
    module, heads = bench.subject.module, bench.trace.heads
    sites = {
        site.layer: with_heads(module, site, len(heads[site.layer].max_logit)) if site.layer in heads else site
        for site in bench.subject.anatomy.attention
    }
    return bench.holding(functools.partial(clipped_heads, module, sites, gammas))


@contextmanager
def clipped_heads(
    module: nn.Module, sites: Mapping[int, Attention], gammas: Mapping[tuple[int, int], float]
) -> Iterator[None]:
    """Within this context the logits of each (layer, head) are multiplied by its factor; `sites` are by layer.

    Half of the factor goes to W_q and half to W_k. Where query heads share a key head, all of it goes to
    W_q: the key rows also belong to healthy siblings. Under latent attention the rotary key, which all heads share,
    stays as it is.
    """
    new: dict[str, Tensor] = {}

    def scale(rows: HeadRows | None, layer: int, factor: float) -> None:
        if rows is None:
            raise CannotRun(f"the layout of the query and key projections of {sites[layer].name} is not known")
        for name in (rows.parameter, rows.bias):
            if name is not None:
                tensor = new.setdefault(name, module.get_parameter(name).detach().clone())
                rows.of(tensor).mul_(factor)

    with torch.no_grad():
        for (layer, head), gamma in gammas.items():
            if layer not in sites:
                raise CannotRun(f"layer {layer} has no known attention module")
            site = sites[layer]
            if latent := latent_head_rows(module, site, head):
                for rows, power in latent:
                    scale(rows, layer, gamma**power)
                continue
            shared = site.n_kv_heads != site.n_heads
            for side, factor in (("q", gamma),) if shared else (("q", gamma**0.5), ("k", gamma**0.5)):
                scale(head_rows(module, site, head, side), layer, factor)
    with swapped(module, new):
        yield
