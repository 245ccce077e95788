"""Statistics of module outputs, and of the gradients that flow into block outputs."""

from __future__ import annotations

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
        calls: order of the first call, for 'which module came first'.
    """

    order: int
    sum_square: Any = 0.0
    count: int = 0
    absmax: Any = -1.0
    row: Any = 0
    position: Any = 0
    channel: Any = 0
    nonfinite: Any = 0
    outside: Any = 0
    grad_square: Any = 0.0
    grad_absmax: Any = 0.0
    grad_nonfinite: Any = 0
    sketch: Tensor | None = None
    grad_sketch: Tensor | None = None


@dataclass
class ActivationTap:
    """Hooks on the outputs of the named modules; `row` is set by the replay before each forward."""

    names: tuple[str, ...]
    gradients_of: tuple[str, ...] = ()
    with_sketch: bool = False
    row: int = 0
    found: dict[str, OutputStatistics] = field(default_factory=dict)

    @contextmanager
    def on(self, module: nn.Module) -> Iterator[None]:
        """Hooks are there inside the context and gone after it, on exceptions too."""
        handles = [module.get_submodule(name).register_forward_hook(self._hook(name)) for name in self.names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensor = first_tensor(output)
            if tensor is None or not tensor.is_floating_point() or tensor.numel() == 0:
                return
            statistics = self.found.setdefault(name, OutputStatistics(order=len(self.found)))
            # The attention tap listens to every torch function of the forward; our own need not pass it.
            with torch._C.DisableTorchFunction():
                self._measure(statistics, tensor.detach())
            if name in self.gradients_of and tensor.requires_grad:
                tensor.register_hook(lambda grad: self._measure_gradient(statistics, grad))

        return hook

    @torch.no_grad()
    def _measure(self, statistics: OutputStatistics, tensor: Tensor) -> None:
        flat = tensor.reshape(-1, tensor.shape[-1])
        norm = torch.linalg.vector_norm(flat, dtype=torch.float32)
        statistics.sum_square = statistics.sum_square + norm.double().square()
        statistics.count += flat.numel()
        low, high = flat.aminmax(dim=0)
        peaks = torch.maximum(high, -low).float()
        absmax, channel = peaks.max(dim=0)
        position = flat.index_select(1, channel.reshape(1)).abs().argmax()
        is_new = absmax > statistics.absmax  # False for NaN: counted below, located by `nonfinite`
        statistics.row = torch.where(is_new, self.row, statistics.row)
        statistics.position = torch.where(is_new, position, statistics.position)
        statistics.channel = torch.where(is_new, channel, statistics.channel)
        statistics.absmax = torch.where(is_new, absmax, statistics.absmax)
        # A NaN or Inf shows in the peaks, a value outside fp16 too: the full counts are made only then.
        if not bool(absmax <= FP16_MAX):
            statistics.nonfinite = statistics.nonfinite + (~flat.isfinite()).sum()
            statistics.outside = statistics.outside + (flat.abs() > FP16_MAX).sum()
        if self.with_sketch:
            piece = sketch(flat, seed=self.row)
            statistics.sketch = piece if statistics.sketch is None else statistics.sketch + piece

    @torch.no_grad()
    def _measure_gradient(self, statistics: OutputStatistics, grad: Tensor) -> None:
        norm = torch.linalg.vector_norm(grad, dtype=torch.float32)
        absmax = torch.linalg.vector_norm(grad, ord=float("inf"), dtype=torch.float32)
        statistics.grad_square = statistics.grad_square + norm.double().square()
        statistics.grad_absmax = torch.maximum(torch.as_tensor(statistics.grad_absmax, device=grad.device), absmax)
        if not bool(absmax.isfinite()):
            statistics.grad_nonfinite = statistics.grad_nonfinite + (~grad.isfinite()).sum()
        if self.with_sketch:
            piece = sketch(grad, seed=self.row)
            statistics.grad_sketch = piece if statistics.grad_sketch is None else statistics.grad_sketch + piece


def first_tensor(output: Any) -> Tensor | None:
    """The hidden state in whatever a module returns."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    if isinstance(logits := getattr(output, "logits", None), Tensor):
        return logits
    return None
