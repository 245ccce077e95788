"""From the runs of one precision to its table of modules, parameters, ranges and tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch

from stability_probe.compare.reference import Fingerprint, Range, cosine, relative_error
from stability_probe.compare.result import ModuleError, OutputReport, ParameterError, RangeReport
from stability_probe.compare.rounding_tap import LowStatistics
from stability_probe.compare.runs import LowRun, OutputSums, ReferenceRun, logits_format
from stability_probe.models.anatomy import Anatomy
from stability_probe.precisions.formats import FP16, Format, fp16_loss_scale

# A module stands out at four times what is ordinary for it. On SmolLM2-135M in bf16 the largest healthy ratio to the
# median of the sibling layers is 2.0 (an MLP; attention 1.4): benchmarks/compare_precision.py prints it.
STANDS_OUT = 4.0
# And only where its error is at least a quarter of the format's unit roundoff, the size of one honest rounding.
WORTH_NAMING = 0.25
# Added to what is ordinary, in unit roundoffs: between modules that are exact in fp32 the ratio means nothing.
FLOOR = 1 / 32
# What a module without siblings and without a baseline may show: inputs, weights and result rounded once each.
ALONE = 2.0


def module_errors(anatomy: Anatomy, reference: ReferenceRun, low: LowRun) -> list[ModuleError]:
    """Every module in the order of the forward, not yet judged."""
    return [_module_error(anatomy, reference, low, name) for name in reference.tap.order if name in low.tap.modules]


def _module_error(anatomy: Anatomy, reference: ReferenceRun, low: LowRun, name: str) -> ModuleError:
    seen: LowStatistics = low.tap.modules[name]
    source = reference.tap.source(name)
    shown = low.tap.modules.get(source, seen)
    mine, fp32 = low.tap.outputs.get((source, 0)), reference.tap.outputs.get((source, 0))
    site, own = seen.worst_own()
    amplified = seen.whole.relative if seen.whole else math.nan
    failed = name in low.tap.failed
    outward, outward_z = own.bias("outward")
    fits = reference.tap.activation_range.get((low.precision.name, source), Range())
    nonfinite = int(shown.nonfinite)
    return ModuleError(
        module=name or "(model)",
        role=anatomy.role_of(name) if name else "other",
        layer=anatomy.layer_of(name),
        relative_error=math.inf if nonfinite else relative_error(mine, fp32),
        introduced_error=math.nan if failed else max(own.relative, _or_zero(amplified)),
        own_error=math.nan if failed else own.relative,
        own_site=site,
        amplified_error=amplified,
        cosine=math.nan if nonfinite else cosine(mine, fp32),
        absmax=shown.absmax,
        nonfinite=nonfinite,
        outside_range=fits.share("overflow") + fits.share("underflow"),
        bias=outward,
        bias_z=outward_z,
        signed_bias=own.bias("signed")[0],
        grad_relative_error=relative_error(low.tap.gradients.get(name), reference.tap.gradients.get(name)),
        grad_introduced_error=introduced_gradient(low, name),
    )


def introduced_gradient(low: LowRun, name: str) -> float:
    """Of a block's input or of a parameter, on the sampled rows; NaN where it was not computed again."""
    again = low.tap.backward.again.get(name)
    return relative_error(low.tap.backward.low.get(name), again)


def judged(
    anatomy: Anatomy, modules: Sequence[ModuleError], unit_roundoff: float, baseline: Sequence[ModuleError] = ()
) -> tuple[ModuleError, ...]:
    """Each module against its siblings in other layers and against itself on the baseline batch.

    The excess is the larger of the two ratios: a fault of the state stands out among its siblings, one that the
    batch brings out stands out from the baseline.
    """
    before = {m.module: m for m in baseline}
    forward = _siblings(anatomy, modules, "introduced_error")
    backward = _siblings(anatomy, modules, "grad_introduced_error")
    return tuple(
        _judged(m, unit_roundoff, forward.get(m.module, []), backward.get(m.module, []), before.get(m.module))
        for m in modules
    )


def _siblings(anatomy: Anatomy, modules: Sequence[ModuleError], field: str) -> dict[str, list[float]]:
    """Values of the same module in other layers; a norm outside the blocks is compared with all norms."""
    groups: dict[str, dict[str, float]] = {}
    norms: list[float] = []
    for m in modules:
        value = getattr(m, field)
        if m.layer >= 0 and math.isfinite(value):
            groups.setdefault(anatomy.kind_of(m.module), {})[m.module] = value
            norms += [value] * (m.role == "norm")
    found = {name: [v for other, v in group.items() if other != name] for group in groups.values() for name in group}
    return found | {m.module: norms for m in modules if m.layer < 0 and m.role == "norm"}


def _judged(
    m: ModuleError, unit: float, siblings: list[float], grad_siblings: list[float], baseline: ModuleError | None
) -> ModuleError:
    sibling = median(siblings) if siblings else math.nan
    before = baseline.introduced_error if baseline else math.nan
    excess = _excess(m.introduced_error, unit, sibling, before)
    grad_sibling = median(grad_siblings) if grad_siblings else math.nan
    grad_before = baseline.grad_introduced_error if baseline else math.nan
    grad_excess = _excess(m.grad_introduced_error, unit, grad_sibling, grad_before)
    return dataclasses.replace(
        m,
        sibling_error=sibling,
        baseline_error=before,
        excess=excess,
        stands_out=bool(excess >= STANDS_OUT and m.introduced_error >= WORTH_NAMING * unit),
        grad_stands_out=bool(grad_excess >= STANDS_OUT and m.grad_introduced_error >= WORTH_NAMING * unit),
    )


def _excess(value: float, unit: float, sibling: float, before: float) -> float:
    if math.isnan(value):
        return math.nan
    references = [r for r in (sibling, before) if not math.isnan(r)] or [ALONE * unit]
    return value / (min(references) + FLOOR * unit)


def parameter_errors(reference: ReferenceRun, low: LowRun) -> tuple[ParameterError, ...]:
    return tuple(
        ParameterError(
            parameter=name,
            grad_relative_error=relative_error(low.gradients.get(name), fp32)
            if low.gradients[name].is_finite
            else math.inf,
            grad_cosine=cosine(low.gradients.get(name), fp32),
            grad_norm=low.gradients[name].norm,
            grad_norm_fp32=fp32.norm,
            grad_introduced_error=introduced_gradient(low, name),
            nonfinite=not low.gradients[name].is_finite,
        )
        for name, fp32 in reference.gradients.items()
        if name in low.gradients
    )


def gradient_gap(reference: dict[str, Fingerprint], low: dict[str, Fingerprint]) -> tuple[float, float]:
    """Relative error and cosine of the gradient over all parameters."""
    gap = mine = size = 0.0
    for name, fp32 in reference.items():
        other = low.get(name)
        if other is None or other.sketch is None or fp32.sketch is None:
            continue
        gap += (other.sketch - fp32.sketch).double().square().sum().item()
        mine += other.norm**2
        size += fp32.norm**2
    if not all(map(math.isfinite, (gap, mine, size))):
        return math.inf, math.nan
    error = math.sqrt(gap / size) if size > 0 else (0.0 if gap == 0 else math.inf)
    return error, (mine + size - gap) / 2 / math.sqrt(mine * size) if mine > 0 and size > 0 else math.nan


def ranges(reference: ReferenceRun, low: LowRun) -> tuple[RangeReport, ...]:
    name, precision = low.precision.name, low.precision
    activations = [r for (p, _), r in reference.tap.activation_range.items() if p == name]
    kinds = [
        ("weights", precision.operands, [reference.weight_range[name]]),
        ("activations", precision.operands, activations),
        ("gradients", precision.gradients, [reference.tap.gradient_range.get(name, Range())]),
    ]
    found = [_range_report(what, fmt, parts) for what, fmt, parts in kinds]
    peak, fmt = reference.max_attention_logit, logits_format(precision)
    if not math.isnan(peak):
        overflow = float(peak > fmt.max)
        found.append(RangeReport("attention logits", fmt.name, overflow, 0.0, 0.0, peak, fmt.headroom_bits(peak)))
    return tuple(found)


def _range_report(what: str, fmt: Format, parts: list[Range]) -> RangeReport:
    elements = max(sum(r.elements for r in parts), 1)
    absmax = max((r.absmax for r in parts), default=0.0)
    over, under, subnormal = (
        sum(r.share(n) * r.elements for r in parts) / elements for n in ("overflow", "underflow", "subnormal")
    )
    return RangeReport(what, fmt.name, over, under, subnormal, absmax, fmt.headroom_bits(absmax))


def loss_scale_needed(reference: ReferenceRun, low: LowRun) -> float | None:
    """The power of two that lifts fp16 gradients as far as their maximum allows; None for other formats."""
    if low.precision.gradients is not FP16:
        return None
    seen = reference.tap.gradient_range.get(low.precision.name)  # nothing where no position has a target
    return fp16_loss_scale(seen.absmax) if seen is not None else None


def output_report(reference: ReferenceRun, low: LowRun) -> OutputReport:
    fmt = logits_format(low.precision)
    sums: OutputSums = reference.outputs[fmt.name]
    positions = max(sums.positions, 1)
    spacing = torch.cat(sums.spacings).median().item() if sums.spacings else math.nan
    return OutputReport(
        fmt.name, spacing, float(sums.unresolved) / positions, float(sums.rounding) / positions, low.variation
    )


def worst_tokens(batch: Any, reference: ReferenceRun, low: LowRun, most: int = 20) -> Iterator[dict[str, Any]]:
    """Targets whose loss differs most, worst first; a loss that is not finite comes before all."""
    gap = (low.token_loss_BT - reference.token_loss_BT).nan_to_num(math.inf, math.inf, -math.inf)
    size = gap.abs().masked_fill(~reference.has_target_BT, -1.0).flatten()
    for flat in size.topk(min(most, size.numel())).indices.tolist():
        row, position = divmod(flat, gap.shape[1])
        if reference.has_target_BT[row, position]:
            yield {
                "row": row,
                "position": position,
                "token": batch.ids_BT[row, position].item(),
                "target": batch.targets_BT[row, position].item(),
                "loss_fp32": reference.token_loss_BT[row, position].item(),
                "loss": low.token_loss_BT[row, position].item(),
            }


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value
