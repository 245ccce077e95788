"""Embedding rows that are huge, or zero, and that the batch uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Plan, Rule, Suspect, Threshold
from stability_probe.rules._tables import Record, is_number, plural, records, times
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "large": Threshold(
        10, "x median row norm", "the largest row of a healthy table is 2.4 x its median, the smallest 0.57 x",
        "python benchmarks/healthy_ranges.py (SmolLM2-135M)",
    ),
    "latent": Threshold(
        50, "x median row norm", "no frequency or rarity of a token explains it; a tied head returns it as a logit",
        "python benchmarks/healthy_ranges.py (SmolLM2-135M)",
    ),
    "zero": Threshold(
        1e-3, "x median row norm", "an untrained row still has its initial norm; only erased rows are this small",
        "common initialisations give all rows one scale (0.02 x root of the width)",
    ),
    "grad_share": Threshold(
        0.5, "of the table's squared gradient norm", "a norm divides by a zero row's length: its gradient drowns all "
        "others. Padding rows are zero by design and get none",
        "RMSNorm's gradient is of order 1 / rms(x); PyTorch, torch.nn.Embedding: padding_idx gets no gradient",
    ),
}  # fmt: skip

PAGE = Page(
    title="Embedding row outlier",
    claim="A few rows of the embedding are far larger than the rest, or erased, and this batch uses them.",
    mechanism=(
        "An embedding row is updated only when its token appears. A rare token meets an Adam second moment that has "
        "decayed since its last visit, takes a full-size step, and can grow row by row far beyond the table. A huge "
        "row fills the residual stream of its positions with one direction; with a tied head it also gives its token "
        "a huge logit everywhere. A zero row makes the first norm divide by almost nothing, and the gradient of that "
        "row explodes."
    ),
    signature=(
        "Rows whose norm is ten times the table's median or more, used by named rows of the batch; for an erased row, "
        "or several, most of the embedding's squared gradient norm in them."
    ),
    false_alarms=(
        "A rare token alone is no fault: its row has an ordinary norm. A zero row at the padding id is by design and "
        "gets no gradient. Embeddings that are scaled as a whole (by the root of the width) are large together. One "
        "absurd element in an ordinary row is `corrupt-weights`."
    ),
    proof="The rows are rescaled to the table's median norm (a zero row becomes the mean row), and the batch replayed.",
    remedies=(
        Remedy("Rescale the named rows to the median norm, and reset their optimizer moments."),
        Remedy("Clip row norms of the embedding after each step, or decay rows that were not used."),
        Remedy("Give the embedding a larger epsilon or a lower learning rate than the rest."),
    ),
    references=(
        "Takase et al., Spike No More: Stabilizing the Pre-training of Large Language Models, 2023",
        "Land and Bartolo, Fishing for Magikarp: Automatically Detecting Under-trained Tokens, 2024",
        "PyTorch, torch.nn.Embedding: padding_idx, max_norm",
    ),
)


def _odd(rows: list[Record], t: dict[str, Threshold]) -> list[Record]:
    """Huge rows of one table, and erased ones where these, together, get most of the table's gradient."""
    known = [row for row in rows if is_number(row["norm"]) and row["median_norm"] > 0]
    huge = [row for row in known if times(row["norm"], row["median_norm"]) >= t["large"].value]
    erased = [
        row
        for row in known
        if times(row["norm"], row["median_norm"]) <= t["zero"].value and is_number(row["grad_share"])
    ]
    drowning = sum(row["grad_share"] for row in erased) >= t["grad_share"].value
    # Beside a row that drowns the table, one that gets nothing is padding, which is zero by design.
    return huge + [row for row in erased if drowning and row["grad_share"] > 0]


def _suspect(parameter: str, odd: list[Record], t: dict[str, Threshold]) -> Suspect:
    worst = max(odd, key=lambda row: (row["norm"] / row["median_norm"], row["grad_share"]))
    ratio = worst["norm"] / worst["median_norm"]
    tokens = [int(row["token"]) for row in odd]
    used = sorted({int(row) for record in odd for row in record["rows"]})
    size = f"has {ratio:.3g} x the table's median norm" if ratio >= 1 else f"is erased (norm {worst['norm']:.2g})"
    more = f" and {plural(len(odd) - 1, 'more')}" if len(odd) > 1 else ""
    return Suspect(
        cause=RULE.slug,
        summary=f"Embedding row {int(worst['token'])}{more} of {parameter} {size}; batch rows "
        f"{', '.join(map(str, used[:6]))}{', …' if len(used) > 6 else ''} use it.",
        location=Location(
            module=parameter.rpartition(".")[0] or None,
            rows=tuple(used),
            parameters=tuple(f"{parameter}[{token}]" for token in tokens),
        ),
        evidence=(
            Evidence(
                f"norm of row {int(worst['token'])} of {parameter}", worst["norm"], "", worst["median_norm"],
                "median row of the table", t["large"].value * worst["median_norm"], t["large"].source,
            ),
            Evidence(f"uses of token {int(worst['token'])} in the batch", int(worst["count"]), ""),
            Evidence("the listed rows' share of the table's squared gradient norm",
                     sum(row["grad_share"] for row in odd if is_number(row["grad_share"])), "",
                     threshold=t["grad_share"].value if ratio < 1 else None,
                     source=t["grad_share"].source if ratio < 1 else ""),
        ),
        plans=(
            Plan("replace_rows", {"parameter": parameter, "rows": tokens},
                 f"{plural(len(tokens), 'row')} of {parameter} brought to the median norm"),
        ),
        strength=max(ratio, 1 / max(ratio, 1e-6) ** 0.5),
        # The first norm divides a row of zeros by its epsilon: every batch that uses it gets that gradient.
        latent=ratio >= t["latent"].value or any(row["norm"] == 0.0 for row in odd),
        # Nothing brings an erased row back: the median norm in some direction may well cost more than zeros.
        exact=worst["norm"] == 0.0,
    )  # fmt: skip


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    by_table: dict[str, list[Record]] = {}
    for row in records(m.embedding_rows):
        by_table.setdefault(row["parameter"], []).append(row)
    found = [_suspect(parameter, odd, t) for parameter, rows in by_table.items() if (odd := _odd(rows, t))]
    return sorted(found, key=lambda suspect: -suspect.strength)


RULE = Rule(
    slug="embedding-row-outlier",
    order=603,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case("a row x 1000", {"embedding_rows": [{"norm": 400.0, "rows": [1, 2], "grad_share": 0.02}]}, True),
        Case(
            "an erased row that gets all the gradient", {"embedding_rows": [{"norm": 0.0, "grad_share": 0.999}]}, True
        ),
        Case("near miss: a rare token with 2.4 x the median", {"embedding_rows": [{"norm": 0.96, "count": 1}]}, False),
        Case(
            "five erased rows that share all the gradient",
            {"embedding_rows": [{"token": token, "norm": 0.0, "grad_share": 0.199} for token in range(5)]},
            True,
        ),
        Case(
            "near miss: the padding row is zero by design",
            {"embedding_rows": [{"norm": 0.0, "grad_share": 0.0}]},
            False,
        ),
        Case("near miss: a token never trained, at its initial norm", {"embedding_rows": [{"norm": 0.1}]}, False),
    ),
)
