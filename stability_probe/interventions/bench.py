"""What an intervention may use: the replays that exist, and the means to make new ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from stability_probe.batches.base import Batch
from stability_probe.checkpoints.base import OptimizerState
from stability_probe.judge import Measure
from stability_probe.measure import Measurements
from stability_probe.optimizer_step import StepSetting
from stability_probe.replay import Trace, replay

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

    def read(self, extra: Callable[[], Any] = nullcontext, precision: str = "fp32") -> Reading:
        """Replay the batch with a change in place, and read what came out."""
        trace = replay(
            self.subject,
            self.batch,
            precision,
            backward=self.with_gradients,
            detail=False,
            microbatch=self.microbatch,
            extra=extra,
        )
        return reading_of(trace)


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
