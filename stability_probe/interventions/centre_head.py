"""Take the mean over the vocabulary out of the head's rows: the same probabilities, from logits around zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from stability_probe.interventions.bench import Bench, CannotRun, Reading, reading_of
from stability_probe.precisions.casting import replaced_forward
from stability_probe.replay import replay
from stability_probe.tables import precision_gap

OF_THE_DATA = False


def trial(bench: Bench, module: str, precision: str = "bf16") -> Reading:
    """Replay in `precision` with what all rows of the head share, in weight and bias, taken out of them.

    Raises:
        CannotRun: the head is no linear layer, or its logits are capped afterwards.
    """
    head = bench.subject.module.get_submodule(module)
    if type(head) is not nn.Linear or bench.measurements.output_softcap:
        raise CannotRun("needs a linear head whose logits go into the softmax as they are")

    def centred(_original: Callable[..., Any]) -> Callable[..., Any]:
        def run(input: Tensor) -> Tensor:  # named as in nn.Linear.forward, which may be called by keyword
            bias = None if head.bias is None else head.bias - head.bias.mean()
            return F.linear(input, head.weight - head.weight.mean(0), bias)

        return run

    def changed() -> Any:
        return replaced_forward(head, centred)

    trace = replay(bench.subject, bench.batch, precision, detail=False, microbatch=bench.microbatch, extra=changed)
    return {**reading_of(trace), "precision_gap": precision_gap(bench.trace, trace).token_gap}
