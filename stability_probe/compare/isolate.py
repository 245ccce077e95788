"""Which modules to keep in fp32: replays with one block at a time in fp32, then the best of them together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stability_probe.batches.base import Batch
from stability_probe.compare.result import Isolated
from stability_probe.compare.runs import ReferenceRun, gradient_fingerprints
from stability_probe.compare.tables import gradient_gap
from stability_probe.precisions.base import Precision
from stability_probe.replay import Subject, replay

# The set is large enough when it leaves a quarter of the gap: the rest is spread over all modules.
TARGET = 0.25
MOST_TOGETHER = 8


@dataclass(frozen=True)
class Gap:
    """Mean |loss difference| per target, and relative error of the whole gradient."""

    token: float
    gradient: float


def candidates(subject: Subject, culprits: tuple[str, ...]) -> tuple[str, ...]:
    """Blocks, every module outside them that owns a weight, and what stood out."""
    blocks = subject.anatomy.blocks
    outside = [
        name
        for name, part in subject.module.named_modules()
        if name and subject.anatomy.layer_of(name) < 0 and "weight" in part._parameters
    ]
    modules = dict(subject.module.named_modules())
    return tuple(dict.fromkeys(name for name in (*culprits, *blocks, *outside) if name in modules and name))


def isolate(
    subject: Subject,
    batch: Batch,
    precision: Precision,
    reference: ReferenceRun,
    whole: Gap,
    culprits: tuple[str, ...],
    microbatch: int,
    advance: Callable[[int], None],
) -> tuple[tuple[Isolated, ...], tuple[str, ...]]:
    """Every candidate alone in fp32, most useful first, the sets tried after that, and the set to keep in fp32.

    The set takes the most useful ones until a quarter of both gaps is left, then drops those that are not needed.
    It is empty where even the best eight miss that. Usefulness is the larger of the two removed shares.
    """

    def measure(modules: tuple[str, ...]) -> Isolated:
        gap = _gap(subject, batch, precision, reference, modules, microbatch)
        advance(1)
        removed = _removed(whole.token, gap.token), _removed(whole.gradient, gap.gradient)
        return Isolated(modules, gap.token, gap.gradient, *removed)

    def enough(modules: tuple[str, ...]) -> bool:
        tried.append(measure(modules))
        return _left(whole, tried[-1]) <= TARGET

    alone = sorted((measure((name,)) for name in candidates(subject, culprits)), key=_usefulness, reverse=True)
    tried = list(alone)
    if alone and _left(whole, alone[0]) <= TARGET:
        return tuple(tried), alone[0].modules
    ranked = [one.modules[0] for one in alone[:MOST_TOGETHER]]
    for size in range(2, len(ranked) + 1):
        together = tuple(_without_nested(ranked[:size]))
        if enough(together):
            for name in together[:-1]:  # what the last one made superfluous
                fewer = tuple(kept for kept in together if kept != name)
                together = fewer if enough(fewer) else together
            return tuple(tried), together
    return tuple(tried), ()


def count_replays(subject: Subject, culprits: tuple[str, ...]) -> int:
    """Replays that `isolate` makes at most."""
    return len(candidates(subject, culprits)) + 2 * MOST_TOGETHER


def _gap(
    subject: Subject,
    batch: Batch,
    precision: Precision,
    reference: ReferenceRun,
    kept: tuple[str, ...],
    microbatch: int,
) -> Gap:
    name = f"{precision.name}:fp32={'+'.join(kept)}"
    trace = replay(subject, batch, name, detail=False, microbatch=microbatch)
    difference = (trace.token_loss_BT - reference.token_loss_BT)[reference.has_target_BT]
    token = difference.abs().double().mean().item() if difference.numel() else math.nan
    return Gap(token, gradient_gap(reference.gradients, gradient_fingerprints(trace))[0])


def _removed(before: float, after: float) -> float:
    """Share of a gap that is gone, in [0, 1]; a gap that was not finite is all gone when it is."""
    if not math.isfinite(before):
        return 1.0 if math.isfinite(after) else 0.0
    return max(0.0, min(1.0, (before - after) / before)) if before > 0 and math.isfinite(after) else 0.0


def _usefulness(one: Isolated) -> float:
    return max(one.removed_loss, one.removed_grad)


def _left(whole: Gap, one: Isolated) -> float:
    gaps = ((whole.token, one.removed_loss), (whole.gradient, one.removed_grad))
    return max((1 - share for gap, share in gaps if gap > 0), default=0.0)


def _without_nested(names: list[str]) -> Iterator[str]:
    """Modules that lie inside another of the list are kept by it."""
    for name in names:
        if not any(name.startswith(other + ".") for other in names):
            yield name
