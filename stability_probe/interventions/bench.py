"""What an intervention may use: the replays that exist, and the means to make new ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from stability_probe.batches.base import Batch
from stability_probe.checkpoints.base import OptimizerState
from stability_probe.judge import Measure
from stability_probe.measure import Measurements
from stability_probe.optimizer_step import StepSetting
from stability_probe.replay import Change, Trace, replay

Reading = dict[Measure, float]


class CannotRun(Exception):
    """The intervention cannot be run here; the message says why."""


@dataclass(frozen=True)
class StepBench:
    """What a simulated step needs, and the text that it must not harm.

    Attributes:
        batch, loss_before, measured_on: that text, its loss before the step, nats, and what it is called.
    """

    gradients: Mapping[str, Tensor]
    state: OptimizerState
    setting: StepSetting
    batch: Batch
    loss_before: float
    measured_on: str


@dataclass(frozen=True)
class Bench:
    """The incident on the bench.

    Attributes:
        trace: fp32 replay of the batch; `reduced` the replays in other precisions, by name.
        healthy: the baseline batch and its fp32 replay, or None.
        with_gradients: replays measure gradients too (the excess to explain is one of gradients).
        held, change_logits: repairs that are in place in each replay: contexts, the outermost first, and what is
            done to the output logits.
    """

    subject: Any
    batch: Batch
    trace: Trace
    measurements: Measurements
    reduced: Mapping[str, Trace]
    healthy: tuple[Batch, Trace] | None
    step: StepBench | None
    microbatch: int = 1
    with_gradients: bool = False
    held: tuple[Callable[[], Any], ...] = ()
    change_logits: Change | None = None
    attention_is_changed: bool = False

    def holding(self, context: Callable[[], Any] | None = None, change_logits: Change | None = None) -> Bench:
        """The same bench with a change of the state in place, inside those that it already holds."""
        held = self.held if context is None else (*self.held, context)
        before, after = self.change_logits, change_logits
        both = (lambda logits: after(before(logits))) if before and after else after or before
        return replace(self, held=held, change_logits=both)

    def holding_attention(self, context: Callable[[], Any]) -> Bench:
        """As `holding`, for a change of the attention logits.

        Raises:
            CannotRun: one is in place already: the second would not see what the first made of the mask.
        """
        if self.attention_is_changed:
            raise CannotRun("the attention logits are changed already")
        return replace(self.holding(context), attention_is_changed=True)

    def read(self) -> Reading:
        """Replay the batch with what is held in place, and read what came out."""

        @contextmanager
        def inside() -> Iterator[None]:
            with ExitStack() as stack:
                for context in self.held:
                    stack.enter_context(context())
                yield

        trace = replay(
            self.subject,
            self.batch,
            backward=self.with_gradients,
            detail=False,
            microbatch=self.microbatch,
            change_logits=self.change_logits,
            extra=inside,
        )
        return reading_of(trace)


def tried(kind: Any, bench: Bench, arguments: Mapping[str, Any]) -> Reading:
    """What one kind of intervention (a module of this package) gives: its own reading, or that of the repaired bench.

    Raises:
        CannotRun: it cannot be run on this bench.
    """
    return kind.trial(bench, **arguments) if hasattr(kind, "trial") else repaired_reading(kind, bench, arguments)


def repaired_reading(kind: Any, bench: Bench, arguments: Mapping[str, Any]) -> Reading:
    """A new replay with the repair in place, beside whatever the bench already holds."""
    repaired: Bench = kind.repaired(bench, **arguments)
    return repaired.read()


def reading_of(trace: Trace) -> Reading:
    """Loss, gradient norm and whether anything was not finite."""
    loss, norm = trace.loss, trace.global_grad_norm
    reading: Reading = {"loss": loss}
    if norm is not None:
        reading["grad_norm"] = norm
    finite = math.isfinite(loss) or trace.valid_targets == 0
    reading["nonfinite"] = 0.0 if finite and (norm is None or math.isfinite(norm)) else 1.0
    return reading


@contextmanager
def swapped(module: nn.Module, replacements: Mapping[str, Tensor]) -> Iterator[None]:
    """Within this context the named parameters hold other values; afterwards exactly the old ones."""
    parameters = dict(module.named_parameters())
    old = {name: parameters[name].data for name in replacements}
    try:
        for name, value in replacements.items():
            parameters[name].data = value
        yield
    finally:
        for name, value in old.items():
            parameters[name].data = value
