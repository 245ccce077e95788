"""Everything that the user supplied, read and checked once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stability_probe.errors import ProbeError, nearest
from stability_probe.request import RUN_PRECISIONS, Request, request_from_folder

if TYPE_CHECKING:
    import pandas as pd

    from stability_probe.batches.base import Batch
    from stability_probe.checkpoints.base import Checkpoint
    from stability_probe.measure import LogFacts
    from stability_probe.models.base import LoadedModel

__all__ = ["Incident", "Request", "load_incident", "request_from_folder"]

# What fp32 tensors can be multiplied by.
LARGEST_RATE = 3.4e38
# A judgement: a schedule seldom moves the rate by more between a checkpoint and the spike after it, a slip does.
FAR_ABOVE = 30.0


@dataclass(frozen=True)
class Incident:
    """A checkpoint, the batch that followed it, and whatever else is known about the step.

    Attributes:
        batch, baselines: at most `max_rows` rows and `max_positions` positions of the files.
        log: what the logs say around the step; None without logs. `logs` are the tables of `read_log`, of `log_paths`.
        tokenizer: a `tokenizers.Tokenizer`, or None where there is none that can be read.
        run_precision: what the run trained in; `precision_is_assumed` where nobody said.
        lr, grad_clip: of the incident's step; None where nothing says.
        device: where to replay ("cpu", "cuda"…).
        source: where the batch came from, as the incident folder says.
        notes: what was decided or assumed, for the report.
    """

    request: Request
    checkpoint: Checkpoint
    model: LoadedModel
    batch: Batch
    baselines: tuple[Batch, ...] = ()
    log: LogFacts | None = None
    logs: tuple[pd.DataFrame, ...] = ()
    log_paths: tuple[Path, ...] = ()
    tokenizer: Any | None = None
    run_precision: str = "bf16"
    precision_is_assumed: bool = True
    lr: float | None = None
    grad_clip: float | None = None
    device: str = "cpu"
    source: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def load_incident(request: Request) -> Incident:
    """Read all that the request names: existence first, then the small files, the model last.

    Raises:
        ProbeError: exit code 3, where an input is missing, cannot be read, or does not fit the others.
    """
    from stability_probe.checkpoints import read_checkpoint
    from stability_probe.models import load_model
    from stability_probe.runlogs.facts import log_facts

    ckpt, batch_path = _require_paths(request)
    device = choose_device(request.device)
    checkpoint = read_checkpoint(ckpt, request.config, request.optimizer)
    pad_id = _pad_id(checkpoint.config)
    batch = _read_batch(batch_path, request, pad_id)
    baselines = tuple(_read_batch(path, request, pad_id) for path in request.baselines)
    log_paths, logs, log_notes = _read_logs(request, ckpt)
    log = log_facts(logs, request.step)
    tokenizer, tokenizer_notes = load_tokenizer(request.tokenizer, ckpt)
    lr, lr_notes = _learning_rate(request, log, checkpoint.optimizer)
    run_precision, precision_is_assumed, precision_notes = _run_precision(request)
    batch_notes = dict.fromkeys(note for one in (batch, *baselines) for note in one.notes)
    return Incident(
        request=request,
        checkpoint=checkpoint,
        model=load_model(checkpoint, request.model),
        batch=batch,
        baselines=baselines,
        log=log,
        logs=logs,
        log_paths=log_paths,
        tokenizer=tokenizer,
        run_precision=run_precision,
        precision_is_assumed=precision_is_assumed,
        lr=lr,
        grad_clip=request.grad_clip,
        device=device,
        source=request.source,
        notes=(
            *request.notes,
            *batch_notes,
            *log_notes,
            *_step_notes(log),
            *tokenizer_notes,
            *lr_notes,
            *precision_notes,
        ),
    )


def _require_paths(request: Request) -> tuple[Path, Path]:
    if request.ckpt is None or request.batch is None:
        missing = "checkpoint" if request.ckpt is None else "batch"
        raise ProbeError(
            f"no {missing} was given", "a replay needs both", "give --ckpt and --batch, or an incident folder"
        )
    named = [("checkpoint", request.ckpt), ("batch", request.batch), ("config", request.config)]
    named += [("optimizer", request.optimizer), ("tokenizer", request.tokenizer)]
    named += [("baseline", path) for path in request.baselines] + [("log", path) for path in request.logs]
    for what, path in named:
        if path is not None and not _exists(path):
            raise ProbeError(f"cannot read the {what} {path}", "there is no such file or folder", _siblings(path))
    return request.ckpt, request.batch


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name longer than the file system allows, before Python 3.14
        return False


def _siblings(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir()][:1000]
    except OSError:
        return "check the path: its folder does not exist either"
    return nearest(path.name, names) if names else "check the path: its folder is empty"


def _read_batch(path: Path, request: Request, pad_id: int | None) -> Batch:
    from stability_probe.batches import read_batch
    from stability_probe.batches.edit import select

    return select(read_batch(path, request.labels, pad_id), request.max_rows, request.max_positions)


def _pad_id(config: Mapping[str, Any] | None) -> int | None:
    pad_id = (config or {}).get("pad_token_id")
    return pad_id if isinstance(pad_id, int) and 0 <= pad_id < 2**31 else None


def _read_logs(request: Request, ckpt: Path) -> tuple[tuple[Path, ...], tuple[pd.DataFrame, ...], tuple[str, ...]]:
    """Paths, tables, notes: of the named logs, else of the one that a Trainer keeps in its checkpoint, if of use."""
    from stability_probe.runlogs import read_log

    if request.logs:
        frames = tuple(read_log(path) for path in request.logs)
        return request.logs, frames, tuple(note for frame in frames for note in frame.attrs["notes"])
    kept = (ckpt if ckpt.is_dir() else ckpt.parent) / "trainer_state.json"
    if not kept.is_file():
        return (), (), ()
    try:
        frame = read_log(kept)
    except ProbeError as error:
        return (), (), (f"{kept.name} beside the checkpoint was not used: {error.why}",)
    return (kept,), (frame,), (f"the log is {kept.name} beside the checkpoint", *frame.attrs["notes"])


def load_tokenizer(named: Path | None, ckpt: Path) -> tuple[Any | None, tuple[str, ...]]:
    """The tokenizer that was named, else `tokenizer.json` beside the checkpoint, and notes.

    Raises:
        ProbeError: where a tokenizer that was named cannot be read.
    """
    where = named if named is not None else (ckpt if ckpt.is_dir() else ckpt.parent)
    path = where / "tokenizer.json" if where.is_dir() else where
    if not path.is_file():
        if named is None:
            return None, ()
        hint = "give the folder that holds tokenizer.json, or the file"
        raise ProbeError(f"cannot read the tokenizer {named}", "it holds no tokenizer.json", hint)
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None, ("the tokenizer was not read: the package `tokenizers` is not installed (pip install tokenizers)",)
    try:
        return Tokenizer.from_file(str(path)), ()
    except Exception as error:  # the library raises bare Exception for whatever is wrong in the file
        why = str(error)[:200]
        if named is None:
            return None, (f"{path.name} beside the checkpoint was not used: {why}",)
        raise ProbeError(f"cannot read the tokenizer {path}", why, "give the tokenizer.json of the run") from error


def choose_device(name: str) -> str:
    """ "auto" as the GPU where there is one, else the CPU; anything else as typed.

    Raises:
        ProbeError: where there is no such device.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=torch.device(name))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0][:200]
        raise ProbeError(f"cannot use the device {name!r}", why, "give --device cpu, cuda or auto") from error
    return name


def _learning_rate(
    request: Request, log: LogFacts | None, optimizer: Mapping[str, Any] | None
) -> tuple[float | None, tuple[str, ...]]:
    """As given, else as logged at the step, else the largest of the stored optimizer's groups.

    Where all stored rates are far above the logged one, their largest is taken: a resumed run may step with it.

    Raises:
        ProbeError: for a given rate that no step can be taken with.
    """
    if request.lr is not None:
        if not 0.0 <= request.lr <= LARGEST_RATE:
            raise ProbeError("cannot use the learning rate", f"it is {request.lr:g}", "give the rate of the run's step")
        return request.lr, ()
    stored = max(_group_rates(optimizer), default=None)
    logged = log.logged_lr if log is not None else None
    if logged is not None and 0.0 <= logged <= LARGEST_RATE:
        if stored is not None and min(_group_rates(optimizer)) > FAR_ABOVE * logged > 0:
            return stored, (
                f"learning rate {stored:g}, as stored with the optimizer; the log has {logged:g} at the step",
            )
        return logged, (f"learning rate {logged:g}, as logged at the step",)
    if stored is None:
        return None, ()
    return stored, (f"learning rate {stored:g}, as stored with the optimizer",)


def _group_rates(optimizer: Mapping[str, Any] | None) -> Iterator[float]:
    from torch import Tensor

    groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    for group in groups if isinstance(groups, (list, tuple)) else ():
        rate = group.get("lr") if isinstance(group, Mapping) else None
        if isinstance(rate, Tensor) and rate.numel() == 1:  # fused and compiled optimizers keep it on the device
            rate = rate.item()
        if isinstance(rate, (int, float)) and 0.0 <= rate <= LARGEST_RATE:
            yield float(rate)


def _run_precision(request: Request) -> tuple[str, bool, tuple[str, ...]]:
    """What the run trained in, whether that is only assumed, and notes."""
    if request.run_precision is not None:
        return request.run_precision, False, ()
    for name in request.precisions:
        if name in RUN_PRECISIONS:
            return name, False, (f"the run is taken to have trained in {name}, the first precision asked for",)
    return "bf16", True, ("the precision of the run is not known: bf16 autocast on fp32 weights is assumed",)


def _step_notes(log: LogFacts | None) -> tuple[str, ...]:
    """That the log does not hold the step, which is else easily taken for a log that shows nothing there."""
    if log is None or log.step is None or log.first_step is None or log.last_step is None or _tells(log):
        return ()
    where = f"it holds steps {log.first_step}–{log.last_step}"
    hint = "without this one" if log.first_step < log.step < log.last_step else "give the part that holds it"
    return (f"the log says nothing about step {log.step}: {where}, {hint}; usual values are those before the step",)


def _tells(log: LogFacts) -> bool:
    return log.logged_loss is not None or log.logged_grad_norm is not None
