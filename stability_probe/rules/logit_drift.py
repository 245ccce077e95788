"""The output logits have drifted as a whole, to where bf16 cannot tell them apart."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Plan, Rule, Suspect, Threshold
from stability_probe.rules._tables import is_number, times
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements, PrecisionGap

THRESHOLDS = {
    "spacing": Threshold(
        0.5, "bf16 spacing at log Z, nats", "half a nat between neighbouring numbers: likely tokens become equal; the "
        "healthy SmolLM2-135M stands at 0.125 to 0.25 (log Z 27 to 38)",
        "bf16 keeps 8 significant bits: spacing 2^(floor(log2 x) - 7); python benchmarks/healthy_ranges.py",
    ),
    "latent_spacing": Threshold(
        1.0, "bf16 spacing at log Z, nats", "past this a probability is off by a factor of e^0.5 by rounding alone",
        "half the spacing is the largest rounding error",
    ),
    "token_gap": Threshold(
        0.1, "nats per token", "ordinary bf16 rounding of a healthy model costs 0.02 to 0.03",
        "python benchmarks/healthy_ranges.py (mean |loss in bf16 - loss in fp32|)",
    ),
    "from_rounding": Threshold(
        0.5, "of the gap", "most of the gap comes from rounding the logits, not from what happened before them",
        "the same half that the verdict asks of an explained share",
    ),
}  # fmt: skip

PAGE = Page(
    title="Logit drift",
    claim="All output logits have moved far from zero together, to where bf16's steps swallow their differences.",
    mechanism=(
        "Softmax and cross-entropy do not see a constant added to every logit, so nothing in the loss holds log Z "
        "near zero. It wanders during training. bf16 has eight significant bits: around 50 its numbers are a quarter "
        "apart, around 500 they are 2 apart. Rounded there, tokens whose probabilities differ by a factor of five "
        "become equal; loss and gradient turn into rounding noise that no optimizer step can lower."
    ),
    signature=(
        "A large mean |log Z| with an ordinary hidden state and attention; a loss in bf16 that differs from fp32 by "
        "tenths of a nat per token; nearly all of that gap appears when the fp32 logits alone are rounded, and is "
        "gone when log Z is subtracted first."
    ),
    false_alarms=(
        "|log Z| above 10 is common in healthy models: what counts is the spacing of bf16 there. A large head norm "
        "says nothing by itself. A soft-cap saturates logits by design. If the hidden state before the head is large, "
        "the residual stream is where to look. Masked vocabulary entries at -1e9 are not drift."
    ),
    proof="log Z is subtracted from the fp32 logits before they are rounded, or what all rows of the head share is "
    "taken out of them: the gap closes.",
    remedies=(
        Remedy("Add a z-loss: 1e-4 to 1e-5 times the square of log Z. It pulls log Z back without touching the "
               "probabilities.", "loss = loss + 1e-4 * torch.logsumexp(logits.float(), -1).pow(2).mean()"),
        Remedy("Compute the logits and the cross-entropy in fp32 until it has come back."),
        Remedy("Log the mean and spread of log Z."),
    ),
    references=(
        "Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022, section 5 (z-loss)",
        "Wortsman et al., Small-scale proxies for large-scale Transformer training instabilities, 2023, section 3.1.2",
        "OLMo team, 2 OLMo 2 Furious, 2024, section 3.3.2",
    ),
)  # fmt: skip


def bf16_spacing(value: float) -> float:
    """Distance of neighbouring bf16 numbers at |value|."""
    return 2.0 ** (math.floor(math.log2(abs(value))) - 7) if value else 0.0


def _gap(m: Measurements) -> PrecisionGap | None:
    names = [m.run_precision, "bf16", "bf16-true"]
    return next((m.precisions[name] for name in names if name.startswith("bf16") and name in m.precisions), None)


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    if not is_number(m.log_z_mean):
        return []
    spacing = bf16_spacing(m.log_z_mean)
    gap = _gap(m)
    known = gap is not None and is_number(gap.token_gap) and is_number(gap.rounding_gap)
    share = times(gap.rounding_gap or 0.0, gap.token_gap) if known and gap else math.nan
    costly = known and gap is not None and gap.token_gap >= t["token_gap"].value and share >= t["from_rounding"].value
    helps = not known or gap is None or gap.recentred_gap is None or gap.recentred_gap < (gap.rounding_gap or 0.0)
    if not helps or not (spacing >= t["spacing"].value or costly):
        return []
    cost = f"; bf16 moves the loss of a token by {gap.token_gap:.2f} nats" if gap and is_number(gap.token_gap) else ""
    evidence = [
        Evidence("bf16 spacing at the mean log Z", spacing, "nats", t["spacing"].value, "", t["spacing"].value,
                 t["spacing"].source),
        Evidence("mean log Z of the output logits", m.log_z_mean, "nats", 0.0, "what a z-loss holds it to"),
    ]  # fmt: skip
    if known and gap is not None:
        evidence += [
            Evidence("loss gap per token, bf16 against fp32", gap.token_gap, "nats", threshold=t["token_gap"].value,
                     source=t["token_gap"].source),
            Evidence("of it from rounding the logits alone", share, "", threshold=t["from_rounding"].value,
                     source=t["from_rounding"].source),
        ]  # fmt: skip
    head = _head(m)
    plans = [Plan("recentre_logits", {"precision": "bf16"}, "log Z subtracted from the logits before rounding")]
    if head is not None and not m.output_softcap:
        told = "what all rows of the head share taken out of them"
        plans.append(Plan("centre_head", {"module": head, "precision": "bf16"}, told))
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"Mean log Z is {m.log_z_mean:.0f}, where bf16 numbers are {spacing:g} apart{cost}.",
            location=Location(module=head),
            evidence=tuple(evidence),
            plans=tuple(plans),
            strength=max(spacing / t["spacing"].value, gap.token_gap / t["token_gap"].value if known and gap else 0.0),
            measures=("precision_gap",),
            latent=spacing >= t["latent_spacing"].value,
        )
    ]  # fmt: skip


def _head(m: Measurements) -> str | None:
    heads = [row["module"] for row in m.modules.to_dict("records") if row["role"] == "head"]
    return heads[0] if heads else None


_DRIFTED = {"loss": 3.9, "token_gap": 0.61, "rounding_gap": 0.58, "recentred_gap": 0.02}
RULE = Rule(
    slug="logit-drift",
    order=601,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case(
            "a constant of 500 on all logits",
            {"log_z_mean": 509.0, "logit_absmax": 516.0, "precisions": {"bf16": _DRIFTED}},
            True,
        ),
        Case(
            "drift to the other side",
            {"log_z_mean": -130.0, "precisions": {"bf16": {**_DRIFTED, "token_gap": 0.2, "rounding_gap": 0.18}}},
            True,
        ),
        Case("bf16 was not replayed, the spacing is 1", {"log_z_mean": 140.0, "precisions": {}}, True),
        Case(
            "near miss: healthy with log Z 27.6 and logits up to 43", {"log_z_mean": 27.6, "logit_absmax": 43.0}, False
        ),
        Case("near miss: masked vocabulary entries at -1e9", {"log_z_mean": 9.0, "logit_absmax": 1e9}, False),
        Case(
            "near miss: bf16 errs before the head",
            {
                "log_z_mean": 9.0,
                "precisions": {"bf16": {"token_gap": 0.4, "rounding_gap": 0.01, "recentred_gap": 0.01}},
            },
            False,
        ),
    ),
)
