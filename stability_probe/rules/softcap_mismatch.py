"""The configuration names a cap on the output logits, and the logits are past it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Rule, Skip, Suspect, Threshold
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "past": Threshold(
        1.01, "x the cap", "cap x tanh(x / cap) never passes the cap; bf16 rounds by less than a hundredth",
        "Gemma 2 report, 2024, section 2 (logit soft-capping); bf16 rounds by at most 2^-9",
    ),
    "fill": Threshold(
        1e3, "logit", "values this far out are fills of masked vocabulary entries, set after the cap",
        "usual fills are -1e4, -1e9 and the format's smallest number; trained logits are below 100",
    ),
}  # fmt: skip

PAGE = Page(
    title="Soft-cap mismatch",
    claim="The model was trained with a soft-cap on its output logits, and the replayed code does not apply it.",
    mechanism=(
        "A soft-cap squeezes logits into (-c, c) by c tanh(x / c). A model trained with it lets raw logits grow past "
        "c, because the cap makes up for it. Leave the cap out and all confident predictions become far more "
        "confident, right or wrong; the loss rises by nats, and so do the gradients of the head. The opposite, a cap "
        "that the model never knew, flattens its sure predictions."
    ),
    signature="A cap in the configuration, and output logits beyond it.",
    false_alarms=(
        "Logits that saturate just below a configured cap are by design. Masked vocabulary entries hold large negative "
        "fills. Without a cap in the configuration large logits are nothing but large: `logit-drift` asks whether "
        "bf16 can hold them."
    ),
    proof="Arithmetic: a capped logit cannot pass the cap.",
    remedies=(
        Remedy("Apply the cap of the configuration in the model's forward.",
               "logits = cap * torch.tanh(logits / cap)"),
        Remedy("Check the attention's cap as well: kernels without one drop it silently."),
    ),
    references=(
        "Gemma Team, Gemma 2: Improving Open Language Models at a Practical Size, 2024, section 2",
    ),
)  # fmt: skip


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    cap = m.output_softcap
    if cap is None:
        raise Skip(
            "the configuration names no cap on the output logits; if the model was trained with one, put it there"
        )
    # log Z cannot pass the cap by more than ln V: a sign that no fill can fake.
    whole = m.log_z_mean > t["past"].value * cap + math.log(m.vocab_size)
    if not whole and not t["past"].value * cap < m.logit_absmax < t["fill"].value:
        return []
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"Output logits reach {m.logit_absmax:.3g}, past the configured soft-cap of {cap:g}.",
            location=Location(),
            evidence=(
                Evidence("largest |output logit|", m.logit_absmax, "", cap, "output soft-cap of the configuration",
                         t["past"].value * cap, t["past"].source),
                Evidence("mean log Z", m.log_z_mean, "nats", cap + math.log(m.vocab_size), "largest under the cap"),
            ),
            strength=max(m.logit_absmax / cap, 1.0),
            decisive=True,
        )
    ]  # fmt: skip


RULE = Rule(
    slug="softcap-mismatch",
    order=602,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case("a cap of 30, logits of 58", {"output_softcap": 30.0, "logit_absmax": 58.0}, True),
        Case(
            "log Z alone is past what the cap allows",
            {"output_softcap": 15.0, "logit_absmax": 1e4, "log_z_mean": 24.0},
            True,
        ),
        Case("near miss: logits saturate at the cap", {"output_softcap": 30.0, "logit_absmax": 29.99}, False),
        Case("near miss: masked vocabulary entries", {"output_softcap": 30.0, "logit_absmax": 1e9}, False),
        Case("near miss: no cap is configured", {"logit_absmax": 58.0}, False),
    ),
)
