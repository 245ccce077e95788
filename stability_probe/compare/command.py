"""`probe compare-precision`: from paths to a report."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stability_probe.compare.report import EXTENSIONS, RENDERERS
from stability_probe.compare.result import Comparison
from stability_probe.errors import ProbeError, nearest

OK, WRONG_USAGE = 0, 2


def run_compare_precision(
    ckpt: Path,
    batch: Path,
    precisions: Sequence[str],
    *,
    baseline: Sequence[Path] = (),
    model: str | None = None,
    config: Path | None = None,
    labels: str = "auto",
    device: str = "auto",
    max_rows: int | None = None,
    max_positions: int | None = None,
    isolate: bool = False,
    out: Sequence[Path] = (),
    format: str = "terminal",
    quiet: bool = False,
    trust_code: bool = False,
) -> int:
    """Compare, write the files of `out`, and print the report to standard output.

    Returns:
        the exit code, 0.

    Raises:
        ProbeError: wrong usage (2), an input that cannot be read or does not fit (3), a replay that failed (4).
    """
    from stability_probe.reports import write_text

    for path in out:
        _format_of(Path(path))
    found = compare_files(
        ckpt,
        batch,
        precisions,
        baseline=baseline,
        model=model,
        config=config,
        labels=labels,
        device=device,
        max_rows=max_rows,
        max_positions=max_positions,
        isolate=isolate,
        quiet=quiet,
        trust_code=trust_code,
    )
    for path in out:
        write_text(Path(path), RENDERERS[_format_of(Path(path))](found))
        if not quiet:
            sys.stderr.write(f"wrote {path}\n")
    sys.stdout.write(RENDERERS[format](found))
    sys.stdout.flush()
    return OK


def compare_files(
    ckpt: Path,
    batch: Path,
    precisions: Sequence[str],
    *,
    baseline: Sequence[Path] = (),
    model: str | None = None,
    config: Path | None = None,
    labels: str = "auto",
    device: str = "auto",
    max_rows: int | None = None,
    max_positions: int | None = None,
    isolate: bool = False,
    quiet: bool = True,
    trust_code: bool = False,
) -> Comparison:
    """The comparison of a checkpoint and a batch on disk; see `compare_precisions`."""
    from stability_probe.batches.edit import join
    from stability_probe.checkpoints.optimizer import name_optimizer_state
    from stability_probe.compare.session import compare_precisions
    from stability_probe.incident import Request, load_incident
    from stability_probe.precisions import get_precision
    from stability_probe.progress import open_progress
    from stability_probe.replay import Subject

    if not precisions:
        raise ProbeError(
            "nothing to compare", "--precisions is empty", "give for example --precisions bf16", WRONG_USAGE
        )
    for name in precisions:
        get_precision(name)
    request = Request(
        ckpt=Path(ckpt),
        batch=Path(batch),
        baselines=tuple(Path(path) for path in baseline),
        model=model,
        config=config,
        labels=labels,
        device=device,
        max_rows=max_rows,
        max_positions=max_positions,
        trust_code=trust_code,
        run_precision="bf16",  # the run's own precision does not matter here; said so that nothing is assumed aloud
    )
    incident = load_incident(request)
    subject = Subject.of(incident.model.module.to(incident.device), incident.device)
    notes = list(incident.notes)
    state = None
    if incident.checkpoint.optimizer is not None:
        named = name_optimizer_state(incident.checkpoint.optimizer, incident.model.module)
        if isinstance(named, str):
            notes.append(f"the stored optimizer was not used: {named}")
        else:
            state = named
    with open_progress(quiet) as progress:
        found = compare_precisions(
            subject,
            incident.batch,
            precisions,
            baseline=join(incident.baselines) if incident.baselines else None,
            isolated=isolate,
            optimizer=state,
            lr=incident.lr,
            progress=progress,
        )
    tokenizer = incident.tokenizer
    if tokenizer is not None:
        found = with_texts(found, lambda token: tokenizer.decode([token], skip_special_tokens=False))
    rows, positions = incident.batch.ids_BT.shape
    inputs = {
        "ckpt": {"path": str(ckpt), "format": incident.checkpoint.format, "step": incident.checkpoint.step},
        "batch": {"path": str(batch), "sha256": incident.batch.sha256, "rows": rows, "positions": positions},
        "labels": incident.batch.convention,
        "device": incident.device,
    }
    return dataclasses.replace(found, inputs=inputs, notes=tuple(notes))


def with_texts(found: Comparison, decode: Callable[[int], str]) -> Comparison:
    """The same with the text of the worst tokens beside their ids."""

    def told(token: dict[str, Any]) -> dict[str, Any]:
        return {**token, "token_text": decode(token["token"]), "target_text": decode(token["target"])}

    results = {
        name: dataclasses.replace(result, tokens=tuple(told(token) for token in result.tokens))
        for name, result in found.precisions.items()
    }
    return dataclasses.replace(found, precisions=results)


def _format_of(path: Path) -> str:
    extension = path.suffix.lower()
    if extension in EXTENSIONS:
        return EXTENSIONS[extension]
    hint = nearest(extension, EXTENSIONS)
    raise ProbeError(f"cannot write a comparison to {path}", "the extension names no format of it", hint, WRONG_USAGE)
