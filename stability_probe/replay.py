"""The forward and backward over a batch: the only place that runs the model.

One sequence at a time by default, so that every row's loss and gradient norm is exact for every
architecture and the activations of one row are all that is ever held. Right padding without targets is cut
off before the forward: under a causal mask it cannot reach a real token.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stability_probe.batches.base import IGNORED, Batch
from stability_probe.errors import REPLAY_FAILED, ProbeError, said
from stability_probe.models.anatomy import Anatomy, dissect
from stability_probe.precisions import get_precision
from stability_probe.taps.activations import ActivationTap, OutputStatistics, first_tensor
from stability_probe.taps.attention import AttentionTap, HeadStatistics
from stability_probe.taps.gradients import GradientTap

# What forwards call the token ids where these are not their first parameter.
IDS_NAMES = ("input_ids", "idx", "tokens")
OFFSETS = (-2, -1, 0, 1, 2, 3)
# Rounding of the logits is looked at where bf16's spacing there is 0.5 or more (2⁶ and up: 8 significant bits).
COARSE_LOGIT = 64.0

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Subject:
    """The model under replay.

    Attributes:
        takes: names of the forward's parameters that the replay fills besides the ids.
        ids_name: the keyword that the ids are passed by; None where they are the first argument.
    """

    module: nn.Module
    anatomy: Anatomy
    device: torch.device
    takes: frozenset[str]
    is_transformers: bool
    ids_name: str | None = None

    @classmethod
    def of(cls, module: nn.Module, device: str = "cpu") -> Subject:
        parameters = list(inspect.signature(module.forward).parameters)
        is_transformers = any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)
        by_name = next((name for name in IDS_NAMES if name in parameters), None)
        first = parameters[0] if parameters else None
        ids_name = by_name if by_name != first or _keyword_only(module, by_name) else None
        takes = frozenset(parameters) - {ids_name or first}
        return cls(module, dissect(module), torch.device(device), takes, is_transformers, ids_name)


def _keyword_only(module: nn.Module, name: str | None) -> bool:
    parameter = inspect.signature(module.forward).parameters.get(name or "")
    return parameter is not None and parameter.kind is parameter.KEYWORD_ONLY


@dataclass
class HeadTotals:
    """Running head statistics of one layer over the rows of a batch; (H,) tensors on the device."""

    max_logit: Tensor
    row: Tensor
    query: Tensor
    key: Tensor
    entropy: Tensor
    top_weight: Tensor
    top_key_share: Tensor
    rows: Tensor
    blind: Tensor


@dataclass
class Trace:
    """What one replay saw.

    Attributes:
        token_loss_BT: fp32 on the CPU, 0 where there is no target.
        has_target_BT: True where a position has a target.
        log_z_BT: log of the softmax normaliser, NaN on positions that were cut off.
        valid_targets: targets of the whole batch; every loss and gradient is divided by it.
        offset_sums: by row, {k: (sum of losses, count)} with the targets moved by k (see `Measurements`).
        modules, heads, gradients: what the taps saw; empty or None without taps.
        rounding_loss_BT, recentred_loss_BT: losses after rounding the logits to bf16 as they are, and after
            log Z was subtracted; None where the logits are small.
        drew_random_numbers: the forward took numbers from torch's generator: with another seed it gives another loss.
    """

    precision: str
    token_loss_BT: Tensor
    has_target_BT: Tensor
    log_z_BT: Tensor
    valid_targets: int
    logit_absmax: float = 0.0
    offset_sums: list[dict[int, tuple[float, int]]] = field(default_factory=list)
    modules: dict[str, OutputStatistics] = field(default_factory=dict)
    heads: dict[int, HeadTotals] = field(default_factory=dict)
    gradients: GradientTap | None = None
    rounding_loss_BT: Tensor | None = None
    recentred_loss_BT: Tensor | None = None
    seconds: float = 0.0
    drew_random_numbers: bool = False
    _forgotten_norm: float | None = None

    @property
    def loss(self) -> float:
        """Mean over the valid targets of the batch; NaN where there is none."""
        return mean_loss(self.token_loss_BT, self.has_target_BT)

    @property
    def row_losses(self) -> list[float]:
        return [mean_loss(*row) for row in zip(self.token_loss_BT, self.has_target_BT, strict=True)]

    @property
    def global_grad_norm(self) -> float | None:
        """Norm of the batch's gradient over all parameters, before clipping."""
        if self.gradients is None or self._forgotten_norm is not None:
            return self._forgotten_norm
        squares = [
            torch.linalg.vector_norm(grad, dtype=torch.float32).double().square().cpu()
            for grad in self.gradients.total.values()
        ]
        return math.sqrt(torch.stack(squares).sum().item()) if squares else 0.0

    def forget_gradients(self) -> None:
        """Let the batch's gradients go; their norm, the sketches and the rows' norms stay."""
        if self.gradients is not None:
            self._forgotten_norm = self.global_grad_norm
            self.gradients.total.clear()


def mean_loss(token_loss: Tensor, has_target: Tensor) -> float:
    """Mean of the losses of valid targets; NaN where there is none."""
    return token_loss[has_target].double().mean().item() if bool(has_target.any()) else math.nan


def replay(
    subject: Subject,
    batch: Batch,
    precision: str = "fp32",
    *,
    backward: bool = True,
    detail: bool = True,
    sketches: bool = False,
    microbatch: int = 1,
    change_logits: Change | None = None,
    extra: Callable[[], Any] = nullcontext,
    advance: Callable[[int], None] = lambda _: None,
    seed: int = 0,
) -> Trace:
    """Forward (and backward) over a batch, row by row.

    Args:
        precision: a name of `precisions/`.
        backward: measure gradients too.
        detail: tap activations and attention; without it only losses and gradients are measured.
        sketches: keep sketches of outputs and gradients for comparison with another replay.
        microbatch: rows per forward; above 1 the per-row gradient norms are not known.
        change_logits: applied to the logits before the loss.
        extra: a context manager entered around the whole replay, inside the precision's.
        advance: called with the number of rows done.
        seed: of torch's generators, for models that draw random numbers in their forward.

    Raises:
        ProbeError: exit code 4 where the model's forward or backward fails.
    """
    B, T = batch.ids_BT.shape
    has_target = batch.targets_BT != IGNORED
    unknown = torch.full((B, T), math.nan)
    trace = Trace(precision, torch.zeros(B, T), has_target, unknown, int(has_target.sum()))
    trace.offset_sums = [{} for _ in range(B)]
    taps = _Taps(subject, trace, detail, sketches, backward)
    started = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(seed)
        stack.enter_context(torch.set_grad_enabled(backward))
        stack.enter_context(get_precision(precision).apply(subject.module, subject.device))
        stack.enter_context(extra())
        stack.enter_context(taps.on())
        generators = _generator_states(subject.device)
        for rows in _groups(B, microbatch):
            try:
                _replay_rows(subject, batch, rows, trace, taps, change_logits)
            except ProbeError:
                raise
            except (Exception, SystemExit) as error:
                raise _failed(error, rows, precision, T, position_limit(subject.module)) from error
            advance(len(rows))
        after = _generator_states(subject.device)
        trace.drew_random_numbers = any(not torch.equal(*pair) for pair in zip(generators, after, strict=True))
    trace.seconds = time.perf_counter() - started
    return trace


def _generator_states(device: torch.device) -> list[Tensor]:
    """Of torch's default generators, on the CPU and on the device of the replay."""
    on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_device]


@dataclass
class _Taps:
    subject: Subject
    trace: Trace
    detail: bool
    sketches: bool
    backward: bool

    def __post_init__(self) -> None:
        anatomy = self.subject.anatomy
        self.activations = ActivationTap(tapped_modules(self.subject), anatomy.blocks, self.sketches)
        # Not a method of this object: a circle of references would keep the batch's gradient until the next collection.
        self.attention = AttentionTap(partial(_record_heads, self.trace.heads, self.activations))
        self.gradients = GradientTap()

    @contextmanager
    def on(self) -> Iterator[None]:
        module = self.subject.module
        with ExitStack() as stack:
            if self.detail:
                stack.enter_context(self.activations.on(module))
                sites = {site.name: site.layer for site in self.subject.anatomy.attention}
                stack.enter_context(self.attention.on(module, sites))
                self.trace.modules = self.activations.found
            if self.backward:
                stack.enter_context(self.gradients.on(module))
                self.trace.gradients = self.gradients
            yield

    def at(self, row: int, first_query: int) -> None:
        self.activations.row = self.gradients.row = row
        self.attention.first_query = first_query


def _record_heads(heads: dict[int, HeadTotals], activations: ActivationTap, layer: int, seen: HeadStatistics) -> None:
    _add_heads(heads, layer, seen, activations.row)


def tapped_modules(subject: Subject) -> tuple[str, ...]:
    """Blocks, attention, MLPs, norms, embeddings, the head, and every other module that owns a weight."""
    anatomy = subject.anatomy
    sites = {site.name for site in anatomy.attention}
    known = {*anatomy.blocks, *sites, *anatomy.mlps, *anatomy.norms, *anatomy.embeddings}
    owners = {name for name, part in subject.module.named_modules() if name and "weight" in part._parameters}
    return tuple(name for name, _ in subject.module.named_modules() if name in known | owners)


def _groups(B: int, size: int) -> Iterator[range]:
    for start in range(0, B, size):
        yield range(start, min(start + size, B))


def _replay_rows(
    subject: Subject, batch: Batch, rows: range, trace: Trace, taps: _Taps, change_logits: Change | None
) -> None:
    ids, targets, mask, positions = _cut(batch, rows)
    first = int(mask.int().argmax(-1).min()) if mask is not None else 0
    taps.at(rows.start, first)
    logits_BTV = forward(subject, ids, mask, positions, targets)
    if change_logits is not None:
        logits_BTV = change_logits(logits_BTV)
    token_loss, log_z = token_losses(logits_BTV, targets.to(logits_BTV.device))
    if taps.backward and trace.valid_targets:
        # Rows without a target go through the backward too: their gradient is an exact zero, or a NaN that matters.
        (token_loss.sum() / trace.valid_targets).backward()
    with torch.no_grad():
        T = ids.shape[1]
        valid = targets != IGNORED
        kept = trace.token_loss_BT[rows.start : rows.stop, :T]
        kept[valid] = token_loss.detach().float().cpu()[valid]
        trace.log_z_BT[rows.start : rows.stop, :T] = log_z.detach().float().cpu()
        if taps.detail:
            _look_at_logits(logits_BTV.detach(), targets, log_z.detach(), rows, trace)


def widths(batch: Batch) -> list[int]:
    """Positions of each row that go through the forward."""
    return [_cut(batch, rows)[0].shape[1] for rows in _groups(batch.ids_BT.shape[0], 1)]


def _cut(batch: Batch, rows: range) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The rows without the right padding that holds no target."""
    pick = slice(rows.start, rows.stop)
    ids, targets = batch.ids_BT[pick], batch.targets_BT[pick]
    mask = None if batch.mask_BT is None else batch.mask_BT[pick]
    needed = targets != IGNORED
    needed = torch.ones_like(needed) if mask is None else needed | mask
    columns = needed.any(0).nonzero()
    T = int(columns.max()) + 1 if columns.numel() else 1
    positions = None if batch.position_ids_BT is None else batch.position_ids_BT[pick, :T]
    mask = None if mask is None or bool(mask[:, :T].all()) else mask[:, :T]
    return ids[:, :T], targets[:, :T], mask, positions


def forward(
    subject: Subject, ids_BT: Tensor, mask_BT: Tensor | None, positions_BT: Tensor | None, targets_BT: Tensor
) -> Tensor:
    """(B, T, V) logits, whatever the model's forward is called with and whatever it returns.

    Raises:
        ProbeError: exit code 4 where there are no logits, or not one row of them per position.
    """
    device = subject.device
    keywords: dict[str, Any] = {}
    if mask_BT is not None and "attention_mask" in subject.takes:
        keywords["attention_mask"] = mask_BT.long().to(device)
    if positions_BT is not None and "position_ids" in subject.takes:
        keywords["position_ids"] = positions_BT.to(device)
    if subject.is_transformers:
        keywords["use_cache"] = False
    else:
        # Models that return only the last position's logits without targets get some; the loss is ours anyway.
        for name in ("targets", "labels"):
            if name in subject.takes:
                keywords[name] = targets_BT.clamp_min(0).to(device)
    positional = () if subject.ids_name else (ids_BT.to(device),)
    if subject.ids_name:
        keywords[subject.ids_name] = ids_BT.to(device)
    logits = first_tensor(subject.module(*positional, **keywords))
    if logits is None or logits.dim() != 3 or logits.shape[:2] != ids_BT.shape:
        shape = None if logits is None else tuple(logits.shape)
        raise ProbeError(
            "cannot replay this model",
            f"its forward returned logits of shape {shape} for ids of shape {tuple(ids_BT.shape)}",
            "return logits of shape (rows, positions, vocabulary), or (logits, loss), or an object with .logits",
            REPLAY_FAILED,
        )
    if int(targets_BT.max()) >= logits.shape[-1]:  # on a GPU this would end the process's use of it
        raise ProbeError(
            "cannot compute the loss of this model",
            f"token {int(targets_BT.max())} is a target, and its head gives {logits.shape[-1]} logits a position",
            "check that the head has a row for every row of the embedding",
            REPLAY_FAILED,
        )
    return logits


def token_losses(logits_BTV: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy per position (0 where ignored) and log Z, both (B, T) in fp32.

    bf16 keeps 8 significant bits, so log-sum-exp is done in fp32 from whatever dtype the logits have.
    """
    logits = logits_BTV.float()
    log_z = torch.logsumexp(logits, dim=-1)
    picked = logits.gather(-1, targets_BT.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return (log_z - picked).masked_fill(targets_BT == IGNORED, 0.0), log_z


def _look_at_logits(logits_BTV: Tensor, targets_BT: Tensor, log_z_BT: Tensor, rows: range, trace: Trace) -> None:
    low, high = logits_BTV.aminmax()
    absmax = max(abs(low.item()), abs(high.item()))
    trace.logit_absmax = max(trace.logit_absmax, absmax) if absmax == absmax else math.nan
    targets = targets_BT.to(logits_BTV.device)
    for index, row in enumerate(rows):
        for offset in OFFSETS:
            moved = moved_targets(targets[index], offset)
            valid = moved != IGNORED
            picked = logits_BTV[index].gather(-1, moved.clamp_min(0).unsqueeze(-1)).squeeze(-1).float()
            loss = (log_z_BT[index] - picked)[valid].double().sum().item()
            trace.offset_sums[row][offset] = (loss, int(valid.sum()))
    if trace.precision == "fp32" and absmax >= COARSE_LOGIT and math.isfinite(absmax):
        _round_logits(logits_BTV, targets, log_z_BT, rows, trace)


def moved_targets(targets_T: Tensor, offset: int) -> Tensor:
    """Targets moved `offset` positions further into the future; positions without one become IGNORED."""
    moved = torch.full_like(targets_T, IGNORED)
    T = targets_T.shape[0]
    if abs(offset) < T:
        moved[max(0, -offset) : T - max(0, offset)] = targets_T[max(0, offset) : T - max(0, -offset)]
    return moved


def _round_logits(logits_BTV: Tensor, targets_BT: Tensor, log_z_BT: Tensor, rows: range, trace: Trace) -> None:
    """Losses after the logits alone were rounded to bf16: as they are, and recentred by log Z."""
    if trace.rounding_loss_BT is None or trace.recentred_loss_BT is None:
        trace.rounding_loss_BT = trace.token_loss_BT.clone()
        trace.recentred_loss_BT = trace.token_loss_BT.clone()
    T = targets_BT.shape[1]
    valid = (targets_BT != IGNORED).cpu()
    centred = logits_BTV - log_z_BT.unsqueeze(-1)
    for kept, logits in ((trace.rounding_loss_BT, logits_BTV), (trace.recentred_loss_BT, centred)):
        loss, _ = token_losses(logits.bfloat16(), targets_BT)
        kept[rows.start : rows.stop, :T][valid] = loss.cpu()[valid]


def _add_heads(heads: dict[int, HeadTotals], layer: int, seen: HeadStatistics, row: int) -> None:
    best, which = seen.max_logit_BH.max(dim=0)
    query = seen.query_BH.gather(0, which.unsqueeze(0)).squeeze(0)
    key = seen.key_BH.gather(0, which.unsqueeze(0)).squeeze(0)
    known = seen.entropy_BH.isfinite()
    entropy, top, share = (
        torch.where(known, values, 0.0).sum(0)
        for values in (seen.entropy_BH, seen.top_weight_BH, seen.top_key_share_BH)
    )
    rows = known.sum(0)
    at = which + row
    if layer not in heads or heads[layer].max_logit.shape != best.shape:
        heads[layer] = HeadTotals(best, at, query, key, entropy, top, share, rows, seen.blind_BH.sum(0))
        return
    total = heads[layer]
    newer = ~(best <= total.max_logit)  # a NaN counts as newer: it is what must be seen
    total.max_logit = torch.where(newer, best, total.max_logit)
    total.row = torch.where(newer, at, total.row)
    total.query = torch.where(newer, query, total.query)
    total.key = torch.where(newer, key, total.key)
    total.entropy = total.entropy + entropy
    total.top_weight = total.top_weight + top
    total.top_key_share = total.top_key_share + share
    total.rows = total.rows + rows
    total.blind = total.blind + seen.blind_BH.sum(0)


def position_limit(module: nn.Module) -> int | None:
    """The longest row that the model's configuration allows, where it states one."""
    config = getattr(module, "config", None)
    for name in ("max_position_embeddings", "n_positions", "block_size", "max_positions"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _failed(error: BaseException, rows: range, precision: str, T: int, limit: int | None) -> ProbeError:
    where = f"row {rows.start}" if len(rows) == 1 else f"rows {rows.start}–{rows.stop - 1}"
    problem = f"the replay failed in {precision} on {where}"
    if limit is not None and limit < T:
        why = f"the rows have {T} positions, the model takes {limit}"
        return ProbeError(problem, why, f"replay the first ones with --max-positions {limit}", REPLAY_FAILED)
    memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "not enough memory" in said(error)
    hint = (
        "replay fewer rows or positions (--max-rows, --max-positions), or use a device with more memory"
        if memory
        else "run again with --debug for the traceback; check that the model's forward takes token ids"
    )
    message = said(error).splitlines()[0][:300]
    return ProbeError(problem, message, hint, REPLAY_FAILED)
