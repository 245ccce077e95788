"""What the rules may look at: data frames and numbers, as `tables.py` makes them from traces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from stability_probe.checkpoints.base import KeyReport


@dataclass(frozen=True)
class PrecisionGap:
    """One precision against fp32, on the same batch.

    Attributes:
        token_gap: mean |loss in this precision − loss in fp32| over valid targets, nats.
        first_nonfinite: the first module in execution order whose output is not finite, or None.
        rounding_gap: token gap that comes from rounding the fp32 logits to this format alone, nats.
        recentred_gap: the same after log Z was subtracted from the logits, nats.
        grad_relative_error: ‖g − g_fp32‖ / ‖g_fp32‖ over all parameters (sketched).
    """

    loss: float
    token_gap: float
    global_grad_norm: float
    nonfinite: int
    first_nonfinite: str | None = None
    rounding_gap: float | None = None
    recentred_gap: float | None = None
    grad_relative_error: float | None = None


@dataclass(frozen=True)
class StepEffect:
    """What one simulated optimizer step does, and what it does when one thing is changed.

    All damages are in nats: loss after the step minus loss before it, on `measured_on`.

    Attributes:
        measured_on: "baseline batch"; without one "held-out half of this batch", whose gradient the step does not
            follow; "this batch" where it is a single row.
        damage: with the stored moments, the LR, and the clipping of the run.
        damage_by_lr: {0.5: …, 0.25: …} the same at a multiple of the LR; 0.05 and 0.01 too where 0.25 does not heal.
        damage_refreshed: with v̂ replaced by max(v̂, g²) in the suspicious tensors.
        lr, grad_clip, clip_factor: what the step used; clip_factor is 1 where nothing was clipped.
    """

    measured_on: str
    damage: float
    damage_by_lr: dict[float, float]
    damage_refreshed: float | None
    lr: float
    grad_clip: float | None
    clip_factor: float


@dataclass(frozen=True)
class StepProgress:
    """What one simulated AdamW step gains to first order: −⟨gradient, update⟩, in nats. The excess of a plateau.

    Attributes:
        expected: of the reference step: weights in fp32, ε far below √v̂.
        lost: share of it that the run's own step does not make: 1 − gained / expected.
        lost_to_rounding, lost_to_epsilon: the same where only the weights' format, or only ε, is the run's own.
        in_bf16: the weights are kept in bf16 without an fp32 copy; `in_bf16_reason` says how that is known.
        vanish_share: share of the elements with an update whose update rounds away there; 0 where not `in_bf16`.
        vanishing: the same by parameter, the worst first, at most 50.
        eps: the largest ε of the optimizer's groups.
    """

    expected: float
    lost: float
    lost_to_rounding: float
    lost_to_epsilon: float
    vanish_share: float = 0.0
    vanishing: tuple[tuple[str, float], ...] = ()
    in_bf16: bool = False
    in_bf16_reason: str = ""
    eps: float = 1e-8


@dataclass(frozen=True)
class PositionFacts:
    """How positions are told to the model.

    Attributes:
        stored: the batch holds position ids, and `taken` the model's forward takes them.
        first: the smallest first position of a row (0 as it should be; the first real token of a padded row).
        breaks: (row, position) where the next id is not one more than the last, at most 200.
        broken_rows: all rows with such a break, listed or not.
        at_documents: share of the breaks that go back to 0 where a document starts (after a separator): packing.
        rotary_theta: base of the rotary frequencies; None without rotary positions, or with unevenly scaled ones.
        rotary_stretch: what all positions are divided by (position interpolation), 1 where they are not.
        losses: (start, end, mean loss in nats, targets) by position: the first position alone, then buckets that
            double in length up to the later half of the row.
    """

    stored: bool = False
    taken: bool = False
    first: int = 0
    breaks: tuple[tuple[int, int], ...] = ()
    at_documents: float = 1.0
    rotary_theta: float | None = None
    rotary_stretch: float = 1.0
    losses: tuple[tuple[int, int, float, int], ...] = ()
    broken_rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class BlindQueries:
    """Attention queries that see no key.

    Attributes:
        padding: by the stored mask: left padding of rows, whose queries have only padding before them.
        padded_rows: the rows with such padding.
        rows: rows whose mask leaves out every token, or every one but a run of padding.
        real: (layer, count) of queries on real tokens with no key, as the attention calls show it.
    """

    padding: int = 0
    rows: tuple[int, ...] = ()
    real: tuple[tuple[int, int], ...] = ()
    padded_rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class LogFacts:
    """What the run's log says around the incident's step; None where it does not say.

    Attributes:
        usual_loss, usual_grad_norm: median of the (up to 50) logged steps before `step`.
        loss_spread: robust standard deviation (1.4826 × MAD) around the line that the same window follows, nats.
        logged_loss, logged_grad_norm, logged_lr: at `step` (NaN where the log holds a NaN).
        peak_lr: the largest LR logged up to `step`; warmup_end: the step that reached it first.
        nonfinite_steps: steps with a loss or gradient norm that is not finite.
        first_step, last_step: the smallest and the largest logged step.
        spike_steps: where the logged loss leaves the level of the steps before it, or is not finite.
    """

    step: int | None = None
    usual_loss: float | None = None
    loss_spread: float | None = None
    usual_grad_norm: float | None = None
    logged_loss: float | None = None
    logged_grad_norm: float | None = None
    logged_lr: float | None = None
    peak_lr: float | None = None
    warmup_end: int | None = None
    nonfinite_steps: tuple[int, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    spike_steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Measurements:
    """Every number that a rule may judge. Losses are in nats per valid target; fp32 unless said.

    Frames (one row each per …). Columns named `baseline_x` hold x measured on the baseline batch with the same
    checkpoint, NaN where no baseline was given. `layer` is the block's index, −1 outside blocks.

    `modules` (module, in execution order): module, role ("embedding", "block", "attention", "mlp", "norm", "head",
        "linear", "other"), layer, rms, absmax, nonfinite, outside_fp16 (share with |x| > 65 504), channel
        (last-axis index that holds absmax), row, position (where absmax is), grad_norm, grad_absmax,
        grad_nonfinite (gradient of the output; blocks only, else NaN), gap_bf16 (‖y_bf16 − y_fp32‖ / ‖y_fp32‖),
        baseline_rms, baseline_absmax.
    `heads` (attention head): module, layer, head, max_logit (largest |logit| before softmax over allowed keys),
        row, query, key (where it is), entropy (nats, mean over the later half of the queries), top_weight (mean
        largest weight, same queries), top_key_share (share of those queries whose largest weight falls on the same
        key position: 1 for a sink), baseline_max_logit, baseline_entropy.
    `parameters` (parameter): parameter, kind (the name with the block's index replaced by "*": siblings share it),
        layer, shape, numel, rms, mean, std, absmax, absmax_index (tuple), median_abs (of a strided sample of at
        most 65 536 elements), median (same sample), outlier_count (elements with |x| > 300 × median_abs),
        outlier_indices (list of tuples, the largest 16), nonfinite, first_nonfinite_index (tuple or None),
        constant (the value, if all elements are equal, else NaN), norm_gain (True for a norm's weight), qk_gain
        ("q", "k" or ""), grad_norm, grad_absmax, grad_nonfinite, gap_bf16 (relative gradient error),
        baseline_grad_norm, update_rms, update_ratio (update rms / weight rms), g2_over_v (sum g² / sum v̂ with g
        as clipped), eps_share (share of elements with √v̂ < 10 ε), impossible_share (of elements whose first moment no
        gradients with that second moment make); the last five NaN without optimizer state.
    `embedding_rows` (token id used by the batch whose row is an outlier, at most 50): parameter, token, norm,
        median_norm, count (uses in the batch), grad_share (share of the table's squared gradient norm), rows
        (batch rows that use it).
    `rows` (row of the batch): row, loss (NaN without valid targets), valid_targets, tokens (not padding),
        grad_norm (of the row's share of the batch loss), cosine (to the sum of the other rows' gradients, NaN in a
        batch of 1), audit_score, flags (list of slugs, high and critical), spans (list of (start, end, kind,
        detail)), span_losses (for each span the mean loss and number of the targets inside), reason (str).
    `tokens` (worst tokens, at most 50): row, position, token, target, loss, loss_bf16.

    Scalars and dicts:
        offset_losses: loss when the targets are moved by k positions further into the future than declared,
            k = −2…3 (0 is as declared; −1 asks position t for its own input token).
        row_offset_losses: the same by row, [{k: loss}] in row order.
        unigram_entropy: pooled over batch and baseline, nats.
        bad_ids: (row, position, id) outside [0, vocab_size).
        baseline_loss, baseline_grad_norm: None without a baseline.
        baseline_row_losses: losses of the baseline's rows.
        log_z_mean/std, logit_absmax: of the output logits.
        final_norm_rms: rms of what enters the head, NaN where unknown.
        attention_softcap, output_softcap, qk_norm: from the model; None/False where absent.
        precisions: by name, without fp32.
        checkpoint_step: the run's step that the checkpoint itself states.
        optimizer: kind, step (median of the parameters' counters of updates), naming and groups of the stored state.
        optimizer_misfits: "name: stored …, model …" of parameters whose moments have another shape.
        repeat_differs: True where the same replay twice was not bit-equal; None where it was not tried.
        repeat_gap: largest |difference| of a token's loss between the two, nats (infinite where one is not finite);
            repeat_loss_change: of the mean loss of the rows replayed twice (at most 8); repeat_rows: those that differ.
        seed_gap, seed_loss_change: the same between two replays with different seeds; None where the forward draws
            no random numbers.
        tokenizer_known: the audit could decode the rows: what it does not flag survives decoding and encoding.
        positions, blind: see `PositionFacts` and `BlindQueries`.
        step_progress: None without an AdamW state, or where the reference step gains nothing.
        routers: one dict per router of experts: module, layer, experts, top_k, tokens, load_entropy (nats, of the
            share of assignments by expert), load_top (largest share), idle (experts without a token), log_z (mean
            log-sum-exp of the logits), logit_absmax, sigmoid. Left padding counts as tokens.
        mixing: one dict per hyper-connection mixing matrix in order of depth: parameter, layer, size,
            spectral_norm, product_norm (spectral norm of the product up to and with this one).
    """

    vocab_size: int
    n_layers: int
    loss: float
    global_grad_norm: float
    modules: pd.DataFrame
    heads: pd.DataFrame
    parameters: pd.DataFrame
    rows: pd.DataFrame
    embedding_rows: pd.DataFrame
    tokens: pd.DataFrame
    run_precision: str = "bf16"
    checkpoint_step: int | None = None
    loss_nonfinite: bool = False
    grad_nonfinite: bool = False
    valid_targets: int = 0
    offset_losses: dict[int, float] = field(default_factory=dict)
    row_offset_losses: list[dict[int, float]] = field(default_factory=list)
    unigram_entropy: float | None = None
    bad_ids: tuple[tuple[int, int, int], ...] = ()
    keys: KeyReport | None = None
    baseline_loss: float | None = None
    baseline_grad_norm: float | None = None
    baseline_row_losses: tuple[float, ...] = ()
    log_z_mean: float = 0.0
    log_z_std: float = 0.0
    logit_absmax: float = 0.0
    final_norm_rms: float = float("nan")
    attention_softcap: float | None = None
    output_softcap: float | None = None
    qk_norm: bool = False
    precisions: dict[str, PrecisionGap] = field(default_factory=dict)
    log: LogFacts | None = None
    step_effect: StepEffect | None = None
    optimizer: dict[str, Any] | None = None
    optimizer_missing: str = ""
    optimizer_misfits: tuple[str, ...] = ()
    repeat_differs: bool | None = None
    repeat_gap: float | None = None
    repeat_loss_change: float | None = None
    repeat_rows: tuple[int, ...] = ()
    seed_gap: float | None = None
    seed_loss_change: float | None = None
    positions: PositionFacts | None = None
    blind: BlindQueries | None = None
    tokenizer_known: bool = False
    step_progress: StepProgress | None = None
    routers: tuple[dict[str, Any], ...] = ()
    mixing: tuple[dict[str, Any], ...] = ()
