"""The fp32 pass: fingerprints of what every module returns, and of the gradients of the blocks.

A fingerprint is a sketch and a norm, so nothing of the activations is kept for the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stability_probe.compare.calls import Call, CallWatcher, absolute_maximum, float_tensors
from stability_probe.precisions.casting import PureFloat32
from stability_probe.precisions.formats import FP32, Format, range_shares
from stability_probe.replay import Subject
from stability_probe.taps.modes import without_modes
from stability_probe.taps.sketch import sketch

Key = tuple[str, int]
# A prime stride visits every channel; one element in 7 is plenty for shares over 10⁵ elements.
STRIDE = 7
# From here on positions are many, and half as many of them are looked at: 64 still are.
MANY_POSITIONS = 256


def position_stride(positions: int) -> int:
    """Of (rows, positions, channels) every second or fourth position is looked at: errors differ little from one
    to the next, and small batches have few.

    Args:
        positions: of all rows of the batch together, so that grouping them changes nothing.
    """
    return 4 if positions >= MANY_POSITIONS else 2


@dataclass
class Fingerprint:
    """A vector that is gone, summed over the rows of a batch. 0-d double tensors and one fp32 sketch."""

    sketch: Tensor | None = None
    square: Tensor | float = 0.0

    def add(self, piece: Tensor, values: Tensor) -> None:
        self.sketch = piece if self.sketch is None else self.sketch + piece
        self.square = self.square + torch.linalg.vector_norm(values.detach(), dtype=torch.float32).double().square()

    @property
    def norm(self) -> float:
        return math.sqrt(float(self.square))

    @property
    def is_finite(self) -> bool:
        return math.isfinite(float(self.square))


def relative_error(low: Fingerprint | None, reference: Fingerprint | None) -> float:
    """‖low − reference‖ / ‖reference‖, from the sketches (1.1 % standard error of itself); NaN where unknown."""
    if low is None or reference is None or low.sketch is None or reference.sketch is None:
        return math.nan
    gap = torch.linalg.vector_norm((low.sketch - reference.sketch).double()).item()
    return gap / reference.norm if reference.norm > 0 else (0.0 if gap == 0 else math.inf)


def cosine(low: Fingerprint | None, reference: Fingerprint | None) -> float:
    """Cosine between the two vectors, by the law of cosines: sharp where it is near 1."""
    error = relative_error(low, reference)
    if low is None or reference is None or not math.isfinite(error) or reference.norm == 0 or low.norm == 0:
        return math.nan
    ratio = low.norm / reference.norm
    return max(-1.0, min(1.0, (1 + ratio**2 - error**2) / (2 * ratio)))


@dataclass
class Range:
    """What a format could not hold of some values, and their largest size; sums of shares over tensors."""

    elements: int = 0
    overflow: Tensor | float = 0.0
    underflow: Tensor | float = 0.0
    subnormal: Tensor | float = 0.0
    absmax: float = 0.0

    @torch.no_grad()
    def add(self, values: Tensor, fmt: Format, scaled: bool) -> None:
        """Count `values`; with `scaled` each tensor is first scaled so that its maximum is the format's."""
        absmax = absolute_maximum(values)
        count = values.numel()
        self.elements += count
        self.absmax = math.nan if math.isnan(absmax) else max(self.absmax, absmax)
        if scaled:
            factor = fmt.max / absmax if 0 < absmax < math.inf else 1.0
        elif absmax <= fmt.max and fmt.min_normal <= FP32.min_normal:
            return  # bf16 has fp32's range: nothing can fall out of it below
        else:
            factor = 1.0
        flat = values.detach().reshape(-1)
        sample = flat if not absmax <= fmt.max else flat[::STRIDE]
        shares = range_shares(sample, fmt, factor)
        for name in ("overflow", "underflow", "subnormal"):
            setattr(self, name, getattr(self, name) + getattr(shares, name).double() * count)

    def share(self, name: str) -> float:
        return float(getattr(self, name)) / self.elements if self.elements else 0.0


@dataclass
class ReferencePass:
    """Hooks for the fp32 replay, and what they saw.

    Attributes:
        stride: of the positions that fingerprints are made of.
        formats: by precision, the format of forward operands, that of gradients, and whether tensors are scaled
            to the format before they are rounded.
        outputs: fingerprints by (module, index of the tensor in its output).
        gradients: fingerprints of the gradients of the blocks' outputs, by block.
        activation_range: by (precision, module); gradient_range: by precision.
        order: modules in the order of their first return.
        handed_on: modules that return another's output as it is, with that other one.
    """

    subject: Subject
    stride: int
    formats: dict[str, tuple[Format, Format, bool]] = field(default_factory=dict)
    outputs: dict[Key, Fingerprint] = field(default_factory=dict)
    gradients: dict[str, Fingerprint] = field(default_factory=dict)
    activation_range: dict[tuple[str, str], Range] = field(default_factory=dict)
    gradient_range: dict[str, Range] = field(default_factory=dict)
    order: dict[str, None] = field(default_factory=dict)
    handed_on: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def on(self) -> Iterator[None]:
        self.watcher = CallWatcher(self._left)
        with ExitStack() as stack:
            stack.enter_context(PureFloat32())
            stack.enter_context(self.watcher.on(self.subject.module))
            yield

    @torch.no_grad()
    @without_modes
    def _left(self, call: Call) -> None:
        outputs = float_tensors(call.output)
        if not outputs:
            return
        self.order[call.name] = None
        source = call.handed_on()
        if source is not None:
            self.handed_on[call.name] = source
        for index, values in enumerate(outputs):
            if index or source is None:
                add_output(self.outputs, self.watcher, call, index, values, self.stride)
        if source is None:
            for precision, (fmt, _, scaled) in self.formats.items():
                self.activation_range.setdefault((precision, call.name), Range()).add(outputs[0], fmt, scaled)
        if outputs[0].requires_grad and (call.name in self.subject.anatomy.blocks or call.depth == 0):
            self._hook_gradient(call.name, self.watcher.seed(call, 0, 0), outputs[0])

    def source(self, name: str) -> str:
        """The module whose output `name` returns: mostly itself."""
        while name in self.handed_on:
            name = self.handed_on[name]
        return name

    def _hook_gradient(self, name: str, seed: int, values: Tensor) -> None:
        # The hook must not hold the call: its output holds the hook, and the circle would keep the whole graph alive.
        is_block = name in self.subject.anatomy.blocks

        @without_modes
        def hook(grad: Tensor) -> None:
            with torch.no_grad():
                if is_block:
                    self.gradients.setdefault(name, Fingerprint()).add(sketch(grad, seed), grad)
                self.measure_gradient(grad)

        values.register_hook(hook)

    @torch.no_grad()
    def measure_gradient(self, grad: Tensor) -> None:
        """Count how a gradient fits the formats."""
        for precision, (_, fmt, scaled) in self.formats.items():
            self.gradient_range.setdefault(precision, Range()).add(grad, fmt, scaled)


def add_output(
    into: dict[Key, Fingerprint], watcher: CallWatcher, call: Call, index: int, values: Tensor, stride: int
) -> None:
    """Add one output tensor to its module's fingerprint, row by row, so that grouping rows changes nothing."""
    fingerprint = into.setdefault((call.name, index), Fingerprint())
    values = values.detach()
    has_rows = values.dim() > 1 and values.shape[0] == watcher.rows
    if has_rows and values.dim() == 3:
        values = values[:, ::stride]
    values = values.float().contiguous()  # once: the sketch and the norm would each convert and gather it
    rows = values if has_rows else values.unsqueeze(0)
    for row, part in enumerate(rows):
        fingerprint.add(sketch(part, watcher.seed(call, index, row)), part)
