"""Early in the run: the weights were drawn far too wide or too narrow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Plan, Rule, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._tables import Record, finite, is_trained, median, records
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "wide": Threshold(
        4, "x the recipes' std, median matrix", "0.02 and one over the root of the width differ by up to 3 at usual "
        "widths (64 to 8192), and both are sound: only what is outside both counts",
        "GPT-2 (0.02); Glorot and Bengio 2010 and torch's own Linear (of order one over the root of the inputs)",
    ),
    "narrow": Threshold(
        0.1, "x the recipes' std, median matrix", "logits and gradients shrink with every factor of it; small-init "
        "schemes go down to the root of 2 / 5d, well above",
        "Nguyen and Salazar, Transformers without Tears, 2019, section 2.2 (SmallInit)",
    ),
    "early": Threshold(
        100, "steps", "after this many steps the optimizer has moved the weights: width is the rate's doing then",
        "at a learning rate of 1e-3 Adam moves a weight by at most 0.1 in 100 steps",
    ),
    "over_uniform": Threshold(
        0.5, "nats over ln V", "an untrained model guesses: a sound initialisation starts within a few tenths of ln V",
        "logits of variance s² cost s²/2 nats; usual initialisations have s below 0.5",
    ),
}  # fmt: skip

PAGE = Page(
    title="Initialisation scale",
    claim="The weights were initialised far wider or narrower than the recipe, and the run starts ill.",
    mechanism=(
        "At the start the loss should be ln V: the model guesses. Weights that are too wide give logits of tens and a "
        "loss of many nats, saturated softmaxes, and gradients that grow through the depth; the first steps throw the "
        "model about until clipping and warm-up have undone the draw. Weights that are too narrow pass on nothing: "
        "the loss sits at ln V exactly, and the gradients of the lower layers are too small to leave it."
    ),
    signature=(
        "An untrained checkpoint, or one of the first steps; the std of most matrices several times off both 0.02 and "
        "one over the root of the inputs; a loss well above ln V (wide), or at it with tiny gradients (narrow)."
    ),
    false_alarms=(
        "Later in the run the weights' size is what training made of it: `learning-rate-too-high` or weight decay. "
        "Output projections without depth scaling are common and healthy at moderate depth. Embeddings are drawn "
        "with std 1 in some recipes. One wide tensor alone is `corrupt-weights`."
    ),
    proof="Every matrix is scaled to the recipe's std and the batch is replayed: the loss falls to ln V.",
    remedies=(
        Remedy("Initialise matrices with std 0.02 or one over the root of their inputs, before loading anything."),
        Remedy("Scale the projections into the residual stream by one over the root of twice the number of layers."),
        Remedy("Check the loss of step 0: it should be within a few tenths of ln V."),
    ),
    references=(
        "Radford et al., Language Models are Unsupervised Multitask Learners, 2019, section 2.3",
        "Glorot and Bengio, Understanding the difficulty of training deep feedforward neural networks, 2010",
        "Takase et al., Spike No More: Stabilizing the Pre-training of Large Language Models, 2023",
    ),
)  # fmt: skip


def recipe_std(row: Record) -> tuple[float, float]:
    """The narrowest and the widest std that the usual recipes give this matrix."""
    inputs = min(row["shape"]) if row["layer"] < 0 else row["shape"][-1]
    both = (0.02, 1 / math.sqrt(inputs))
    return min(both), max(both)


def width_ratio(row: Record) -> float:
    """How far the std lies outside of what the recipes give: 1 inside, above 1 wider, below 1 narrower."""
    low, high = recipe_std(row)
    return row["std"] / high if row["std"] > high else row["std"] / low if row["std"] < low else 1.0


def is_early(m: Measurements, steps: float) -> str:
    """Why the checkpoint counts as one of the first of its run; empty where it does not."""
    done = [m.log.step] if m.log is not None and m.log.step is not None else []
    done += [m.optimizer["step"]] if m.optimizer and m.optimizer.get("step") is not None else []
    if any(step > steps for step in done):
        return ""
    if done:
        return f"step {min(done)}"
    gains = [row for row in records(m.parameters) if row["norm_gain"] and row["numel"] > 1]
    return "every norm gain is at its initial value" if gains and not is_trained(m) else ""


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    early = is_early(m, t["early"].value)
    inside = [row for row in records(m.parameters) if len(row["shape"]) == 2 and row["layer"] >= 0 and row["std"] > 0]
    if not early or not inside:
        return []
    ratio = median(width_ratio(row) for row in inside)
    uniform = math.log(m.vocab_size)
    wide = ratio >= t["wide"].value and m.loss >= uniform + t["over_uniform"].value
    narrow = ratio <= t["narrow"].value and abs(m.loss - uniform) <= t["over_uniform"].value
    if not (wide or narrow):
        return []
    matrices = [row for row in records(m.parameters) if len(row["shape"]) == 2 and row["std"] > 0]
    factors = {row["parameter"]: _to_recipe(row) / row["std"] for row in matrices}
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"Early in the run ({early}) the median matrix has {ratio:.3g} x the recipes' "
            f"{'widest' if wide else 'narrowest'} std; loss {m.loss:.2f} nats, ln V {uniform:.2f}.",
            location=Location(
                layers=tuple(sorted({int(row["layer"]) for row in inside})),
                parameters=tuple(row["parameter"] for row in inside[:16]),
            ),
            evidence=(
                Evidence("std over the recipes', median matrix of the blocks", ratio, "x",
                         threshold=t["wide" if wide else "narrow"].value, source=t["wide"].source),
                Evidence("std of the median matrix", median(finite(row["std"] for row in inside)), "",
                         median(recipe_std(row)[1] for row in inside), "widest recipe"),
                Evidence("loss", m.loss, "nats", uniform, "guessing, ln V", uniform + t["over_uniform"].value,
                         t["over_uniform"].source),
            ),
            plans=(Plan("rescale_tensors", {"factors": factors}, "every matrix at the recipe's std"),) if wide else (),
            strength=ratio / t["wide"].value if wide else t["narrow"].value / ratio,
            latent=narrow,
        )
    ]  # fmt: skip


def _to_recipe(row: Record) -> float:
    """The nearer end of what the recipes give."""
    low, high = recipe_std(row)
    return min(max(row["std"], low), high)


_FRESH = {"constant": 1.0, "std": 0.0, "mean": 1.0}


def _drawn(std: float) -> list[Record]:
    table = _cases.parameters()
    return [{**row, **_FRESH} if row["norm_gain"] else {**row, "std": std, "rms": std} for row in table]


RULE = Rule(
    slug="init-scale",
    order=704,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case("drawn with std 1 instead of 0.02", {"parameters": _drawn(1.0), "loss": 31.0}, True),
        Case(
            "wide, and a few steps old",
            {"parameters": _cases.parameters(everywhere={"std": 0.9}), "loss": 9.0, "optimizer": {"step": 12}},
            True,
        ),
        Case("drawn with std 1e-4: the run starts on a plateau", {"parameters": _drawn(1e-4), "loss": 6.908}, True),
        Case("near miss: an untrained model within the recipes", {"parameters": _drawn(0.02), "loss": 6.92}, False),
        Case(
            "near miss: wide weights late in the run",
            {"parameters": _cases.parameters(everywhere={"std": 0.9}), "loss": 9.0, "optimizer": {"step": 40_000}},
            False,
        ),
        Case("near miss: wide, but the loss is ln V", {"parameters": _drawn(0.6), "loss": 6.95}, False),
    ),
)
