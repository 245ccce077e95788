"""Stored optimizer state by parameter name. `state_dict()` numbers the parameters; which number is which is found here.

In order of trust: states keyed by name, `param_names` in the groups, then the orders in which training scripts
usually hand over their parameters. An order is accepted only when the count and every shape match.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stability_probe.checkpoints.base import OptimizerGroup, OptimizerState
from stability_probe.checkpoints.orders import candidate_orders
from stability_probe.checkpoints.safe import InertObject
from stability_probe.checkpoints.tensors import canonical

FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
_MUON_SETTINGS = {"ns_steps", "ns_coefficients", "backend_steps", "use_muon"}
_NAN = float("nan")


@dataclass(frozen=True)
class _Stored:
    """A state dict with its shape checked: `ids` by group, and each id's entry (absent without a gradient)."""

    entries: Mapping[Hashable, Mapping[str, Any]]
    groups: tuple[Mapping[str, Any], ...]
    ids: tuple[tuple[Hashable, ...], ...]


def name_optimizer_state(raw: Mapping[str, Any], model: nn.Module) -> OptimizerState | str:
    """Moments, steps and settings by the model's parameter names; parameters without moments are left out.

    Returns:
        the named state, or a sentence that says why it cannot be used and what to supply.
    """
    stored = _checked(raw)
    if isinstance(stored, str):
        return stored
    kind = _kind(stored)
    if kind not in ("adamw", "muon", "lion", "sgd"):
        return kind
    named = _named(stored, model)
    if isinstance(named, str):
        return named
    names, naming, notes = named
    exp_avg, exp_avg_sq, step, group_of = {}, {}, {}, {}
    for index, (group_names, ids) in enumerate(zip(names, stored.ids, strict=True)):
        for name, key in zip(group_names, ids, strict=True):
            group_of[name] = index
            entry = stored.entries.get(key, {})
            first = _first_moment(entry)
            if first is None:
                continue
            exp_avg[name] = first
            step[name] = _step(entry, stored.groups[index])
            if _is_plain(entry.get("exp_avg_sq")):
                exp_avg_sq[name] = entry["exp_avg_sq"]
    groups = tuple(_settings(group) for group in stored.groups)
    notes += _doubts(stored, len(group_of) - len(exp_avg))
    return OptimizerState(kind, exp_avg, exp_avg_sq, step, groups, group_of, naming, notes)


def misfits(raw: Mapping[str, Any], model: nn.Module) -> tuple[str, ...]:
    """Parameters whose AdamW moments have another shape, "name: stored …, model …".

    Empty where the file leaves open which parameter is meant (another count, or the right shapes in an order of their
    own), and where moments are smaller by design: shards, flat buffers, low-rank projections.
    """
    stored = _checked(raw)
    if isinstance(stored, str) or _kind(stored) != "adamw":
        return ()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    written = _written_names(stored)
    sizes = tuple(len(ids) for ids in stored.ids)
    if written is not None:
        orders = [list(itertools.chain(*_as_in_model(written[0], shapes)))]
    else:
        usual = [order for _, order in candidate_orders(model, sizes)]
        orders = [list(itertools.chain(*order)) for order in usual if tuple(map(len, order)) == sizes]
    stored_shapes = [_moment_shapes(stored.entries.get(key, {})) for key in itertools.chain(*stored.ids)]
    of_model = Counter(shapes.values())
    permuted = all(Counter(own[at] for own in stored_shapes if len(own) > at) <= of_model for at in (0, 1))
    if (written is None and permuted) or any("rank" in group or "projector" in group for group in stored.groups):
        return ()
    found = [_disagreements(order, stored_shapes, shapes) for order in orders if set(order) <= set(shapes)]
    return min((told for told in found if told is not None), key=len, default=())


def _moment_shapes(entry: Mapping[str, Any]) -> list[tuple[int, ...]]:
    return [tuple(entry[name].shape) for name in ("exp_avg", "exp_avg_sq") if isinstance(entry.get(name), Tensor)]


def _disagreements(
    names: list[str], stored: list[list[tuple[int, ...]]], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str, ...] | None:
    """What does not fit in this order; None where no matrix fits, or half of what does not is part of its parameter.

    Moments with fewer sides than their parameter are smaller by design: one number a tensor, flat buffers, none here.
    """
    pairs = [(name, shape) for name, own in zip(names, stored, strict=True) for shape in own if 0 not in shape]
    wrong = [pair for pair in pairs if len(pair[1]) == len(shapes[pair[0]]) and pair[1] != shapes[pair[0]]]
    whole = any(len(shape) >= 2 and shape == shapes[name] for name, shape in pairs)
    parts = sum(_is_part(shape, shapes[name]) for name, shape in wrong)
    if not whole or (len(wrong) > 2 and 2 * parts >= len(wrong)):
        return None
    told = {name: shape for name, shape in wrong if not _is_padded(shape, shapes[name])}
    return tuple(f"{name}: stored {shape}, model {shapes[name]}" for name, shape in told.items())


def _is_part(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether the shape is that of one of several equal parts: one side divided."""
    sides = [(own, full) for own, full in zip(shape, whole, strict=True) if own != full]
    return len(sides) == 1 and sides[0][0] > 0 and sides[0][1] % sides[0][0] == 0


def _is_padded(shape: tuple[int, ...], own: tuple[int, ...]) -> bool:
    """Whether only rows were added: a vocabulary that was padded for training, and trimmed when it was saved."""
    return shape[1:] == own[1:] and shape[0] > own[0]


def _checked(raw: Mapping[str, Any]) -> _Stored | str:
    state, groups = raw.get("state"), raw.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(groups, list) or not groups:
        return "the optimizer's state dict has no state or no param_groups: save optimizer.state_dict()"
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups):
        return "the optimizer's param_groups do not list their params: save optimizer.state_dict()"
    ids = tuple(tuple(group["params"]) for group in groups)
    if not all(isinstance(key, (int, str)) for key in itertools.chain(*ids)):
        return "the optimizer's params are neither numbers nor names: save optimizer.state_dict()"
    entries = {key: entry for key, entry in state.items() if isinstance(entry, Mapping)}
    if not entries:
        return "the optimizer's state is empty: no step was taken before it was saved; give a later checkpoint"
    return _Stored(entries, tuple(groups), ids)


def _kind(stored: _Stored) -> str:
    """The optimizer's name, or a sentence about one that cannot be read."""
    values = [item for entry in stored.entries.values() for item in entry.items()]
    held = {name for name, value in values if isinstance(value, Tensor) and name != "step"}
    has_both = any({"exp_avg", "exp_avg_sq"} <= set(entry) for entry in stored.entries.values())
    if "momentum_buffer" in held:
        is_muon = has_both or any(_MUON_SETTINGS & set(group) for group in stored.groups)
        return "muon" if is_muon else "sgd"
    if has_both and {"exp_avg", "exp_avg_sq"} <= held:
        return "adamw"
    if "exp_avg" in held and not any("exp_avg_sq" in name for name in held):
        return "lion"
    inert = sorted({value.inert_name for _, value in values if isinstance(value, InertObject)})
    what = f"objects of {inert[0]}" if inert else f"{', '.join(sorted(held)[:5]) or 'nothing'} by parameter"
    return f"the optimizer's state holds {what}, which are no moments of AdamW, Muon, Lion or SGD in plain tensors"


def _first_moment(entry: Mapping[str, Any]) -> Tensor | None:
    return next((entry[name] for name in FIRST_MOMENTS if _is_plain(entry.get(name))), None)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_complex()


_Naming = tuple[list[list[str]], str, tuple[str, ...]]


def _named(stored: _Stored, model: nn.Module) -> _Naming | str:
    """The parameters' names by group, the rule that gave them, and notes."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    written = _written_names(stored)
    if written is not None:
        found, rule = written
        names = _as_in_model(found, shapes)
        strangers = [name for name in itertools.chain(*names) if name not in shapes]
        if strangers:
            return (
                f"the optimizer names parameters that the model lacks ({strangers[0]}): give the model's own optimizer"
            )
        if not _fits(stored, names, shapes):
            return "the optimizer's moments have other shapes than the parameters that it names: give the model's own"
        return names, rule, ()
    sizes = tuple(len(ids) for ids in stored.ids)
    fitting = [(rule, order) for rule, order in candidate_orders(model, sizes) if _fits(stored, order, shapes)]
    if not fitting:
        return (
            f"the optimizer has {sum(sizes)} parameters in groups of {', '.join(map(str, sizes))}, and no usual order "
            f"of the model's {len(shapes)} fits their number and shapes: save an optimizer that was built from "
            "model.named_parameters() (its groups then hold param_names)"
        )
    rule, order = fitting[0]
    rivals = [other for other, another in fitting[1:] if another != order]
    notes = (f"the order of the optimizer's parameters is a guess: {rivals[0]} fits as well",) if rivals else ()
    return order, rule, notes


def _as_in_model(written: list[list[str]], shapes: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
    """The model's own names for those that the file wrote, by group; a stranger keeps its name."""
    by_canonical = {canonical(name): name for name in shapes}
    return [[by_canonical.get(canonical(name), name) for name in group] for group in written]


def _written_names(stored: _Stored) -> tuple[list[list[str]], str] | None:
    if all(isinstance(key, str) for key in itertools.chain(*stored.ids)):
        return [[str(key) for key in ids] for ids in stored.ids], "named by the file"
    lists = [group.get("param_names") for group in stored.groups]
    complete = all(
        isinstance(names, list) and len(names) == len(ids) and all(isinstance(name, str) for name in names)
        for names, ids in zip(lists, stored.ids, strict=True)
    )
    return ([list(names or ()) for names in lists], "param_names in the groups") if complete else None


def _fits(stored: _Stored, names: list[list[str]], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Do the numbers of parameters match, and every moment's shape (and is it stored, not on the meta device)?"""
    if [len(group) for group in names] != [len(ids) for ids in stored.ids]:
        return False
    pairs = zip(itertools.chain(*names), itertools.chain(*stored.ids), strict=True)
    entries = ((name, stored.entries.get(key, {})) for name, key in pairs)
    moments = ((name, moment) for name, entry in entries for moment in (_first_moment(entry), entry.get("exp_avg_sq")))
    return all(
        tuple(moment.shape) == shapes[name] and not moment.is_meta
        for name, moment in moments
        if isinstance(moment, Tensor)
    )


def _step(entry: Mapping[str, Any], group: Mapping[str, Any]) -> int:
    """Updates done: kept by parameter, or by group (apex, DeepSpeed); 0 where neither says."""
    step = _number(entry.get("step", group.get("step", 0)), 0)
    return max(int(step), 0) if math.isfinite(step) else 0


def _number(value: Any, default: float = _NAN) -> float:
    if _is_plain(value) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    try:
        return float(value) if isinstance(value, (int, float)) else default
    except OverflowError:
        return default


def _decay(value: Any) -> float:
    """A moment's decay rate; NaN where it is none."""
    rate = _number(value)
    return rate if 0 <= rate <= 1 else _NAN


def _settings(group: Mapping[str, Any]) -> OptimizerGroup:
    """The group's settings; NaN for one that this optimizer does not have."""
    betas = group.get("betas")
    pair = (
        (betas[0], betas[1]) if isinstance(betas, (list, tuple)) and len(betas) == 2 else (group.get("momentum"), None)
    )
    return OptimizerGroup(
        lr=_number(group.get("lr")),
        betas=(_decay(pair[0]), _decay(pair[1])),
        eps=_number(group.get("eps")),
        weight_decay=_number(group.get("weight_decay"), 0.0),
    )


def _doubts(stored: _Stored, n_without: int) -> tuple[str, ...]:
    notes = []
    if n_without:
        notes.append(f"{n_without} parameters have no moments: they never got a gradient")
    if any(group.get("amsgrad") for group in stored.groups):
        notes.append("the run used amsgrad; the simulated step divides by the current second moment, not its maximum")
    if any(group.get("decoupled_weight_decay") is False and group.get("weight_decay") for group in stored.groups):
        notes.append("the run used Adam with weight decay in the gradient; the simulated step decays weights apart")
    return tuple(notes)
