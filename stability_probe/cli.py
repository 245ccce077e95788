"""The `probe` command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import codecs
import dataclasses
import functools
import os
import shutil
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from stability_probe._version import __version__
from stability_probe.errors import REPLAY_FAILED, ProbeError, nearest, said

if TYPE_CHECKING:
    from stability_probe.schema import Report

FOUND, WRONG_USAGE, INTERRUPTED = 1, 2, 130
PIPED_WIDTH = 100  # columns where nothing tells: wide enough for the tables, narrow enough for a mail
MIN_WIDTH, MAX_WIDTH = 60, 160  # under 60 the tables break up; over 160 the eye loses the line

app = typer.Typer(
    name="probe",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


class Format(str, Enum):
    terminal = "terminal"
    markdown = "markdown"
    json = "json"


class PageFormat(str, Enum):
    terminal = "terminal"
    markdown = "markdown"


class FailOn(str, Enum):
    found = "found"


class Labels(str, Enum):
    auto = "auto"
    shifted = "shifted"
    unshifted = "unshifted"


# --- options that several commands share --------------------------------------------------------

Ckpt = Annotated[Path | None, typer.Option("--ckpt", metavar="PATH", help="Checkpoint: a file or a folder.")]
BatchFile = Annotated[Path | None, typer.Option("--batch", metavar="PATH", help="The saved batch.")]
Baselines = Annotated[
    list[Path] | None, typer.Option("--baseline", metavar="PATH", help="A healthy batch; repeatable.")
]
Model = Annotated[
    str | None,
    typer.Option("--model", metavar="CODE", help="MODULE:FUNCTION or FILE.py:FUNCTION that returns the nn.Module."),
]
Config = Annotated[Path | None, typer.Option("--config", metavar="PATH", help="The model's configuration (JSON).")]
Tokenizer = Annotated[
    Path | None, typer.Option("--tokenizer", metavar="PATH", help="A tokenizer's folder or tokenizer.json.")
]
LabelsOption = Annotated[Labels, typer.Option("--labels", help="Whether labels are already shifted by one.")]
Device = Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:1 …")]
MaxRows = Annotated[int | None, typer.Option("--max-rows", min=1, metavar="N", help="Replay the first N rows only.")]
MaxPositions = Annotated[
    int | None, typer.Option("--max-positions", min=1, metavar="N", help="Replay the first N positions only.")
]


def _out(suffixes: str) -> Any:
    return typer.Option("--out", metavar="PATH", help=f"Write the report too ({suffixes}); repeatable.")


Out = Annotated[list[Path] | None, _out(".md, .json, .txt")]
FormatOption = Annotated[Format, typer.Option("--format", help="What goes to standard output.")]
TrustCode = Annotated[bool, typer.Option("--trust-code", help="Run model code that the incident folder names.")]
FailOnOption = Annotated[
    FailOn | None, typer.Option("--fail-on", help="Exit with 1 when a cause is found.", show_choices=True)
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no remarks on standard error.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback when something breaks.")]

Command = TypeVar("Command", bound=Callable[..., Any])


def guarded(command: Command) -> Command:
    """Turn whatever a command raises into a message and an exit code; a traceback only with --debug."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return command(*args, **options)
        except (typer.Exit, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            _say("interrupted; nothing was written")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # the reader has seen enough, as in `probe replay … | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except Exception as error:
            if options.get("debug"):
                raise
            failure = error if isinstance(error, ProbeError) else _unexpected(error)
            _complain(failure)
            raise typer.Exit(failure.exit_code) from None

    return run  # type: ignore[return-value]


def _unexpected(error: Exception) -> ProbeError:
    told = said(error)
    if isinstance(error, MemoryError) or "out of memory" in told.lower() or "can't allocate memory" in told.lower():
        hint = "replay less at a time: --microbatch 1, --max-rows, --max-positions, or --device cpu"
        return ProbeError("the replay ran out of memory", told.splitlines()[0], hint, REPLAY_FAILED)
    hint = "rerun with --debug for the traceback, and report it with the command line"
    return ProbeError("this is a bug in probe", told, hint, REPLAY_FAILED)


# --- commands -----------------------------------------------------------------------------------


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"probe {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Post-mortem for a loss spike: replays a checkpoint and a batch, and proves what broke by intervening."""


@app.command()
@guarded
def replay(
    incident: Annotated[
        Path | None, typer.Argument(metavar="INCIDENT_DIR", help="A folder with incident.json, instead of options.")
    ] = None,
    ckpt: Ckpt = None,
    batch: BatchFile = None,
    baseline: Baselines = None,
    log: Annotated[list[Path] | None, typer.Option("--log", metavar="PATH", help="The run's log; repeatable.")] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=0, metavar="N", help="The step that consumed the batch.")
    ] = None,
    model: Model = None,
    config: Config = None,
    optimizer: Annotated[
        Path | None, typer.Option("--optimizer", metavar="PATH", help="Optimizer state, if not beside the checkpoint.")
    ] = None,
    tokenizer: Tokenizer = None,
    labels: LabelsOption = Labels.auto,
    lr: Annotated[float | None, typer.Option("--lr", min=0, metavar="X", help="Learning rate at that step.")] = None,
    grad_clip: Annotated[
        float | None, typer.Option("--grad-clip", min=0, metavar="X", help="The run's gradient clipping norm.")
    ] = None,
    precisions: Annotated[
        str,
        typer.Option("--precisions", metavar="LIST", help="Compared with fp32, separated by commas; else the run's."),
    ] = "",
    device: Device = "auto",
    microbatch: Annotated[
        int, typer.Option("--microbatch", min=1, metavar="N", help="Rows replayed at a time; 1 gives exact row norms.")
    ] = 1,
    max_rows: MaxRows = None,
    max_positions: MaxPositions = None,
    no_confirm: Annotated[bool, typer.Option("--no-confirm", help="Do not intervene: suspects stay unproven.")] = False,
    out: Out = None,
    format: FormatOption = Format.terminal,
    trust_code: TrustCode = False,
    fail_on: FailOnOption = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Replay a checkpoint on a batch and name the cause of the spike.

    Give an incident folder, or --ckpt and --batch. Options win over the folder's values.
    """
    from stability_probe.checklist import written_down
    from stability_probe.progress import open_progress

    _check_outputs(out)
    if incident is None and (ckpt is None or batch is None):
        raise typer.BadParameter("give an incident folder, or both --ckpt and --batch")
    from stability_probe.incident import Request, request_from_folder

    request = Request(
        ckpt=ckpt,
        batch=batch,
        baselines=tuple(baseline or ()),
        logs=tuple(log or ()),
        step=step,
        model=model,
        config=config,
        optimizer=optimizer,
        tokenizer=tokenizer,
        labels=labels.value,
        lr=lr,
        grad_clip=grad_clip,
        precisions=_split(precisions),
        device=device,
        microbatch=microbatch,
        max_rows=max_rows,
        max_positions=max_positions,
        confirm=not no_confirm,
        trust_code=trust_code,
    )
    if incident is not None:
        request = request_from_folder(incident, request)
    from stability_probe.pipeline import run

    with open_progress(quiet) as progress:
        report = run(request, progress)
    report = dataclasses.replace(report, checklist=written_down(report.checklist, out or []))
    _deliver(report, out, format, quiet)
    _exit_for(report, fail_on)


@app.command("batch-audit")
@guarded
def batch_audit(
    batch: Annotated[
        list[Path] | None,
        typer.Option("--batch", metavar="PATH...", help="Saved batches or token shards; a glob will do."),
    ] = None,
    more: Annotated[list[Path] | None, typer.Argument(metavar="PATH", help="The same, without --batch.")] = None,
    baseline: Baselines = None,
    tokenizer: Tokenizer = None,
    labels: LabelsOption = Labels.auto,
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", min=1, metavar="N", help="Rows of the embedding.")
    ] = None,
    out: Annotated[list[Path] | None, _out(".md, .json, .txt; .csv, .parquet: the flagged rows")] = None,
    format: FormatOption = Format.terminal,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Find token anomalies in saved batches and token shards, without a model."""
    if not (batch or more):
        raise typer.BadParameter("name the batches or token shards to audit: probe batch-audit --batch PATH")
    from stability_probe.audit.command import run_batch_audit

    code = run_batch_audit(
        [*(batch or []), *(more or [])],  # what a shell makes of `--batch shards/*.npy`
        baseline=baseline or [],
        tokenizer=tokenizer,
        labels=labels.value,
        vocab_size=vocab_size,
        out=out or [],
        format=format.value,
        quiet=quiet,
    )
    raise typer.Exit(code)


@app.command("compare-precision")
@guarded
def compare_precision(
    ckpt: Annotated[Path, typer.Option("--ckpt", metavar="PATH", help="Checkpoint: a file or a folder.")],
    batch: Annotated[Path, typer.Option("--batch", metavar="PATH", help="The saved batch.")],
    precisions: Annotated[
        str, typer.Option("--precisions", metavar="LIST", help="Compared with fp32, separated by commas.")
    ] = "bf16",
    baseline: Baselines = None,
    model: Model = None,
    config: Config = None,
    labels: LabelsOption = Labels.auto,
    device: Device = "auto",
    max_rows: MaxRows = None,
    max_positions: MaxPositions = None,
    isolate: Annotated[
        bool,
        typer.Option("--isolate", help="Replay also with one module at a time in fp32: which to keep there."),
    ] = False,
    out: Annotated[list[Path] | None, _out(".md, .json")] = None,
    format: FormatOption = Format.terminal,
    trust_code: TrustCode = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Compare low precisions with fp32, module by module, forward and backward."""
    _check_outputs(out)
    from stability_probe.compare import run_compare_precision

    code = run_compare_precision(
        ckpt,
        batch,
        _split(precisions),
        baseline=baseline or [],
        model=model,
        config=config,
        labels=labels.value,
        device=device,
        max_rows=max_rows,
        max_positions=max_positions,
        isolate=isolate,
        out=out or [],
        format=format.value,
        quiet=quiet,
        trust_code=trust_code,
    )
    raise typer.Exit(code)


@app.command()
@guarded
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN.json", help="A report that `probe replay --out RUN.json` wrote.")],
    out: Out = None,
    format: FormatOption = Format.terminal,
    fail_on: FailOnOption = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Render a saved run again, without torch."""
    from stability_probe.reports.saved import load

    _check_outputs(out)
    saved = load(run)
    _deliver(saved, out, format, quiet)
    _exit_for(saved, fail_on)


@app.command()
@guarded
def rules(
    format: Annotated[
        PageFormat, typer.Option("--format", help="The list, or as Markdown the list and every page.")
    ] = PageFormat.terminal,
    debug: Debug = False,
) -> None:
    """List every cause that a replay can name."""
    from stability_probe.judge import load_rules
    from stability_probe.reports.catalogue import render_list
    from stability_probe.reports.catalogue_markdown import render_catalogue

    if format is PageFormat.markdown:
        _print(render_catalogue(load_rules()))
    else:
        _print(render_list(load_rules(), **layout()))


@app.command()
@guarded
def explain(
    slug: Annotated[str, typer.Argument(metavar="SLUG", help="A cause, as `probe rules` lists it.")],
    debug: Debug = False,
) -> None:
    """Explain one cause: why it spikes the loss, what proves it, false alarms, what to do."""
    from stability_probe.judge import load_rules
    from stability_probe.reports.catalogue import ANSWERS, render_page

    pages = {rule.slug: (rule.page, rule.thresholds) for rule in load_rules()}
    pages |= {name: (page, {}) for name, page in ANSWERS.items()}
    if slug not in pages:
        raise ProbeError(f"there is no cause {slug!r}", "it is not in the catalogue", nearest(slug, pages), WRONG_USAGE)
    page, thresholds = pages[slug]
    _print(render_page(slug, page, thresholds, **layout()))


@app.command()
@guarded
def demo(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Which incident; see --list.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Name the incidents that can be made.")] = False,
    out: Out = None,
    format: FormatOption = Format.terminal,
    fail_on: FailOnOption = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Make an incident from a tiny model that ships with the package, and diagnose it."""
    from stability_probe.demo import DEMOS, run_demo

    if list_:
        width = max(map(len, DEMOS))
        _print("".join(f"{known:<{width}}  {told}\n" for known, told in DEMOS.items()))
        return
    name = name or next(iter(DEMOS))
    if name not in DEMOS:
        raise ProbeError(f"there is no demo {name!r}", "it does not ship with probe", nearest(name, DEMOS), WRONG_USAGE)
    _check_outputs(out)
    made = run_demo(name, out=out or [], format=format.value, quiet=quiet)
    _exit_for(made, fail_on)


# --- what comes out -----------------------------------------------------------------------------


def layout() -> dict[str, Any]:
    """`width` and `colour` for standard output: the terminal's, or plain text where nobody watches.

    NO_COLOR and TERM=dumb turn colours off; FORCE_COLOR turns them on where the output is piped.
    """
    watched = sys.stdout.isatty()
    columns = shutil.get_terminal_size((PIPED_WIDTH, 24)).columns if watched else _columns_asked_for()
    wanted = bool(os.environ.get("FORCE_COLOR")) or (watched and os.environ.get("TERM") != "dumb")
    return {
        "width": max(MIN_WIDTH, min(columns, MAX_WIDTH)),
        "colour": wanted and not os.environ.get("NO_COLOR"),
    }


def _columns_asked_for() -> int:
    asked = os.environ.get("COLUMNS", "")
    return int(asked) if asked.isdecimal() and int(asked) > 0 else PIPED_WIDTH


def _deliver(report: Report, out: list[Path] | None, format: Format, quiet: bool) -> None:
    """Files first, then standard output: a closed pipe must not cost the files."""
    from stability_probe.reports import deliver

    deliver(report, out or [], format.value, quiet=quiet, **(layout() if format is Format.terminal else {}))


def _exit_for(report: Report, fail_on: FailOn | None) -> None:
    from stability_probe.reports.words import is_found

    if fail_on is FailOn.found and is_found(report.verdict.cause):
        raise typer.Exit(FOUND)


def _check_outputs(out: list[Path] | None) -> None:
    from stability_probe.reports import check_destination

    for path in out or []:
        check_destination(path)


def _split(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _complain(error: ProbeError) -> None:
    """The three parts on standard error: what could not be done, why, what to try."""
    from rich.console import Console
    from rich.text import Text

    from stability_probe.reports.safe_text import clean

    told = Text.assemble(
        ("error: ", "bold red"),
        (clean(error.problem), "bold"),
        f"\n  why: {clean(error.why)}\n",
        (f"  try: {clean(error.hint)}", "cyan"),
    )
    Console(stderr=True, highlight=False, soft_wrap=True).print(told)


# One character for one, so that columns stay: what a terminal without Unicode shows instead.
_PLAIN = str.maketrans("─│╭╮╰╯━✓✗→▶–—−×≥≤≪≫“”’…·⠋", '-|++++-+x>>---x><<>""\'.-*')


def _plain_characters(error: UnicodeError) -> tuple[str, int]:
    """Codec error handler: near ASCII characters for what the stream's encoding lacks, else question marks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end].translate(_PLAIN)
    return "".join(char if char.isascii() else "?" for char in lacking), error.end


def main() -> None:
    """Entry point of the `probe` script."""
    codecs.register_error("probe-plain", _plain_characters)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="probe-plain")
    app()


if __name__ == "__main__":
    main()
