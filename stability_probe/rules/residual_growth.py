"""The residual stream is amplified block after block."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from stability_probe.judge import Case, Page, Plan, Rule, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._tables import (
    CLEAR_NATS,
    CLEAR_SIGMAS,
    Record,
    clear_margin,
    is_number,
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
    "product": Threshold(
        3, "spectral norm of the product of mixing matrices", "identities and doubly stochastic matrices have 1 at "
        "any depth; perturbations of 0.15 reach 1.4, 6.3 and 23 after 10, 30 and 60 layers",
        "python -m pytest tests/test_seeds.py -k mixing",
    ),
    "runaway": Threshold(
        10, "spectral norm of the product of mixing matrices", "an amplification that the later blocks' additions "
        "cannot be heard over, whatever this batch pays for it",
        "python -m pytest tests/test_seeds.py -k mixing (30 layers reach 6.3, 60 layers 23)",
    ),
    "per_block": Threshold(
        1.6, "x rms per block, lower quartile", "additions of equal size grow the stream by a root of the depth, "
        "1.4 once and less after; a steady factor is an amplification",
        "fixtures/tiny.py: 1.03 to 1.4 per block; SmolLM2-135M: 1.01 but for one jump, from 6 to 60 at block 11",
    ),
    "total": Threshold(
        8, "x rms, first to last block", "three doublings within the stack",
        "fixtures/tiny.py: 1.2 to 1.9 over 4 blocks"
    ),
    "without_jump": Threshold(
        20, "x rms, first to last block, its largest step left out", "one jump is massive activations; what is left of "
        "a healthy stack is additions, which slow down with depth",
        "fixtures/tiny.py: at most 1.9; SmolLM2-135M: 1.3 but for the jump",
    ),
    "uneven_block": Threshold(
        1.25, "x rms per block, lower quartile", "factors that differ from block to block still compound",
        "as per_block: 1.03 to 1.4 in healthy tiny models, of a total under 2",
    ),
    "fell": Threshold(
        0.5, "nats over the usual loss in the log", "growth that was trained costs what the run was used to",
        "little-trained models, as in rule attention-scale",
    ),
    "sigmas": Threshold(
        4, "robust standard deviations of the logged loss", "the growth is the finding, and the loss need only agree: "
        "less than the 6 of a spike rule", "OLMo-core: a step is skipped at 6 standard deviations over 128 steps",
    ),
    "written": Threshold(
        1 / 3, "x, the first block's output projection over the largest later one", "decides only whether that repair "
        "is tried: trained projections of one kind differ by a factor of two, and more says nothing yet",
        "python benchmarks/healthy_ranges.py (rms / median of siblings)",
    ),
    "fewest_blocks": Threshold(
        4, "blocks", "a trend needs a few points", "three ratios are the fewest whose quartile means something"
    ),
}  # fmt: skip

PAGE = Page(
    title="Residual growth",
    claim="Each block multiplies the residual stream by more than one, and the factors compound over the depth.",
    mechanism=(
        "A residual stream carries its input on unchanged and adds to it. If the carrying matrix amplifies, or every "
        "block adds more than it was given, the size grows like a power of the depth: late blocks work on a stream "
        "that drowns their own additions, early ones send gradients that are too large by the same factor, and half "
        "precision runs out of range. Mixing matrices of hyper-connections do this as soon as they are free to: "
        "each is close to the identity, their product is not."
    ),
    signature=(
        "An rms that grows by a steady factor from block to block; a product of mixing matrices whose spectral norm "
        "is far above 1."
    ),
    false_alarms=(
        "Massive activations make the rms jump once, in one or two channels at fixed tokens, and stay there: healthy. "
        "A stream that grows by equal additions slows down with depth. Scaled embeddings make the first step small. "
        "A norm after each addition hides the growth and removes it."
    ),
    proof=(
        "Mixing matrices are divided by their spectral norm, or made doubly stochastic; output projections are scaled "
        "to what a stack of this depth needs; the batch is replayed."
    ),
    remedies=(
        Remedy("Constrain the mixing matrices to be doubly stochastic.",
               "stability_probe.mitigations.sinkhorn(matrix)"),
        Remedy("Initialise output projections narrower by one over the root of twice the number of layers."),
        Remedy("Log the rms of each block's output; alarm on the ratio of the last to the first."),
    ),
    references=(
        "Xie et al., mHC: Manifold-Constrained Hyper-Connections, 2025 (arXiv:2512.24880)",
        "Zhu et al., Hyper-Connections, 2024 (arXiv:2409.19606)",
        "Radford et al., Language Models are Unsupervised Multitask Learners, 2019, section 2.3 (depth scaling)",
    ),
)  # fmt: skip


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    mixed = _by_mixing(m, t)
    return mixed or _by_size(m, t)


def _by_mixing(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    known = [record for record in m.mixing if is_number(record["product_norm"])]
    if not known or known[-1]["product_norm"] < t["product"].value:
        return []
    last = known[-1]
    ranked = sorted(known, key=lambda record: -record["spectral_norm"])
    names = [record["parameter"] for record in known]
    some = _spaced(known)
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"The product of {len(known)} mixing matrices has a spectral norm of {last['product_norm']:.3g}; "
            "constrained ones have 1.",
            location=Location(
                layer=int(ranked[0]["layer"]),
                layers=tuple(dict.fromkeys(int(record["layer"]) for record in ranked)),
                parameters=tuple(record["parameter"] for record in ranked[:16]),
            ),
            evidence=(
                *(
                    Evidence(f"spectral norm of the product up to layer {record['layer']}", record["product_norm"], "",
                             1.0, "doubly stochastic matrices", t["product"].value, t["product"].source)
                    for record in some
                ),
                Evidence(f"largest spectral norm of one, {ranked[0]['parameter']}", ranked[0]["spectral_norm"], "", 1.0,
                         "doubly stochastic matrices"),
            ),
            plans=(
                Plan("constrain_mixing", {"parameters": names, "how": "norm"},
                     "mixing matrices over their spectral norm"),
                Plan("constrain_mixing", {"parameters": names, "how": "sinkhorn"}, "mixing matrices doubly stochastic"),
            ),
            strength=last["product_norm"] / t["product"].value,
            latent=last["product_norm"] >= t["runaway"].value,
        )
    ]  # fmt: skip


def _spaced(known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most five records over the depth, the last among them."""
    step = max(1, len(known) // 5)
    return known[::-1][::step][:5][::-1]


def _by_size(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    blocks = sorted((row for row in records(m.modules) if row["role"] == "block"), key=lambda row: row["layer"])
    sizes = [row["rms"] for row in blocks]
    if len(blocks) < t["fewest_blocks"].value or not all(is_number(size) and size > 0 for size in sizes):
        return []
    steps = [later / earlier for earlier, later in pairwise(sizes)]
    usual, total = quantile(steps, 0.25), sizes[-1] / sizes[0]
    steady = usual >= t["per_block"].value and total >= t["total"].value
    # A stream may also have been trained to grow: where its factors differ, the loss must stand above what it was.
    before = m.log.usual_loss if m.log is not None else None
    fell = before is not None and m.loss >= before + clear_margin(m, t, "fell")
    outputs = [row["parameter"] for row in records(m.parameters) if writes_residual(row)]
    as_first = _as_in_first(m, outputs)
    written = min(as_first.values(), default=1.0) <= t["written"].value
    # Where the projections themselves grow with depth, the stream need not have grown as far.
    far = total >= t["total"].value if written else total / max(steps) >= t["without_jump"].value
    uneven = fell and usual >= t["uneven_block"].value and far
    if not (steady or uneven):
        return []
    depth = (2 * len(blocks)) ** -0.5
    repairs = [
        (dict.fromkeys(outputs, factor), f"output projections x {factor:.3g}")
        for factor in dict.fromkeys((depth, 1 / usual, depth / usual))
    ]
    if not steady:
        told = "each block's output projections over the stream's growth up to it"
        repairs = [(_by_block(m, blocks, outputs), told)]
    if written:
        repairs.append((as_first, "output projections at the size of the first block's"))
    worst = max(range(len(steps)), key=lambda at: steps[at]) + 1
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"The residual stream grows {total:.3g} x from the first to the last of {len(blocks)} blocks, "
            f"{median(steps):.2g} x per block.",
            location=Location(
                module=blocks[worst]["module"],
                layer=int(blocks[worst]["layer"]),
                layers=tuple(int(row["layer"]) for row in blocks),
                parameters=tuple(outputs[:16]),
            ),
            evidence=(
                Evidence("growth of the rms per block, lower quartile", usual, "x", threshold=t["per_block"].value,
                         source=t["per_block"].source),
                Evidence("rms after the last block", sizes[-1], "", sizes[0], "first block",
                         t["total"].value * sizes[0], t["total"].source),
            ),
            plans=tuple(Plan("rescale_tensors", {"factors": factors}, told) for factors, told in repairs if outputs),
            strength=usual / t["per_block"].value,
        )
    ]  # fmt: skip


def _by_block(m: Measurements, blocks: list[Record], outputs: list[str]) -> dict[str, float]:
    """What makes each block add no more than the first stream's size."""
    size = {int(row["layer"]): row["rms"] for row in blocks}
    first = size[min(size)]
    layer = {row["parameter"]: int(row["layer"]) for row in records(m.parameters)}
    return {name: min(1.0, first / size.get(layer[name], first)) for name in outputs}


def _as_in_first(m: Measurements, outputs: list[str]) -> dict[str, float]:
    """What gives each output projection the rms of the same one in the first block, where it is larger."""
    rows = [row for row in records(m.parameters) if row["parameter"] in outputs and row["rms"] > 0]
    first: dict[str, float] = {}
    for row in sorted(rows, key=lambda row: row["layer"]):
        first.setdefault(row["kind"], row["rms"])
    return {row["parameter"]: min(1.0, first[row["kind"]] / row["rms"]) for row in rows}


def writes_residual(row: Record) -> bool:
    """Whether the tensor is a weight of a projection back into the residual stream."""
    ends = ("o_proj.weight", "down_proj.weight", "c_proj.weight", "dense.weight", "w2.weight", "dense_4h_to_h.weight")
    return row["layer"] >= 0 and row["parameter"].endswith((*ends, "wo.weight", "out_proj.weight"))


def _growing(*sizes: float) -> list[Record]:
    return _cases.modules({f"model.layers.{layer}": {"rms": size} for layer, size in enumerate(sizes)})


def _mixing(norm: float) -> tuple[dict[str, Any], ...]:
    return tuple(
        {"parameter": f"blocks.{layer}.stream_mix", "layer": layer, "size": 4, "spectral_norm": norm,
         "product_norm": norm ** (layer + 1)}
        for layer in range(12)
    )  # fmt: skip


_FELL: dict[str, Any] = {"loss": 5.6, "log": {"step": 400, "usual_loss": 3.4, "loss_spread": 0.05}}
RULE = Rule(
    slug="residual-growth",
    order=701,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case("a factor of five per block", {"modules": _growing(2.0, 10.0, 50.0, 250.0)}, True),
        Case("mixing matrices that amplify", {"mixing": _mixing(1.3)}, True),
        Case("the stream just doubles", {"modules": _growing(1.0, 2.1, 4.3, 8.8)}, True),
        Case("by factors that differ", _FELL | {"modules": _growing(1.0, 1.4, 22.0, 450.0)}, True),
        Case(
            "near miss: by factors that differ, at the usual loss", {"modules": _growing(1.0, 1.4, 22.0, 450.0)}, False
        ),
        Case("near miss: massive activations, one jump", {"modules": _growing(2.0, 2.2, 65.0, 65.0)}, False),
        Case("near miss: equal additions", {"modules": _growing(1.4, 1.9, 2.1, 2.3)}, False),
        Case("near miss: mixing matrices near the identity", {"mixing": _mixing(1.05)}, False),
    ),
)
