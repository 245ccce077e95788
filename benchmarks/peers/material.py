"""What every tool is given of an incident, what is noted of its answer, and when that answer counts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fixtures.verdict_dynamics import trained
from fixtures.verdict_incident import LENGTH, Incident, Truth, healthy_rows
from fixtures.verdict_training import Trained, module_of, token_loss
from stability_probe import replay
from stability_probe.batches.base import Batch
from stability_probe.incident import Incident as Loaded
from stability_probe.incident import load_incident
from stability_probe.request import Request

DATA = ("repeated-tokens", "garbage-tokens", "duplicate-examples", "boilerplate", "numeric-runs", "data-shift")
STEP = ("optimizer-state-mismatch", "stale-second-moment", "epsilon-floor", "learning-rate-too-high")


@dataclass(frozen=True)
class Saying:
    """What a tool said of one incident.

    Attributes:
        told: its own words, shortened.
        causes: slugs that the words lead an engineer to; the tool's file says by which reading.
        places: dotted names of the modules or parameters that it points to first, as in `named_modules()`.
        rows: indices of the rows of the batch that it points to.
        alarm: it says that something is wrong, whether or not it says what.
        problem: why it gave no answer.
        seconds: how long the answer took.
    """

    told: str = ""
    causes: frozenset[str] = frozenset()
    places: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    alarm: bool = False
    problem: str = ""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "causes": sorted(self.causes)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Saying:
        lists = {name: tuple(stored[name]) for name in ("places", "rows")}
        return cls(**{**stored, **lists, "causes": frozenset(stored["causes"])})


class WithLoss(nn.Module):
    """The model and its loss as one module, so that tools which look at modules also see a loss that is not finite."""

    def __init__(self, subject: replay.Subject) -> None:
        super().__init__()
        self.model = subject.module
        self.subject = subject

    def forward(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor,
        mask_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
    ) -> Tensor:
        logits_BTV = replay.forward(self.subject, ids_BT, mask_BT, positions_BT, targets_BT)
        return token_loss(logits_BTV.float() if logits_BTV.dtype.itemsize < 4 else logits_BTV, targets_BT)


@dataclass(frozen=True)
class Material:
    """One incident as read from its files, and the run that it was planted in.

    Attributes:
        request: what `probe replay` is called with.
        loaded: model, batches, log and optimizer state as this package reads them.
        run: the sound run; only for tools that need a history of healthy steps.
    """

    incident: Incident
    request: Request
    loaded: Loaded
    run: Trained

    @classmethod
    def of(cls, incident: Incident, folder: Path) -> Material:
        request = incident.make(folder)
        return cls(incident, request, load_incident(request), trained(incident.model))

    @property
    def module(self) -> nn.Module:
        return self.loaded.model.module

    @property
    def batch(self) -> Batch:
        return self.loaded.batch

    def with_loss(self) -> WithLoss:
        return WithLoss(replay.Subject.of(self.module))

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What `WithLoss` is called with."""
        batch = self.batch
        given = {
            "ids_BT": batch.ids_BT,
            "targets_BT": batch.targets_BT,
            "mask_BT": batch.mask_BT,
            "positions_BT": batch.position_ids_BT,
        }
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """What the run trained in, as far as it is known."""
        low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.loaded.run_precision.removesuffix("-true"))
        return contextlib.nullcontext() if low is None else torch.autocast("cpu", low)

    def sound(self) -> nn.Module:
        return module_of(self.run)

    def healthy_ids(self, seed: int) -> Tensor:
        """(B, T) token ids of healthy text, of the batch's number of rows, as long as the sound run takes them."""
        incident = self.incident
        return healthy_rows(self.run, incident.kinds, min(incident.length, LENGTH), 7000 + seed)["input_ids"]


# --- when an answer counts ------------------------------------------------------------------------


def named(saying: Saying, truth: Truth) -> bool:
    """Any of the causes that its words lead to is a right one."""
    return bool(saying.causes & set(truth.causes))


def pointed(saying: Saying, truth: Truth, n_rows: int) -> bool | None:
    """Whether the first place that it names is right; None where the truth has none.

    Right is the layer, else the module, else all of the faulty rows; of several places, or rows, at least half must be
    right. A fault of every row is no place.
    """
    if truth.layer is not None:
        return _mostly([layer_of(place) == truth.layer for place in saying.places])
    if truth.parameters:
        right = [any(_same_part(place, parameter) for parameter in truth.parameters) for place in saying.places]
        return _mostly(right)
    if truth.rows is not None and len(truth.rows) < n_rows:
        return set(truth.rows) <= set(saying.rows) and _mostly([row in truth.rows for row in saying.rows])
    return None


def _mostly(right: list[bool]) -> bool:
    return bool(right) and 2 * sum(right) >= len(right)


def layer_of(name: str) -> int | None:
    """The first number between dots: the index of the block."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def _same_part(told: str, parameter: str) -> bool:
    layer = layer_of(parameter)
    if layer is not None:
        return layer_of(told) == layer
    module = parameter.split("[")[0].removesuffix(".weight").rstrip(".")
    return told.removesuffix(".weight") == module


def false_alarm(saying: Saying, truth: Truth) -> bool:
    """It says of a healthy incident that something is wrong; a shift of the data may be called that."""
    excused = bool(saying.causes) and saying.causes <= set(truth.causes)
    return truth.healthy and saying.alarm and not excused
