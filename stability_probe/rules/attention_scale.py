"""Attention logits divided by the wrong number, in every head of every layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Plan, Rule, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._attention import require_attention
from stability_probe.rules._tables import (
    CLEAR_NATS,
    CLEAR_SIGMAS,
    Record,
    clear_margin,
    is_number,
    is_trained,
    median,
    quantile,
    records,
)
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "clear": CLEAR_NATS,
    "clear_sigmas": CLEAR_SIGMAS,
    "steep": Threshold(
        5, "x the log's usual gradient norm, no row flagged", "the model no longer computes what training had made of "
        "it, even where the loss hardly shows it; the repair, tried, decides",
        "ordinary batches differ by a factor of two or three: python benchmarks/healthy_ranges.py (gradient norms)",
    ),
    "hot": Threshold(
        40, "median of the heads' largest logits", "healthy medians are 13 to 17; without 1/root(64) they are eight "
        "times as large",
        "python benchmarks/healthy_ranges.py (SmolLM2-135M on five kinds of text)",
    ),
    "hot_quartile": Threshold(
        25, "lower quartile of the heads' largest logits", "a wrong scale is the same in all heads, so the cool "
        "ones are hot too; the healthy lower quartile is about 11",
        "python benchmarks/healthy_ranges.py (SmolLM2-135M on five kinds of text)",
    ),
    "some": Threshold(
        100, "largest logit of any head", "where the loss has risen too, other heads may have begun lower",
        "rule attention-logit-growth: tau of QK-clip (Kimi K2)",
    ),
    "all": Threshold(
        15, "lower quartile of the heads' largest logits", "then no head is cold: the healthy lower quartile is about "
        "11, and a factor is the same for all", "python benchmarks/healthy_ranges.py",
    ),
    "fell": Threshold(
        0.3, "nats over the usual loss in the log", "flat attention is a fault only where the run did better before; "
        "the repair, tried, decides",
        "little-trained models measured: median head 4.0 to 4.4 of 4.55 nats, x 2 gained 0.01 nats",
    ),
    "sigmas": Threshold(
        6, "robust standard deviations of the logged loss", "the spike rule of long runs",
        "OLMo-core: a step is skipped at 6 standard deviations over 128 steps",
    ),
    "cold": Threshold(
        0.75, "of the uniform entropy, median head", "a trained model's median head has 2.3 of 5.2 nats",
        "python benchmarks/healthy_ranges.py (SmolLM2-135M on five kinds of text)",
    ),
}  # fmt: skip

PAGE = Page(
    title="Attention scale",
    claim="The attention logits are wrong in all layers: without 1/root(d), with it twice, or with another d.",
    mechanism=(
        "Weights are trained for one scale. Loaded into code that leaves it out, all logits are larger by the root of "
        "the head width and every softmax is one-hot; in code that applies it twice, or takes the model's width for "
        "the head's, attention goes flat and averages over everything. The loss jumps when the code changes, at a "
        "restart or a kernel swap, with weights that have nothing wrong with them."
    ),
    signature=(
        "Every head of every layer hot, or flat (with a loss far above the log's usual), by about the same "
        "factor; replaying with the logits scaled back brings the loss down by nats."
    ),
    false_alarms=(
        "A few hot heads, or one hot layer, are `attention-logit-growth`. An untrained model attends evenly "
        "everywhere and is right to. Models that fold the scale into their weights have ordinary logits. On a healthy "
        "model no other scale lowers the loss (x 0.9 costs 0.03 nats, x 0.5 costs 1.5)."
    ),
    proof="All logits are multiplied by the factor that is missing (or too many), and the batch is replayed.",
    remedies=(
        Remedy("Set the scale in the configuration or the attention call to one over the root of the head width."),
        Remedy("Compare the new attention code with the old on one batch before resuming, to 1e-3 in the loss."),
    ),
    references=(
        "Vaswani et al., Attention Is All You Need, 2017, section 3.2.1",
        "PyTorch, torch.nn.functional.scaled_dot_product_attention: scale",
    ),
)


def uniform_entropy(length: float) -> float:
    """Mean of ln(keys in sight) over the later half of the queries of a causal row, nats."""
    first = int(length // 2)
    seen = range(first + 1, int(length) + 1)
    return sum(math.log(keys) for keys in seen) / len(seen) if seen else math.nan


def _widths(m: Measurements, heads: list[Record]) -> list[int]:
    """Head widths to try: read off the query projection where it has a name, else the two usual ones."""
    per_layer = sum(head["layer"] == heads[0]["layer"] for head in heads)
    outputs = [
        shape[0] // per_layer
        for row in records(m.parameters)
        if "q_proj" in row["parameter"] and len(shape := row["shape"]) == 2
    ]
    return sorted(set(outputs[:1])) or [64, 128]


def _plans(m: Measurements, heads: list[Record], hot: bool) -> tuple[Plan, ...]:
    places = [(int(head["layer"]), int(head["head"])) for head in heads]
    per_layer = sum(layer == places[0][0] for layer, _ in places)
    roots = {f"root of the head width {width}": width**0.5 for width in _widths(m, heads)}
    factors = {f"divided by the {name}": 1 / root for name, root in roots.items()}
    factors |= {f"divided by the head width {width}": 1 / width for width in _widths(m, heads)}
    if not hot:
        # Over the width, over its power of 1.5, or over its square where its root was meant.
        powers = (("root of the head width", 0.5), ("head width", 1.0), ("head width to the power of 1.5", 1.5))
        factors = {f"times the {name} {width}": width**p for width in _widths(m, heads) for name, p in powers}
        if per_layer > 1:
            factors["times the root of the number of heads"] = per_layer**0.5
    return tuple(Plan("rescale_logits", {"factor": factor}, f"all logits {name}") for name, factor in factors.items())


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    require_attention(m)
    heads = [row for row in records(m.heads) if is_number(row["max_logit"]) and is_number(row["entropy"])]
    if not heads or not is_trained(m):
        return []
    largest = [head["max_logit"] for head in heads]
    middle, low = median(largest), quantile(largest, 0.25)
    entropy = median(head["entropy"] for head in heads)
    uniform = uniform_entropy(median(row["tokens"] for row in records(m.rows)))
    hot = middle >= t["hot"].value and low >= t["hot_quartile"].value
    # A little-trained model is flat too, and may gain from any sharpening: only a fall from what the run had counts.
    usual = m.log.usual_loss if m.log is not None else None
    usual_norm = m.log.usual_grad_norm if m.log is not None else None
    # A bad row has a large gradient on any weights.
    steep = (
        usual_norm is not None
        and usual_norm > 0
        and m.global_grad_norm >= t["steep"].value * usual_norm
        and not any(row["flags"] for row in records(m.rows))
    )
    dearer = usual is not None and m.loss >= usual + clear_margin(m, t, "fell")
    fell = steep or dearer
    cold = fell and uniform > 0 and entropy >= t["cold"].value * uniform
    # Layers differ in what they had before the factor came on top: some may be past any limit, and others not.
    partly = fell and not cold and max(largest) >= t["some"].value and low >= t["all"].value
    if not (hot or cold or partly):
        return []
    hot = hot or partly
    what = (
        f"hot: the median head reaches a logit of {middle:.0f}, the largest {max(largest):.0f}"
        if hot
        else f"flat: {entropy:.2f} of {uniform:.2f} nats"
    )
    layers = tuple(sorted({int(head["layer"]) for head in heads}))
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"All {len(heads)} heads of all layers are {what}.",
            location=Location(layers=layers),
            evidence=(
                Evidence("median of the heads' largest logits", middle, "", threshold=t["hot"].value,
                         source=t["hot"].source),
                Evidence("lower quartile of the heads' largest logits", low, "", threshold=t["hot_quartile"].value,
                         source=t["hot_quartile"].source),
                Evidence("attention entropy of the median head", entropy, "nats", uniform, "uniform attention",
                         t["cold"].value * uniform, t["cold"].source),
                Evidence("loss of this batch", m.loss, "nats", usual, "usual loss in the log", source=t["fell"].source),
                Evidence("global gradient norm", m.global_grad_norm, "", usual_norm, "usual norm in the log",
                         source=t["steep"].source),
            ),
            plans=_plans(m, heads, hot),
            strength=middle / t["hot"].value if hot else entropy / (t["cold"].value * uniform),
            measures=("loss",),
        )
    ]  # fmt: skip


RULE = Rule(
    slug="attention-scale",
    order=503,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case(
            "the scale is missing",
            {"heads": [{**row, "max_logit": 8 * row["max_logit"], "entropy": 0.1} for row in _cases.heads()]},
            True,
        ),
        Case(
            "the scale is applied twice",
            {
                "heads": [{**row, "max_logit": row["max_logit"] / 8, "entropy": 4.4} for row in _cases.heads()],
                "loss": 5.1,
                "log": {"step": 400, "usual_loss": 3.4, "loss_spread": 0.05},
            },
            True,
        ),
        Case(
            "the scale is applied twice: the loss hardly shows it, the gradient does",
            {
                "heads": [{**row, "max_logit": row["max_logit"] / 8, "entropy": 4.4} for row in _cases.heads()],
                "loss": 3.6,
                "global_grad_norm": 6.0,
                "log": {"step": 400, "usual_loss": 3.4, "loss_spread": 0.05, "usual_grad_norm": 1.0},
            },
            True,
        ),
        Case(
            "near miss: a flat model under a log whose gradient norms are all zero",
            {
                "heads": [{**row, "max_logit": row["max_logit"] / 8, "entropy": 4.4} for row in _cases.heads()],
                "log": {"step": 400, "usual_loss": 3.4, "loss_spread": 0.05, "usual_grad_norm": 0.0},
            },
            False,
        ),
        Case(
            "near miss: a steep gradient on a flat model, from a row that is flagged",
            {
                "heads": [{**row, "max_logit": row["max_logit"] / 8, "entropy": 4.4} for row in _cases.heads()],
                "loss": 3.6,
                "global_grad_norm": 6.0,
                "rows": _cases.rows({1: {"flags": ["garbage-tokens"], "audit_score": 0.9}}),
                "log": {"step": 400, "usual_loss": 3.4, "loss_spread": 0.05, "usual_grad_norm": 1.0},
            },
            False,
        ),
        Case(
            "the scale is missing where layers began at different levels",
            {
                "heads": _cases.heads(
                    {
                        (layer, h): {"max_logit": (20.0, 800.0, 50.0, 60.0)[layer]}
                        for layer in range(4)
                        for h in range(4)
                    }
                ),
                "loss": 5.1,
                "log": {"step": 400, "usual_loss": 3.4, "loss_spread": 0.05},
            },
            True,
        ),
        Case(
            "near miss: one hot layer and a loss above the usual: the other heads are as cool as ever",
            {
                "heads": _cases.heads({(1, h): {"max_logit": 300.0} for h in range(4)}),
                "loss": 5.1,
                "log": {"step": 400, "usual_loss": 3.4, "loss_spread": 0.05},
            },
            False,
        ),
        Case(
            "near miss: one hot layer", {"heads": _cases.heads({(1, h): {"max_logit": 300.0} for h in range(4)})}, False
        ),
        Case(
            "near miss: a little-trained model is flat, and the log never had it better",
            {"heads": [{**row, "max_logit": row["max_logit"] / 8, "entropy": 4.4} for row in _cases.heads()]},
            False,
        ),
        Case(
            "near miss: an untrained model attends evenly",
            {
                "heads": [{**row, "max_logit": 0.8, "entropy": 4.55} for row in _cases.heads()],
                "parameters": _cases.parameters(everywhere={"constant": 1.0, "std": 0.0}),
            },
            False,
        ),
    ),
)
