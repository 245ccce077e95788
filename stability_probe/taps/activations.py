"""Statistics of module outputs, and of the gradients that flow into block outputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stability_probe.taps.sketch import sketch

FP16_MAX = 65504.0


@dataclass
class OutputStatistics:
    """Running statistics of one module's output over the rows of a batch, kept on the device.

    Attributes:
        sum_square, count: for the rms, over finite and non-finite elements alike.
        absmax, row, position, channel: largest |x| and where it is (channel is the last axis).
        nonfinite, outside: counts of NaN/Inf and of |x| > 65 504.
        grad_square, grad_absmax: of the gradient of the output, where it is tapped.
        sketch, grad_sketch: for comparison with another precision; None unless asked for.
        order: of the first call, for 'which module came first'.
        broken_at: place in its forward of the first output with a NaN or Inf, counted over all tapped outputs.
    """

    order: int
    sum_square: float = 0.0
    count: int = 0
    absmax: float = -1.0
    row: int = 0
    position: int = 0
    channel: int = 0
    nonfinite: int = 0
    broken_at: int = sys.maxsize
    outside: int = 0
    grad_square: Any = 0.0
    grad_absmax: Any = 0.0
    grad_nonfinite: Any = 0
    sketch: Tensor | None = None
    grad_sketch: Tensor | None = None


@dataclass(frozen=True)
class _Reading:
    """What one output adds to the statistics of the modules that returned it."""

    square: float
    absmax: float
    nonfinite: int
    outside: int
    sketch: Tensor | None


@dataclass
class ActivationTap:
    """Hooks on the outputs of the named modules; `row` is set by the replay before each forward."""

    names: tuple[str, ...]
    gradients_of: tuple[str, ...] = ()
    with_sketch: bool = False
    row: int = 0
    found: dict[str, OutputStatistics] = field(default_factory=dict)
    # The forward that runs, by its first row, and the outputs seen in it so far.
    _running: tuple[int, int] = (-1, 0)
    # The latest output: an attention or MLP often returns its last projection's very tensor, read once for both.
    _latest: tuple[Tensor, int, _Reading] | None = None

    @contextmanager
    def on(self, module: nn.Module) -> Iterator[None]:
        """Hooks are there inside the context and gone after it, on exceptions too."""
        handles = [module.get_submodule(name).register_forward_hook(self._hook(name)) for name in self.names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._latest = None

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensor = first_tensor(output)
            if tensor is None or not tensor.is_floating_point() or tensor.numel() == 0 or tensor.dim() == 0:
                return
            statistics = self.found.setdefault(name, OutputStatistics(order=len(self.found)))
            self._running = (self.row, self._running[1] + 1 if self._running[0] == self.row else 0)
            # The attention tap listens to every torch function of the forward; our own need not pass it.
            with torch._C.DisableTorchFunction():
                self._measure(statistics, tensor)
            if name in self.gradients_of and tensor.requires_grad:
                tensor.register_hook(lambda grad: self._measure_gradient(statistics, grad))

        return hook

    @torch.no_grad()
    def _measure(self, statistics: OutputStatistics, tensor: Tensor) -> None:
        flat = tensor.detach().reshape(-1, tensor.shape[-1])
        version = 0 if tensor.is_inference() else tensor._version  # a tensor of inference mode counts no changes
        if self._latest is None or self._latest[0] is not tensor or self._latest[1] != version:
            self._latest = (tensor, version, self._read(flat))
        reading = self._latest[2]
        statistics.sum_square += reading.square
        statistics.count += flat.numel()
        statistics.nonfinite += reading.nonfinite
        if reading.nonfinite:  # a module may run twice in one forward, finite at first
            statistics.broken_at = min(statistics.broken_at, self._running[1])
        statistics.outside += reading.outside
        if reading.absmax > statistics.absmax:  # False for NaN: counted, and located by `nonfinite`
            statistics.absmax = reading.absmax
            statistics.row = self.row
            statistics.position, statistics.channel = _place_of_peak(flat)
        if reading.sketch is not None:
            statistics.sketch = reading.sketch if statistics.sketch is None else statistics.sketch + reading.sketch

    def _read(self, flat: Tensor) -> _Reading:
        norm = torch.linalg.vector_norm(flat, dtype=torch.float32)
        low, high, norm = torch.stack((*flat.aminmax(), norm)).tolist()  # one wait for the device
        absmax = max(high, -low)
        # A NaN or Inf shows in the peak, a value outside fp16 too: the full counts are made only then.
        fits = absmax <= FP16_MAX
        return _Reading(
            norm * norm,
            absmax,
            0 if fits else int((~flat.isfinite()).sum()),
            0 if fits else int((flat.abs() > FP16_MAX).sum()),
            sketch(flat, seed=self.row) if self.with_sketch else None,
        )

    @torch.no_grad()
    def _measure_gradient(self, statistics: OutputStatistics, grad: Tensor) -> None:
        norm = torch.linalg.vector_norm(grad, dtype=torch.float32)
        low, high = grad.aminmax()
        absmax = torch.maximum(high, -low).float()
        statistics.grad_square = statistics.grad_square + norm.double().square()
        statistics.grad_absmax = torch.maximum(torch.as_tensor(statistics.grad_absmax, device=grad.device), absmax)
        if not bool(absmax.isfinite()):
            statistics.grad_nonfinite = statistics.grad_nonfinite + (~grad.isfinite()).sum()
        if self.with_sketch:
            piece = sketch(grad, seed=self.row)
            statistics.grad_sketch = piece if statistics.grad_sketch is None else statistics.grad_sketch + piece


def _place_of_peak(flat: Tensor) -> tuple[int, int]:
    """(position, channel) of the largest |x|; amax over an axis is vectorised, argmax over all is not."""
    channel = torch.maximum(flat.amax(0), -flat.amin(0)).argmax()
    return int(flat.index_select(1, channel.reshape(1)).abs().argmax()), int(channel)


def first_tensor(output: Any) -> Tensor | None:
    """The hidden state in whatever a module returns."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    if isinstance(logits := getattr(output, "logits", None), Tensor):
        return logits
    return None
