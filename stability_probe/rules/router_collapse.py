"""A router of experts sends nearly all tokens to the same few experts, or its logits have exploded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from stability_probe.judge import Case, Page, Plan, Rule, Skip, Suspect, Threshold
from stability_probe.rules._tables import is_number, median
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "spread": Threshold(
        0.25, "of the possible spread of load", "0 is all tokens to the same experts, 1 an even load; a batch of one "
        "kind of text skews a sound router, but leaves it well above",
        "python -m pytest tests/test_planted_more.py -k router (a sound tiny router spreads 0.8 and more)",
    ),
    "dead": Threshold(
        0.05, "of the possible spread of load", "nearly every token has the same experts: the others are dead weight "
        "whatever this batch pays for it",
        "Shazeer et al., Outrageously Large Neural Networks, 2017, section 4 (routers favour the same few experts)",
    ),
    "log_z": Threshold(
        64, "mean log Z of the router's logits", "there bf16 numbers are half apart: experts are chosen by rounding",
        "Zoph et al., ST-MoE, 2022, section 3.3 (router z-loss); bf16 has 8 significant bits",
    ),
    "rounded": Threshold(
        128, "mean log Z of the router's logits", "there bf16 numbers are one apart: a preference of nearly three to "
        "one is lost in rounding, whatever this batch pays for it",
        "bf16 has 8 significant bits; as in rule logit-drift",
    ),
    "tokens": Threshold(
        64, "tokens per expert and more", "fewer do not tell a skewed load from chance", "the load of n draws "
        "scatters by one over the root of n"
    ),
}  # fmt: skip

PAGE = Page(
    title="Router collapse",
    claim="The router chooses the same few experts for nearly every token, or its logits have grown out of range.",
    mechanism=(
        "An expert that is chosen more often learns more, gets better, and is chosen more often still. Without a "
        "balancing term this ends with a few experts doing all the work: the model shrinks to a fraction of its "
        "parameters, their buffers overflow and drop tokens, and the loss rises or flattens. Nothing bounds the "
        "router's logits either: as they grow, the choice turns into an on/off switch that rounding can flip, and "
        "each flip sends a token through weights that never saw its like."
    ),
    signature=(
        "In a layer, an entropy of the load near that of its top-k alone, with experts that get no token; or a mean "
        "log Z of the router's logits in the tens, beyond what bf16 resolves."
    ),
    false_alarms=(
        "A batch of one language or domain loads experts unevenly, and small batches do by chance. Sigmoid routers "
        "with a balancing bias are uneven in their scores and even in their choices: the choices count. A shared "
        "expert, which sees every token by design, is no router's choice."
    ),
    proof=(
        "What all tokens share is taken out of the router's logits, so that each expert's mean logit is the same "
        "(exploded logits are scaled down), and the batch is replayed."
    ),
    remedies=(
        Remedy("Add a router z-loss of 1e-4 to 1e-3 and a load-balancing loss of 1e-2, or bias-based balancing."),
        Remedy("Roll back to before the load entropy fell; dead experts do not come back by themselves."),
        Remedy("Compute the router in fp32, and log load entropy and log Z per layer."),
    ),
    references=(
        "Fedus et al., Switch Transformers, 2021, section 2.2",
        "Zoph et al., ST-MoE: Designing Stable and Transferable Sparse Expert Models, 2022, section 3.3",
        "DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 2.1.2",
    ),
)  # fmt: skip


def spread(router: dict[str, Any]) -> float:
    """Load entropy between its least (the same top-k experts for all tokens, 0) and its most (even, 1)."""
    least, most = math.log(router["top_k"]), math.log(router["experts"])
    return (router["load_entropy"] - least) / (most - least) if most > least else math.nan


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    if not m.routers:
        raise Skip("no router of experts was found: the model is dense, or names it in a way that is not known")
    counted = [r for r in m.routers if r["tokens"] * r["top_k"] >= t["tokens"].value * r["experts"]]
    collapsed = sorted((r for r in counted if is_number(s := spread(r)) and s < t["spread"].value), key=spread)
    exploded = sorted(
        (r for r in m.routers if is_number(r["log_z"]) and abs(r["log_z"]) >= t["log_z"].value),
        key=lambda r: -abs(r["log_z"]),
    )
    found = [_suspect(m, collapsed, t, False)] if collapsed else []
    return found + ([_suspect(m, exploded, t, True)] if exploded else [])


def _suspect(m: Measurements, sick: list[dict[str, Any]], t: dict[str, Threshold], exploded: bool) -> Suspect:
    first = sick[0]
    share = max(0.0, spread(first)) if is_number(spread(first)) else 1.0
    others = [r for r in m.routers if r not in sick]
    more = f" and {len(sick) - 1} more" if len(sick) > 1 else ""
    what = (
        f"has a mean log Z of {first['log_z']:.0f}"
        if exploded
        else f"leaves {first['idle']} of {first['experts']} experts idle; its load has {share:.0%} of the even spread"
    )
    names = [r["module"] for r in sick]
    limit = {"limit": 10.0} if exploded else {}
    return Suspect(
        cause=RULE.slug,
        summary=f"The router of layer {first['layer']}{more} {what}.",
        location=Location(
            module=first["module"],
            layer=int(first["layer"]),
            layers=tuple(int(r["layer"]) for r in sick),
            parameters=tuple(f"{name}.weight" for name in names[:16]),
        ),
        evidence=(
            Evidence(f"load entropy, {first['module']}", first["load_entropy"], "nats", math.log(first["experts"]),
                     "even load", source=t["spread"].source),
            Evidence("the same, of the possible spread", share, "", median(spread(r) for r in others), "other layers",
                     t["spread"].value, t["spread"].source),
            Evidence("largest share of one expert", first["load_top"], "", 1 / first["experts"], "even load"),
            Evidence("mean log Z of the router's logits", first["log_z"], "nats", median(r["log_z"] for r in others),
                     "other layers", t["log_z"].value, t["log_z"].source),
        ),
        plans=(
            Plan("recentre_router", {"modules": names, **limit},
                 "router logits held to 10" if exploded else "each expert's mean logit made the same"),
        ),
        strength=abs(first["log_z"]) / t["log_z"].value if exploded else t["spread"].value / max(share, 0.01),
        measures=("loss",),
        latent=abs(first["log_z"]) >= t["rounded"].value if exploded else share < t["dead"].value,
    )  # fmt: skip


def _router(layer: int, **changes: Any) -> dict[str, Any]:
    return {
        "module": f"model.layers.{layer}.mlp.gate", "layer": layer, "experts": 8, "top_k": 2, "tokens": 512,
        "load_entropy": 1.95, "load_top": 0.2, "idle": 0, "log_z": 2.5, "logit_absmax": 4.0, "sigmoid": False,
        **changes,
    }  # fmt: skip


RULE = Rule(
    slug="router-collapse",
    order=901,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case(
            "one layer sends everything to two experts",
            {"routers": (_router(0), _router(1, load_entropy=0.70, load_top=0.5, idle=6))},
            True,
        ),
        Case("logits in the hundreds", {"routers": (_router(0), _router(1, log_z=210.0, logit_absmax=230.0))}, True),
        Case(
            "three experts are left",
            {"routers": (_router(0, load_entropy=0.95, load_top=0.45, idle=5), _router(1))},
            True,
        ),
        Case(
            "near miss: a batch of one domain",
            {"routers": (_router(0), _router(1, load_entropy=1.35, load_top=0.38))},
            False,
        ),
        Case(
            "near miss: too few tokens to tell",
            {"routers": (_router(0, tokens=20, load_entropy=0.7, idle=6), _router(1, tokens=20))},
            False,
        ),
        Case("near miss: a warm router", {"routers": (_router(0, log_z=18.0, logit_absmax=20.0), _router(1))}, False),
        Case("near miss: a dense model", {}, False),
    ),
)
