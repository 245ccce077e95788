"""What a comparison found: plain values, ready for JSON and for the reports. Nothing here imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

NAN = math.nan


@dataclass(frozen=True)
class ModuleError:
    """One module in one precision against fp32. Errors are ‖low − fp32‖ / ‖fp32‖ of its (first) output.

    Attributes:
        relative_error: inherited and introduced together.
        introduced_error: what it makes itself, on the inputs that it had in the low precision: the larger of
            `own_error` and `amplified_error`.
        own_error: of its own code, the results of the modules inside it taken as they were; `own_site` says where
            ("output", or the inner module whose input it made).
        amplified_error: with the simple modules inside it in fp32 too; NaN for modules that hold none or that
            hold modules which hold modules.
        bias, bias_z: mean of the error away from zero in units of its rms (−0.87 is rounding toward zero, 0 is
            noise) and its z score; signed_bias likewise of the error with its sign.
        outside_range: share of its fp32 output that the format of the operands flushes to zero or overflows.
        sibling_error: median introduced error of the same module in the other layers.
        baseline_error: introduced error on the baseline batch.
        excess: introduced_error over what is ordinary for it; `stands_out` where that and the size are large.
        grad_relative_error, grad_introduced_error: of the gradient of a block's output, and of the gradient that
            the block sends back to its input (NaN elsewhere).
    """

    module: str
    role: str
    layer: int
    relative_error: float
    introduced_error: float
    own_error: float
    own_site: str
    amplified_error: float
    cosine: float
    absmax: float
    nonfinite: int
    outside_range: float
    bias: float
    bias_z: float
    signed_bias: float
    sibling_error: float = NAN
    baseline_error: float = NAN
    excess: float = NAN
    stands_out: bool = False
    grad_relative_error: float = NAN
    grad_introduced_error: float = NAN
    grad_stands_out: bool = False


@dataclass(frozen=True)
class ParameterError:
    """The gradient of one parameter against fp32; the introduced part is that of its block, on the sampled rows."""

    parameter: str
    grad_relative_error: float
    grad_cosine: float
    grad_norm: float
    grad_norm_fp32: float
    grad_introduced_error: float = NAN
    nonfinite: bool = False


@dataclass(frozen=True)
class RangeReport:
    """How a kind of values fits the format: shares in [0, 1], largest size, doublings left to the limit."""

    what: str
    format: str
    overflow: float
    underflow: float
    subnormal: float
    absmax: float
    headroom_bits: float


@dataclass(frozen=True)
class OutputReport:
    """The token distributions.

    Attributes:
        spacing: median distance between neighbouring values of the format at the largest logit of a position.
        unresolved: share of positions whose two largest logits are closer than that.
        rounding_variation: mean total variation when the fp32 logits alone are rounded to the format.
        variation: mean total variation between the two replays (the 128 likeliest tokens, the rest as one).
    """

    format: str
    spacing: float
    unresolved: float
    rounding_variation: float
    variation: float


@dataclass(frozen=True)
class UpdateReport:
    """What happens to one optimizer step when weights are stored in bf16.

    Attributes:
        source: where the size of the update comes from.
        lost: share of elements that do not move although their update is not zero.
        progress: ⟨update, what was applied⟩ / ⟨update, update⟩ with rounding to nearest; 1 with fp32 master weights.
        progress_stochastic: the same with stochastic rounding.
    """

    source: str
    lost: float
    progress: float
    progress_stochastic: float


@dataclass(frozen=True)
class Isolated:
    """One replay with some modules kept in fp32.

    Attributes:
        removed_loss, removed_grad: shares of the token-loss gap and of the gradient error that this removes.
    """

    modules: tuple[str, ...]
    token_gap: float
    grad_relative_error: float
    removed_loss: float
    removed_grad: float


@dataclass(frozen=True)
class PrecisionResult:
    """One precision against fp32 on one batch.

    Attributes:
        loss_gap: loss − loss in fp32, nats; token_gap: mean of |difference| over targets.
        grad_relative_error, grad_cosine: of the whole gradient (sketched).
        culprits: modules that stand out, the first to look at first.
        loss_scale_needed: the power of two that would keep all gradients in fp16; None for other formats.
        keep_fp32: modules that bring the gap under the target when kept in fp32 (only with isolation).
        sentence: whether this precision explains the incident, and where.
        severity: 2 it does, 1 a fault without a visible cost on this batch, 0 ordinary rounding.
    """

    name: str
    summary: str
    emulated: bool
    loss: float
    loss_gap: float
    token_gap: float
    global_grad_norm: float
    grad_relative_error: float
    grad_cosine: float
    nonfinite: int
    first_nonfinite: str | None
    seconds: float
    modules: tuple[ModuleError, ...]
    parameters: tuple[ParameterError, ...]
    ranges: tuple[RangeReport, ...]
    output: OutputReport
    tokens: tuple[dict[str, Any], ...]
    loss_scale_needed: float | None = None
    baseline_loss_gap: float | None = None
    baseline_grad_relative_error: float | None = None
    culprits: tuple[str, ...] = ()
    isolated: tuple[Isolated, ...] = ()
    keep_fp32: tuple[str, ...] = ()
    sentence: str = ""
    severity: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Every precision against fp32; `summary` is the one sentence that leads every report."""

    summary: str
    loss: float
    global_grad_norm: float
    baseline_loss: float | None
    max_attention_logit: float
    seconds: float
    precisions: dict[str, PrecisionResult]
    updates: tuple[UpdateReport, ...] = ()
    inputs: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
