"""Routers of experts: where they are, how they load the experts, how large their logits are."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stability_probe.models.anatomy import Anatomy

ROUTER = re.compile(r"^(gate|router|wg|gating|router_gate)$", re.IGNORECASE)
TOP_K = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k")


@dataclass(frozen=True)
class RouterSite:
    """One router: a module that owns an (experts, width) weight beside the experts.

    Attributes:
        correction: name of a buffer or parameter that is added to the scores before experts are chosen, or "".
        sigmoid: scores are sigmoids of the logits (DeepSeek-V3), so the correction is added to those.
    """

    name: str
    layer: int
    experts: int
    top_k: int
    correction: str = ""
    sigmoid: bool = False


def find_routers(module: nn.Module, anatomy: Anatomy) -> tuple[RouterSite, ...]:
    """The routers of the model's blocks, in order of depth."""
    found = []
    for name, part in module.named_modules():
        layer = anatomy.layer_of(name)
        leaf = name.rsplit(".", 1)[-1]
        weight = part._parameters.get("weight")
        if layer < 0 or weight is None or weight.dim() != 2 or weight.shape[0] < 2:
            continue
        if not (ROUTER.search(leaf) or "router" in type(part).__name__.lower()):
            continue
        parent = module.get_submodule(name.rsplit(".", 1)[0])
        if not any("expert" in child for child, _ in parent.named_children() if child != leaf):
            continue
        # In Qwen's blocks the shared expert has a gate of its own, with one output.
        correction = next((n for n in ("e_score_correction_bias", "expert_bias") if hasattr(part, n)), "")
        top_k = _top_k((part, parent, getattr(module, "config", None)), weight.shape[0])
        found.append(RouterSite(name, layer, weight.shape[0], top_k, correction, bool(correction)))
    return tuple(found)


def _top_k(owners: tuple[object, ...], experts: int) -> int:
    values = (getattr(owner, name, None) for owner in owners for name in TOP_K)
    stated = next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), 2)
    return min(stated, experts)


@dataclass
class RouterTotals:
    """Running statistics of one router, on the device."""

    load_E: Tensor
    log_z: Tensor
    absmax: Tensor
    tokens: int = 0


@dataclass
class RouterTap:
    """Counts what every router chooses. The logits are computed again in fp32 from the router's input."""

    sites: tuple[RouterSite, ...]
    found: dict[str, RouterTotals] = field(default_factory=dict)

    @contextmanager
    def on(self, module: nn.Module) -> Iterator[None]:
        handles = [module.get_submodule(s.name).register_forward_hook(self._hook(s)) for s in self.sites]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, site: RouterSite) -> Callable[..., None]:
        @torch.no_grad()
        def hook(part: nn.Module, inputs: Any, _output: Any) -> None:
            logits = router_logits(part, inputs[0])
            chosen = chosen_experts(part, site, logits)
            load = torch.bincount(chosen.flatten(), minlength=site.experts).double()
            log_z, absmax = logits.logsumexp(-1).double().sum(), logits.abs().max()
            total = self.found.get(site.name)
            if total is None:
                self.found[site.name] = RouterTotals(load, log_z, absmax, len(logits))
                return
            total.load_E = total.load_E + load
            total.log_z = total.log_z + log_z
            total.absmax = torch.maximum(total.absmax, absmax)
            total.tokens += len(logits)

        return hook

    def table(self) -> tuple[dict[str, Any], ...]:
        """The `routers` of `Measurements`."""
        return tuple(_record(site, self.found[site.name]) for site in self.sites if site.name in self.found)


def router_logits(part: nn.Module, hidden: Tensor) -> Tensor:
    """(tokens, experts) in fp32."""
    weight, bias = part.get_parameter("weight").float(), part._parameters.get("bias")
    flat = hidden.detach().reshape(-1, weight.shape[1]).float()
    return F.linear(flat, weight, None if bias is None else bias.float())


def chosen_experts(part: nn.Module, site: RouterSite, logits: Tensor) -> Tensor:
    """(tokens, top_k) indices; limits on groups of experts are not looked at."""
    scores = logits.sigmoid() if site.sigmoid else logits
    if site.correction:
        scores = scores + getattr(part, site.correction).float()
    return scores.topk(site.top_k, dim=-1).indices


def _record(site: RouterSite, total: RouterTotals) -> dict[str, Any]:
    share = total.load_E / total.load_E.sum().clamp_min(1)
    used = share[share > 0]
    log_z = total.log_z.item() / max(total.tokens, 1)
    return {
        "module": site.name,
        "layer": site.layer,
        "experts": site.experts,
        "top_k": site.top_k,
        "tokens": total.tokens,
        "load_entropy": -(used * used.log()).sum().item(),
        "load_top": share.max().item(),
        "idle": int((total.load_E == 0).sum()),
        "log_z": log_z if math.isfinite(log_z) else math.nan,
        "logit_absmax": total.absmax.item(),
        "sigmoid": site.sigmoid,
    }
