"""Linear layers whose operands are quantised before each of their three matrix products.

Products of the quantised values are computed in fp32, as tensor cores accumulate them; the result is rounded
to bf16, the precision of everything around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from stability_probe.precisions.base import Fp32Inside, Setting
from stability_probe.precisions.casting import autocast, no_autocast, replaced_forward

SEED = 0


@dataclass(frozen=True)
class Recipe:
    """How the operands are quantised. Each function works along the last axis, the one that is summed over.

    Attributes:
        activation: (…, n) inputs; weight: (rows, n) weights.
        gradient: (…, n) output gradients, with the generator that stochastic rounding draws from.
        mix: what both operands of the weight gradient pass through first, leaving their product unchanged.
    """

    activation: Callable[[Tensor], Tensor]
    weight: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Generator], Tensor]
    mix: Callable[[Tensor], Tensor] = lambda values: values


class _QuantisedLinear(torch.autograd.Function):
    """y = x Wᵀ + b with every operand quantised along the axis that its product sums over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, noise: Generator) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe, ctx.noise = recipe, noise
        y = recipe.activation(x) @ recipe.weight(weight).T
        return (y if bias is None else y + bias.float()).to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        recipe, noise = ctx.recipe, ctx.noise
        grad_rows = grad.reshape(-1, grad.shape[-1]).float()
        grad_x = grad_w = grad_b = None
        if ctx.needs_input_grad[0]:
            product = recipe.gradient(grad_rows, noise) @ recipe.weight(weight.T).T
            grad_x = product.reshape(x.shape).to(torch.bfloat16).to(x.dtype)
        if ctx.needs_input_grad[1]:
            x_rows = x.reshape(-1, x.shape[-1]).float()
            left, right = recipe.mix(grad_rows.T), recipe.mix(x_rows.T)
            grad_w = (recipe.gradient(left, noise) @ recipe.activation(right).T).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_b = grad_rows.sum(0)
        return grad_x, grad_w, grad_b, None, None


@contextmanager
def quantised(setting: Setting, recipe: Recipe) -> Iterator[Fp32Inside]:
    """bf16 autocast with quantised linear layers.

    The head and `keep_bf16` stay in bf16, as in every published recipe. A module in fp32 is left alone: there
    autocast is off.
    """
    noise = Generator(setting.device).manual_seed(SEED)
    device = setting.device

    def wrap(module: nn.Module) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def outer(forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(x: Tensor) -> Tensor:
                if not torch.is_autocast_enabled(device.type):
                    return forward(x)
                # transformers' Conv1D, used by GPT-2, stores (in, out).
                weight = module.weight if isinstance(module, nn.Linear) else module.weight.T
                with no_autocast(device):
                    return _QuantisedLinear.apply(x, weight, module.bias, recipe, noise)

            return run

        return outer

    with ExitStack() as stack:
        fp32_inside = stack.enter_context(autocast(setting, torch.bfloat16))
        for module in quantised_modules(setting.model, setting.keep_bf16):
            stack.enter_context(replaced_forward(module, wrap(module)))
        yield fp32_inside


def quantised_modules(model: nn.Module, keep_bf16: tuple[nn.Module, ...] = ()) -> list[nn.Module]:
    """The linear layers that a recipe quantises: all but the head and what is kept in bf16."""
    vocabularies = {part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)}
    kept = {part for module in keep_bf16 for part in module.modules()}
    return [
        part
        for part in model.modules()
        if (isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D")
        and part not in kept
        and not (isinstance(part, nn.Linear) and part.out_features in vocabularies)
    ]
