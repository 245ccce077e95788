"""A value passes 65 504, the largest that fp16 can hold."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Plan, Rule, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._tables import is_number, layer_of, layers_of, records
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "absmax": Threshold(
        65_504, "largest finite value", "the largest finite number of the format; everything beyond rounds to infinity",
        "IEEE 754-2019, binary16: (2 - 2^-10) x 2^15",
    ),
}  # fmt: skip

PAGE = Page(
    title="fp16 overflow",
    claim="An activation or attention logit passes 65 504 and becomes infinite in fp16.",
    mechanism=(
        "fp16 keeps five exponent bits. A residual stream with massive activations, a wide matrix product or a dot "
        "product of two long vectors can pass its largest value; the result is infinity, and infinity minus infinity "
        "in a softmax or a norm is NaN. The loss scale does not help: it moves gradients, not activations. Whatever "
        "batch first drives a value over the edge turns the loss into NaN."
    ),
    signature=(
        "The fp16 replay is not finite while fp32 and bf16 are, with ordinary losses. The first module in execution "
        "order whose output is not finite names the place; its fp32 output shows by how much it passes the limit."
    ),
    false_alarms=(
        "Loss scaling at the start of a run overflows on purpose a few times and skips those steps: only the forward "
        "is judged here. Where fp32 is not finite either, the weights or the mask are at fault. Grown attention logits "
        "are bad in fp32 too. A run that trains in bf16 does not care that fp16 would overflow. Activations of 20 000 "
        "in the residual stream are common and fit."
    ),
    proof="The batch is replayed in bf16, which has fp32's range: the result is finite.",
    remedies=(
        Remedy("Train in bf16: the range of fp32 with the size of fp16."),
        Remedy("Keep the named module in fp32, or scale its input down and its output up."),
        Remedy("If attention logits are what overflows: QK-norm, or scale q before the product with k."),
    ),
    references=(
        "Micikevicius et al., Mixed Precision Training, 2017, section 3",
        "Sun et al., Massive Activations in Large Language Models, 2024",
    ),
)


def _first(m: Measurements, name: str | None) -> tuple[str | None, int | None, float]:
    """Module to look at, its layer, and the absmax it has in fp32."""
    table = records(m.modules)
    named = [row for row in table if row["module"] == name]
    over = [row for row in table if row["outside_fp16"] > 0]
    row = next(iter(named or over), None)
    if row is None:
        return name, None, math.nan
    return row["module"], layer_of(row), row["absmax"]


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    if not m.run_precision.startswith("fp16") or not math.isfinite(m.loss):
        return []
    gap = m.precisions.get(m.run_precision) or m.precisions.get("fp16") or m.precisions.get("fp16-true")
    over = [row for row in records(m.modules) if row["outside_fp16"] > 0 or row["absmax"] > t["absmax"].value]
    # A gradient that overflows under its loss scale is skipped by the scaler: only the forward counts.
    broken = gap is not None and (gap.first_nonfinite is not None or not math.isfinite(gap.loss))
    if not broken and not (gap is None and over):
        return []
    module, layer, absmax = _first(m, gap.first_nonfinite if gap else None)
    size = f" (absmax {absmax:.3g} in fp32)" if is_number(absmax) else ""
    what = "the loss is not a number" if gap is not None and not is_number(gap.loss) else "the value has no place there"
    evidence = [
        Evidence(
            f"largest value in {module}", absmax, "", t["absmax"].value, "largest fp16 number", t["absmax"].value,
            t["absmax"].source,
        )
    ] if is_number(absmax) else []  # fmt: skip
    if gap is not None:
        evidence.append(Evidence(f"loss in {m.run_precision}", gap.loss, "nats", m.loss, "loss in fp32"))
        evidence.append(Evidence(f"non-finite values in {m.run_precision}", gap.nonfinite, "", 0, "fp32"))
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"{module or 'A module'} overflows fp16{size}: {what}; fp32 gives {m.loss:.2f} nats.",
            location=Location(
                module=module, layer=layer, layers=layers_of(over) or ((layer,) if layer is not None else ())
            ),
            evidence=tuple(evidence),
            plans=(Plan("change_precision", {"precision": "bf16", "modules": []}, "replayed in bf16"),),
            strength=absmax / t["absmax"].value if is_number(absmax) else 1.0,
            measures=("nonfinite", "loss"),
        )
    ]


_MLP = "model.layers.2.mlp.down_proj"
_OVER = {_MLP: {"absmax": 91_000.0, "outside_fp16": 0.001}}
_NAN_GAP = {"loss": _cases.NAN, "token_gap": _cases.NAN, "nonfinite": 900, "first_nonfinite": _MLP}

RULE = Rule(
    slug="fp16-overflow",
    order=401,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case(
            "an MLP passes 65 504 in an fp16 run",
            {"run_precision": "fp16", "precisions": {"fp16": _NAN_GAP, "bf16": {}}, "modules": _cases.modules(_OVER)},
            True,
        ),
        Case(
            "the weights are in fp16 too",
            {"run_precision": "fp16-true", "precisions": {"fp16-true": _NAN_GAP}, "modules": _cases.modules(_OVER)},
            True,
        ),
        Case(
            "fp16 was not replayed, but a value has no place in it",
            {"run_precision": "fp16", "precisions": {"bf16": {}}, "modules": _cases.modules(_OVER)},
            True,
        ),
        Case(
            "near miss: massive activations of 23 281 fit",
            {
                "run_precision": "fp16",
                "precisions": {"fp16": {}},
                "modules": _cases.modules({_MLP: {"absmax": 23_281.0}}),
            },
            False,
        ),
        Case(
            "near miss: the run trains in bf16",
            {"run_precision": "bf16", "precisions": {"fp16": _NAN_GAP, "bf16": {}}, "modules": _cases.modules(_OVER)},
            False,
        ),
        Case(
            "near miss: fp32 is not finite either",
            {"run_precision": "fp16", "precisions": {"fp16": _NAN_GAP}, "loss": _cases.NAN, "loss_nonfinite": True},
            False,
        ),
    ),
)
