"""bf16 rounding costs more than ordinary noise, and it enters in one module."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Plan, Rule, Skip, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._tables import Record, is_number, layer_of, layers_of, median, records, times
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "token_gap": Threshold(
        0.1, "nats per token", "ordinary bf16 rounding of a healthy model costs 0.026 to 0.029",
        "python benchmarks/healthy_ranges.py (mean |loss in bf16 - loss in fp32|)",
    ),
    "grad_error": Threshold(
        0.5, "relative, of the whole gradient", "half of the gradient is error: the step no longer follows it",
        "python benchmarks/compare_precision.py: 0.025 on healthy SmolLM2-135M",
    ),
    "some_gap": Threshold(
        0.05, "nats per token", "beside such a gradient; half as much again as healthy rounding costs, and more",
        "as token_gap",
    ),
    "error": Threshold(
        0.04, "relative", "healthy modules stay below 0.017; one rounding alone is 2^-9 = 0.002",
        "python benchmarks/healthy_ranges.py (relative error in bf16 by role)",
    ),
    "jump": Threshold(
        3, "x the largest error before it", "an error that was there before is inherited; where it jumps it is made",
        "healthy errors grow by under a factor of two from one block to the next",
    ),
    "leap": Threshold(
        0.3, "relative", "of this size in one module nothing is ordinary, even where all later layers inherit as much: "
        "errors end near 1",
        "rule's own limit for a module, seven times over",
    ),
    "far_jump": Threshold(
        10, "x the largest error before it", "then nothing of it is inherited, however large it is in the layers after",
        "healthy errors grow by under a factor of two from one block to the next",
    ),
    "drifted": Threshold(
        256, "mean |log Z|", "a head that loses precision at such a level is the echo: the level itself is the cause, "
        "logit-drift",
        "bf16 numbers there are two apart; rule logit-drift",
    ),
    "from_rounding": Threshold(
        0.5, "of the gap", "where rounding the logits alone makes most of the gap, the head's level is the cause",
        "rule logit-drift",
    ),
}  # fmt: skip

PAGE = Page(
    title="bf16 precision loss",
    claim="One module loses far more in bf16 than rounding should cost, and the loss or the gradient shows it.",
    mechanism=(
        "bf16 keeps eight significant bits. That is enough for sums of many random terms, whose errors average out, "
        "and not enough where large numbers cancel: means and variances in norms, angles of distant positions, long "
        "cumulative sums, small differences of large logits. There the error is of the size of the result, often with "
        "one sign, and every layer after it inherits the error. Training then follows a gradient of another function."
    ),
    signature=(
        "A loss in bf16 that differs from fp32 by tenths of a nat per token, and a first module in execution order "
        "where the relative error jumps from a hundredth to many; the modules after it inherit the error."
    ),
    false_alarms=(
        "Ordinary rounding is spread over all layers at one or two per cent and moves a token's loss by 0.03 nats. "
        "The thread count alone moves a bf16 loss in the fourth digit. If rounding the output logits makes the gap, "
        "the cause is `logit-drift`. A module whose output is nearly zero has a large relative error that nobody sees."
    ),
    proof="The batch is replayed in bf16 with that one module in fp32: the gap closes.",
    remedies=(
        Remedy("Keep the named module in fp32 under autocast."),
        Remedy("Compute norms, rotary angles and softmax in fp32; keep their inputs and outputs in bf16."),
        Remedy("See which module introduces the error.", "probe compare-precision --ckpt CKPT --batch BATCH"),
    ),
    references=(
        "Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019",
        "Micikevicius et al., Mixed Precision Training, 2017, section 3",
    ),
)

_INDEX = re.compile(r"\.\d+(?=\.|$)")


def _introduces(table: list[Record], t: dict[str, Threshold]) -> tuple[Record, float] | None:
    """The first module whose error is large and jumps over everything before it, and over its siblings."""
    before = 0.0
    for row in table:
        error = row["gap_bf16"]
        siblings = [
            other["gap_bf16"]
            for other in table
            if other is not row and _INDEX.sub("", other["module"]) == _INDEX.sub("", row["module"])
        ]
        # The lower half of the siblings: the later ones inherit this module's error.
        usual = median(sorted(value for value in siblings if is_number(value))[: max(1, len(siblings) // 2)])
        leaps = error >= max(t["leap"].value, t["far_jump"].value * before)
        stands_out = not is_number(usual) or error >= t["jump"].value * usual or leaps
        if error >= t["error"].value and error >= t["jump"].value * before and stands_out:
            return row, before
        before = max(before, error)
    return None


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    name = next((n for n in (m.run_precision, "bf16", "bf16-true") if n.startswith("bf16") and n in m.precisions), None)
    if name is None:
        raise Skip("the batch was not replayed in bf16; ask for it with --precisions bf16")
    gap = m.precisions[name]
    spoilt = gap.grad_relative_error is not None and gap.grad_relative_error >= t["grad_error"].value
    least = t["some_gap" if spoilt else "token_gap"].value
    if not is_number(gap.token_gap) or gap.token_gap < least:
        return []
    if is_number(gap.rounding_gap) and times(gap.rounding_gap or 0.0, gap.token_gap) >= t["from_rounding"].value:
        return []
    table = [row for row in records(m.modules) if is_number(row["gap_bf16"])]
    found = _introduces(table, t)
    if not found:
        return []
    row, before = found
    helps = (gap.rounding_gap or 0.0) > (math.inf if gap.recentred_gap is None else gap.recentred_gap)
    if row["role"] == "head" and abs(m.log_z_mean) >= t["drifted"].value and helps:
        return []
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"{row['module']} is off by {row['gap_bf16']:.0%} in bf16 ({before:.1%} before it), "
            f"and the loss of a token by {gap.token_gap:.2f} nats.",
            location=Location(module=row["module"], layer=layer_of(row), layers=layers_of([row])),
            evidence=(
                Evidence(f"relative error of {row['module']} in {name}", row["gap_bf16"], "", before,
                         "largest error before it", t["error"].value, t["error"].source),
                Evidence(f"loss gap per token, {name} against fp32", gap.token_gap, "nats",
                         threshold=least, source=t["token_gap"].source),
                *(
                    (
                        Evidence(f"relative error of the gradient in {name}", gap.grad_relative_error, "",
                                 threshold=t["grad_error"].value, source=t["grad_error"].source),
                    )
                    if gap.grad_relative_error is not None
                    else ()
                ),
            ),
            plans=(
                Plan("change_precision", {"precision": name, "modules": [row["module"]]},
                     f"{name} with {row['module']} in fp32"),
            ),
            strength=gap.token_gap / t["token_gap"].value,
            measures=("precision_gap",),
        )
    ]  # fmt: skip


_NORM = "model.layers.2.input_layernorm"
_AFTER = ("model.layers.2.self_attn", "model.layers.2", "model.layers.3")
_BAD_GAP = {"loss": 3.9, "token_gap": 0.5, "rounding_gap": 0.01}
RULE = Rule(
    slug="bf16-precision-loss",
    order=402,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case(
            "one norm computed in bf16, and what inherits its error",
            {
                "modules": _cases.modules({_NORM: {"gap_bf16": 0.3}, **{name: {"gap_bf16": 0.25} for name in _AFTER}}),
                "precisions": {"bf16": _BAD_GAP},
            },
            True,
        ),
        Case(
            "one MLP alone",
            {"modules": _cases.modules({"model.layers.3.mlp": {"gap_bf16": 0.2}}), "precisions": {"bf16": _BAD_GAP}},
            True,
        ),
        Case(
            "the first layer spoils all that comes after it",
            {
                "modules": _cases.modules(
                    {
                        "model.embed_tokens": {"gap_bf16": 0.0},
                        "model.layers.0.input_layernorm": {"gap_bf16": 0.002},
                        "model.layers.0.self_attn": {"gap_bf16": 1.8},
                    },
                    everywhere={"gap_bf16": 1.0},
                ),
                "precisions": {"bf16": _BAD_GAP},
            },
            True,
        ),
        Case(
            "near miss: a head whose logits have drifted by two thousand",
            {
                "modules": _cases.modules({"lm_head": {"gap_bf16": 0.09}}),
                "precisions": {"bf16": {**_BAD_GAP, "rounding_gap": 0.2, "recentred_gap": 0.01}},
                "log_z_mean": -1992.0,
            },
            False,
        ),
        Case(
            "a head at such a level, where logits around zero would round no better",
            {
                "modules": _cases.modules({"lm_head": {"gap_bf16": 0.3}}),
                "precisions": {"bf16": {**_BAD_GAP, "recentred_gap": 0.01}},
                "log_z_mean": -1992.0,
            },
            True,
        ),
        Case(
            "a head",
            {"modules": _cases.modules({"lm_head": {"gap_bf16": 0.3}}), "precisions": {"bf16": _BAD_GAP}},
            True,
        ),
        Case("near miss: ordinary rounding", {"modules": _cases.modules(everywhere={"gap_bf16": 0.016})}, False),
        Case(
            "one MLP whose rounding costs the loss little and the gradient all",
            {
                "modules": _cases.modules({"model.layers.3.mlp": {"gap_bf16": 0.2}}),
                "precisions": {"bf16": {**_BAD_GAP, "token_gap": 0.08, "grad_relative_error": 1.1}},
            },
            True,
        ),
        Case(
            "near miss: so little for the loss, and an ordinary gradient",
            {
                "modules": _cases.modules({"model.layers.3.mlp": {"gap_bf16": 0.2}}),
                "precisions": {"bf16": {**_BAD_GAP, "token_gap": 0.08, "grad_relative_error": 0.03}},
            },
            False,
        ),
        Case(
            "near miss: a module is off, the loss does not care",
            {"modules": _cases.modules({_NORM: {"gap_bf16": 0.3}})},
            False,
        ),
        Case(
            "near miss: the head's level makes the gap",
            {
                "modules": _cases.modules({"lm_head": {"gap_bf16": 0.3}}),
                "precisions": {"bf16": {**_BAD_GAP, "rounding_gap": 0.49}},
            },
            False,
        ),
    ),
)
