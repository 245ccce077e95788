"""Whether a precision explains the incident, and where: one sentence from the tables. Pure; no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stability_probe.compare.result import ModuleError, PrecisionResult

# Nats. bf16 costs the healthy SmolLM2-135M up to 0.004 nats on 4 × 512 tokens (benchmarks/compare_precision.py): ten
# times that is no rounding noise. Coarser formats are allowed more, as the square root of their unit roundoff:
# errors of many values add up like noise.
LOSS_GAP = 0.04
BF16_UNIT = 2.0**-8
# Half of the gradient is error: the step no longer follows it. Healthy bf16 shows 0.025, healthy NVFP4 0.3.
GRAD_ERROR = 0.5
# A gradient that is all gone has an error of 1; what is nearer to that than this is lost in any format.
ALL_GONE = 0.95
# Both are excused where the baseline batch shows as much: then the precision costs that always, incident or not.
TIMES_BASELINE = 3.0
# −√3/2 = −0.87 is rounding toward zero, 0 is rounding to nearest; healthy modules stay under 0.12 (attention).
BIASED = 0.4
# A logit of 100 is rounded by 0.25 in bf16, and a weight exp(logit) with it by a quarter.
HOT_LOGIT = 100.0
# The error with the inner modules in fp32 contains the module's own: half as much again is more than that.
AMPLIFIES = 1.5
# Share of the parameters that lose most of their gradient, from which on underflow is the story.
MANY = 0.1
BIAS_Z = 8.0  # standard errors: with 10³ modules a chance of 10⁻¹² each


def culprits(modules: Sequence[ModuleError]) -> tuple[str, ...]:
    """Modules that stand out, largest extra error first, without those that pass on an inner culprit's error."""
    standing = [m for m in modules if m.stands_out]
    extra = {m.module: m.introduced_error - _ordinary(m) for m in standing}
    kept = [
        m
        for m in standing
        if not any(
            inner.module.startswith(m.module + ".") and extra[inner.module] >= 0.5 * extra[m.module]
            for inner in standing
        )
    ]
    return tuple(m.module for m in sorted(kept, key=lambda m: -extra[m.module]))


def _ordinary(m: ModuleError) -> float:
    known = [v for v in (m.sibling_error, m.baseline_error) if not math.isnan(v)]
    return min(known, default=0.0)


def judge(result: PrecisionResult, unit_roundoff: float, fp32_loss: float, max_logit: float) -> tuple[int, str]:
    """Severity (see `PrecisionResult`) and the sentence.

    Args:
        unit_roundoff: of the format of the operands.
        max_logit: largest attention logit in fp32, NaN where unknown.
    """
    name = result.name
    if result.nonfinite or not math.isfinite(result.loss):
        return _not_finite(result, fp32_loss)
    if not math.isfinite(result.global_grad_norm):
        return 2, f"In {name} the gradient is not finite, in fp32 it is{_backward(result)}."
    place = _forward(result, max_logit) or _backward(result)
    coarser = max(1.0, unit_roundoff / BF16_UNIT)
    if abs(result.loss_gap) > max(LOSS_GAP * math.sqrt(coarser), TIMES_BASELINE * abs(result.baseline_loss_gap or 0.0)):
        change = f"{fp32_loss:.4g} → {result.loss:.4g}"
        return 2, f"{name} moves the loss by {result.loss_gap:+.3g} nats ({change}){place}."
    error = _percent(result.grad_relative_error)
    allowed = min(GRAD_ERROR * coarser**0.25, ALL_GONE)
    if result.grad_relative_error > max(allowed, TIMES_BASELINE * (result.baseline_grad_relative_error or 0.0)):
        lost = _vanished(result)
        return 2, f"{name} changes the gradient by {error}{lost}{(_backward(result) if lost else '') or place}."
    ordinary = f"{name} moves the loss by {result.loss_gap:+.2g} nats and the gradient by {error}"
    if place:
        return 1, f"Precision is lost{place}, and it does not show yet: {ordinary}."
    return 0, f"No fault: {ordinary}, and no module rounds worse than its siblings."


def _not_finite(result: PrecisionResult, fp32_loss: float) -> tuple[int, str]:
    if not math.isfinite(fp32_loss):
        return 0, f"fp32 is not finite either, so {result.name} is not the cause."
    first = f"first in `{result.first_nonfinite}`" if result.first_nonfinite else "in the loss"
    return 2, f"{result.name} makes {result.nonfinite} values non-finite, {first}; in fp32 all are finite."


def _forward(result: PrecisionResult, max_logit: float) -> str:
    """The first culprit with what it does, as the end of a sentence."""
    if not result.culprits:
        return ""
    module = next(m for m in result.modules if m.module == result.culprits[0])
    more = f" (and {len(result.culprits) - 1} more)" if len(result.culprits) > 1 else ""
    ordinary = _ordinary(module)
    times = f", {module.introduced_error / ordinary:.0f}× the ordinary" if ordinary > 1e-6 else ""
    size = f"{_percent(module.introduced_error)} of its output{times}"
    return f" in `{module.module}`{more}, which {_does(module, max_logit)} ({size})"


def _does(m: ModuleError, max_logit: float) -> str:
    if m.role == "attention" and max_logit > HOT_LOGIT:
        return f"amplifies the rounding of queries and keys: attention logits reach {max_logit:.4g}"
    if m.amplified_error > AMPLIFIES * m.own_error:
        return "amplifies the rounding of the modules inside it"
    if abs(m.bias) >= BIASED and abs(m.bias_z) >= BIAS_Z:
        return f"rounds {'toward' if m.bias < 0 else 'away from'} zero: a bias, not noise"
    site = "" if m.own_site == "output" else f" in what it hands to `{m.own_site}`"
    return f"introduces the error itself{site}"


def _backward(result: PrecisionResult) -> str:
    """The worst block backward, as the end of a sentence."""
    worst = [m for m in result.modules if m.grad_stands_out]
    if not worst:
        return ""
    first = max(worst, key=lambda m: m.grad_introduced_error)
    error = _percent(first.grad_introduced_error)
    return f" in the backward of `{first.module}`, which changes the gradient it passes on by {error}"


def _vanished(result: PrecisionResult) -> str:
    """How much of the gradient is gone, where that is what happened; only fp16's range is that short."""
    gone = [p for p in result.parameters if p.grad_norm_fp32 > 0 and p.grad_norm < 0.5 * p.grad_norm_fp32]
    scale = result.loss_scale_needed
    if scale is None or len(gone) < MANY * len(result.parameters):
        return ""
    remedy = f" (a loss scale of 2^{int(math.log2(scale))} keeps it)" if scale > 1 else ""
    return f": most of it underflows to zero in {len(gone)} of {len(result.parameters)} parameters{remedy}, first"


def explained_share(result: PrecisionResult, fp32_loss: float, baseline_fp32: float | None) -> float | None:
    """Share of the excess over the baseline, in this precision, that fp32 does not have; None without an excess."""
    if baseline_fp32 is None or result.baseline_loss_gap is None:
        return None
    excess_low = result.loss - (baseline_fp32 + result.baseline_loss_gap)
    excess_fp32 = fp32_loss - baseline_fp32
    if not math.isfinite(excess_low) or excess_low <= LOSS_GAP:
        return None
    return max(0.0, min(1.0, (excess_low - excess_fp32) / excess_low))


def summary(results: Sequence[PrecisionResult]) -> str:
    """The one sentence that leads every report: that of the most serious precision."""
    if not results:
        return "No precision was compared."
    return max(results, key=lambda r: r.severity).sentence


def _percent(share: float) -> str:
    if not math.isfinite(share):
        return "all"
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"
