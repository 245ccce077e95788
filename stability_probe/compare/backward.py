"""The backward error that a block makes by itself: its gradients computed again in fp32.

On chosen rows each block is run again in fp32 on the input that it had, and the gradient that reached its output is
sent back through it. What then differs in the gradients of its parameters and of its input is the block's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from stability_probe.compare.calls import Call, CallWatcher, float_tensors
from stability_probe.compare.reference import Fingerprint
from stability_probe.precisions.base import fp32_inside
from stability_probe.precisions.casting import PureFloat32
from stability_probe.taps.modes import without_modes
from stability_probe.taps.sketch import sketch


@dataclass
class BlockGradients:
    """Gradients of blocks as they were and as fp32 makes them, by block (input) and by parameter.

    Attributes:
        rows: first rows of the forwards on which this is done.
        quota: for how many of the blocks; where not for all, half of it evenly spaced, the others those that stand out
            most in the forward.
        standing_out: how far the blocks' own errors in the forward are above those of the others, by name.
        loss_scale: of the precision; gradients of parameters have been divided by it, those of inputs have not.
    """

    blocks: tuple[str, ...]
    rows: frozenset[int]
    quota: int
    loss_scale: float = 1.0
    standing_out: Callable[[], dict[str, float]] = dict
    low: dict[str, Fingerprint] = field(default_factory=dict)
    again: dict[str, Fingerprint] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    chosen: frozenset[str] = frozenset()
    watching: bool = False

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Hooks on the parameters of the blocks are there inside the context and gone after it."""
        with ExitStack() as stack:
            for block in self.blocks:
                for name, parameter in model.get_submodule(block).named_parameters(prefix=block):
                    if parameter.requires_grad:
                        stack.callback(parameter.register_hook(self._take(block, name)).remove)
            yield

    def _choose(self) -> None:
        if not self.chosen:
            few = self.quota < len(self.blocks)
            even = self.blocks[:: math.ceil(2 * len(self.blocks) / self.quota)] if few else ()
            error = self.standing_out() if even else {}
            rest = sorted((b for b in self.blocks if b not in even), key=lambda block: -error.get(block, 0.0))
            self.chosen = frozenset((*even, *rest[: self.quota - len(even)]))

    def _take(self, block: str, name: str) -> Callable[[Tensor], None]:
        @without_modes
        def hook(grad: Tensor) -> None:
            if self.watching and block in self.chosen:
                _add(self.low, name, grad)

        return hook

    def follow(self, call: Call, watcher: CallWatcher) -> None:
        """Called when a module has returned; does something for blocks on the chosen rows."""
        self.watching = watcher.row in self.rows
        outputs = float_tensors(call.output)
        if call.name not in self.blocks or not self.watching or not outputs or not outputs[0].requires_grad:
            return
        inputs = [v for v in tree_leaves((call.args, call.kwargs)) if isinstance(v, Tensor) and v.requires_grad]
        if not inputs:
            return
        source = inputs[0]
        name, module, args, kwargs = call.name, call.module, call.args, call.kwargs

        @without_modes
        def at_output(grad: Tensor) -> None:
            self._choose()
            if name not in self.chosen:
                return
            watcher.paused = True
            try:
                self._again(name, module, args, kwargs, source, grad)
            except Exception as error:  # noqa: BLE001  somebody's own module: the comparison goes on without it
                self.failed[name] = f"{type(error).__name__}: {error}"[:200]
            finally:
                watcher.paused = False

        outputs[0].register_hook(at_output)
        source.register_hook(lambda grad: self._at_input(name, grad))

    @without_modes
    def _at_input(self, name: str, grad: Tensor) -> None:
        if name in self.chosen:
            _add(self.low, name, grad / self.loss_scale)

    def _again(self, name: str, module: nn.Module, args: Any, kwargs: Any, source: Tensor, grad: Tensor) -> None:
        leaf = source.detach().float().requires_grad_()

        def fp32(value: Any) -> Any:
            if value is source:
                return leaf
            is_float = isinstance(value, Tensor) and value.is_floating_point()
            return value.detach().float() if is_float else value

        with ExitStack() as stack:
            stack.enter_context(fp32_inside(module))
            stack.enter_context(PureFloat32())
            stack.enter_context(torch.enable_grad())
            weights = {key: p.detach().requires_grad_() for key, p in module.named_parameters() if p.requires_grad}
            output = float_tensors(functional_call(module, weights, tree_map(fp32, args), tree_map(fp32, kwargs)))[0]
            sources = [leaf, *weights.values()]
            found = torch.autograd.grad(output, sources, grad.to(output.dtype) / self.loss_scale, allow_unused=True)
        for key, value in zip((name, *(f"{name}.{key}" for key in weights)), found, strict=True):
            if value is not None:
                _add(self.again, key, value)


@torch.no_grad()
def _add(into: dict[str, Fingerprint], name: str, values: Tensor) -> None:
    into.setdefault(name, Fingerprint()).add(sketch(values), values)
