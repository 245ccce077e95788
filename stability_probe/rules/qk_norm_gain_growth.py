"""The learnable gains of q_norm and k_norm have grown until the softmax saturates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Plan, Rule, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._attention import SATURATED, TAU, X_HIGH, X_SIBLINGS, HotHead, head_evidence, hot_heads
from stability_probe.rules._tables import Record, median, plural, records, times
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "tau": TAU,
    "x_siblings": X_SIBLINGS,
    "x_high": X_HIGH,
    "saturated": SATURATED,
    "gain": Threshold(
        3, "x the sibling layers' largest gains", "gains alone prove nothing: the healthy Qwen3-0.6B has one of 96.5 "
        "in its first layer; they only tell a grown layer from a hot one",
        "Qwen3-0.6B, model.layers.0.self_attn.k_norm.weight; the logits of the layer decide",
    ),
}  # fmt: skip

PAGE = Page(
    title="QK-norm gain growth",
    claim="The gains of a layer's query and key norms have grown, and with them the attention logits.",
    mechanism=(
        "QK-norm takes the length of queries and keys out of the logits, so that the weights can grow without harm. "
        "It leaves one knob: the learnable gain of each norm. A logit is bounded by the root of the head width times "
        "the largest gain of the queries times the largest of the keys, and nothing bounds the gains, least of all "
        "when norms are left out of weight decay. When they drift up the softmax saturates as if there were no norm."
    ),
    signature=(
        "The heads of one layer past 100 and several times the other layers', with QK-norm present, and gains in that "
        "layer that stand out from the same gains elsewhere. Scaling W_q or W_k changes nothing here."
    ),
    false_alarms=(
        "A large gain by itself: it may undo a small one on the other side. Sinks have low entropy with logits below "
        "about 50. Without QK-norm the same picture is `attention-logit-growth`."
    ),
    proof="The gains of the layer are scaled down until the logits are at the threshold, and at the siblings' level.",
    remedies=(
        Remedy("Clip the gains of the named layer, each by the root of tau over the largest logit."),
        Remedy("Put the gains of q_norm and k_norm under weight decay, towards their initial value."),
        Remedy("Log the largest |gain| per layer beside the largest logit."),
    ),
    references=(
        "Dehghani et al., Scaling Vision Transformers to 22 Billion Parameters, 2023, section 2",
        "Wortsman et al., Small-scale proxies for large-scale Transformer training instabilities, 2023, section 3.1",
        "Kimi Team, Kimi K2: Open Agentic Intelligence, 2025, section 2.1",
    ),
)


def _gain(gains: list[Record], layer: int) -> float:
    """Product of the layer's largest query and key gains: what the logits scale with."""
    product = 1.0
    for row in gains:
        if int(row["layer"]) == layer:
            product *= row["absmax"]
    return product


def _usual(gains: list[Record], layer: int) -> float:
    return median(_gain(gains, other) for other in sorted({int(row["layer"]) for row in gains} - {layer}))


def _ratio(gains: list[Record], layer: int) -> float:
    return times(_gain(gains, layer), _usual(gains, layer))


def _suspect(m: Measurements, layer: int, hot: list[HotHead], gains: list[Record], t: dict[str, Threshold]) -> Suspect:
    own = [row for row in gains if int(row["layer"]) == layer]
    usual, ratio = _usual(gains, layer), _ratio(gains, layer)
    first = hot[0]
    names = tuple(row["parameter"] for row in own)
    grown = ratio >= t["gain"].value
    said = f", gains {ratio:.3g} x the other layers'" if grown else ""
    levels = {"tau": t["tau"].value, "the siblings' 95th percentile": first.high, "the siblings' median": first.usual}
    past_tau = first.max_logit > t["tau"].value
    return Suspect(
        cause=RULE.slug,
        summary=f"{plural(len(hot), 'head')} of layer {layer} up to attention logits of {first.max_logit:.0f} under "
        f"QK-norm, siblings {first.usual:.3g}{said}.",
        location=Location(
            module=first.record["module"], layer=layer, layers=(layer,),
            heads=tuple(head.place for head in hot), parameters=names,
        ),
        evidence=(
            *head_evidence(first, t)[0 if past_tau else 1 :],
            Evidence(f"largest query gain x largest key gain of layer {layer}", _gain(gains, layer), "", usual,
                     "median of the other layers", t["gain"].value * usual, t["gain"].source),
        ),
        plans=tuple(
            Plan("clip_gains", {"gammas": {layer: level / first.max_logit}},
                 f"gains of layer {layer} scaled until its logits are at {name} ({level:.3g})")
            for name, level in levels.items() if 0 < level < first.max_logit
        ),
        strength=first.max_logit / t["tau"].value,
        # Danger without a cost is said of logits past the published limit alone.
        latent=grown and any(head.max_logit > t["tau"].value and head.is_danger(t) for head in hot),
    )  # fmt: skip


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    if not m.qk_norm:
        return []
    gains = [row for row in records(m.parameters) if row["qk_gain"]]
    by_layer: dict[int, list[HotHead]] = {}
    for head in hot_heads(m, t):
        by_layer.setdefault(head.place[0], []).append(head)
    # In narrow heads logits stay small. A layer's gains drive all of its heads: where they have grown and most of the
    # heads are far above those of other layers, that is enough to ask.
    above: dict[int, list[HotHead]] = {}
    for head in hot_heads(m, t, least=0.0):
        above.setdefault(head.place[0], []).append(head)
    for layer, heads in above.items():
        all_heads = sum(int(row["layer"]) == layer for row in records(m.heads))
        if layer not in by_layer and 2 * len(heads) > all_heads and _ratio(gains, layer) >= t["gain"].value:
            by_layer[layer] = heads
    found = [_suspect(m, layer, hot, gains, t) for layer, hot in by_layer.items()]
    return sorted(found, key=lambda suspect: -suspect.strength)


def _grown(layer: int, gain: float) -> list[Record]:
    names = [f"model.layers.{layer}.self_attn.{which}_norm.weight" for which in ("q", "k")]
    return _cases.parameters({name: {"absmax": gain, "rms": gain / 2} for name in names}, qk_norm=True)


_HOT_LAYER = {(2, head): {"max_logit": 310.0 + head, "entropy": 0.2} for head in range(4)}
RULE = Rule(
    slug="qk-norm-gain-growth",
    order=502,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case(
            "both gains of one layer grown sixfold",
            {"qk_norm": True, "heads": _cases.heads(_HOT_LAYER), "parameters": _grown(2, 8.4)},
            True,
        ),
        Case(
            "one head of the layer is past the limit",
            {
                "qk_norm": True,
                "heads": _cases.heads({(1, 3): {"max_logit": 130.0, "entropy": 0.4}}),
                "parameters": _grown(1, 4.0),
            },
            True,
        ),
        Case(
            "gains of one layer grown in narrow heads, whose logits stay under the limit",
            {
                "qk_norm": True,
                "heads": _cases.heads({(2, head): {"max_logit": 45.0 + head, "entropy": 0.5} for head in range(4)}),
                "parameters": _grown(2, 16.0),
            },
            True,
        ),
        Case("near miss: a gain of 96.5 with ordinary logits", {"qk_norm": True, "parameters": _grown(0, 96.5)}, False),
        Case("near miss: the same heads without QK-norm", {"heads": _cases.heads(_HOT_LAYER)}, False),
        Case(
            "near miss: a sink of 60",
            {
                "qk_norm": True,
                "heads": _cases.heads({(1, 3): {"max_logit": 60.0, "entropy": 0.01}}),
                "parameters": _grown(1, 4.0),
            },
            False,
        ),
    ),
)
