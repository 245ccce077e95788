"""Putting a model into another dtype and back: autocast, true dtypes, and the purest fp32 there is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from stability_probe.precisions.base import Fp32Inside, Setting

_NARROW = (getattr(torch, name) for name in dir(torch) if name.startswith(("float8_", "float4_")))
LOW = frozenset((torch.bfloat16, torch.float16, *_NARROW))
aten = torch.ops.aten
PRODUCTS = frozenset((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default))
_CPU_ATTENTION_BACKWARD = getattr(aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


def is_low(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in LOW


class _Uncompiled(TorchDispatchMode):
    """A mode in a process that compiles nothing: guarding each call against it would cost more than the mode itself."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class PureFloat32(_Uncompiled):
    """Turns every cast to a low-precision dtype into one to fp32, those inside the model's own code as well.

    A norm, a rotary table or a softmax that is written in half precision is then computed in fp32, which is
    what makes it visible: the plain fp32 run has the same rounding and would agree with it.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(value in LOW for value in args if isinstance(value, torch.dtype)):
            args = tuple(torch.float32 if isinstance(v, torch.dtype) and v in LOW else v for v in args)
        if kwargs.get("dtype") in LOW:
            kwargs = {**kwargs, "dtype": torch.float32}
        return func(*args, **kwargs)


class AccumulateInFloat32(_Uncompiled):
    """Half-precision matrix products on a processor that has no instructions for them.

    Operands and result keep their dtype; sums run in fp32 and are rounded once, as tensor cores do. On such
    processors this is also 4 to 10 times as fast as torch's own kernels (benchmarks/compare_precision.py).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS and is_low(args[0]):
            dtype = args[0].dtype
            return func(*(a.float() if is_low(a) else a for a in args), **(kwargs or {})).to(dtype)
        if func.overloadpacket is _CPU_ATTENTION_BACKWARD and is_low(args[0]):
            dtype = args[0].dtype
            return tuple(g.to(dtype) for g in func(*(a.float() if is_low(a) else a for a in args), **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def has_native_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrix products in this dtype run on the device's own instructions."""
    if device.type != "cpu":
        return device.type == "cuda" and (dtype is torch.float16 or torch.cuda.is_bf16_supported(False))
    name = "_is_avx512_bf16_supported" if dtype is torch.bfloat16 else "_is_amx_fp16_supported"
    return bool(getattr(torch.cpu, name, bool)())


def products(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """The mode under which half-precision products are computed well on this device."""
    return ExitStack() if has_native_products(device, dtype) else AccumulateInFloat32()


@contextmanager
def replaced_forward(module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """`module.forward` is `wrap(module.forward)` within this context; its signature stays readable."""
    own = module.__dict__.get("forward")
    original = module.forward
    module.__dict__["forward"] = functools.wraps(original)(wrap(original))
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


def cast_floats(values: Any, dtype: torch.dtype) -> Any:
    """The floating-point tensors in nested arguments as `dtype`; everything else as it is."""
    if type(values) is tuple:  # pytrees cost more than the casts, and arguments are tuples of tensors nearly always
        return tuple(cast_floats(value, dtype) for value in values)
    if isinstance(values, Tensor):
        return values.to(dtype) if values.is_floating_point() else values
    return tree_map(lambda v: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v, values)


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


@contextmanager
def scaled_gradients(model: nn.Module, scale: float) -> Iterator[None]:
    """Gradients are `scale` times as large between the model's outputs and its parameters, and right in both.

    The outputs become fp32 first, so that scaling comes before the gradient is rounded to half precision.
    """

    def scaled(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            return tree_map(
                lambda v: _ScaleGradient.apply(v.float(), scale) if isinstance(v, Tensor) and v.requires_grad else v,
                forward(*args, **kwargs),
            )

        return run

    with ExitStack() as stack:
        stack.enter_context(replaced_forward(model, scaled))
        for parameter in model.parameters():
            if parameter.requires_grad:
                stack.callback(parameter.register_hook(lambda grad: grad / scale).remove)
        yield


@contextmanager
def autocast(setting: Setting, dtype: torch.dtype) -> Iterator[Fp32Inside]:
    """fp32 weights; the model's forward runs under `torch.autocast(dtype)`, the backward follows it."""
    device = setting.device

    def under(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device.type, dtype):
                return forward(*args, **kwargs)

        return run

    def outside(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with no_autocast(device):
                return forward(*cast_floats(args, torch.float32), **cast_floats(kwargs, torch.float32))

        return run

    with ExitStack() as stack:
        stack.enter_context(products(device, dtype))
        stack.enter_context(replaced_forward(setting.model, under))
        for module in setting.keep_fp32:
            stack.enter_context(replaced_forward(module, outside))
        if setting.loss_scale != 1.0:
            stack.enter_context(scaled_gradients(setting.model, setting.loss_scale))
        yield lambda module: no_autocast(device)


@contextmanager
def no_autocast(device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def true_dtype(setting: Setting, dtype: torch.dtype) -> Iterator[Fp32Inside]:
    """Weights, activations and gradients in `dtype`.

    Parameters and persistent buffers are cast, as a checkpoint saved in `dtype` would hold them. Buffers outside
    the checkpoint (rotary tables) stay in fp32, as loaders rebuild them; what they make of the values is cast where a
    layer of torch's own would refuse it, since in the run it cannot have been. Modules kept in fp32 hand their results
    back in `dtype`.
    """
    kept = {id(tensor) for module in setting.keep_fp32 for tensor in _stored(module)}
    originals = {id(t): (t, t.data) for t in _stored(setting.model) if t.is_floating_point()}

    def island(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = forward(*cast_floats(args, torch.float32), **cast_floats(kwargs, torch.float32))
            return cast_floats(result, dtype)

        return run

    @contextmanager
    def fp32_inside(module: nn.Module) -> Iterator[None]:
        inside = [(t, t.data, originals[id(t)][1]) for t in _stored(module) if id(t) in originals]
        try:
            for tensor, _, fp32 in inside:
                tensor.data = fp32
            yield
        finally:
            for tensor, low, _ in inside:
                tensor.data = low

    with ExitStack() as stack:
        stack.enter_context(products(setting.device, dtype))
        for module in setting.model.modules():
            if type(module) in (nn.Linear, nn.LayerNorm):  # others may mean it, and do their own casting
                stack.callback(module.register_forward_pre_hook(_in_own_dtype).remove)
        for module in setting.keep_fp32:
            stack.enter_context(replaced_forward(module, island))
        try:
            for tensor, data in originals.values():
                if id(tensor) not in kept:
                    tensor.data = data.to(dtype)
            if setting.loss_scale != 1.0:
                stack.enter_context(scaled_gradients(setting.model, setting.loss_scale))
            yield fp32_inside
        finally:
            for tensor, data in originals.values():
                tensor.data = data


def _in_own_dtype(module: nn.Module, args: tuple[Any, ...]) -> Any:
    weight: Any = module.weight
    return cast_floats(args, weight.dtype) if is_low(weight) else None


def _stored(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and persistent buffers, each once."""
    seen = set()
    for part in module.modules():
        skipped = part._non_persistent_buffers_set
        held = [*part._parameters.values(), *(b for n, b in part._buffers.items() if n not in skipped)]
        for tensor in held:
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor
