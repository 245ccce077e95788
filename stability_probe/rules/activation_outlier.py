"""One channel of one module explodes on this batch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Plan, Rule, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._tables import (
    CLEAR_NATS,
    CLEAR_SIGMAS,
    Record,
    clear_margin,
    is_number,
    layer_of,
    layers_of,
    median,
    records,
    times,
)
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

_HEALTHY = "python benchmarks/healthy_ranges.py (SmolLM2-135M)"

THRESHOLDS = {
    "clear": CLEAR_NATS,
    "clear_sigmas": CLEAR_SIGMAS,
    "fell": Threshold(
        0.5, "nats over the usual loss in the log", "a run that was used to its activations is at its usual loss",
        "as in rule attention-scale",
    ),
    "sigmas": Threshold(
        4, "robust standard deviations of the logged loss", "the activation is the finding, and the loss need only "
        "agree", "OLMo-core: a step is skipped at 6 standard deviations over 128 steps",
    ),
    "steeper": Threshold(
        3, "x the log's usual gradient norm", "beside it half a nat is enough: hard text has larger gradients, by less",
        "python benchmarks/healthy_ranges.py (gradient norms over five kinds of text)",
    ),
    "x_baseline": Threshold(
        5, "x the same module on the baseline batch", "a healthy model's largest activations hardly depend on the "
        "text: 22 983 to 28 122 over five kinds of it",
        _HEALTHY,
    ),
    "x_siblings": Threshold(
        3, "x the same module in the other layers", "with a baseline this only keeps out what all layers do", _HEALTHY
    ),
    "alone_x_siblings": Threshold(
        100, "x the same module in the other layers", "without a baseline siblings are all there is; the layer that "
        "writes massive activations is let out by its channel, which the later blocks share",
        "Sun et al., Massive Activations in Large Language Models, 2024, section 2",
    ),
}  # fmt: skip

PAGE = Page(
    title="Activation outlier",
    claim="One channel of one module takes values on this batch that neither the baseline nor its siblings know.",
    mechanism=(
        "In a gated MLP the two input projections of a channel can align during training; the product then grows with "
        "the square of the input, and a single token can drive the channel a thousandfold. The output projection "
        "carries it into the residual stream, where every later norm divides all other channels down. Low precision "
        "suffers first: the outlier takes the whole range of its block. Loss and gradient jump for the rows that "
        "trigger it."
    ),
    signature=(
        "The largest value of a module five times what it is on the baseline batch, and far above the same module in "
        "the other layers, in one channel, at named rows and positions."
    ),
    false_alarms=(
        "Massive activations of a healthy model are as large as 1e5 times the median, sit in one or two channels at "
        "the first token or delimiter, are shared by all later blocks, and are there on the baseline batch too. "
        "Corrupt weights show in the weights themselves. A row of repeated tokens can trigger a channel: when the "
        "excess goes with the row, the row is the cause."
    ),
    proof="The channel, or the module's whole output, is clamped to its usual size and the batch is replayed.",
    remedies=(
        Remedy("Clip the product inside the MLP, or scale it per channel before it is rounded (smooth-SwiGLU)."),
        Remedy("Apply weight decay to the gate and up projections; it slows their alignment."),
        Remedy("Keep the named output projection out of 8-bit formats."),
    ),
    references=(
        "Fishman et al., Scaling FP8 training to trillion-token LLMs, 2024, sections 3 and 4",
        "Sun et al., Massive Activations in Large Language Models, 2024",
        "Dettmers et al., LLM.int8(), 2022 (outlier features across layers)",
    ),
)  # fmt: skip

_INDEX = re.compile(r"\.\d+(?=\.|$)")


def _kind(name: str) -> str:
    return _INDEX.sub(".*", name)


def _shared_later(row: Record, blocks: list[Record]) -> bool:
    """Whether later blocks hold their maximum in the same channel: a massive activation on the residual stream."""
    later = [block for block in blocks if block["layer"] >= row["layer"]]
    return any(block["channel"] == row["channel"] for block in later)


def _fell(m: Measurements, t: dict[str, Threshold]) -> bool:
    """Whether the log says that the loss was not always what it is, and no row of the batch is odd."""
    if m.log is None or m.log.usual_loss is None or any(row["flags"] for row in records(m.rows)):
        return False
    over, norm = m.loss - m.log.usual_loss, m.log.usual_grad_norm or 0.0
    steeper = norm > 0 and m.global_grad_norm >= t["steeper"].value * norm
    return over >= clear_margin(m, t, "fell") or (steeper and over >= t["fell"].value)


def _baseline_fell(m: Measurements, t: dict[str, Threshold]) -> bool:
    """Whether the baseline batch stands above the log as well: its activations are those of the same fault."""
    if m.log is None or m.log.usual_loss is None or m.baseline_loss is None:
        return False
    return m.baseline_loss - m.log.usual_loss >= clear_margin(m, t, "fell")


def _past_baseline(row: Record, usual: float, t: dict[str, Threshold]) -> bool:
    if not row["absmax"] >= t["x_baseline"].value * row["baseline_absmax"]:
        return False
    return not is_number(usual) or times(row["absmax"], usual) >= t["x_siblings"].value


def _past_siblings(row: Record, usual: float, blocks: list[Record], fell: bool, t: dict[str, Threshold]) -> bool:
    if row["role"] in ("block", "norm", "embedding", "head") or row["position"] == 0:
        return False
    # A massive activation that the model is used to costs nothing; beside a rise in the log the repair will tell.
    excused = _shared_later(row, blocks) and not fell
    return usual > 0 and times(row["absmax"], usual) >= t["alone_x_siblings"].value and not excused


def _found(m: Measurements, t: dict[str, Threshold]) -> Iterator[tuple[Record, float]]:
    """Modules past the limits with what their siblings have; without a baseline value where only these told."""
    table = [row for row in records(m.modules) if is_number(row["absmax"])]
    blocks, fell, baseline_fell = [row for row in table if row["role"] == "block"], _fell(m, t), _baseline_fell(m, t)
    for row in table:
        same = [
            other["absmax"] for other in table if other is not row and _kind(other["module"]) == _kind(row["module"])
        ]
        usual = median(same)
        if row["role"] == "head":
            continue
        has_baseline = is_number(row["baseline_absmax"])
        if has_baseline and _past_baseline(row, usual, t):
            yield row, usual
        elif (baseline_fell or not has_baseline) and _past_siblings(row, usual, blocks, fell, t):
            yield {**row, "baseline_absmax": math.nan}, usual


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    found = list(_found(m, t))
    if not found:
        return []
    # In execution order: everything after the first one inherits its value through the residual stream.
    row, usual = found[0]
    reference = row["baseline_absmax"] if is_number(row["baseline_absmax"]) else usual
    name = "baseline batch" if is_number(row["baseline_absmax"]) else "median of sibling layers"
    ratio = times(row["absmax"], reference)
    inner: tuple[Plan, ...] = ()
    if row["role"] == "linear":
        told = f"the largest input channel of {row['module']} held to that of the median channel"
        inner = (Plan("clamp_largest_input", {"module": row["module"]}, told),)
    channel, place = int(row["channel"]), (int(row["row"]), int(row["position"]))
    limit = max(value for value in (row["baseline_absmax"], usual) if is_number(value))
    used = t["x_baseline"] if is_number(row["baseline_absmax"]) else t["alone_x_siblings"]
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"{row['module']} reaches {row['absmax']:.3g} in channel {channel} (row {place[0]}, position "
            f"{place[1]}), {ratio:.3g} x the {name}.",
            location=Location(
                module=row["module"],
                layer=layer_of(row),
                layers=layers_of(record for record, _ in found),
                rows=(place[0],),
                positions=((place[0], place[1], place[1] + 1),),
            ),
            evidence=(
                Evidence(f"largest |output| of {row['module']}", row["absmax"], "", reference, name,
                         used.value * reference, used.source),
                Evidence("the same in the other layers, median", usual, ""),
                Evidence("modules past the limits, this one first", len(found), f"of {len(m.modules)}"),
            ),
            plans=(
                Plan("clamp_channel", {"module": row["module"], "channel": channel, "limit": limit},
                     f"channel {channel} of {row['module']} clamped to {limit:.3g}"),
                # One unit inside an MLP drives every channel of its output at once.
                Plan("clamp_channel", {"module": row["module"], "channel": None, "limit": limit},
                     f"all channels of {row['module']} clamped to {limit:.3g}"),
                *inner,
            ),
            strength=ratio / used.value,
        )
    ]  # fmt: skip


_DOWN = "model.layers.2.mlp.down_proj"
_BLOCKS = [f"model.layers.{layer}" for layer in range(4)]
RULE = Rule(
    slug="activation-outlier",
    order=702,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case(
            "one MLP at 5 000, 9 on the baseline batch",
            {"modules": _cases.modules({_DOWN: {"absmax": 5000.0, "baseline_absmax": 9.0}})},
            True,
        ),
        Case(
            "one MLP far past its siblings, no baseline", {"modules": _cases.modules({_DOWN: {"absmax": 5000.0}})}, True
        ),
        Case(
            "near miss: massive activations, the same on the baseline batch",
            {
                "modules": _cases.modules(
                    {
                        name: {"absmax": 23_281.0, "baseline_absmax": 23_300.0, "position": 0}
                        for name in (_DOWN, *_BLOCKS[2:])
                    }
                )
            },
            False,
        ),
        Case(
            "near miss: massive activations without a baseline: the later blocks share the channel",
            {
                "modules": _cases.modules(
                    {name: {"absmax": 23_281.0, "channel": 7, "position": 12} for name in (_DOWN, *_BLOCKS[2:])}
                )
            },
            False,
        ),
        Case(
            "one MLP far past its siblings whose channel the later blocks share, and a loss that has risen",
            {
                "modules": _cases.modules(
                    {name: {"absmax": 5000.0, "channel": 7, "position": 12} for name in (_DOWN, *_BLOCKS[2:])}
                ),
                "loss": 5.6,
                "log": {"step": 400, "usual_loss": 3.4, "loss_spread": 0.05},
            },
            True,
        ),
        Case(
            "one MLP far past its siblings on the baseline batch as well, and both stand above the log",
            {
                "modules": _cases.modules({_DOWN: {"absmax": 5000.0, "baseline_absmax": 4800.0, "position": 12}}),
                "loss": 5.6,
                "baseline_loss": 5.7,
                "log": {"step": 400, "usual_loss": 3.4, "loss_spread": 0.05},
            },
            True,
        ),
        Case(
            "one MLP at 62 x the baseline batch, which is somewhat dear itself",
            {
                "modules": _cases.modules({_DOWN: {"absmax": 500.0, "baseline_absmax": 8.0, "position": 12}}),
                "loss": 5.6,
                "baseline_loss": 4.3,
                "log": {"step": 400, "usual_loss": 3.4, "loss_spread": 0.05},
            },
            True,
        ),
        Case(
            "near miss: the same where the baseline batch costs what the log says",
            {
                "modules": _cases.modules({_DOWN: {"absmax": 5000.0, "baseline_absmax": 4800.0, "position": 12}}),
                "loss": 5.6,
                "baseline_loss": 3.4,
                "log": {"step": 400, "usual_loss": 3.4, "loss_spread": 0.05},
            },
            False,
        ),
        Case(
            "near miss: one MLP at 20 x its siblings, no baseline",
            {"modules": _cases.modules({_DOWN: {"absmax": 160.0}})},
            False,
        ),
    ),
)
