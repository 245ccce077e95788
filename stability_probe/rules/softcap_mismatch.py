"""The configuration names a cap on the output logits, and the logits are past it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Plan, Rule, Skip, Suspect, Threshold
from stability_probe.rules._tables import is_number, records
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
    "saturated": Threshold(
        0.9, "of the cap", "tanh is within a tenth of its limit: the cap shapes these logits",
        "tanh(1.47) = 0.9: a raw logit half as large again as the cap",
    ),
    "fell": Threshold(
        0.3, "nats over the usual loss in the log", "saturation is by design in a model that was trained with the cap; "
        "a needless one costs more than this (cap 30 on SmolLM2-135M: 0.8 nats)",
        "SmolLM2-135M, soft-caps 15, 30 and 50 on the output: 6.3, 3.4 and 2.75 against 2.625 nats",
    ),
}  # fmt: skip

PAGE = Page(
    title="Soft-cap mismatch",
    claim="The code's soft-cap is not the one that the model was trained with: it is left out, or one too many.",
    mechanism=(
        "A soft-cap squeezes logits into (-c, c) by c tanh(x / c). A model trained with it lets raw logits grow past "
        "c, because the cap makes up for it. Leave the cap out and all confident predictions become far more "
        "confident, right or wrong; the loss rises by nats, and so do the gradients of the head. The opposite, a cap "
        "that the model never knew, flattens its sure predictions."
    ),
    signature=(
        "A cap in the configuration, and output logits beyond it; or logits that saturate at the cap with a loss far "
        "above the log's usual, which comes back when the cap is undone."
    ),
    false_alarms=(
        "Logits that saturate just below a configured cap are by design. Masked vocabulary entries hold large negative "
        "fills. Without a cap in the configuration large logits are nothing but large: `logit-drift` asks whether "
        "bf16 can hold them."
    ),
    proof="Arithmetic where logits pass the cap; else the cap is undone (c atanh(x / c)) and the batch is replayed.",
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
    if m.output_softcap is None and m.attention_softcap is None:
        raise Skip("the configuration names no cap on logits; if the model was trained with one, put it there")
    return [*_left_out(m, t), *_one_too_many(m, t)]


def _left_out(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    cap = m.output_softcap
    if cap is None:
        return []
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


def _one_too_many(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    """Logits that saturate at a cap, where the log says that the run did better."""
    usual = m.log.usual_loss if m.log is not None else None
    # However the log scatters: undoing the cap is the test, and where it belongs that gains nothing.
    if usual is None or not m.loss >= usual + t["fell"].value:
        return []
    hottest = max((row["max_logit"] for row in records(m.heads) if is_number(row["max_logit"])), default=0.0)
    sites = {"output": (m.output_softcap, m.logit_absmax), "attention": (m.attention_softcap, hottest)}
    found = []
    for where, (cap, largest) in sites.items():
        if cap is None or not t["saturated"].value * cap <= largest <= t["past"].value * cap:
            continue
        found.append(
            Suspect(
                cause=RULE.slug,
                summary=f"The {where} logits saturate at the soft-cap of {cap:g}, and the loss stands "
                f"{m.loss - usual:.2f} nats above the log's usual.",
                location=Location(),
                evidence=(
                    Evidence(f"largest |logit|, {where}", largest, "", cap, "soft-cap of the configuration",
                             t["saturated"].value * cap, t["saturated"].source),
                    Evidence("loss", m.loss, "nats", usual, "usual loss in the log", source=t["fell"].source),
                ),
                plans=(
                    Plan("cap_logits", {"cap": cap, "where": where, "remove": True},
                         f"the cap on the {where} logits undone"),
                ),
                strength=largest / (t["saturated"].value * cap),
                measures=("loss",),
            )
        )  # fmt: skip
    return found


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
        Case(
            "saturated at a cap of 5, and the run did better without it",
            {"output_softcap": 5.0, "logit_absmax": 4.99, "loss": 4.6, "log": {"usual_loss": 3.4, "loss_spread": 0.05}},
            True,
        ),
        Case(
            "a log that scatters: what undoing the cap gains decides",
            {"output_softcap": 5.0, "logit_absmax": 4.99, "loss": 4.6, "log": {"usual_loss": 3.4, "loss_spread": 0.5}},
            True,
        ),
        Case(
            "near miss: saturated, and the loss is the usual one",
            {"output_softcap": 5.0, "logit_absmax": 4.99, "loss": 3.6, "log": {"usual_loss": 3.4, "loss_spread": 0.05}},
            False,
        ),
        Case("near miss: logits saturate at the cap", {"output_softcap": 30.0, "logit_absmax": 29.99}, False),
        Case("near miss: masked vocabulary entries", {"output_softcap": 30.0, "logit_absmax": 1e9}, False),
        Case("near miss: no cap is configured", {"logit_absmax": 58.0}, False),
    ),
)
