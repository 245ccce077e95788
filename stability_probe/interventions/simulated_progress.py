"""What the optimizer's step would gain, to first order, with its weights in fp32 or with another ε."""

from __future__ import annotations

import dataclasses

from stability_probe.interventions.bench import Bench, CannotRun, Reading
from stability_probe.step_progress import TINY_EPS, gain, lost_share

OF_THE_DATA = False


def trial(bench: Bench, in_fp32: bool = False, tiny_eps: bool = False) -> Reading:
    """The share of the reference step's gain that is still lost with that changed and all else as the run has it.

    Raises:
        CannotRun: the step cannot be simulated.
    """
    known = bench.measurements.step_progress
    if bench.step is None or known is None:
        raise CannotRun("the optimizer's state is not known; give it with --optimizer")
    eps = TINY_EPS if tiny_eps else None
    setting = dataclasses.replace(bench.step.setting, eps=eps, in_bf16=known.in_bf16 and not in_fp32)
    own = gain(bench.subject.module, bench.step.gradients, bench.step.state, setting)
    return {"lost_progress": lost_share(own, known.expected)}
