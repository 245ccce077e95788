"""Ids that were written with another tokenizer, or wrapped by a narrow integer type."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Plan, Rule, Skip, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._audit import AUDIT_SCORE, SWAP, flagged_rows, row_evidence, slugs_of
from stability_probe.rules._tables import finite, is_number, plural, records, reference_loss
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "over_unigrams": Threshold(
        1.0, "nats over the pooled unigram entropy", "a model that knows only word frequencies reaches the unigram "
        "entropy; only wrong predictions cost more",
        "Shannon: the unigram entropy is the loss of the best context-free guess",
    ),
    "room": Threshold(
        0.5, "of the way from the unigram entropy to ln V", "a small vocabulary has less than two nats between what "
        "frequencies tell and a uniform guess: past half of it they are no help either",
        "ids of two tokenizers of 640 and 1024 ids exchanged: 6.5 nats of 6.9, unigram entropy 5.6 to 5.9",
    ),
    "noise": Threshold(
        0.7, "x ln V", "rare languages reach 5.7 of 10.8 nats; ids of another vocabulary 9 and more",
        "French and Chinese on models whose own text is at 3 nats, measured",
    ),
    "row_slack": Threshold(
        0.8, "nats", "a row of 128 targets whose losses scatter by 3 nats is known to 0.27: three of those",
        "standard error of a mean of 128 token losses",
    ),
    "most_rows": Threshold(
        0.9, "of the rows", "a wrong tokenizer spoils every row; fewer are garbage rows", "one file, one tokenizer"
    ),
    "high_score": AUDIT_SCORE,
    "dearer": Threshold(
        1.0, "nats over the baseline batch or the log", "what a healthy row may cost more than another of its run; "
        "text of another tokenizer cost 1.8 to 4.4 more",
        "python -m benchmarks.verdicts --split fresh --only tokenizer",
    ),
    "ordinary_gradient": Threshold(
        15, "x the baseline batch's gradient norm", "foreign ids are mispredicted with less confidence than a damaged "
        "state mispredicts its own: beyond it the state takes part",
        "rule data-shift, proved_gradient; python -m benchmarks.verdicts --only tokenizer loses none to it",
    ),
    "flag_score": Threshold(
        1.0, "audit score", "text that does not survive decoding and encoding was not written by this tokenizer",
        "stability_probe/audit (D6)",
    ),
}  # fmt: skip

PAGE = Page(
    title="Tokenizer mismatch",
    claim="The ids of the batch were written with another tokenizer or vocabulary, or wrapped to a narrower integer.",
    mechanism=(
        "Ids are only names: read with another vocabulary, a sentence becomes a random walk over the embedding table. "
        "The model predicts the words it knows and is confidently wrong everywhere, so the loss is above what a table "
        "of word frequencies reaches. It happens when a shard of another run gets into the mixture, when special "
        "tokens were added in another order, or when ids above 65 535 were stored in 16 bits and wrapped."
    ),
    signature=(
        "Every row far above the unigram entropy pooled over batch and baseline, and near ln V; the baseline fine on "
        "the same checkpoint; with a tokenizer at hand, decoding and encoding again does not give the ids back."
    ),
    false_alarms=(
        "A few garbage rows are `garbage-tokens`. A foreign language is hard, but has structure, and stays far under "
        "ln V. Labels at the wrong offset cost as much, but another offset is cheap. A single row's entropy is capped "
        "by its length, so only the pooled one counts."
    ),
    proof="The baseline batch in its place is ordinary on the same checkpoint.",
    remedies=(
        Remedy("Tokenise the source again with this model's tokenizer."),
        Remedy("Store a hash of the vocabulary in every shard, and compare it when the run starts."),
        Remedy("Check the width and byte order of the stored ids."),
    ),
    references=(
        "Shannon, A Mathematical Theory of Communication, 1948",
        "nanoGPT, data/openwebtext/prepare.py: ids as uint16, which holds vocabularies up to 65 536",
    ),
)


def _by_the_audit(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    rows = flagged_rows(m, RULE.slug, t["flag_score"].value)
    certain = bool(rows)
    if not rows:
        # A lesser finding is a habit of some rows' text; on every row it is one of the file, if the loss says so too.
        rows = flagged_rows(m, RULE.slug, t["high_score"].value)
        usual, _ = _reference(m)
        dearer = usual is not None and m.loss >= usual + t["dearer"].value
        if len(rows) < t["most_rows"].value * len(m.rows) or not dearer:
            return []
    reason = rows[0]["reason"].partition(": ")[2].rstrip(".")
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"{plural(len(rows), 'row')} do not survive decoding and encoding ({reason[:99]}).",
            location=Location(rows=tuple(int(row["row"]) for row in rows)),
            evidence=row_evidence(m, rows, t["flag_score"]),
            # Without a baseline the plan cannot be run, which the report says: likely, not proved.
            plans=_plans(m) if certain else (SWAP,),
            strength=float(len(rows)),
            latent=certain,
        )
    ]


def _reference(m: Measurements) -> tuple[float | None, str]:
    """What the loss should be, the baseline's first: only the same checkpoint can clear the weights."""
    return (m.baseline_loss, "baseline batch") if is_number(m.baseline_loss) else reference_loss(m)


def _plans(m: Measurements) -> tuple[Plan, ...]:
    return (SWAP,) if is_number(m.baseline_loss) else ()


def _right_offset(m: Measurements, limit: float) -> bool:
    """Whether no other offset is the right one: of offsets that all cost as much as noise, one is always the least."""
    losses = {int(k): loss for k, loss in m.offset_losses.items() if is_number(loss)}
    return 0 not in losses or min(losses.values()) >= min(losses[0] - 0.5, limit)


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    flagged = _by_the_audit(m, t)
    if flagged:
        return flagged
    if m.tokenizer_known and not any(RULE.slug in slugs_of(row) for row in records(m.rows)):
        return []  # the ids survive decoding and encoding: they are this tokenizer's, and hard text
    usual, name = _reference(m)
    if usual is None or m.unigram_entropy is None:
        raise Skip("a healthy batch must show that the checkpoint is fine; give one with --baseline, or --tokenizer")
    uniform = math.log(m.vocab_size)
    room = max(uniform - m.unigram_entropy, 0.0)
    over_unigrams = m.unigram_entropy + min(t["over_unigrams"].value, t["room"].value * room)
    # The rows must be past what frequencies tell, each of them; how near to noise is asked of the batch, which is less
    # uncertain than a row.
    limit = max(over_unigrams, t["noise"].value * uniform - t["row_slack"].value)
    losses = finite(row["loss"] for row in records(m.rows))
    over = [loss for loss in losses if loss >= limit]
    odd_rows = any(row["norm"] >= 10 * row["median_norm"] for row in records(m.embedding_rows))
    # Ids of another vocabulary read as garbage to the audit; any other finding on most rows is its own cause.
    content = sum(bool(set(row["flags"]) - {"garbage-tokens", RULE.slug}) for row in records(m.rows))
    if not is_number(m.loss) or not m.loss >= max(over_unigrams, t["noise"].value * uniform):
        return []
    if not losses or len(over) < t["most_rows"].value * len(losses):
        return []
    # The entropy of few tokens is too low an estimate; past a uniform guess no frequencies explain the loss.
    trained = usual < min(m.unigram_entropy, limit - 1) or (m.loss >= uniform and usual <= uniform - 1)
    # Not the log's: its norms are of batches of another size.
    steep = m.global_grad_norm > t["ordinary_gradient"].value * (m.baseline_grad_norm or math.inf)
    if not trained or odd_rows or steep or 2 * content >= len(losses) or not _right_offset(m, limit):
        return []
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"{len(over)} of {len(losses)} rows cost {m.loss:.2f} nats, over the unigram entropy of "
            f"{m.unigram_entropy:.2f}; the {name} costs {usual:.2f}.",
            location=Location(rows=tuple(int(row["row"]) for row in records(m.rows) if row["loss"] >= limit)),
            evidence=(
                Evidence("loss of this batch", m.loss, "nats", usual, name, limit, t["over_unigrams"].source),
                Evidence("unigram entropy, pooled over batch and baseline", m.unigram_entropy, "nats"),
                Evidence("rows past the limit", len(over), f"of {len(losses)}", threshold=t["most_rows"].value,
                         source=t["most_rows"].source),
            ),
            plans=_plans(m),
            strength=m.loss / limit,
            measures=("loss",),
        )
    ]  # fmt: skip


_HALF = {
    "audit_score": 0.7, "flags": ["tokenizer-mismatch"], "loss": 6.5,
    "reason": "tokenizer-mismatch: 56 % of the bigrams survive decoding and encoding again",
}  # fmt: skip
_ALIEN = _cases.rows({row: {"loss": 6.4 + 0.1 * row} for row in range(4)})
_WORSE = _cases.rows({row: {"loss": 7.1 + 0.1 * row} for row in range(4)})
_ALIEN_LOSSES = {-1: 8.3, 0: 6.55, 1: 6.6, 2: 6.7, 3: 6.7}
RULE = Rule(
    slug="tokenizer-mismatch",
    order=205,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case(
            "every row far above the unigram entropy",
            {"loss": 6.55, "rows": _ALIEN, "baseline_loss": 3.4, "offset_losses": _ALIEN_LOSSES},
            True,
        ),
        Case(
            "ids of another vocabulary: as bad at every offset, one of which is the least bad",
            {"loss": 7.2, "rows": _WORSE, "baseline_loss": 3.4, "offset_losses": {-1: 6.5, 0: 7.2, 1: 7.0}},
            True,
        ),
        Case(
            "the round trip fails on every row",
            {
                "rows": _cases.rows(
                    {
                        row: {
                            "audit_score": 1.0,
                            "flags": ["tokenizer-mismatch"],
                            "reason": "tokenizer-mismatch: 3 % kept",
                        }
                        for row in range(4)
                    }
                )
            },
            True,
        ),
        Case(
            "half of the bigrams of every row do not survive, and the batch is dear",
            {"loss": 6.5, "rows": _cases.rows(dict.fromkeys(range(4), _HALF)), "baseline_loss": 4.7},
            True,
        ),
        Case(
            "ids of a vocabulary of 640 read with one of 1024: little room between frequencies and a guess",
            {
                "vocab_size": 1024,
                "loss": 6.5,
                "unigram_entropy": 5.7,
                "baseline_loss": 4.5,
                "rows": _cases.rows({row: {"loss": 6.5} for row in range(4)}),
            },
            True,
        ),
        Case(
            "near miss: as dear, with forty times the gradient: the state takes part",
            {
                "loss": 6.55,
                "rows": _ALIEN,
                "baseline_loss": 3.4,
                "offset_losses": _ALIEN_LOSSES,
                "global_grad_norm": 40.0,
                "baseline_grad_norm": 1.0,
            },
            False,
        ),
        Case(
            "near miss: half of the bigrams of one row in four do not survive",
            {"loss": 5.5, "rows": _cases.rows({1: _HALF}), "baseline_loss": 4.0},
            False,
        ),
        Case(
            "near miss: half of the bigrams of every row do not survive, yet the batch costs what it should",
            {"loss": 3.6, "rows": _cases.rows({row: {**_HALF, "loss": 3.6} for row in range(4)}), "baseline_loss": 3.4},
            False,
        ),
        Case(
            "near miss: a script that the model never saw, which the tokenizer gives back as it was",
            {
                "loss": 11.5,
                "rows": _cases.rows({row: {"loss": 11.5} for row in range(4)}),
                "baseline_loss": 3.4,
                "tokenizer_known": True,
            },
            False,
        ),
        Case(
            "near miss: one garbage row",
            {"loss": 4.1, "rows": _cases.rows({1: {"loss": 6.6}}), "baseline_loss": 3.4},
            False,
        ),
        Case(
            "near miss: a rare language, below the unigram entropy plus a nat",
            {"loss": 5.5, "rows": _cases.rows({row: {"loss": 5.5} for row in range(4)}), "baseline_loss": 3.4},
            False,
        ),
        Case(
            "near miss: labels at the wrong offset",
            {"loss": 6.55, "rows": _ALIEN, "baseline_loss": 3.4, "offset_losses": {-1: 3.4, 0: 6.55, 1: 7.0}},
            False,
        ),
        Case(
            "near miss: the baseline is as bad: the checkpoint",
            {"loss": 6.55, "rows": _ALIEN, "baseline_loss": 6.5, "offset_losses": _ALIEN_LOSSES},
            False,
        ),
    ),
)
