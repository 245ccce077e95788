"""Scale the learnable gains of q_norm and k_norm: the knob that is left under QK-norm."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from stability_probe.interventions.bench import Bench, CannotRun, swapped
from stability_probe.models.anatomy import Anatomy

OF_THE_DATA = False


def repaired(bench: Bench, gammas: Mapping[int, float]) -> Bench:
    """The bench with the logits of each layer × its factor, through both gains.

    Raises:
        CannotRun: a layer has no q_norm or k_norm with a gain.
    """
    subject = bench.subject
    return bench.holding(functools.partial(clipped_gains, subject.module, subject.anatomy, gammas))


@contextmanager
def clipped_gains(module: nn.Module, anatomy: Anatomy, gammas: Mapping[int, float]) -> Iterator[None]:
    """Within this context q_norm's and k_norm's gains of each layer are multiplied by √factor."""
    sites = {site.layer: site for site in anatomy.attention}
    new = {}
    for layer, gamma in gammas.items():
        site = sites.get(layer)
        owners = [owner for owner in (site.query_norm, site.key_norm) if owner] if site else []
        if not owners:
            raise CannotRun(f"layer {layer} has no norm on its queries and keys")
        for owner in owners:
            # Gemma stores the gain as its difference from 1.
            centre = 1.0 if type(module.get_submodule(owner)).__name__.startswith("Gemma") else 0.0
            gain = module.get_parameter(f"{owner}.weight").detach() + centre
            new[f"{owner}.weight"] = gain * gamma ** (1 / len(owners)) - centre
    with swapped(module, new):
        yield
