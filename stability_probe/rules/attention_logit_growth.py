"""The query and key projections of some heads have grown until their softmax saturates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Plan, Rule, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._attention import SATURATED, TAU, X_HIGH, X_SIBLINGS, HotHead, head_evidence, hot_heads
from stability_probe.rules._tables import plural, records
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {"tau": TAU, "x_siblings": X_SIBLINGS, "x_high": X_HIGH, "saturated": SATURATED}

PAGE = Page(
    title="Attention logit growth",
    claim="The query and key weights of some heads, or of one layer, have grown; their attention logits are extreme.",
    mechanism=(
        "A logit is the product of two projections, so it grows with the square of their common growth. Past a few "
        "tens the softmax picks one key with certainty: most positions then get no gradient through it, a few get a "
        "large one, and a small change of the weights flips the choice for whole stretches of text. The loss spikes "
        "when such a flip happens. Optimizers that push all singular directions alike get there sooner; under fp16 "
        "the product overflows first."
    ),
    signature=(
        "The largest logit of a few heads, or of all heads of one layer, above 100 and several times the other "
        "heads'; an entropy near zero; query and key weights whose norms stand out from the same tensors elsewhere. "
        "A grown head can cost next to nothing on this batch: it is reported as latent then."
    ),
    false_alarms=(
        "Attention sinks have little entropy too, but they look at one fixed position with logits below about 50. "
        "If every head of every layer is hot by one factor, the scale is wrong: `attention-scale`. Under QK-norm the "
        "weights cannot do it, only the gains: `qk-norm-gain-growth`. A soft-cap bounds the logits from outside."
    ),
    proof=(
        "The heads' query and key rows are scaled down, to the threshold and to their siblings' level, and the batch "
        "is replayed. On a healthy model no such clip lowers the loss."
    ),
    remedies=(
        Remedy("Clip the named heads after the optimizer step: W_q and W_k times the root of tau over the largest "
               "logit. With shared key heads, scale W_q alone."),
        Remedy("Normalise queries and keys per head before their product (QK-norm)."),
        Remedy("Cap the logits smoothly: 50 tanh(x / 50).", None),
        Remedy("Lower the learning rate of the attention, and log the largest logit per head."),
    ),
    references=(
        "Kimi Team, Kimi K2: Open Agentic Intelligence, 2025, section 2.1",
        "Dehghani et al., Scaling Vision Transformers to 22 Billion Parameters, 2023, section 2 (QK-norm)",
        "Zhai et al., Stabilizing Transformer Training by Preventing Attention Entropy Collapse, 2023",
        "Wortsman et al., Small-scale proxies for large-scale Transformer training instabilities, 2023, section 3.1",
    ),
)  # fmt: skip


_PROJECTIONS = ("q_proj", "q_b_proj", "k_proj", "kv_b_proj", "c_attn", "qkv", "query_key_value")


def _plans(hot: list[HotHead], tau: float) -> tuple[Plan, ...]:
    """Clip to tau, as a run would, and to what the siblings do: a head that grew in place needs the second."""
    levels = {"tau": tau, "the siblings' 95th percentile": hot[0].high, "the siblings' median": hot[0].usual}
    who = plural(len(hot), "head")
    return tuple(
        Plan(
            "clip_heads",
            {"gammas": {head.place: level / head.max_logit for head in hot}},
            f"logits of {who} clipped to {name} ({level:.3g})",
        )
        for name, level in levels.items()
        if level > 0
    )


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    if m.qk_norm:
        return []
    hot = hot_heads(m, t)
    if not hot:
        return []
    first = hot[0]
    layer, number = first.place
    layers = tuple(sorted({head.place[0] for head in hot}, key=lambda n: (n != layer, n)))
    in_layer = [row for row in records(m.heads) if int(row["layer"]) == layer]
    whole = len(in_layer) > 1 and sum(head.place[0] == layer for head in hot) == len(in_layer)
    who = f"All {len(in_layer)} heads of layer {layer}" if whole else f"Layer {layer} head {number}"
    more = f" and {plural(len(hot) - 1, 'more head')}" if len(hot) > 1 and not whole else ""
    verb = "reach" if whole or more else "reaches"
    weights = [
        row["parameter"]
        for row in records(m.parameters)
        if int(row["layer"]) == layer and any(name in row["parameter"] for name in _PROJECTIONS)
    ]
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"{who}{more} {verb} attention logits of {first.max_logit:.0f}, siblings {first.usual:.3g}; "
            f"entropy {first.record['entropy']:.2f} nats.",
            location=Location(
                module=first.record["module"],
                layer=layer,
                layers=layers,
                heads=tuple(head.place for head in hot),
                rows=(int(first.record["row"]),),
                parameters=tuple(weights),
            ),
            evidence=(*head_evidence(first, t), Evidence("heads past both limits", len(hot), f"of {len(m.heads)}")),
            plans=_plans(hot, t["tau"].value),
            strength=first.max_logit / t["tau"].value,
            latent=any(head.is_danger(t) for head in hot),
        )
    ]


_HOT = {"max_logit": 379.0, "entropy": 0.28, "top_weight": 0.91}
RULE = Rule(
    slug="attention-logit-growth",
    order=501,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case("one head's query and key weights grown eightfold", {"heads": _cases.heads({(2, 1): _HOT})}, True),
        Case(
            "all heads of one layer",
            {"heads": _cases.heads({(1, head): {**_HOT, "max_logit": 200.0 + head} for head in range(4)})},
            True,
        ),
        Case(
            "a head grown eightfold behind a soft-cap of 50",
            {"heads": _cases.heads({(2, 1): {"max_logit": 49.99999, "entropy": 1.5}}), "attention_softcap": 50.0},
            True,
        ),
        Case(
            "near miss: a head near its cap",
            {"heads": _cases.heads({(2, 1): {"max_logit": 48.0, "entropy": 1.5}}), "attention_softcap": 50.0},
            False,
        ),
        Case("just past the limits", {"heads": _cases.heads({(0, 3): {"max_logit": 104.0, "entropy": 0.9}})}, True),
        Case(
            "near miss: a sink with almost no entropy and logits of 48",
            {"heads": _cases.heads({(0, 3): {"max_logit": 48.0, "entropy": 0.03, "top_key_share": 1.0}})},
            False,
        ),
        Case(
            "near miss: a healthy head of 88, six times the median",
            {"heads": _cases.heads({(0, 3): {"max_logit": 88.0}})},
            False,
        ),
        Case(
            "near miss: every head is hot by the same factor",
            {"heads": [{**row, "max_logit": 16 * row["max_logit"]} for row in _cases.heads()]},
            False,
        ),
        Case(
            "near miss: under QK-norm the gains are to blame",
            {"heads": _cases.heads({(2, 1): _HOT}), "qk_norm": True},
            False,
        ),
    ),
)
