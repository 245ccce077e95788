"""A model's calls as they happen: each module with its inputs, its output and the calls inside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Call:
    """One call of one module.

    Attributes:
        args, kwargs: what it was called with; output: what it returned (None until it has).
        inner: calls made inside it, in order.
        reference: its output computed again in fp32, while the enclosing call may still need it.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    inner: list[Call] = field(default_factory=list)
    reference: Any = None
    depth: int = 0

    def handed_on(self) -> str | None:
        """The inner module whose output this call returned as it was: attention and its output projection, say."""
        outputs = float_tensors(self.output)
        for inner in reversed(self.inner):
            found = float_tensors(inner.output)
            if outputs and found and found[0] is outputs[0]:
                return inner.name
        return None

    def forget(self) -> None:
        """Let go of the tensors that only the enclosing call needed."""
        self.inner, self.reference, self.args, self.kwargs = [], None, (), {}


@dataclass
class CallWatcher:
    """Follows every forward of a model. `row` is the first row of the running forward.

    Attributes:
        entered, left: called with a call when it begins and when it has returned.
        paused: while True, calls are made unseen.
    """

    left: Callable[[Call], None]
    entered: Callable[[Call], None] = lambda call: None
    row: int = 0
    rows: int = 0
    stack: list[Call] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    paused: bool = False

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Hooks are there inside the context and gone after it, on exceptions too."""
        handles = []
        for name, module in model.named_modules():
            handles += [
                module.register_forward_pre_hook(self._enter(name), with_kwargs=True),
                module.register_forward_hook(self._leave, with_kwargs=True),
            ]
        try:
            yield
        finally:
            self.stack.clear()
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.paused:
                return
            if not self.stack:
                self.row += self.rows
                self.rows = _leading(args, kwargs)
                self.counts.clear()
            call = Call(name, module, args, kwargs)
            self.stack.append(call)
            self.entered(call)

        return hook

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.paused:
            return
        call = self.stack.pop()
        call.output = output
        call.depth = 1 + max((inner.depth for inner in call.inner), default=-1)
        self.left(call)
        self.counts[call.name] = self.counts.get(call.name, 0) + 1
        for inner in call.inner:
            inner.forget()
        call.inner = []
        if self.stack:
            self.stack[-1].inner.append(call)

    def seed(self, call: Call, index: int, row: int) -> int:
        """A number of its own for each row, call and output, the same in every precision."""
        return (self.row + row) * 64 + self.counts.get(call.name, 0) * 8 + index


def _leading(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dim() > 0]
    return tensors[0].shape[0] if tensors else 1


MAX_OUTPUTS = 4


def float_tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors that a module returns, at most four, in order."""
    if isinstance(output, Tensor):
        values = [output]
    elif isinstance(output, (tuple, list)):
        values = list(output)
    else:
        values = list(output.values()) if hasattr(output, "values") else []
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.numel()][:MAX_OUTPUTS]


@torch.no_grad()
def absolute_maximum(values: Tensor) -> float:
    """Largest |x|; NaN where there is one."""
    low, high = torch.stack(values.detach().aminmax()).tolist()  # fourteen times as fast as the maximum norm, on a CPU
    return math.nan if math.isnan(low) else max(-low, high)
