"""Take the optimizer's step in memory, with one thing changed, and look at what it does to healthy text."""

from __future__ import annotations

import dataclasses
import functools

from stability_probe.interventions.bench import Bench, CannotRun, Reading
from stability_probe.optimizer_step import StepSetting, stepped
from stability_probe.replay import replay

OF_THE_DATA = False


def trial(bench: Bench, refresh: list[str] | None = None, lr_factor: float = 1.0) -> Reading:
    """The damage of the step with v̂ refreshed in those parameters, or at another LR.

    Raises:
        CannotRun: there is no optimizer state.
    """
    if bench.step is None:
        raise CannotRun("the optimizer's state is not known; give it with --optimizer")
    setting = dataclasses.replace(bench.step.setting, lr_factor=lr_factor, refresh=frozenset(refresh or ()))
    return {"step_damage": damage(bench, setting)}


def damage(bench: Bench, setting: StepSetting) -> float:
    """Loss after the step minus loss before it, nats, on the text of `StepBench`."""
    step = bench.step
    if step is None:
        raise CannotRun("the optimizer's state is not known; give it with --optimizer")
    taken = functools.partial(stepped, bench.subject.module, step.gradients, step.state, setting)
    after = replay(bench.subject, step.batch, backward=False, detail=False, microbatch=bench.microbatch, extra=taken)
    return after.loss - step.loss_before
