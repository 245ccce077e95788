"""Gradients of every parameter, measured and freed row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from stability_probe.taps.modes import without_modes
from stability_probe.taps.sketch import sketch


@dataclass
class GradientTap:
    """Takes each parameter's gradient as soon as it is complete and adds it to the batch's total.

    The totals take the memory that `.grad` would have taken: nothing more is kept, but the sketches.

    Attributes:
        total: gradient of the batch by parameter name, in the order of `named_parameters()`.
        row_square: squared norm of each row's gradient (0-d tensors, by row).
        row_sketch: sketch of each row's whole gradient, by row.
        parameter_sketch: sketch of the batch's gradient by parameter.
    """

    row: int = 0
    total: dict[str, Tensor] = field(default_factory=dict)
    row_square: dict[int, Tensor] = field(default_factory=dict)
    row_sketch: dict[int, Tensor] = field(default_factory=dict)
    parameter_sketch: dict[str, Tensor] = field(default_factory=dict)

    @contextmanager
    def on(self, module: nn.Module) -> Iterator[None]:
        """Hooks are there inside the context; `.grad` is None on every parameter after it."""
        handles = []
        for index, (name, parameter) in enumerate(module.named_parameters()):
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(self._hook(name, index)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter in module.parameters():
                parameter.grad = None

    def _hook(self, name: str, index: int) -> Callable[[Tensor], None]:
        @without_modes
        @torch.no_grad()
        def hook(parameter: Tensor) -> None:
            grad = parameter.grad
            parameter.grad = None
            if grad is None:
                return
            if grad.layout != torch.strided:  # nn.Embedding(sparse=True)
                grad = grad.to_dense()
            square = torch.linalg.vector_norm(grad, dtype=torch.float32).double().square()
            self.row_square[self.row] = self.row_square.get(self.row, torch.zeros_like(square)) + square
            piece = sketch(grad, seed=index)
            self.row_sketch[self.row] = self.row_sketch[self.row] + piece if self.row in self.row_sketch else piece
            known = self.parameter_sketch.get(name)
            self.parameter_sketch[name] = piece if known is None else known + piece
            if name in self.total:
                self.total[name].add_(grad)
            else:
                self.total[name] = grad

        return hook
