"""The same replay, done twice, gives two results."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Rule, Skip, Suspect, Threshold
from stability_probe.rules._tables import plural
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "gap": Threshold(
        1e-3, "nats, a token's loss", "sums in another order move a token's loss by about 1e-5 in fp32",
        "fp32 keeps 24 significant bits: 6e-8 relative, over a few thousand additions",
    ),
    "loss_change": Threshold(
        0.02, "nats, the batch's loss", "from here on the interventions of the verdict cannot be told from noise",
        "the noise floor that explained shares are held against (confirm.LOSS_NOISE)",
    ),
    "token_change": Threshold(
        0.5, "nats, a token's loss", "so far no other order of sums moves a token: another computation was done, even "
        "where the tokens' changes cancel in the mean",
        "500 times the limit above, 50 000 times what fp32 sums move it by",
    ),
}  # fmt: skip

PAGE = Page(
    title="Nondeterministic replay",
    claim="The same weights, batch and seed gave two different losses: something outside them takes part.",
    mechanism=(
        "A forward pass is a function of weights, inputs and seed. If it returns something else the second time, "
        "memory is being read that nobody wrote, two kernels race, a counter or a clock is part of the model, or the "
        "hardware computes wrongly. In training such a fault shows as rare spikes or NaNs that no replay brings "
        "back, on any batch; as silent corruption it does not show at all until the loss has drifted."
    ),
    signature="The losses of the same rows differ between two replays by far more than rounding.",
    false_alarms=(
        "Atomic additions on a GPU sum in another order each time: differences of about 1e-5 nats, and now and then "
        "an expert chosen differently. Dropout and other random numbers are seeded alike for both replays. Another "
        "thread count changes a bf16 result between runs, not within one."
    ),
    proof="The repetition is the proof: nothing was changed between the two.",
    remedies=(
        Remedy("Replay on the CPU and on another device: if one of them repeats itself, the other is the suspect."),
        Remedy("Run with CUDA_LAUNCH_BLOCKING=1 and torch.use_deterministic_algorithms(True) to find the kernel."),
        Remedy("Look for state in the model: counters, caches, generators of its own, uninitialised buffers."),
        Remedy("Run the vendor's hardware diagnostic on the machine of the incident."),
    ),
    references=(
        "PyTorch documentation, Reproducibility",
        "Dixit et al., Silent Data Corruptions at Scale, 2021",
    ),
)


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    if m.repeat_differs is None:
        raise Skip("the replay was not repeated")
    gap, change = m.repeat_gap or 0.0, m.repeat_loss_change or 0.0
    if not m.repeat_differs or not gap >= t["gap"].value:
        return []
    whole = not math.isfinite(change) or abs(change) >= t["loss_change"].value or gap >= t["token_change"].value
    size = f"{gap:.3g} nats" if math.isfinite(gap) else "a value that is not finite"
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"The same replay twice: a token's loss differs by {size}, in {plural(len(m.repeat_rows), 'row')}.",
            location=Location(rows=m.repeat_rows),
            evidence=(
                Evidence("largest difference of a token's loss between two replays", gap, "nats", 0.0,
                         "the same replay", t["gap"].value, t["gap"].source),
                Evidence("difference of the rows' mean loss", change, "nats", 0.0, "the same replay",
                         t["loss_change"].value, t["loss_change"].source),
            ),
            strength=min(gap / t["gap"].value, 1e6),
            decisive=whole,
            latent=not whole,
        )
    ]  # fmt: skip


_DIFFERS = {"repeat_differs": True, "repeat_rows": (0, 1, 2, 3)}
RULE = Rule(
    slug="nondeterministic-replay",
    order=1002,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case("the batch's loss differs", {**_DIFFERS, "repeat_gap": 1.7, "repeat_loss_change": 0.31}, True),
        Case(
            "finite once, NaN the other time",
            {**_DIFFERS, "repeat_gap": math.inf, "repeat_loss_change": math.nan},
            True,
        ),
        Case("a few tokens differ", {**_DIFFERS, "repeat_gap": 0.02, "repeat_loss_change": 1e-4}, True),
        Case("near miss: sums in another order", {**_DIFFERS, "repeat_gap": 2e-5, "repeat_loss_change": 1e-7}, False),
        Case("near miss: bit for bit the same", {"repeat_gap": 0.0, "repeat_loss_change": 0.0}, False),
    ),
)
