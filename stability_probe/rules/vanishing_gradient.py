"""The gradient dies on its way to the early layers."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Rule, Skip, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._tables import is_number, median, records
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "total": Threshold(
        1e-4, "x the last block's", "the residual stream carries gradients to all depths: healthy early blocks "
        "get as much as late ones or more",
        "python benchmarks/healthy_ranges.py (gradient norms of the blocks' outputs)",
    ),
    "per_block": Threshold(
        0.5, "x per block, median", "a fall that is the same block after block, not one step between two of them",
        "0.5 per block loses 1e-4 in 13 blocks; a residual block at initialisation loses nothing",
    ),
    "fewest_blocks": Threshold(
        4, "blocks", "a trend needs a few points", "three ratios are the fewest whose median means something"
    ),
}  # fmt: skip

PAGE = Page(
    title="Vanishing gradient",
    claim="The gradient falls geometrically from the last block to the first; the early layers do not learn.",
    mechanism=(
        "Each block passes on the gradient through its residual branch. Where that branch is missing or scaled down, "
        "where a norm after the addition shrinks it, or where attention and activations are saturated, each block "
        "takes away its share, and after a dozen of them nothing is left. The loss falls until the late layers have "
        "learned what they can from frozen inputs, and then lies flat; Adam turns the tiny gradients into noise."
    ),
    signature="Norms of the gradient at the blocks' outputs that shrink by a steady factor towards the input.",
    false_alarms=(
        "A converged model has small gradients everywhere, evenly over depth. A single step between two blocks, such "
        "as where massive activations arise, is no trend. In fp16 small gradients round to zero without a loss scale, "
        "at all depths: compare with fp32."
    ),
    proof="No single change of the weights repairs it; the ratios between the blocks of one model are the evidence.",
    remedies=(
        Remedy("Use norms before the branches (pre-norm), so that the residual path is the identity."),
        Remedy("Scale the initial output projections by one over the root of twice the depth, not the residual path."),
        Remedy("Look for saturated attention or activations in the block where the fall begins."),
    ),
    references=(
        "Xiong et al., On Layer Normalization in the Transformer Architecture, 2020",
        "Wang et al., DeepNet: Scaling Transformers to 1,000 Layers, 2022",
    ),
)


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    blocks = sorted((row for row in records(m.modules) if row["role"] == "block"), key=lambda row: row["layer"])
    norms = [row["grad_norm"] for row in blocks]
    if not any(is_number(norm) for norm in norms):
        raise Skip("the gradients of the blocks' outputs were not measured (they need the backward pass)")
    if len(norms) < t["fewest_blocks"].value or not all(is_number(norm) for norm in norms) or not norms[-1] > 0:
        return []
    total = norms[0] / norms[-1]
    step = median(early / late for early, late in pairwise(norms) if late > 0)
    if total > t["total"].value or not step <= t["per_block"].value:
        return []
    layers = tuple(int(row["layer"]) for row in blocks)
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"The gradient at the first block's output is {total:.1e} of that at the last, "
            f"{step:.2g} x per block.",
            location=Location(module=blocks[0]["module"], layer=layers[0], layers=layers),
            evidence=(
                Evidence("gradient norm at the first block's output", norms[0], "", norms[-1], "last block",
                         t["total"].value * norms[-1], t["total"].source),
                Evidence("fall per block, median", step, "x", threshold=t["per_block"].value,
                         source=t["per_block"].source),
            ),
            strength=t["total"].value / max(total, 1e-12),
            latent=True,
        )
    ]  # fmt: skip


def _falling(*norms: float) -> list[dict[str, object]]:
    return _cases.modules({f"model.layers.{layer}": {"grad_norm": norm} for layer, norm in enumerate(norms)})


RULE = Rule(
    slug="vanishing-gradient",
    order=703,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case("a fall by a factor of 30 per block", {"modules": _falling(7e-6, 2e-4, 6e-3, 0.2)}, True),
        Case("nothing reaches the first block", {"modules": _falling(0.0, 1e-7, 1e-4, 0.1)}, True),
        Case("near miss: converged, small everywhere", {"modules": _falling(2e-6, 2e-6, 1e-6, 1e-6)}, False),
        Case("near miss: one step between two blocks", {"modules": _falling(1e-6, 1.1e-6, 1e-6, 0.2)}, False),
    ),
)
