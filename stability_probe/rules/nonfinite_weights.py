"""NaN or infinity stored in a tensor of the checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Rule, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._tables import NAMED_AT_MOST, element, layer_of, layers_of, plural, records
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "elements": Threshold(
        0, "non-finite elements", "one NaN reaches every logit through the first matrix product that touches it",
        "IEEE 754-2019, section 6.2: a NaN operand gives a NaN result",
    ),
}  # fmt: skip

PAGE = Page(
    title="Non-finite weights",
    claim="The checkpoint itself holds NaN or infinite weights.",
    mechanism=(
        "A weight that is not finite makes every product that touches it non-finite, and the residual stream carries "
        "it to every logit after it. Most often an earlier step did it: a NaN gradient compares false with any clip "
        "threshold, passes the clip, and the optimizer writes it into the weights. From then on no batch is healthy."
    ),
    signature=(
        "A count above zero in the table of parameters, with the first index. Loss and gradients of the batch and of "
        "the baseline batch are NaN alike."
    ),
    false_alarms=(
        "An overflow during the replay also ends in NaN, but there the stored tensors are finite. Infinities in a "
        "mask buffer are by design; only parameters are counted."
    ),
    proof="None is needed: the stored bytes are the proof.",
    remedies=(
        Remedy("Roll back to the last checkpoint whose weights are all finite; nothing later can be saved."),
        Remedy("Skip the optimizer step whenever the gradient norm is not finite, before clipping."),
        Remedy("Replay the batch of the step before on the older checkpoint: the cause of the first NaN is there."),
    ),
    references=(
        "PyTorch, torch.nn.utils.clip_grad_norm_: error_if_nonfinite is off by default",
        "Zhang et al., OPT: Open Pre-trained Transformer Language Models, 2022, section 2.5 (restarts)",
    ),
)


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    bad = [row for row in records(m.parameters) if row["nonfinite"] > t["elements"].value]
    if not bad:
        return []
    first = bad[0]
    index = first["first_nonfinite_index"]
    count = sum(int(row["nonfinite"]) for row in bad)
    where = element(first["parameter"], index) if index is not None else first["parameter"]
    names = [
        element(row["parameter"], row["first_nonfinite_index"])
        if row["first_nonfinite_index"] is not None
        else row["parameter"]
        for row in bad[:NAMED_AT_MOST]
    ]
    evidence = tuple(
        Evidence(
            f"non-finite elements in {row['parameter']}", int(row["nonfinite"]), f"of {int(row['numel'])}",
            reference=0, reference_name="a usable checkpoint",
            threshold=t["elements"].value, source=t["elements"].source,
        )
        for row in bad[:4]
    )  # fmt: skip
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"{plural(count, 'stored weight')} in {plural(len(bad), 'tensor')} not finite, first {where}.",
            location=Location(layer=layer_of(first), layers=layers_of(bad), parameters=tuple(names)),
            evidence=evidence,
            strength=float(count),
            decisive=True,
        )
    ]


_Q = "model.layers.2.self_attn.q_proj.weight"
RULE = Rule(
    slug="nonfinite-weights",
    order=101,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case(
            "one NaN in a query projection",
            {"parameters": _cases.parameters({_Q: {"nonfinite": 1, "first_nonfinite_index": (3, 17)}})},
            fires=True,
        ),
        Case(
            "every tensor of the model is NaN after a bad step",
            {"parameters": _cases.parameters(everywhere={"nonfinite": 64, "first_nonfinite_index": (0,)})},
            fires=True,
        ),
        Case(
            "near miss: the loss is NaN, the stored weights are finite",
            {"loss": float("nan"), "loss_nonfinite": True, "grad_nonfinite": True},
            fires=False,
        ),
        Case(
            "near miss: a weight of 1e37 is absurd and yet finite",
            {"parameters": _cases.parameters({_Q: {"absmax": 1e37, "outlier_count": 1}})},
            fires=False,
        ),
    ),
)
