"""A query of the attention sees no key at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Plan, Rule, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._tables import is_number, plural, records
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "blind": Threshold(
        1, "queries without a key", "the softmax of a query that sees nothing is 0/0: one is enough",
        "softmax over an empty set; torch returns NaN for a row of -inf",
    ),
}  # fmt: skip

PAGE = Page(
    title="Fully masked rows",
    claim="The mask leaves some query without a single key, and the softmax over nothing becomes the loss.",
    mechanism=(
        "A softmax over scores that are all minus infinity divides zero by zero. The NaN sits on a padding position "
        "at first, where nobody looks; the next layer multiplies it by a weight of zero, which is NaN again, and the "
        "whole row is lost, then its gradient, then every weight. Padding on the left under a causal mask does it, "
        "and so does a row that is padding throughout, or a triangle that is off by one. Other kernels return zeros "
        "or an even mean in its place: finite, but wrong wherever the position has a target."
    ),
    signature=(
        "Queries without a key, counted in the stored mask and in the attention calls, beside a loss or gradient that "
        "is not finite even in fp32; or a row with targets whose mask is zero from end to end."
    ),
    false_alarms=(
        "Padding on the left is harmless where the kernel lets a query see itself or returns zeros: then everything "
        "stays finite and nothing is said. A NaN that fp32 does not have is an overflow: `fp16-overflow`. A row "
        "without targets gives NaN in the loss alone, with finite logits: `no-valid-labels`."
    ),
    proof="Every query without a key is made to see itself (wholly masked rows see all their tokens); replay.",
    remedies=(
        Remedy("Let every position see itself: mask = mask | torch.eye(T, dtype=torch.bool)."),
        Remedy("Pad on the right for training, or use a large negative number instead of minus infinity."),
        Remedy("Drop rows that hold nothing but padding before the batch is built."),
    ),
    references=(
        "PyTorch issue 41508: MultiheadAttention gives NaN where a mask leaves nothing",
        "transformers, masking_utils: rows that attend to nothing are unmasked for memory-efficient SDPA",
    ),
)  # fmt: skip


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    if m.blind is None:
        return []
    real = sum(count for _, count in m.blind.real)
    wide = [row for row in records(m.rows) if int(row["row"]) in m.blind.rows and row["valid_targets"]]
    lost = (m.loss_nonfinite or m.grad_nonfinite) and m.blind.padding + real + len(m.blind.rows) > 0
    if not lost and not wide and real < t["blind"].value:
        return []
    rows = m.blind.rows
    # Which rows the queries are in: of padding only those that are lost with it, where any row can be told from others.
    named = tuple(sorted({*rows, *(_lost_rows(m) if lost else ())}))
    layers = tuple(layer for layer, _ in m.blind.real)
    parts = [
        plural(len(rows), "row") + " whose text is masked" if rows else "",
        f"{plural(real, 'real token')} without a key" if real else "",
        f"{plural(m.blind.padding, 'position')} of left padding" if m.blind.padding else "",
    ]
    what = ", ".join(part for part in parts if part)
    outcome = "the loss or gradient is not finite in fp32" if lost else "all values are finite"
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"Attention queries that see no key: {what}; {outcome}.",
            location=Location(layer=layers[0] if layers else None, layers=layers, rows=named),
            evidence=(
                Evidence("queries of left padding that see only padding", m.blind.padding, "",
                         threshold=t["blind"].value, source=t["blind"].source),
                Evidence("queries on real tokens without a key, in all layers", real, "", threshold=t["blind"].value,
                         source=t["blind"].source),
                Evidence("rows whose mask leaves out all of their text", len(rows), ""),
            ),
            plans=(
                Plan("unmask_queries", {"rows": list(rows)}, "every query without a key sees itself"),
            ),
            strength=float(max(1, real + len(rows) + m.blind.padding)),
            # Such a row is trained on without its own text, whatever its loss is beside others.
            latent=bool(rows),
        )
    ]  # fmt: skip


def _lost_rows(m: Measurements) -> list[int]:
    """Rows with left padding whose loss is not finite; all rows with left padding where only the gradient is lost."""
    padded = set(m.blind.padded_rows) if m.blind is not None else set()
    lost = [int(row["row"]) for row in records(m.rows) if int(row["row"]) in padded and not is_number(row["loss"])]
    return lost or sorted(padded)


_LOST = {"loss": _cases.NAN, "loss_nonfinite": True, "grad_nonfinite": True}
RULE = Rule(
    slug="fully-masked-rows",
    order=504,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case("left padding, and everything is NaN", {"blind": {"padding": 12}, **_LOST}, True),
        Case("a triangle that leaves out the first query", {"blind": {"real": ((0, 4), (1, 4))}, **_LOST}, True),
        Case("a row with targets whose mask is zero", {"blind": {"rows": (1,)}}, True),
        Case(
            "left padding in two rows, one of which is lost",
            {
                "blind": {"padding": 12, "padded_rows": (1, 2)},
                "rows": _cases.rows({1: {"loss": _cases.NAN}}),
                **_LOST,
            },
            True,
        ),
        Case("near miss: left padding that the kernel copes with", {"blind": {"padding": 12}}, False),
        Case(
            "near miss: a wholly masked row without targets",
            {"blind": {"rows": (1,)}, "rows": _cases.rows({1: {"valid_targets": 0, "loss": _cases.NAN}})},
            False,
        ),
        Case("near miss: NaN, but every query sees a key", {"blind": {}, **_LOST}, False),
    ),
)
