"""The replays of a comparison: one in fp32, one in each precision, with the measurements of this package."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stability_probe.batches.base import Batch
from stability_probe.compare.backward import BlockGradients
from stability_probe.compare.reference import Fingerprint, Range, ReferencePass, position_stride
from stability_probe.compare.rounding_tap import RoundingTap
from stability_probe.memory import Heap
from stability_probe.precisions import get_precision
from stability_probe.precisions.base import Precision
from stability_probe.precisions.casting import replaced_forward
from stability_probe.precisions.formats import Format
from stability_probe.precisions.rounding import round_to_format
from stability_probe.probabilities import Head, head_variation, likeliest, spacing_at, total_variation, unresolved
from stability_probe.replay import Subject, Trace, replay
from stability_probe.taps.attention import AttentionTap, HeadStatistics
from stability_probe.taps.modes import without_modes

# Logits are looked at in pieces, so that no second copy of all of them is made, and at every eighth position: on a
# vocabulary of 49 152 a look at each of them costs an eighth of the replay.
CHUNK = 64
LOGIT_STRIDE = 8
SAMPLED = 4  # one forward in so many is sampled
FEW_BLOCKS = 8  # a small model's backward is cheap, and the median of fewer siblings says little
HIDDEN_FORMATS = ("E4M3", "E2M1", "E5M2")  # formats that recipes keep for the products, never for the logits

Advance = Callable[[int], None]


@dataclass
class OutputSums:
    """Sums over positions of one format's effect on the fp32 logits."""

    spacings: list[Tensor] = field(default_factory=list)
    unresolved: Tensor | float = 0.0
    rounding: Tensor | float = 0.0
    positions: int = 0

    def add(self, logits_NV: Tensor, fmt: Format) -> None:
        for part in logits_NV.split(CHUNK):
            self.spacings.append(spacing_at(part.amax(-1), fmt))
            self.unresolved = self.unresolved + unresolved(part, fmt).sum()
            self.rounding = self.rounding + total_variation(part, rounded(part, fmt)).double().sum()
            self.positions += part.shape[0]


@dataclass
class ReferenceRun:
    """The fp32 replay: traces, fingerprints, and the likeliest tokens of every position."""

    loss: float
    token_loss_BT: Tensor
    has_target_BT: Tensor
    global_grad_norm: float
    tap: ReferencePass
    gradients: dict[str, Fingerprint]
    heads: list[Head]
    outputs: dict[str, OutputSums]
    weight_range: dict[str, Range]
    max_attention_logit: float
    seconds: float


@dataclass
class LowRun:
    """A replay in a low precision."""

    precision: Precision
    loss: float
    token_loss_BT: Tensor
    global_grad_norm: float
    tap: RoundingTap
    gradients: dict[str, Fingerprint]
    variation: float
    seconds: float


def logits_format(precision: Precision) -> Format:
    """The format that the logits leave the model in: recipes for 8 and 4 bits keep the head in bf16."""
    if precision.operands.name not in HIDDEN_FORMATS:
        return precision.operands
    return get_precision("bf16").operands


def run_reference(
    subject: Subject, batch: Batch, precisions: list[Precision], microbatch: int, advance: Advance
) -> ReferenceRun:
    """Replay in the purest fp32: roundings that the model's own code makes are undone too."""
    formats = {p.name: (p.operands, p.gradients, p.operands.name in HIDDEN_FORMATS) for p in precisions}
    tap = ReferencePass(subject, position_stride(batch.ids_BT.numel()), formats)
    heads: list[Head] = []
    outputs = {logits_format(p).name: (OutputSums(), logits_format(p)) for p in precisions}
    peaks: list[Tensor] = []

    @torch.no_grad()
    @without_modes
    def look(logits_BTV: Tensor) -> Tensor:
        flat = _sampled(logits_BTV)
        heads.append(_joined([likeliest(part, part.float().logsumexp(-1)) for part in flat.split(CHUNK)]))
        for sums, fmt in outputs.values():
            sums.add(flat, fmt)
        return logits_BTV

    def record(layer: int, seen: HeadStatistics) -> None:
        peaks.append(seen.max_logit_BH.max())

    looked_at = sampled_rows(batch.ids_BT.shape[0], microbatch)
    sites = {site.name: site.layer for site in subject.anatomy.attention}

    def measured(original: Callable[..., Any]) -> Callable[..., Any]:
        """The forward, with attention logits on the sampled rows: they cost a third of the replay."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if tap.watcher.row not in looked_at:
                return original(*args, **kwargs)
            with AttentionTap(record, peaks_only=True).on(subject.module, sites):
                return original(*args, **kwargs)

        return run

    @contextmanager
    def taps() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(tap.on())
            stack.enter_context(replaced_forward(subject.module, measured))
            yield

    trace = replay(
        subject,
        batch,
        detail=False,
        microbatch=microbatch,
        change_logits=look,
        extra=taps,
        advance=_tidied(advance),
    )
    for total in trace.gradients.total.values() if trace.gradients else ():
        tap.measure_gradient(total)
    weights: dict[str, Range] = {}
    for name, (fmt, _, scaled) in formats.items():
        for parameter in subject.module.parameters():
            weights.setdefault(name, Range()).add(parameter, fmt, scaled)
    gradients = gradient_fingerprints(trace)
    return ReferenceRun(
        loss=trace.loss,
        token_loss_BT=trace.token_loss_BT,
        has_target_BT=trace.has_target_BT,
        global_grad_norm=whole_norm(gradients),
        tap=tap,
        gradients=gradients,
        heads=heads,
        outputs={name: sums for name, (sums, _) in outputs.items()},
        weight_range=weights,
        max_attention_logit=torch.stack(peaks).max().item() if peaks else math.nan,
        seconds=trace.seconds,
    )


def run_low(
    subject: Subject, batch: Batch, precision: Precision, reference: ReferenceRun, microbatch: int, advance: Advance
) -> LowRun:
    """Replay in a low precision, every module computed again in fp32 on the inputs that it had."""
    names = (*subject.anatomy.blocks, *(n for n in (subject.anatomy.final_norm, subject.anatomy.head) if n))
    rows = sampled_rows(batch.ids_BT.shape[0], microbatch)
    stride = position_stride(batch.ids_BT.numel())
    quota = blocks_again(len(names), len(range(0, batch.ids_BT.shape[0], microbatch)))
    # The head costs as much as six blocks of a small model: where there is room for a few alone, it is left out.
    followed = names if quota == len(names) else subject.anatomy.blocks
    tap = RoundingTap(subject, BlockGradients(followed, rows, quota, precision.loss_scale), stride)
    tap.backward.standing_out = tap.standing_out
    heads = iter(reference.heads)
    variations: list[Tensor] = []

    @torch.no_grad()
    @without_modes
    def look(logits_BTV: Tensor) -> Tensor:
        head = next(heads)
        parts = zip(_sampled(logits_BTV).split(CHUNK), _split(head), strict=True)
        variations.extend(head_variation(known, part, part.float().logsumexp(-1)) for part, known in parts)
        return logits_BTV

    trace = replay(
        subject,
        batch,
        precision.name,
        detail=False,
        microbatch=microbatch,
        change_logits=look,
        extra=tap.on,
        advance=_tidied(advance),
    )
    gradients = gradient_fingerprints(trace)
    return LowRun(
        precision=precision,
        loss=trace.loss,
        token_loss_BT=trace.token_loss_BT,
        global_grad_norm=whole_norm(gradients),
        tap=tap,
        gradients=gradients,
        variation=torch.cat(variations).mean().item() if variations else math.nan,
        seconds=trace.seconds,
    )


def sampled_rows(n_rows: int, microbatch: int) -> frozenset[int]:
    """First rows of the forwards whose backward is computed again: one forward in four, evenly spaced.

    The fp32 forward and backward of a block costs as much as the replay itself; a quarter of it is what is affordable:
    the comparison in bf16 takes 3.0 times one bare fp32 forward and backward with it, on a CPU without bf16
    instructions (benchmarks/compare_precision.py, 4 × 512 tokens of SmolLM2-135M).
    """
    starts = list(range(0, n_rows, microbatch))
    return frozenset(starts[::SAMPLED])


def blocks_again(blocks: int, forwards: int) -> int:
    """Of how many blocks the backward is computed again: in a batch of few forwards a quarter of it is not all."""
    return min(blocks, max(FEW_BLOCKS, math.ceil(blocks * forwards / SAMPLED)))


def _tidied(advance: Advance) -> Advance:
    """`advance`, after memory that the rows left in holes was given back."""
    heap = Heap()

    def done(rows: int) -> None:
        heap.tidy()
        advance(rows)

    return done


def rounded(values: Tensor, fmt: Format) -> Tensor:
    """As `round_to_format`, by torch's own cast where there is one."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}.get(fmt.name)
    return round_to_format(values, fmt) if dtype is None else values.to(dtype).float()


def gradient_fingerprints(trace: Trace) -> dict[str, Fingerprint]:
    """Sketches and norms of the batch's gradients; the gradients themselves are let go."""
    if trace.gradients is None:
        return {}
    found = {}
    for name, total in trace.gradients.total.items():
        square = torch.linalg.vector_norm(total, dtype=torch.float32).double().square()
        found[name] = Fingerprint(trace.gradients.parameter_sketch[name], square)
    trace.gradients.total.clear()
    return found


def whole_norm(gradients: dict[str, Fingerprint]) -> float:
    """Norm of the whole gradient, from those of its parameters."""
    return math.sqrt(sum(float(found.square) for found in gradients.values()))


def _sampled(logits_BTV: Tensor) -> Tensor:
    return logits_BTV.detach()[:, ::LOGIT_STRIDE].flatten(0, 1)


def _joined(parts: list[Head]) -> Head:
    return Head(torch.cat([p.tokens for p in parts]), torch.cat([p.probabilities for p in parts]))


def _split(head: Head) -> list[Head]:
    pairs = zip(head.tokens.split(CHUNK), head.probabilities.split(CHUNK), strict=True)
    return [Head(tokens, probabilities) for tokens, probabilities in pairs]
