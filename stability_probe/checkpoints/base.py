"""What every checkpoint format is read into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as stored, mapped lazily: no tensor is copied before it is used.

    Attributes:
        format: module name of the reader ("transformers", "plain", "nanogpt"…).
        step: the run's step stored in the checkpoint, or None.
        tensors: the model's weights by the file's key, known wrapper prefixes removed.
        config: `config.json` or the stored model arguments, as a plain dict; None where there is none.
        optimizer: the optimizer's state dict as stored (integer ids or names), None where there is none.
        notes: what the reader decided or could not read, for the report.
    """

    path: Path
    format: str
    tensors: Mapping[str, Tensor]
    step: int | None = None
    config: Mapping[str, Any] | None = None
    optimizer: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class KeyReport:
    """How the stored keys fitted the model; every list is sorted and empty in a healthy checkpoint.

    Attributes:
        missing: parameters of the model that the file lacks (a tied head that is absent is not missing).
        unexpected: keys of the file that the model has no place for.
        misshaped: (name, stored shape, model's shape).
        untied: pairs of names that the configuration ties but whose stored values differ.
        uninitialised: buffers or parameters left without a value.
        renamed: how keys were mapped, in words ("prefix 'model.' added"…).
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    misshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    untied: tuple[tuple[str, str], ...] = ()
    uninitialised: tuple[str, ...] = ()
    renamed: tuple[str, ...] = ()


@dataclass(frozen=True)
class OptimizerGroup:
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class OptimizerState:
    """Adam-type moments by parameter name (names as in `named_parameters()`).

    Attributes:
        kind: "adamw", or the name of another optimizer that was recognised but cannot be simulated.
        step: updates done, by parameter.
        group_of: index into `groups` by parameter.
        naming: the rule by which stored ids were given names.
    """

    kind: str
    exp_avg: Mapping[str, Tensor]
    exp_avg_sq: Mapping[str, Tensor]
    step: Mapping[str, int]
    groups: tuple[OptimizerGroup, ...]
    group_of: Mapping[str, int]
    naming: str
    notes: tuple[str, ...] = field(default=())
