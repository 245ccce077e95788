"""Adam's ε is larger than the gradients it is added to: the updates lose their scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Plan, Rule, Skip, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._optimizer import no_moments
from stability_probe.rules._tables import is_number, median, records
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "share": Threshold(
        0.5, "of a tensor's elements with root v below 10 epsilon", "where most elements are at the floor the tensor's "
        "step is no longer normalised",
        "fixtures/tiny.py with epsilon 1e-8: 0 in matrices, 0.16 to 0.5 in embeddings with unused rows",
    ),
    "lost": Threshold(
        0.8, "of the step's first-order gain", "an epsilon of the gradients' size costs half and is a choice that some "
        "recipes make; at the floor the step makes a fifth of its progress or less",
        "root v equal to epsilon halves an update; Llama trains with 1e-5",
    ),
}  # fmt: skip

PAGE = Page(
    title="Epsilon floor",
    claim="Most second moments are so small that Adam's ε, not the gradient's own size, sets the update.",
    mechanism=(
        "Adam divides by the root of the second moment plus ε. Gradients get smaller with the batch, the depth and "
        "the width, and with a loss that is divided once too often. When their root mean square falls to ε the "
        "division no longer normalises: the update shrinks in proportion to the gradient, layer by layer in "
        "different measure, and the parameters with the smallest gradients stop learning. The loss lies flat, and a "
        "batch with larger gradients moves such tensors many times as far as usual."
    ),
    signature=(
        "Most elements of many tensors with a root second moment below 10 ε; a simulated step that gains a fifth or "
        "less of what the same step gains with a tiny ε."
    ),
    false_alarms=(
        "Embedding rows of tokens that never came have no second moment and need none. Where only a few tensors have "
        "a small moment and a large gradient, the step is too long, not too short: `stale-second-moment`. A large ε "
        "chosen on purpose costs some gain; only a loss of most of it counts."
    ),
    proof="The AdamW step is simulated with an ε of 1e-15: the lost progress comes back.",
    remedies=(
        Remedy("Lower ε (1e-8 to 1e-15), or multiply the loss by a constant: the update does not see it, ε does."),
        Remedy("Look for a normalisation that is applied twice (accumulation steps, world size, tokens)."),
        Remedy("Where moments straddle ε, raise it to 1e-6 … 1e-5 with a higher learning rate: no element jumps then."),
    ),
    references=(
        "Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015, section 2.1",
        "Wortsman et al., Small-scale proxies for large-scale Transformer training instabilities, 2023, section 3.4",
    ),
)  # fmt: skip


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    progress = m.step_progress
    if progress is None:
        raise Skip(no_moments(m))
    known = [row for row in records(m.parameters) if is_number(row["eps_share"]) and len(row["shape"]) == 2]
    floored = [row for row in known if row["layer"] >= 0 and row["eps_share"] >= t["share"].value]
    if not floored or not progress.lost_to_epsilon >= t["lost"].value:
        return []
    worst = sorted(floored, key=lambda row: (-row["eps_share"], row["parameter"]))
    share = median(row["eps_share"] for row in known)
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"In {len(floored)} of {len(known)} matrices most second moments are at the floor of epsilon "
            f"{progress.eps:g}; the step loses {min(progress.lost_to_epsilon, 1.0):.0%} of its progress.",
            location=Location(
                layers=tuple(sorted({int(row["layer"]) for row in floored})),
                parameters=tuple(row["parameter"] for row in worst[:16]),
            ),
            evidence=(
                Evidence(f"elements with root v below 10 epsilon, {worst[0]['parameter']}", worst[0]["eps_share"], "",
                         share, "median matrix", t["share"].value, t["share"].source),
                Evidence("first-order gain of the step lost to epsilon", progress.lost_to_epsilon, "",
                         threshold=t["lost"].value, source=t["lost"].source),
                Evidence("first-order gain of the step with epsilon 1e-15", progress.expected, "nats"),
                Evidence("epsilon of the optimizer", progress.eps, ""),
            ),
            plans=(Plan("simulated_progress", {"tiny_eps": True}, "the step with epsilon 1e-15"),),
            strength=progress.lost_to_epsilon / t["lost"].value,
            measures=("lost_progress",),
        )
    ]  # fmt: skip


_FLOORED = _cases.parameters(everywhere={"eps_share": 0.97, "g2_over_v": 1.1})
_SOUND = _cases.parameters(everywhere={"eps_share": 0.0, "g2_over_v": 1.1})
RULE = Rule(
    slug="epsilon-floor",
    order=802,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case(
            "the loss is divided by 4096 once too often",
            {"parameters": _FLOORED, "step_progress": {"lost": 0.97, "lost_to_epsilon": 0.97}},
            True,
        ),
        Case(
            "one layer at the floor carries the gradient",
            {
                "parameters": _cases.parameters(
                    {"model.layers.0.mlp.up_proj.weight": {"eps_share": 0.9}}, everywhere={"eps_share": 0.1}
                ),
                "step_progress": {"lost": 0.85, "lost_to_epsilon": 0.85},
            },
            True,
        ),
        Case(
            "near miss: unused rows of the embedding",
            {
                "parameters": _cases.parameters(
                    {"model.embed_tokens.weight": {"eps_share": 0.9}}, everywhere={"eps_share": 0.0}
                ),
                "step_progress": {"lost": 0.01, "lost_to_epsilon": 0.01},
            },
            False,
        ),
        Case(
            "near miss: a large epsilon by choice",
            {"parameters": _FLOORED, "step_progress": {"lost": 0.55, "lost_to_epsilon": 0.55}},
            False,
        ),
        Case("near miss: a sound step", {"parameters": _SOUND, "step_progress": {}}, False),
    ),
)
