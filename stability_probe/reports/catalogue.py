"""The catalogue in a terminal: the list of causes, and one cause's page."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.markdown import Markdown
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from stability_probe.judge import Page, Threshold
from stability_probe.judge import Rule as Cause
from stability_probe.reports import words
from stability_probe.reports.terminal import print_to_text
from stability_probe.schema import Remedy

SECTIONS = {
    1: "Integrity of the checkpoint",
    2: "Labels and token ids",
    3: "Data in the batch",
    4: "Numbers that do not fit the format",
    5: "Attention",
    6: "Output and embedding",
    7: "Residual stream and initialisation",
    8: "Optimizer",
    9: "Mixture of experts",
    10: "Outside the checkpoint and the batch",
}

# The texts of a page that stand under a heading: the heading, and the field of `Page`.
PARTS = (
    ("Why it spikes the loss", "mechanism"),
    ("What the replay shows", "signature"),
    ("False alarms, and what separates them", "false_alarms"),
    ("What proves it", "proof"),
)

# Verdicts that no rule makes: they are what is left when no cause explains the excess, or there is none.
ANSWERS = {
    "none": Page(
        title="No fault found",
        claim="The loss, the gradients and the numbers of this batch on this checkpoint are ordinary.",
        mechanism="Nothing spikes. Where no baseline and no log was given, the repairs were the reference: a repair "
        "improves a sick model and never a healthy one, and none improved this one.",
        signature="No excess over the baseline, the log, the sibling layers or the other rows.",
        false_alarms="The report says what looks alarming and is healthy here: activations in the ten thousands in "
        "one channel at the first token, attention heads that look at one fixed key, a large log Z.",
        proof="No intervention lowers the loss beyond noise.",
        remedies=(
            Remedy("If the run did spike, give its log and a baseline, for the replay to disagree with."),
            Remedy("Replay the batches of the other ranks, and the steps before."),
        ),
        references=(),
    ),
    "unexplained": Page(
        title="A real excess, not explained",
        claim="The excess is there and is reproduced, and no intervention removes half of it.",
        mechanism="Either the cause is not in this catalogue, or two causes share the excess, or what would prove it "
        "was not supplied (optimizer state, a baseline, the log).",
        signature="Every suspect's explained share is below one half; the report lists what was tried.",
        false_alarms="A batch of a harder domain costs more without a fault: a baseline of the same domain tells.",
        proof="None: this is the answer when nothing is proven.",
        remedies=(
            Remedy("Supply what the skipped rules name at the end of the report, and replay."),
            Remedy("Compare the code of the forward pass with the code that trained: a replay cannot see intent."),
        ),
        references=(),
    ),
}  # fmt: skip


def render_list(causes: tuple[Cause, ...], width: int = 100, colour: bool = False) -> str:
    """Every cause with its one-sentence claim, in causal order: a higher one wins where two explain as much."""
    return print_to_text(Group(*_list(causes)), width, colour)


def _list(causes: tuple[Cause, ...]) -> Iterator[RenderableType]:
    for section, heading in SECTIONS.items():
        members = [(cause.slug, cause.page.claim) for cause in causes if cause.order // 100 == section]
        if section == 10:
            members += [(slug, page.claim) for slug, page in ANSWERS.items()]
        if members:
            yield Text(f"{section}  {heading}", style="bold")
            grid = Table.grid(padding=(0, 2, 0, 0))
            grid.add_column(no_wrap=True, style="cyan", width=26)  # the longest slug has 24 characters
            grid.add_column()
            for slug, claim in members:
                grid.add_row(slug, claim)
            yield Padding(grid, (0, 0, 1, 3))
    yield Text("probe explain SLUG tells why it spikes the loss, what proves it, and what to do.", style="dim")


def render_page(slug: str, page: Page, thresholds: dict[str, Threshold], width: int = 100, colour: bool = False) -> str:
    """One cause: what is wrong, why it spikes the loss, what proves it, what to do."""
    return print_to_text(Group(*_page(slug, page, thresholds)), width, colour)


def _page(slug: str, page: Page, thresholds: dict[str, Threshold]) -> Iterator[RenderableType]:
    yield Text.assemble((page.title, "bold"), "  ", (slug, "cyan"))
    yield Text()
    yield Markdown(page.claim)
    for heading, field in PARTS:
        text = getattr(page, field)
        if text:
            yield from _section(heading, Markdown(text))
    if thresholds:
        yield from _section("Limits", _limits(thresholds))
    if page.remedies:
        yield from _section("What to do", _remedies(page.remedies))
    if page.references:
        yield from _section("Read more", Group(*(Text(f"· {reference}") for reference in page.references)))


def _section(heading: str, content: RenderableType) -> Iterator[RenderableType]:
    yield Text()
    yield Rule(Text(heading, style="bold"), align="left", style="dim", characters="─")
    yield content


def _limits(thresholds: dict[str, Threshold]) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right", style="bold")
    grid.add_column()
    for name, limit in thresholds.items():
        value = words.with_unit(limit.value, limit.unit)
        grid.add_row(
            value, Text.assemble(f"{name}: {limit.reason}", (f"\n{limit.source}" if limit.source else "", "dim"))
        )
    return grid


def _remedies(remedies: tuple[Remedy, ...]) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for i, remedy in enumerate(remedies, start=1):
        command = (f"\n$ {remedy.command}" if remedy.command else "", "cyan")
        grid.add_row(Text(f"{i}", style="dim"), Text.assemble(remedy.action, command))
    return grid
