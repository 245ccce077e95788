"""Attention heads whose logits stand out from their siblings'."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stability_probe.judge import Skip, Threshold
from stability_probe.rules._tables import Record, is_number, median, quantile, records
from stability_probe.schema import Evidence

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

_HEALTHY = "python benchmarks/healthy_ranges.py (SmolLM2-135M on five kinds of text)"

TAU = Threshold(
    100, "attention logit", "the clip threshold that kept a run of 15.5T tokens free of spikes; healthy heads reach 88",
    f"Kimi K2 report, 2025, section 2.1 (QK-clip, tau = 100); {_HEALTHY}",
)  # fmt: skip
X_SIBLINGS = Threshold(
    5, "x median of sibling heads", "healthy heads reach 6.0 x the median, though far below tau: both limits must hold",
    _HEALTHY,
)  # fmt: skip
SATURATED = Threshold(
    1.0, "nats of entropy", "a head this sure and this hot passes almost no gradient to its queries and keys",
    "Zhai et al., Stabilizing Transformer Training by Preventing Attention Entropy Collapse, 2023, section 3",
)  # fmt: skip
X_HIGH = Threshold(
    4, "x 95th percentile of sibling heads", "danger without excess is said of heads far outside: the healthy "
    "hottest head is at 3.2 x the 95th percentile, a head with W_q and W_k x 8 at 13 x",
    _HEALTHY,
)  # fmt: skip


@dataclass(frozen=True)
class HotHead:
    """A head past both limits, and what its siblings do: median and 95th percentile of their largest logits."""

    record: Record
    usual: float
    high: float
    usual_entropy: float

    @property
    def place(self) -> tuple[int, int]:
        return int(self.record["layer"]), int(self.record["head"])

    def is_danger(self, t: dict[str, Threshold]) -> bool:
        """Saturated and far outside its siblings: to be reported even where this batch pays nothing for it.

        Where there is a baseline batch, there too: a head whose weights have grown is hot on any text, one that only
        this batch's tokens drive past tau is sound (SmolLM2-135M: a row of hexadecimal takes a head to 110).
        """
        on_baseline = self.record["baseline_max_logit"]
        if is_number(on_baseline) and not self.record["is_capped"] and not on_baseline > t["tau"].value:
            return False
        is_saturated = self.record["is_capped"] or self.record["entropy"] <= t["saturated"].value
        return is_saturated and self.max_logit >= t["x_high"].value * self.high

    @property
    def max_logit(self) -> float:
        return float(self.record["max_logit"])


# At three times the cap tanh lets 1 % of the gradient through: the cap hides the growth and stops the learning.
# Below that, heads near the cap are ordinary (Gemma Team, Gemma 2, 2024, section 2: caps of 50 and 30).
CAP_SATURATED = 3.0
# fp32 holds tanh(x) < 1 up to x = 8.7; beyond, the inverse is only known to be larger.
NEAREST_ONE = 1 - 6e-8


def _uncapped(row: Record, cap: float | None) -> Record:
    """The head with the logit that went into the soft-cap: cap · atanh(logit / cap)."""
    if not cap:
        return {**row, "is_capped": False}
    logit = cap * math.atanh(min(row["max_logit"] / cap, NEAREST_ONE))
    return {**row, "max_logit": logit, "is_capped": logit > CAP_SATURATED * cap}


def require_attention(m: Measurements) -> None:
    """Skip where no attention call was seen: 'not measured' must not read as 'clear'."""
    if not len(m.heads):
        raise Skip("no attention was seen; needs a model that calls scaled_dot_product_attention or softmax in blocks")


def hot_heads(m: Measurements, t: dict[str, Threshold], least: float | None = None) -> list[HotHead]:
    """Heads over tau (over `least` where that is given) and over their siblings, the hottest first.

    The siblings of a head are all other heads, or those of the other layers where that median is lower: in a
    model of two layers, one hot layer must not be its own excuse. Where every head is hot, none is listed.
    """
    require_attention(m)
    table = [_uncapped(row, m.attention_softcap) for row in records(m.heads) if is_number(row["max_logit"])]
    tau = max(t["tau"].value, CAP_SATURATED * (m.attention_softcap or 0.0))
    found = []
    for row in table:
        others = [other for other in table if other is not row]
        elsewhere = [other for other in others if other["layer"] != row["layer"]]
        groups = [group for group in (others, elsewhere) if group]
        if not groups or row["max_logit"] <= (tau if least is None else least):
            continue
        siblings = min(groups, key=lambda group: median(other["max_logit"] for other in group))
        usual = median(other["max_logit"] for other in siblings)
        if row["max_logit"] >= t["x_siblings"].value * usual:
            cool = [other["max_logit"] for other in siblings if other["max_logit"] <= tau] or [usual]
            found.append(HotHead(row, usual, quantile(cool, 0.95), median(other["entropy"] for other in siblings)))
    return sorted(found, key=lambda head: -head.max_logit)


def head_evidence(head: HotHead, t: dict[str, Threshold]) -> tuple[Evidence, ...]:
    layer, number = head.place
    where = f"layer {layer} head {number}"
    row, query, key = (int(head.record[name]) for name in ("row", "query", "key"))
    found = [
        Evidence(
            f"largest attention logit of {where} (row {row}, query {query}, key {key})", head.max_logit, "", head.usual,
            "median of sibling heads", t["tau"].value, t["tau"].source,
        ),
        Evidence(f"the same, over the siblings' median, {where}", head.max_logit / head.usual, "x",
                 threshold=t["x_siblings"].value, source=t["x_siblings"].source),
        Evidence(f"attention entropy of {where}", head.record["entropy"], "nats", head.usual_entropy,
                 "median of sibling heads", t["saturated"].value, t["saturated"].source),
    ]  # fmt: skip
    if is_number(head.record["baseline_max_logit"]):
        found.append(
            Evidence(f"largest attention logit of {where} on the baseline batch", head.record["baseline_max_logit"], "")
        )
    return tuple(found)
