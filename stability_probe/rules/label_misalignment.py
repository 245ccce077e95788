"""Labels that belong to another position than the one they stand at."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Plan, Rule, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._audit import AUDIT_SCORE, drop_plan, flagged_rows
from stability_probe.rules._tables import is_number, median, plural, records, reference_loss
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "margin": Threshold(
        0.5, "nats", "on healthy text the declared offset wins by 6 nats and more; noise is far below half a nat",
        "python benchmarks/healthy_ranges.py: SmolLM2-135M 2.6 nats at the right offset, 9.1 to 10.8 at the others",
    ),
    "flagged_margin": Threshold(
        0.1, "nats", "enough beside labels that equal the ids at a wrong shift: a little-trained model gains as little",
        "a little model at 4.18 nats of 6.46 gained 0.39 with labels that had been shifted twice",
    ),
    "share": Threshold(
        0.15, "of the declared loss", "keeps models near chance, where all offsets cost about the same, out of it",
        "an untrained model differs between offsets by under a tenth of ln V",
    ),
    "row_margin": Threshold(
        1.0, "nats", "a single row is noisier than a batch: 127 targets of a loss with a spread of 3 nats give 0.27",
        "standard error of a mean of 127 token losses; four of them",
    ),
    "token_spread": Threshold(
        3.0, "nats", "the losses of single tokens differ by this much: few targets (masked prompts, short rows) can "
        "prefer any offset, so one must win by four standard errors of its own count",
        "healthy tiny Gemma-2, 8 targets: 1.3 nats cheaper at -1; tiny Llama, 1 target: 2.7 nats at +3",
    ),
    "over_unigrams": Threshold(
        0.5, "nats over the pooled unigram entropy", "the right targets of a trained model cost less than word "
        "frequencies do; those one further ahead cost more (8.9 nats against 5.0)",
        "python benchmarks/healthy_ranges.py (loss by offset, unigram entropy)",
    ),
    "copying_loss": Threshold(
        0.05, "nats", "no model predicts the next token of varied text this well on two different batches",
        "Kaplan et al., Scaling Laws for Neural Language Models, 2020: the entropy of text is over 1 nat per token",
    ),
    "copying_entropy": Threshold(
        3.0, "nats of unigram entropy", "repetitive text is rightly predicted at almost no loss",
        "natural text of 256 tokens and more is above 4 nats",
    ),
    "flagged_rows": Threshold(
        0.9, "of the rows", "a fault in the pipeline's shift hits every row", "stability_probe/audit/labels.py (D13)"
    ),
}  # fmt: skip

PAGE = Page(
    title="Labels at the wrong offset",
    claim="The labels are shifted by another offset than the loss assumes, so the model is asked for the wrong token.",
    mechanism=(
        "A causal model is trained to give the next token. When the loader has shifted the labels already and the "
        "model shifts them again, position t is asked for token t+2; when nobody shifts, it is asked for the token "
        "it has just read. A model that was trained rightly is then confidently wrong on nearly every position, and "
        "the loss rises above what a table of word frequencies would reach. A model trained on unshifted labels "
        "learns to copy: its loss falls to zero and it is worth nothing."
    ),
    signature=(
        "The loss as a function of the offset has its minimum away from the declared one, by several nats; or in "
        "some rows only, where two loaders with different conventions feed one batch. Copying shows as a loss of "
        "almost zero on varied text, on every batch."
    ),
    false_alarms=(
        "A learning rate that is too high, corrupt weights or another tokenizer raise the loss too, but leave the "
        "minimum at the declared offset. In repetitive rows all offsets cost nearly the same. A model with "
        "a tied head that has learned little returns the token it reads, so targets moved back cost it less than the "
        "right ones: there the right ones still cost less than word frequencies."
    ),
    proof="The targets are moved back and the batch is replayed: the loss returns to the usual value.",
    remedies=(
        Remedy("Shift in one place only: pass unshifted labels to a model that shifts, or shifted ones to a loss that "
               "does not."),
        Remedy("Tell the replay which convention the batch follows, if it chose wrongly.",
               "probe replay --ckpt CKPT --batch BATCH --labels shifted"),
        Remedy("Assert on the first batch of a run that the declared offset has the lowest loss."),
    ),
    references=(
        "transformers, causal language models: labels are shifted inside the model",
        "nanoGPT, train.py get_batch: y is x moved by one",
    ),
)  # fmt: skip


_SHIFT = re.compile(r"labels\[t\] is ids\[t(?P<stored>[+-]\d+)?\].*\((?P<expected>shifted|unshifted)\)")


def _best(losses: dict[int, float]) -> tuple[int, float, float]:
    """(best offset, loss at it, declared loss); (0, NaN, NaN) where the declared loss is unknown."""
    known = {int(k): loss for k, loss in losses.items() if is_number(loss)}
    if 0 not in known:
        return 0, math.nan, math.nan
    best = min(known, key=lambda k: (known[k], k != 0))
    return best, known[best], known[0]


def _wrong(losses: dict[int, float], margin: float, share: float) -> tuple[int, float, float] | None:
    best, lowest, declared = _best(losses)
    return (best, lowest, declared) if best and declared - lowest >= max(margin, share * declared) else None


def _least_gain(margin: str, targets: int, t: dict[str, Threshold]) -> float:
    """What another offset must win by over this many targets: the margin, or four standard errors of their mean."""
    return max(t[margin].value, 4 * t["token_spread"].value / math.sqrt(max(targets, 1)))


def _evidence(
    m: Measurements, where: str, losses: dict[int, float], best: int, limit: Threshold
) -> tuple[Evidence, ...]:
    usual, name = reference_loss(m)
    return (
        Evidence(f"loss at the declared offset{where}", losses[0], "nats", usual, name),
        Evidence(
            f"loss with the targets moved by {best:+d}{where}", losses[best], "nats", losses[0], "declared offset",
            limit.value, limit.source,
        ),
    )  # fmt: skip


def _believable(m: Measurements, wrong: tuple[int, float, float], rows: set[int], t: dict[str, Threshold]) -> bool:
    """Whether the other offset is the right one, and moving targets back finds more than the input itself.

    Right targets cost a trained model less than word frequencies do. Noise has no right offset, only a cheaper one.

    A model with a tied head returns the token it reads where it knows no better (little training, rare bytes,
    noise), so targets moved back cost less than the right ones. The stored labels tell the two apart: those that
    are another shift of the ids are flagged by the audit. Labels that are absent are right by construction.
    """
    best, lowest, _ = wrong
    entropy = m.unigram_entropy
    if entropy is not None and lowest > entropy + t["over_unigrams"].value:
        return False
    return best > 0 or bool(rows & {int(row["row"]) for row in flagged_rows(m, RULE.slug, AUDIT_SCORE.value)})


def _testified(reason: str) -> int | None:
    """How far the targets must move by what the audit read off ids and labels; None where it does not say."""
    found = _SHIFT.search(reason)
    return (found["expected"] == "shifted") - int(found["stored"] or 0) if found else None


def _whole_batch(m: Measurements, t: dict[str, Threshold]) -> Suspect | None:
    flagged = flagged_rows(m, RULE.slug, 1.0)
    losses = m.offset_losses
    targets = int(sum(row["valid_targets"] for row in records(m.rows)))
    wrong = _wrong(losses, _least_gain("margin", targets, t), t["share"].value)
    if flagged and len(flagged) >= t["flagged_rows"].value * len(m.rows):
        # The labels themselves say which offset is right; the loss need only agree.
        said = _testified(flagged[0]["reason"])
        told = {k: loss for k, loss in losses.items() if k in (0, said)} if said in losses else losses
        wrong = _wrong(told, t["flagged_margin"].value, 0.0)
    every = {int(row["row"]) for row in records(m.rows)}
    if not wrong or not _believable(m, wrong, every, t):
        return None
    best, lowest, declared = wrong
    return Suspect(
        cause=RULE.slug,
        summary=f"Targets stand {_distance(best)}: the loss is {declared:.2f} nats as declared, {lowest:.2f} with them "
        f"moved by {best:+d}.",
        location=Location(rows=tuple(int(row["row"]) for row in records(m.rows) if row["valid_targets"] > 0)),
        evidence=_evidence(m, "", m.offset_losses, best, t["margin"]),
        plans=(Plan("realign_labels", {"offset": best}, f"all targets moved by {best:+d}"),),
        strength=declared - lowest,
        measures=("loss", "grad_norm"),
    )  # fmt: skip


def _distance(best: int) -> str:
    """Where the declared targets stand, seen from the right ones."""
    return f"{plural(abs(best), 'position')} too {'far ahead' if best < 0 else 'early'}"


def _some_rows(m: Measurements, t: dict[str, Threshold]) -> Suspect | None:
    told = {
        int(row["row"]) for row in flagged_rows(m, RULE.slug, AUDIT_SCORE.value)
    }  # there the labels speak, not the loss alone
    said = {int(row["row"]): _testified(row["reason"]) for row in flagged_rows(m, RULE.slug, 1.0)}
    margins = {
        int(row["row"]): t["row_margin"].value
        if int(row["row"]) in told
        else _least_gain("row_margin", int(row["valid_targets"]), t)
        for row in records(m.rows)
    }
    table = list(margins)

    def wrong_in(row: int, losses: dict[int, float]) -> tuple[int, float, float] | None:
        if said.get(row) in losses:  # the labels themselves say which offset is right; the loss need only agree
            return _wrong({k: losses[k] for k in (0, said[row]) if k in losses}, t["flagged_margin"].value, 0.0)
        return _wrong(losses, margins[row], t["share"].value)

    found = {
        row: wrong
        for row, losses in zip(table, m.row_offset_losses, strict=False)
        if (wrong := wrong_in(row, losses)) and _believable(m, wrong, {row}, t)
    }
    if not found:
        return None
    offsets = [wrong[0] for wrong in found.values()]
    best = max(set(offsets), key=lambda k: (offsets.count(k), -abs(k)))
    rows = [row for row, wrong in found.items() if wrong[0] == best]
    gains = {row: found[row][2] - found[row][1] for row in rows}
    worst = max(rows, key=lambda row: gains[row])
    losses = m.row_offset_losses[table.index(worst)]
    listed = ", ".join(map(str, rows[:8])) + (", …" if len(rows) > 8 else "")
    dropped = [row for row in records(m.rows) if int(row["row"]) in set(rows)]
    return Suspect(
        cause=RULE.slug,
        summary=f"In {plural(len(rows), 'row')} ({listed}) targets stand {_distance(best)}: row {worst} costs "
        f"{losses[0]:.2f} nats as declared, {losses[best]:.2f} moved by {best:+d}.",
        location=Location(rows=tuple(rows)),
        evidence=_evidence(m, f" in row {worst}", losses, best, t["row_margin"]),
        plans=(
            Plan("realign_labels", {"offset": best, "rows": rows}, f"targets of {listed} moved by {best:+d}"),
            *drop_plan(m, dropped),
        ),
        strength=median(gains.values()),
        measures=("loss", "grad_norm"),
    )  # fmt: skip


def _rows_alone(m: Measurements, t: dict[str, Threshold]) -> Suspect | None:
    """Rows that another offset puts right, else rows whose labels belong to none."""
    return _some_rows(m, t) or _of_other_text(m, t)


def _of_other_text(m: Measurements, t: dict[str, Threshold]) -> Suspect | None:
    """Rows whose stored labels agree with their ids at no shift, and which cost far more than the others."""
    flagged = flagged_rows(m, RULE.slug, AUDIT_SCORE.value)
    others = [row["loss"] for row in records(m.rows) if RULE.slug not in row["flags"] and is_number(row["loss"])]
    usual = median(others)
    # The labels themselves are the evidence; the loss need only agree, by what a batch's offset must gain.
    rows = [row for row in flagged if row["loss"] >= usual + _least_gain("margin", int(row["valid_targets"]), t)]
    if not rows or len(rows) >= t["flagged_rows"].value * len(m.rows):
        return None
    worst = max(rows, key=lambda row: row["loss"])
    reason = worst["reason"].partition(": ")[2].rstrip(".")
    return Suspect(
        cause=RULE.slug,
        summary=f"In {plural(len(rows), 'row')} the stored labels are not the next token ({reason[:140]}): row "
        f"{int(worst['row'])} costs {worst['loss']:.2f} nats, the median of the others {usual:.2f}.",
        location=Location(rows=tuple(int(row["row"]) for row in rows)),
        evidence=(
            Evidence(f"loss of row {int(worst['row'])}", worst["loss"], "nats", usual, "median of the other rows",
                     t["margin"].value, t["margin"].source),
            Evidence(f"audit of row {int(worst['row'])}", reason),
        ),
        plans=drop_plan(m, rows),
        strength=worst["loss"] - usual,
        measures=("loss", "grad_norm"),
    )  # fmt: skip


def _copying(m: Measurements, t: dict[str, Threshold]) -> Suspect | None:
    """The model returns its own input: the loss is almost zero on this batch and on the baseline."""
    low = t["copying_loss"].value
    if m.baseline_loss is None or not (m.loss <= low and m.baseline_loss <= low):
        return None
    if m.unigram_entropy is None or m.unigram_entropy < t["copying_entropy"].value:
        return None
    return Suspect(
        cause=RULE.slug,
        summary=f"The loss is {m.loss:.3f} nats on text of {m.unigram_entropy:.1f} nats of unigram entropy, on the "
        "baseline batch too: the model copies its input.",
        location=Location(),
        evidence=(
            Evidence("loss of this batch", m.loss, "nats", m.unigram_entropy, "unigram entropy of the same text",
                     low, t["copying_loss"].source),
            Evidence("loss of the baseline batch", m.baseline_loss, "nats", threshold=low),
        ),
        strength=m.unigram_entropy,
        latent=True,
    )  # fmt: skip


def _by_the_audit(m: Measurements, t: dict[str, Threshold]) -> Suspect | None:
    """The stored labels equal the ids at a shift that is neither convention, whatever the model makes of it."""
    rows = flagged_rows(m, RULE.slug, 1.0)
    if not rows or len(rows) < t["flagged_rows"].value * len(m.rows):
        return None
    reason = rows[0]["reason"].partition(": ")[2].rstrip(".") or "labels are not the next token"
    said = _testified(rows[0]["reason"])
    plans: tuple[Plan, ...] = ()
    if said and said in m.offset_losses:
        plans = (Plan("realign_labels", {"offset": said}, f"all targets moved by {said:+d}"),)
    return Suspect(
        cause=RULE.slug,
        summary=f"In {len(rows)} of {len(m.rows)} rows the stored labels are not the next token ({reason[:140]}).",
        location=Location(rows=tuple(int(row["row"]) for row in rows)),
        evidence=(
            Evidence("rows whose labels are another shift of the ids", len(rows), f"of {len(m.rows)}", 0,
                     "a batch whose labels are the next token", t["flagged_rows"].value, t["flagged_rows"].source),
        ),
        plans=plans,
        strength=1.0,
        measures=("loss",),
        latent=True,
        exact=True,  # a model that was trained on them so is used to it
    )  # fmt: skip


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    whole = _whole_batch(m, t)
    if whole:
        return [whole]
    return [suspect for look in (_rows_alone, _copying, _by_the_audit) if (suspect := look(m, t))]


_DOUBLE = {-1: 3.4, 0: 8.9, 1: 9.3, 2: 9.6, 3: 9.8}
_RIGHT = {-1: 8.1, 0: 3.4, 1: 6.6, 2: 6.9, 3: 7.0}

_ASTRAY = {
    "flags": ["label-misalignment"], "audit_score": 0.75, "spans": [(0, 128, "labels", "")],
    "reason": "label-misalignment: labels agree with the ids at no shift from −2 to 3 (best 4%)",
}  # fmt: skip
_FLAGGED = {"flags": ["label-misalignment"], "audit_score": 1.0, "spans": [(0, 128, "labels", "")]}
RULE = Rule(
    slug="label-misalignment",
    order=202,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case(
            "labels shifted twice",
            {"loss": 8.9, "offset_losses": _DOUBLE, "rows": _cases.rows(dict.fromkeys(range(4), _FLAGGED))},
            True,
        ),
        Case(
            "shifted twice under a little-trained tied model, which likes its input best: the labels say by how much",
            {
                "loss": 4.11, "offset_losses": {-2: 3.84, -1: 3.98, 0: 4.11, 1: 4.2, 2: 4.2, 3: 4.2},
                "rows": _cases.rows(
                    {
                        row: {
                            "flags": ["label-misalignment"], "audit_score": 1.0, "spans": [(0, 128, "labels", "")],
                            "reason": "label-misalignment: labels[t] is ids[t+2] for 100% of the labels; expected "
                            "the next token (shifted)",
                        }
                        for row in range(4)
                    }
                ),
            },
            True,
        ),
        Case("labels never shifted", {"loss": 8.1, "offset_losses": {-1: 9.0, 0: 8.1, 1: 3.4, 2: 6.6, 3: 6.9}}, True),
        Case(
            "one row of four comes from a loader that shifts twice",
            {"loss": 4.8, "offset_losses": {-1: 6.9, 0: 4.8, 1: 7.3, 2: 7.6, 3: 7.7},
             "row_offset_losses": [_RIGHT, _RIGHT, _DOUBLE, _RIGHT], "rows": _cases.rows({2: _FLAGGED})},
            True,
        ),
        Case(
            "near miss: the same losses on noise, whose labels are where they belong",
            {"loss": 4.8, "offset_losses": {-1: 6.9, 0: 4.8, 1: 7.3, 2: 7.6, 3: 7.7},
             "row_offset_losses": [_RIGHT, _RIGHT, _DOUBLE, _RIGHT]},
            False,
        ),
        Case(
            "a model that learned to copy: no loss on two batches of varied text",
            {"loss": 0.01, "baseline_loss": 0.012, "offset_losses": {-1: 9.0, 0: 0.01, 1: 9.5, 2: 9.7, 3: 9.8}},
            True,
        ),
        Case(
            "near miss: a learning rate that was too high spoils every offset",
            {"loss": 7.6, "offset_losses": {-1: 8.3, 0: 7.6, 1: 7.5, 2: 7.7, 3: 7.7}},
            False,
        ),
        Case(
            "near miss: repeated tokens cost the same at all offsets",
            {"loss": 0.4, "offset_losses": {-1: 0.3, 0: 0.4, 1: 0.31, 2: 0.35, 3: 0.3}},
            False,
        ),
        Case(
            "near miss: one batch learned by heart",
            {"loss": 0.01, "baseline_loss": 5.0, "offset_losses": {-1: 9.0, 0: 0.01, 1: 9.5, 2: 9.7, 3: 9.8}},
            False,
        ),
        Case(
            "near miss: a row of noise, cheaper with its own input as target",
            {"loss": 4.6, "row_offset_losses": [_RIGHT, {-1: 6.73, 0: 8.41, 1: 8.5, 2: 8.5}, _RIGHT, _RIGHT]},
            False,
        ),
        Case(
            "one row whose labels belong to another text",
            {
                "loss": 4.2, "rows": _cases.rows({2: {**_ASTRAY, "loss": 6.6}}),
                "row_offset_losses": [_RIGHT, _RIGHT, {-1: 6.5, 0: 6.6, 1: 6.6, 2: 6.7, 3: 6.6}, _RIGHT],
            },
            True,
        ),
        Case(
            "near miss: labels of one row agree with its ids at no shift, and cost what the others do",
            {
                "rows": _cases.rows({2: {**_ASTRAY, "loss": 3.6}}),
                "row_offset_losses": [_RIGHT, _RIGHT, {-1: 8.0, 0: 3.6, 1: 6.6, 2: 6.7, 3: 6.6}, _RIGHT],
            },
            False,
        ),
        Case(
            "near miss: a chat row with eight targets, which cost less three positions further by chance",
            {
                "loss": 4.4, "rows": _cases.rows({2: {"valid_targets": 8, "loss": 7.6}}),
                "row_offset_losses": [_RIGHT, _RIGHT, {-1: 8.2, 0: 7.6, 1: 7.9, 2: 7.7, 3: 4.9}, _RIGHT],
            },
            False,
        ),
        Case(
            "near miss: a batch of five targets prefers another offset by chance",
            {
                "loss": 7.2, "rows": _cases.rows({row: {"valid_targets": 1 + (row == 0)} for row in range(4)}),
                "offset_losses": {-1: 8.2, 0: 7.2, 1: 7.9, 2: 7.7, 3: 4.9},
            },
            False,
        ),
        Case(
            "near miss: a little-trained model with a tied head still returns its input",
            {"loss": 3.83, "offset_losses": {-2: 5.9, -1: 3.09, 0: 3.83, 1: 5.2, 2: 5.4, 3: 5.4}},
            False,
        ),
        Case(
            "near miss: an untrained model with a tied head prefers its own input",
            {
                "loss": 7.4, "offset_losses": {-1: 0.9, 0: 7.4, 1: 7.4, 2: 7.5, 3: 7.5},
                "parameters": _cases.parameters(everywhere={"constant": 1.0, "std": 0.0}),
            },
            False,
        ),
    ),
)  # fmt: skip
