"""What a precision is: a name, its formats, and a context in which a model computes in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import nn

from stability_probe.errors import ProbeError, nearest
from stability_probe.precisions.formats import Format

Fp32Inside = Callable[[nn.Module], AbstractContextManager[None]]

_active: ContextVar[Fp32Inside] = ContextVar("active precision", default=lambda module: nullcontext())


@dataclass(frozen=True)
class Setting:
    """What `enter` of a precision is given.

    Attributes:
        loss_scale: see `Precision`.
        keep_fp32: modules (with all they hold) that compute in fp32 while the rest does not.
        keep_bf16: modules whose matrix products stay in bf16 under an fp8 or fp4 recipe.
    """

    model: nn.Module
    device: torch.device
    loss_scale: float = 1.0
    keep_fp32: tuple[nn.Module, ...] = ()
    keep_bf16: tuple[nn.Module, ...] = ()


@dataclass(frozen=True)
class Precision:
    """One way to compute, as users name it on the command line.

    Attributes:
        operands: format of what enters a matrix product in the forward pass.
        gradients: format of the gradients that enter one in the backward pass.
        weights: format in which the weights are stored.
        enter: puts the model into this precision; its value runs one module in fp32 meanwhile.
        native: whether a device computes in it; elsewhere it is emulated with the same roundings.
        loss_scale: gradients are multiplied by it where they leave the loss, and divided by it where they
            reach a parameter.
        keep_fp32, keep_bf16: dotted names of modules, see `Setting`.
    """

    name: str
    summary: str
    operands: Format
    gradients: Format
    weights: Format
    enter: Callable[[Setting], AbstractContextManager[Fp32Inside]]
    native: Callable[[torch.device], bool]
    loss_scale: float = 1.0
    keep_fp32: tuple[str, ...] = ()
    keep_bf16: tuple[str, ...] = ()

    def emulated(self, device: torch.device | str) -> bool:
        return not self.native(torch.device(device))

    @contextmanager
    def apply(self, model: nn.Module, device: torch.device | str | None = None) -> Iterator[None]:
        """Within this context `model` runs forward and backward in this precision.

        Parameters keep their identity, and everything is as before on exit, after an exception too.
        Enclose the backward pass as well: saved tensors belong to the precision they were made in.

        Args:
            device: by default that of the first parameter.

        Raises:
            ProbeError: the model has no module of a name that is to be kept (exit code 2).
        """
        if device is None:
            device = next((p.device for p in model.parameters()), torch.device("cpu"))
        kept, coarse = (tuple(_submodule(model, name) for name in names) for names in (self.keep_fp32, self.keep_bf16))
        setting = Setting(model, torch.device(device), self.loss_scale, kept, coarse)
        with self.enter(setting) as inside:
            token = _active.set(inside)
            try:
                yield
            finally:
                _active.reset(token)


def fp32_inside(module: nn.Module) -> AbstractContextManager[None]:
    """Within this context `module` computes on its fp32 weights, whatever precision is being applied around it.

    Its inputs are the caller's to cast. Outside any precision it does nothing.
    """
    return _active.get()(module)


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = [known for known, _ in model.named_modules() if known]
        raise ProbeError(
            f"cannot keep {name!r}", "the model has no module of that name", nearest(name, known), 2
        ) from None
