"""A legitimate batch from another distribution than the run's: a statement, not a fault."""

from __future__ import annotations

import functools
import math
import statistics
from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Rule, Skip, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._audit import SWAP
from stability_probe.rules._tables import (
    CLEAR_NATS,
    CLEAR_SIGMAS,
    clear_margin,
    finite,
    is_number,
    median,
    records,
    reference_loss,
)
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "clear": CLEAR_NATS,
    "clear_sigmas": CLEAR_SIGMAS,
    "shift": Threshold(
        0.3, "nats from the reference", "means of ordinary batches of one mixture differ by less",
        "the standard error of the mean over 2 000 tokens of spread 3 nats is 0.07; four of them",
    ),
    "row_errors": Threshold(
        3, "standard errors of the difference of the two batches' row means, more of them where rows are few",
        "a row is one document: rows of one domain scatter by 0.4 nats and more, so four of them say little",
        "4 + 4 rows of Python library code on five healthy tiny models: 0.49 to 0.74 nats apart",
    ),
    "one_row": Threshold(
        1, "nats", "a batch or a baseline of one row has no spread to go by", "as above: single rows of one domain",
    ),
    "log_shift": Threshold(
        0.5, "nats from the log's usual loss", "the log may be of longer rows and other precision than the replay",
        "the margin of the rule not-reproduced",
    ),
    "sigmas": Threshold(6, "robust standard deviations of the logged loss", "the spike rule of long runs",
                        "OLMo-core: a step is skipped at 6 standard deviations over 128 steps"),
    "draws": Threshold(
        200, "draws", "of rows of one domain, one draw in so many puts the batch's as far above the baseline's: a rank "
        "test, which asks nothing of their scatter",
        "Mann and Whitney 1947; 4 + 6 rows have 210 ways",
    ),
    "apart_rarely": Threshold(
        0.5, "nats from the baseline batch, where so rare a draw is what it would take", "less is no shift to speak of",
        "the margin of the rule not-reproduced",
    ),
    "some_draws": Threshold(
        70, "draws", "one draw in seventy is no proof: the means must be far apart as well",
        "Mann and Whitney 1947; 4 + 4 rows have 70 ways",
    ),
    "apart": Threshold(
        1.5, "nats from the baseline batch, where such a draw is what it would take", "then the scatter of the "
        "baseline's own rows says nothing against it",
        "the same margin as the batch excess of the verdict",
    ),
    "most_rows": Threshold(
        0.75, "of the rows", "a shift moves the batch; one or two odd rows are those rows' affair",
        "with fewer, dropping the odd rows would explain it",
    ),
    "of_the_state": Threshold(
        1 / 3, "of the excess over the log, that the baseline batch has too", "a third is what two batches of one "
        "mixture may differ by beside a shift that is clear of it; more is the checkpoint's own",
        "python -m benchmarks.verdicts --only formulas",
    ),
    "noise": Threshold(
        0.75, "of the way from the usual loss to a uniform guess", "well-formed text in a rare language stays well "
        "below a uniform guess",
        "French on models whose own text is at 3 nats: 5.6 to 5.7 of 10.8, a third of the way",
    ),
    "ordinary_gradient": Threshold(
        3, "x the reference's gradient norm", "hard text has larger gradients, by less than this",
        "python benchmarks/healthy_ranges.py (gradient norms over five kinds of text)",
    ),
    "proved_gradient": Threshold(
        15, "x the reference's gradient norm", "a script never seen in training is mispredicted with confidence: then "
        "gradients of all positions agree; beyond it the state takes part",
        "eight rows of Japanese on a tiny model of English: 9.1 (python -m benchmarks.verdicts --only Japanese)",
    ),
    "misplaced": Threshold(
        1, "nats below the loss as declared, at another offset of the labels", "text that repeats itself is cheaper "
        "one position back by half a nat and more; where labels are off the right offset is cheaper by nats",
        "random games of chess on a tiny model: 0.6",
    ),
    "embedding": Threshold(
        10, "x median row norm", "a row this large is a fault of the state that only its users see",
        "rule embedding-row-outlier, large",
    ),
}  # fmt: skip

PAGE = Page(
    title="Data shift",
    claim="The batch is well-formed text from another distribution than the run's usual: harder or easier, not broken.",
    mechanism=(
        "A mixture is drawn source by source. When a shuffle is shallow, a source runs out or a new phase begins, a "
        "batch can come from one language or domain alone, and its loss then differs from the usual by what the model "
        "knows of that domain. The log shows a step that looks like a spike and passes with the batch. Nothing is "
        "wrong with weights, labels or numbers."
    ),
    signature=(
        "Most rows moderately above (or below) the baseline or the log; the audit finds nothing; the loss is below "
        "the unigram entropy or at least far below ln V; the gradient norm is ordinary."
    ),
    false_alarms=(
        "Ids of another tokenizer cost more than the unigram entropy on every row. A few bad rows move the mean as "
        "well, but the other rows are ordinary. A checkpoint that has been damaged raises the baseline batch too. "
        "Without a baseline or a log nobody can say what is usual."
    ),
    proof="The baseline batch in its place is ordinary on the same checkpoint.",
    remedies=(
        Remedy("Keep the batch. Check the mixture ratio and the depth of the shuffle around it."),
        Remedy("Judge such steps by a held-out set per domain, not by the training loss."),
        Remedy("If the mixture was changed on purpose, expect the level of the loss to change with it."),
    ),
    references=(
        "Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022, section 5.1",
        "Xie et al., DoReMi: Optimizing Data Mixtures Speeds Up Language Model Pretraining, 2023",
    ),
)  # fmt: skip


def _well_formed(m: Measurements, t: dict[str, Threshold]) -> bool:
    """Nothing in ids, labels or the rows that they use points to a defect."""
    flagged = any(row["flags"] for row in records(m.rows))
    # Further ahead only: what it reads itself a little-trained model with a tied head gives back of any foreign text,
    # and labels that stand too far ahead are flagged.
    offsets = {int(k): loss for k, loss in m.offset_losses.items() if is_number(loss) and int(k) >= 0}
    misplaced = 0 in offsets and min(offsets.values()) < offsets[0] - t["misplaced"].value
    large = any(row["norm"] >= t["embedding"].value * row["median_norm"] for row in records(m.embedding_rows))
    return not (flagged or misplaced or large or m.bad_ids)  # fmt: skip


def _ordinary_gradient(m: Measurements, limit: float) -> bool:
    usual = m.baseline_grad_norm
    if usual is None and m.log is not None:
        usual = m.log.usual_grad_norm
    return usual is None or not m.global_grad_norm > limit * usual


def _row_margin(m: Measurements, t: dict[str, Threshold]) -> float:
    """How far the means of two healthy batches of one domain can lie apart, by the scatter of their rows."""
    samples = [finite(row["loss"] for row in records(m.rows)), finite(m.baseline_row_losses)]
    if any(len(sample) < 2 for sample in samples):
        return max(t["shift"].value, t["one_row"].value)
    parts = [statistics.variance(sample) / len(sample) for sample in samples]
    variance = sum(parts)
    # Welch and Satterthwaite: what the two spreads, themselves estimated from a few rows, are worth.
    freedom = variance**2 / (sum(p**2 / (len(s) - 1) for p, s in zip(parts, samples, strict=True)) or math.inf)
    return max(t["shift"].value, student(t["row_errors"].value, freedom) * math.sqrt(variance))


def student(z: float, freedom: float) -> float:
    """The quantile of Student's t with the tail of `z` standard deviations (Wallace 1959, inverted).

    At 3 standard deviations it is within 6 % from 3 degrees of freedom on; fewer are taken for 3, since two rows that
    happen to agree say little about the others.
    """
    if not 0 < freedom < 1e6:
        return z
    freedom = max(freedom, 3.0)
    inner = (z * (8 * freedom + 3) / (8 * freedom + 1)) ** 2 / freedom
    return math.sqrt(freedom * math.expm1(min(inner, 50.0)))


def _stands_apart(m: Measurements, t: dict[str, Threshold], shift: float) -> Threshold | None:
    """The limit on the shift where so few of the baseline's rows cost as much; None where it is not reached."""
    own, other = finite(row["loss"] for row in records(m.rows)), finite(m.baseline_row_losses)
    if not own or not other:
        return None
    rarity = 1 / rank_chance(own, other)
    if rarity >= t["draws"].value and shift >= t["apart_rarely"].value:
        return t["apart_rarely"]
    return t["apart"] if rarity >= t["some_draws"].value and shift >= t["apart"].value else None


def rank_chance(own: list[float], other: list[float]) -> float:
    """The chance that rows drawn alike order so far in favour of `own` (Mann and Whitney 1947, exact, one-sided).

    Of equal losses the other's counts as the dearer. 1 from 21 rows of either on: then their spread is known.
    """
    n, m = len(own), len(other)
    if max(n, m) > MOST_RANKED:
        return 1.0
    won = sum(mine > theirs for mine in own for theirs in other)
    ways = _ways(n, m)
    return sum(ways[won:]) / sum(ways)


MOST_RANKED = 20


@functools.cache
def _ways(n: int, m: int) -> tuple[int, ...]:
    """By the number of pairs won (0 to n · m), in how many orders of n + m rows it comes out so."""
    if not n or not m:
        return (1,)
    last_wins = (0,) * m + _ways(n - 1, m)  # the dearest row is one's own: it beats all m others
    last_loses = _ways(n, m - 1) + (0,) * n
    return tuple(a + b for a, b in zip(last_wins, last_loses, strict=True))


def _log_limit(m: Measurements, t: dict[str, Threshold]) -> float:
    """How far a healthy batch can lie from the log's usual loss, by the scatter of the log and of the batch's rows."""
    by_log = clear_margin(m, t, "log_shift")
    losses = finite(row["loss"] for row in records(m.rows))
    if len(losses) < 2:
        return max(by_log, t["one_row"].value)
    return max(by_log, t["row_errors"].value * math.sqrt(statistics.variance(losses) / len(losses)))


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    logged, by_log = reference_loss(m)
    if logged is None:
        raise Skip("nothing says what is usual; give a healthy batch with --baseline, or the log with --log")
    if m.baseline_loss is None or not is_number(m.baseline_loss):
        return _against(m, t, logged, by_log)
    found = _against(m, t, m.baseline_loss, "baseline batch")
    if found or by_log == "baseline batch":
        return found
    # Few rows of a baseline can scatter too far to tell; then the log may, unless the baseline stands above it as well:
    # what both batches cost more is the checkpoint's.
    is_usual = m.baseline_loss - logged <= t["of_the_state"].value * (m.loss - logged)
    return _against(m, t, logged, by_log) if is_usual else []


def _against(m: Measurements, t: dict[str, Threshold], usual: float, name: str) -> list[Suspect]:
    limit = _row_margin(m, t) if name == "baseline batch" else _log_limit(m, t)
    losses = finite(row["loss"] for row in records(m.rows))
    shift = m.loss - usual
    source = t["row_errors" if name == "baseline batch" else "log_shift"].source
    if not is_number(m.loss) or not losses:
        return []
    apart = _stands_apart(m, t, shift) if name == "baseline batch" and abs(shift) < limit else None
    if apart is not None:
        limit, source = apart.value, apart.source
    if abs(shift) < limit:
        return []
    # Beside a baseline, text that the tokenizer gives back as it was may cost anything: a script never seen in training
    # is mispredicted with confidence.
    proved = m.tokenizer_known and name == "baseline batch"
    if not proved and m.loss - usual > t["noise"].value * (math.log(m.vocab_size) - usual):
        return []
    moved = [loss for loss in losses if (loss - usual) * shift > 0 and abs(loss - usual) >= limit / 2]
    if len(moved) < t["most_rows"].value * len(losses):
        return []
    # The log lags behind a falling loss, so an easier batch is one only beside a baseline on the same checkpoint.
    if shift < 0 and name != "baseline batch":
        return []
    if not _well_formed(m, t) or not _ordinary_gradient(
        m, t["proved_gradient" if proved else "ordinary_gradient"].value
    ):
        return []
    side = "above" if shift > 0 else "below"
    plans = (SWAP,) if m.baseline_loss is not None else ()
    evidence = [
        Evidence("loss of this batch", m.loss, "nats", usual, name, limit, source),
        Evidence("rows on the same side", len(moved), f"of {len(losses)}", threshold=t["most_rows"].value,
                 source=t["most_rows"].source),
        Evidence("median row", median(losses), "nats", usual, name),
    ]  # fmt: skip
    if m.unigram_entropy is not None:
        evidence.append(Evidence("unigram entropy, pooled", m.unigram_entropy, "nats"))
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"Well-formed text, {abs(shift):.2f} nats {side} the {name}: {len(moved)} of {len(losses)} rows "
            f"are {'harder' if shift > 0 else 'easier'}, none is flagged.",
            location=Location(),
            evidence=tuple(evidence),
            plans=plans,
            strength=abs(shift) / limit,
            measures=("loss",),
            latent=not plans,
            last_resort=True,
        )
    ]  # fmt: skip


_HARD = _cases.rows({row: {"loss": 4.4 + 0.1 * row} for row in range(4)})
RULE = Rule(
    slug="data-shift",
    order=306,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case("a batch of another language", {"loss": 4.55, "rows": _HARD, "baseline_loss": 3.4}, True),
        Case(
            "an easy domain",
            {"loss": 1.2, "rows": _cases.rows({row: {"loss": 1.2} for row in range(4)}), "baseline_loss": 3.4},
            True,
        ),
        Case(
            "near miss: easier than the log, which lags behind a falling loss",
            {
                "loss": 1.2, "rows": _cases.rows({row: {"loss": 1.2} for row in range(4)}),
                "log": {"step": 400, "usual_loss": 3.4, "loss_spread": 0.05},
            },
            False,
        ),
        Case(
            "over the log, beside a baseline whose rows scatter too far to tell",
            {
                "loss": 5.79,
                "rows": _cases.rows({row: {"loss": loss} for row, loss in enumerate((6.5, 5.7, 5.2, 5.7))}),
                "baseline_loss": 4.4, "baseline_row_losses": (5.6, 4.7, 5.4, 1.8),
                "log": {"step": 400, "usual_loss": 4.0, "loss_spread": 0.4},
            },
            True,
        ),
        Case(
            "near miss: over the log, as the baseline is: the checkpoint is what differs",
            {
                "loss": 3.55, "rows": _cases.rows({row: {"loss": 3.5 + 0.03 * row} for row in range(4)}),
                "baseline_loss": 3.45, "baseline_row_losses": (3.4, 3.5),
                "log": {"step": 400, "usual_loss": 3.0, "loss_spread": 0.05},
            },
            False,
        ),
        Case("near miss: as usual", {"baseline_loss": 3.3}, False),
        Case(
            "a batch of another language, seen against the log",
            {"loss": 4.55, "rows": _HARD, "log": {"step": 400, "usual_loss": 3.4, "loss_spread": 0.05}},
            True,
        ),
        Case(
            "a nat and more over a log that scatters",
            {"loss": 4.55, "rows": _HARD, "log": {"step": 400, "usual_loss": 3.4, "loss_spread": 0.4}},
            True,
        ),
        Case(
            "every row beyond the baseline's dearest, however much those scatter",
            {
                "loss": 6.1, "rows": _cases.rows({row: {"loss": 6.0 + 0.1 * row} for row in range(4)}),
                "baseline_loss": 3.8, "baseline_row_losses": (4.3, 1.3, 4.1, 5.5),
            },
            True,
        ),
        Case(
            "four rows half a nat and more over all of six others",
            {
                "loss": 5.0,
                "rows": _cases.rows({row: {"loss": 4.9 + 0.07 * row} for row in range(4)}),
                "baseline_loss": 4.43, "baseline_row_losses": (4.0, 4.09, 4.34, 4.51, 4.8, 4.86),
            },
            True,
        ),
        Case(
            "near miss: four rows a nat over four others",
            {
                "loss": 5.23,
                "rows": _cases.rows({row: {"loss": loss} for row, loss in enumerate((5.62, 4.58, 5.43, 5.28))}),
                "baseline_loss": 4.22, "baseline_row_losses": (4.34, 3.68, 4.47, 4.38),
            },
            False,
        ),
        Case(
            "near miss: as far over a log that scatters by more",
            {"loss": 4.55, "rows": _HARD, "log": {"step": 400, "usual_loss": 3.4, "loss_spread": 0.5}},
            False,
        ),
        Case(
            "near miss: many standard deviations over a steady log, by less than half a nat",
            {
                "loss": 3.85, "rows": _cases.rows({row: {"loss": 3.85} for row in range(4)}),
                "log": {"step": 400, "usual_loss": 3.4, "loss_spread": 0.05},
            },
            False,
        ),
        Case(
            "near miss: over the log by no more than its own rows scatter",
            {
                "loss": 4.5, "rows": _cases.rows({row: {"loss": 3.6 + 0.6 * row} for row in range(4)}),
                "log": {"step": 400, "usual_loss": 3.4, "loss_spread": 0.05},
            },
            False,
        ),
        Case(
            "near miss: one row does it all",
            {"loss": 4.3, "rows": _cases.rows({2: {"loss": 7.0}}), "baseline_loss": 3.4},
            False,
        ),
        Case(
            "near miss: as bad as a guess, on every row",
            {"loss": 6.6, "rows": _cases.rows({row: {"loss": 6.6} for row in range(4)}), "baseline_loss": 3.4},
            False,
        ),
        Case(
            "a script never seen in training, which the tokenizer gives back as it was",
            {
                "loss": 11.5, "rows": _cases.rows({row: {"loss": 11.5} for row in range(4)}), "baseline_loss": 3.4,
                "tokenizer_known": True,
            },
            True,
        ),
        Case(
            "such a script under a gradient norm nine times the usual",
            {
                "loss": 11.5, "rows": _cases.rows({row: {"loss": 11.5} for row in range(4)}), "baseline_loss": 3.4,
                "tokenizer_known": True, "global_grad_norm": 9.8, "baseline_grad_norm": 1.07,
            },
            True,
        ),
        Case(
            "near miss: forty times: the state takes part",
            {
                "loss": 11.5, "rows": _cases.rows({row: {"loss": 11.5} for row in range(4)}), "baseline_loss": 3.4,
                "tokenizer_known": True, "global_grad_norm": 43.0, "baseline_grad_norm": 1.07,
            },
            False,
        ),
        Case(
            "near miss: the batch uses an embedding row that exploded",
            {"loss": 4.55, "rows": _HARD, "baseline_loss": 3.4, "embedding_rows": [{"norm": 400.0}]},
            False,
        ),
    ),
)  # fmt: skip
