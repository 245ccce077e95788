"""The low-precision pass: the error of every module's output, and the part of it that the module itself makes.

Each module is computed again in fp32 on the very inputs that it had. Modules that hold others are computed twice
over: once with the results of the inner modules as they were, which leaves the error of their own code, and, where
the inner modules are simple (attention, MLP), once with those in fp32 too, which shows whether the module
amplifies what they round. Nothing of it is kept beyond the enclosing call.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stability_probe.compare.backward import BlockGradients
from stability_probe.compare.calls import Call, CallWatcher, absolute_maximum, float_tensors
from stability_probe.compare.reference import Fingerprint, Key, add_output
from stability_probe.precisions.base import fp32_inside
from stability_probe.precisions.casting import PureFloat32, cast_floats, replaced_forward
from stability_probe.replay import Subject
from stability_probe.taps.modes import without_modes
from stability_probe.taps.sketch import sketch

# Masks are filled with a dtype's minimum, −1e4, −1e9 or −1e30: at and beyond the smallest of them values are looked at.
SENTINEL = 1e4
BIAS_STRIDE = 7  # of the channels: a bias is looked for over 10⁴ elements and more
FILLS = (-1e4, -1e9, -1e30, *(torch.finfo(d).min for d in (torch.float32, torch.bfloat16, torch.float16)))


@dataclass
class ErrorSums:
    """Sums over one module's rows of e = low − reference.

    `count` elements are in the squares, every seventh channel (`sampled` elements) in the signed sums, in units of its
    position's rms error.
    """

    error_square: float = 0.0
    reference_square: float = 0.0
    signed: float = 0.0
    outward: float = 0.0
    count: int = 0
    sampled: int = 0

    @torch.no_grad()
    def add(self, low: Tensor, reference: Tensor) -> None:
        """Count one output; mask fills and values that are not finite are left out."""
        reference = reference.detach().contiguous()
        error = (low.detach().float() - reference).contiguous()  # of one layout: what is taken of it is a view
        self.count += error.numel()
        some = _some_channels(error)
        self.sampled += some.numel()
        sizes = _norms(error, reference)
        left_out = _left_out(error, reference, sizes)
        if left_out is not None:
            error = error.masked_fill_(left_out, 0.0)
            reference = reference.masked_fill(left_out, 0.0)
            self.count -= int(left_out.sum())
            self.sampled -= int(_some_channels(left_out).sum())
            sizes = _norms(error, reference)
        self.error_square += sizes[0] ** 2
        self.reference_square += sizes[1] ** 2
        # Each over its position's norm: at the few positions of massive activations errors are a thousandfold.
        errors = some / torch.linalg.vector_norm(some, dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        outward = torch.dot(errors.flatten(), _some_channels(reference).sign().flatten())
        rms = math.sqrt(some.shape[-1])
        signed, outwards = torch.stack((errors.sum(), outward)).tolist()
        self.signed += rms * signed
        self.outward += rms * outwards

    @property
    def relative(self) -> float:
        """‖e‖ / ‖reference‖; NaN where nothing could be compared."""
        if not self.count:
            return math.nan
        error, size = self.error_square, self.reference_square
        return math.sqrt(error / size) if size > 0 else (0.0 if error == 0 else math.inf)

    def bias(self, which: str) -> tuple[float, float]:
        """Mean of e ("signed") or of e · sign(reference) ("outward") in units of its position's rms, and its z score.

        Rounding to nearest gives a mean near 0; rounding toward zero an outward one of −√3/2 = −0.87.
        """
        mean = getattr(self, which) / self.sampled if self.sampled else 0.0
        return mean, mean * math.sqrt(self.sampled)


def _some_channels(values: Tensor) -> Tensor:
    """(positions, every seventh channel) of a tensor of any shape."""
    return values.reshape(-1, values.shape[-1] if values.dim() else 1)[:, ::BIAS_STRIDE]


def _norms(error: Tensor, reference: Tensor) -> tuple[float, float]:
    first, second = torch.stack((torch.linalg.vector_norm(error), torch.linalg.vector_norm(reference))).tolist()
    return first, second


def _left_out(error: Tensor, reference: Tensor, sizes: tuple[float, float]) -> Tensor | None:
    """Where there is a mask fill, or a value that is not finite; None where there is nothing of the kind."""
    # A norm under the smallest fill holds no fill, and a finite one no infinity: most tensors are not looked at again.
    if all(size < SENTINEL for size in sizes):
        return None
    if all(map(math.isfinite, sizes)):
        low = reference[reference <= -SENTINEL]  # massive activations are few, a causal mask is half of a matrix
        if not any(bool((low == fill).any()) for fill in FILLS):
            return None
    left_out = ~(reference.isfinite() & error.isfinite())
    for fill in FILLS:
        left_out |= reference == fill
    return left_out


@dataclass
class LowStatistics:
    """What the low-precision pass saw of one module; `own` leaves inner modules as they were, `whole` does not."""

    absmax: float = 0.0
    nonfinite: Tensor | int = 0
    elements: int = 0
    own: dict[str, ErrorSums] = field(default_factory=dict)
    whole: ErrorSums | None = None

    def worst_own(self) -> tuple[str, ErrorSums]:
        """Where the module's own code errs most: "output", or the inner module whose input it made."""
        if not self.own:  # it hands on what inner modules made, and makes nothing
            return "output", ErrorSums(count=1)
        known = [item for item in self.own.items() if item[1].count]
        return max(known, key=lambda item: item[1].relative, default=("output", ErrorSums()))


@dataclass
class RoundingTap:
    """Hooks for one replay in a low precision, and what they saw.

    Attributes:
        stride: of the positions that are counted; of a linear layer or an MLP, which treat positions alike, half of
            those are, and no other is computed where nothing else needs it.
        outputs, gradients: as in `ReferencePass`.
        modules: by name.
        failed: modules that could not be computed again, with the reason.
        first_nonfinite: the first module to return a value that is not finite.
        backward: does the same for the gradients of blocks.
    """

    subject: Subject
    backward: BlockGradients
    stride: int
    outputs: dict[Key, Fingerprint] = field(default_factory=dict)
    gradients: dict[str, Fingerprint] = field(default_factory=dict)
    modules: dict[str, LowStatistics] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    first_nonfinite: str | None = None
    _positionwise: dict[str, bool] = field(default_factory=dict)

    @contextmanager
    def on(self) -> Iterator[None]:
        self.watcher = CallWatcher(self._left, entered=self._entered)
        with self.watcher.on(self.subject.module), self.backward.on(self.subject.module):
            yield

    def standing_out(self) -> dict[str, float]:
        """By block, the largest of its own errors so far, each over the median of the same module's in all blocks."""
        alike: dict[str, dict[str, float]] = {}
        for block in self.subject.anatomy.blocks:
            for name, statistics in self.modules.items():
                if name == block or name.startswith(f"{block}."):
                    error = statistics.worst_own()[1].relative
                    alike.setdefault(name[len(block) :], {})[block] = 0.0 if error != error else error
        found: dict[str, float] = {}
        for errors in alike.values():
            usual = median(errors.values())
            for block, error in errors.items():
                found[block] = max(found.get(block, 0.0), error / usual if usual > 0 else 0.0)
        return found

    @without_modes
    def _entered(self, call: Call) -> None:
        # Before its own forward, in which it may keep what it needs later on itself.
        if call.name in self.subject.anatomy.mlps and call.name not in self._positionwise:
            self._positionwise[call.name] = _is_plain(call) and self._keeps_apart(call)

    @without_modes
    def _left(self, call: Call) -> None:
        outputs = float_tensors(call.output)
        if not outputs:
            return
        statistics = self.modules.setdefault(call.name, LowStatistics())
        handed_on = call.handed_on() is not None
        for index, values in enumerate(outputs):
            if index or not handed_on:
                add_output(self.outputs, self.watcher, call, index, values, self.stride)
        if not handed_on:
            self._measure(statistics, call, outputs[0])
        if call.name in self.subject.anatomy.blocks and outputs[0].requires_grad:
            self._hook_gradient(call.name, self.watcher.seed(call, 0, 0), outputs[0])
        self.backward.follow(call, self.watcher)
        if call.name not in self.failed:
            try:
                self._compute_again(call, statistics, outputs[0], handed_on)
            except Exception as error:  # noqa: BLE001  somebody's own module: the comparison goes on without it
                self.failed[call.name] = (
                    f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
                )

    @torch.no_grad()
    def _measure(self, statistics: LowStatistics, call: Call, values: Tensor) -> None:
        absmax = absolute_maximum(values)
        statistics.elements += values.numel()
        if absmax < math.inf:
            statistics.absmax = max(statistics.absmax, absmax)
            return
        statistics.absmax = absmax
        statistics.nonfinite = statistics.nonfinite + (~values.isfinite()).sum()
        if self.first_nonfinite is None:
            given = [t for t in _tensors((call.args, call.kwargs)) if t.is_floating_point()]
            # A module that was handed a NaN is not its source: the code around it is.
            blameless = any(bool(t.isnan().any()) for t in given) and self.watcher.stack
            self.first_nonfinite = self.watcher.stack[-1].name if blameless else call.name

    def _hook_gradient(self, name: str, seed: int, values: Tensor) -> None:
        @without_modes
        def hook(grad: Tensor) -> None:
            with torch.no_grad():
                self.gradients.setdefault(name, Fingerprint()).add(sketch(grad, seed), grad)

        values.register_hook(hook)

    @torch.no_grad()
    def _compute_again(self, call: Call, statistics: LowStatistics, output: Tensor, handed_on: bool) -> None:
        made = call
        looked_at = [row for row in range(self.watcher.rows) if (self.watcher.row + row) % ROW_STRIDE == 0]
        # An enclosing module may need all of the output; one that treats positions alike does not.
        within = bool(looked_at) and len(self.watcher.stack) > 1 and not self._is_positionwise(self.watcher.stack[-1])
        is_sampled = _treats_positions_alike(call)
        if is_sampled and (not within or output.numel() >= LARGE_OUTPUT):
            output, call = _fewer_positions(output, call, 2 * self.stride)
        has_whole = looked_at and call.depth == 1 and bool(self.watcher.stack)
        with self._in_fp32(call.module, pure=not _is_torchs_own(call)):
            own = float_tensors(_again(call, self._frozen(call, statistics)))
            whole = self._throughout(call, output) if has_whole else None
        if not handed_on:
            sums = statistics.own.setdefault("output", ErrorSums())
            # A linear layer was computed at the counted positions alone, or because the enclosing module needs all.
            stride = 2 * self.stride if is_sampled else self.stride
            _add(sums, output, own, stride if call is made else 1)
        if whole is not None and whole[1]:
            statistics.whole = statistics.whole or ErrorSums()
            low, again, step = whole
            rows = looked_at if low.shape[0] == self.watcher.rows else slice(None)
            _add(statistics.whole, low[rows], [values[rows] for values in again[:1]], step)
        if within and call is made and call.depth == 0 and own and own[0].shape == output.shape:
            made.reference = own

    @contextmanager
    def _in_fp32(self, module: nn.Module, pure: bool = True) -> Iterator[None]:
        self.watcher.paused = True
        try:
            with fp32_inside(module), PureFloat32() if pure else nullcontext():
                yield
        finally:
            self.watcher.paused = False

    def _throughout(self, call: Call, output: Tensor) -> tuple[Tensor, list[Tensor], int]:
        """What the module gave, what it gives with all inside it in fp32, and the stride still to be taken in both."""
        step = self.stride
        if self._is_positionwise(call):
            (output, call), step = _fewer_positions(output, call, 2 * self.stride), 1
        return output, float_tensors(_again(call, _remembered)), step

    def _is_positionwise(self, call: Call) -> bool:
        return self._positionwise.get(call.name, False) and _is_plain(call)

    @torch.no_grad()
    def _keeps_apart(self, call: Call) -> bool:
        """Whether an MLP makes of a position what it makes of it among others, on its first positions."""
        few = call.args[0][:1, :POSITIONS_TRIED].detach().float()
        try:
            with self._in_fp32(call.module):
                together, apart = (float_tensors(call.module.forward(x))[0] for x in (few, few[:, ::2]))
        except Exception:  # noqa: BLE001  somebody's own module, that wants all of its positions
            return False
        return together.shape == few.shape and torch.allclose(together[:, ::2], apart, rtol=1e-3, atol=1e-5)

    def _frozen(self, call: Call, statistics: LowStatistics) -> Replacement:
        """Inner modules return what they returned; what they are now called with is compared with what it was."""
        passed_on = {id(t) for t in _tensors((call.args, call.kwargs))}
        passed_on |= {id(t) for made in call.inner for t in _tensors(made.output)}

        def replacement(calls: list[Call], original: Callable[..., Any]) -> Callable[..., Any]:
            remaining = iter(calls)

            def run(*args: Any, **kwargs: Any) -> Any:
                made = next(remaining)
                now, before = _tensors((args, kwargs)), _tensors((made.args, made.kwargs))
                for index, low in enumerate(before):
                    if id(low) not in passed_on and low.is_floating_point() and len(now) == len(before):
                        site = made.name if index == 0 else f"{made.name}, input {index}"
                        _add(statistics.own.setdefault(site, ErrorSums()), low, [now[index]], self.stride)
                return cast_floats(made.output, torch.float32)

            return run

        return replacement


Replacement = Callable[[list[Call], Callable[..., Any]], Callable[..., Any]]


# Whether a module amplifies what its inner modules round is looked at in every fourth row, whatever the rows are
# grouped in: that needs the inner modules at all positions.
ROW_STRIDE = 4
POSITIONS_TRIED = 8
LARGE_OUTPUT = 2**22  # elements; only heads have so many, and no module that is computed again needs theirs


def _is_torchs_own(call: Call) -> bool:
    """torch's own simple modules cast nothing by themselves: there is nothing to undo in them."""
    return call.depth == 0 and type(call.module).__module__.startswith("torch.nn.")


def _is_plain(call: Call) -> bool:
    """Called with one (rows, positions, channels) alone."""
    return len(call.args) == 1 and not call.kwargs and isinstance(call.args[0], Tensor) and call.args[0].dim() == 3


def _treats_positions_alike(call: Call) -> bool:
    return type(call.module) is nn.Linear and _is_plain(call)


def _fewer_positions(output: Tensor, call: Call, stride: int) -> tuple[Tensor, Call]:
    """The call of a module that treats positions apart, on those that are counted."""
    return output[:, ::stride], dataclasses.replace(call, args=(call.args[0][:, ::stride],))


def _tensors(values: Any) -> list[Tensor]:
    if type(values) is tuple:  # arguments are tuples of tensors nearly always, and pytrees cost more than what is done
        return [tensor for value in values for tensor in _tensors(value)]
    if type(values) is dict:
        return [tensor for value in values.values() for tensor in _tensors(value)]
    leaves = (values,) if isinstance(values, Tensor) else tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _add(sums: ErrorSums, low: Tensor, reference: list[Tensor], stride: int) -> None:
    """Add the first tensor's errors. Further outputs (sines beside cosines) are made by the same code."""
    if not reference or reference[0].shape != low.shape:
        return
    counted = reference[0]
    if low.dim() == 3:
        low, counted = low[:, ::stride], counted[:, ::stride]
    sums.add(low, counted.float())


def _again(call: Call, replacement: Replacement) -> Any:
    """The module's forward on its recorded inputs in fp32, its inner modules replaced."""
    inner: dict[int, list[Call]] = {}
    modules: dict[int, nn.Module] = {}
    for made in call.inner:
        inner.setdefault(id(made.module), []).append(made)
        modules[id(made.module)] = made.module
    forward = call.module.forward if call.name else _unwrapped(call.module)
    with ExitStack() as stack:
        for key, module in modules.items():
            calls = inner[key]
            stack.enter_context(replaced_forward(module, functools.partial(replacement, calls)))
        return forward(*cast_floats(call.args, torch.float32), **cast_floats(call.kwargs, torch.float32))


def _unwrapped(model: nn.Module) -> Callable[..., Any]:
    """The outermost forward without the autocast that a precision put around it."""
    return type(model).forward.__get__(model)


def _remembered(calls: list[Call], original: Callable[..., Any]) -> Callable[..., Any]:
    """Computes in fp32, or takes the result from when this was done on the very same inputs."""
    remaining = iter(calls)

    def run(*args: Any, **kwargs: Any) -> Any:
        made = next(remaining)
        before = [t for t in (*made.args, *made.kwargs.values()) if isinstance(t, Tensor)]
        now = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        same = len(before) == len(now) and all(
            a.shape == b.shape and torch.equal(a.float(), b.float()) for a, b in zip(before, now, strict=True)
        )
        if same and isinstance(made.output, Tensor) and made.reference:
            return made.reference[0]
        return original(*args, **kwargs)

    return run
