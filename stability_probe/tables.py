"""From traces to tables: the frames and numbers of `Measurements`, one function each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from stability_probe.batches.base import Batch
from stability_probe.measure import PrecisionGap
from stability_probe.optimizer_step import TensorStep
from stability_probe.replay import Subject, Trace, mean_loss


def _number(value: Any) -> float:
    """A 0-d tensor or a number as a float."""
    return float(value.item()) if hasattr(value, "item") else float(value)


def _frame(records: list[dict[str, Any]], columns: tuple[str, ...]) -> pd.DataFrame:
    return pd.DataFrame(records, columns=list(columns))


MODULE_COLUMNS = (
    "module", "role", "layer", "rms", "absmax", "nonfinite", "outside_fp16", "channel", "row", "position",
    "grad_norm", "grad_absmax", "grad_nonfinite", "gap_bf16", "grad_gap_bf16", "baseline_rms", "baseline_absmax",
)  # fmt: skip


def module_table(
    subject: Subject, trace: Trace, baseline: Trace | None = None, reduced: Trace | None = None
) -> pd.DataFrame:
    """The `modules` frame of `Measurements`; `reduced` is the replay in bf16 with sketches."""
    records = []
    for name, seen in sorted(trace.modules.items(), key=lambda item: item[1].order):
        other = baseline.modules.get(name) if baseline else None
        low = reduced.modules.get(name) if reduced else None
        tapped_gradient = name in subject.anatomy.blocks and trace.gradients is not None
        records.append(
            {
                "module": name,
                "role": subject.anatomy.role_of(name),
                "layer": subject.anatomy.layer_of(name),
                "rms": _rms(seen),
                "absmax": _absmax(seen),
                "nonfinite": int(_number(seen.nonfinite)),
                "outside_fp16": _number(seen.outside) / max(seen.count, 1),
                "channel": int(_number(seen.channel)),
                "row": int(_number(seen.row)),
                "position": int(_number(seen.position)),
                "grad_norm": math.sqrt(_number(seen.grad_square)) if tapped_gradient else math.nan,
                "grad_absmax": _number(seen.grad_absmax) if tapped_gradient else math.nan,
                "grad_nonfinite": _number(seen.grad_nonfinite) if tapped_gradient else math.nan,
                "gap_bf16": relative_gap(seen.sketch, low.sketch if low else None),
                "grad_gap_bf16": relative_gap(seen.grad_sketch, low.grad_sketch if low else None),
                "baseline_rms": _rms(other) if other else math.nan,
                "baseline_absmax": _absmax(other) if other else math.nan,
            }
        )
    return _frame(records, MODULE_COLUMNS)


def _rms(seen: Any) -> float:
    return math.sqrt(_number(seen.sum_square) / seen.count) if seen.count else math.nan


def _absmax(seen: Any) -> float:
    """Largest |x|; NaN where no output was finite enough to compare."""
    value = _number(seen.absmax)
    return value if value >= 0 else math.nan


def relative_gap(reference: Tensor | None, other: Tensor | None) -> float:
    """‖other − reference‖ / ‖reference‖ of two sketches; NaN where one is missing or the reference is zero."""
    if reference is None or other is None:
        return math.nan
    norm = reference.double().norm().item()
    return (other.double() - reference.double()).norm().item() / norm if norm > 0 else math.nan


HEAD_COLUMNS = (
    "module", "layer", "head", "max_logit", "row", "query", "key", "entropy", "top_weight", "top_key_share",
    "baseline_max_logit", "baseline_entropy",
)  # fmt: skip


def head_table(subject: Subject, trace: Trace, baseline: Trace | None = None) -> pd.DataFrame:
    """The `heads` frame of `Measurements`."""
    sites = {site.layer: site.name for site in subject.anatomy.attention}
    records = []
    for layer, totals in sorted(trace.heads.items()):
        seen = {key: value.cpu().tolist() for key, value in vars(totals).items()}
        other = baseline.heads.get(layer) if baseline else None
        for head, rows in enumerate(seen["rows"]):
            records.append(
                {
                    "module": sites[layer],
                    "layer": layer,
                    "head": head,
                    **{key: seen[key][head] for key in ("max_logit", "row", "query", "key")},
                    **{
                        key: seen[key][head] / rows if rows else math.nan
                        for key in ("entropy", "top_weight", "top_key_share")
                    },
                    "baseline_max_logit": _number(other.max_logit[head]) if other else math.nan,
                    "baseline_entropy": _number(other.entropy[head] / other.rows[head]) if other else math.nan,
                }
            )
    return _frame(records, HEAD_COLUMNS)


PARAMETER_COLUMNS = (
    "parameter", "kind", "layer", "shape", "numel", "rms", "mean", "std", "absmax", "absmax_index", "median_abs",
    "median", "outlier_count", "outlier_indices", "nonfinite", "first_nonfinite_index", "constant", "norm_gain",
    "qk_gain", "grad_norm", "grad_absmax", "grad_nonfinite", "gap_bf16", "baseline_grad_norm", "update_rms",
    "update_ratio", "g2_over_v", "eps_share", "impossible_share",
)  # fmt: skip
SAMPLE = 65_536
OUTLIER = 300.0


def parameter_table(
    subject: Subject,
    trace: Trace,
    baseline: Trace | None = None,
    reduced: Trace | None = None,
    steps: Mapping[str, TensorStep] | None = None,
) -> pd.DataFrame:
    """The `parameters` frame of `Measurements`."""
    records = []
    for name, parameter in subject.module.named_parameters():
        grad = trace.gradients.total.get(name) if trace.gradients else None
        step = steps.get(name) if steps else None
        before = trace.gradients.parameter_sketch.get(name) if trace.gradients else None
        after = reduced.gradients.parameter_sketch.get(name) if reduced and reduced.gradients else None
        usual = baseline.gradients.total.get(name) if baseline and baseline.gradients else None
        records.append(
            {
                "parameter": name,
                "kind": subject.anatomy.kind_of(name),
                "layer": subject.anatomy.layer_of(name),
                "shape": tuple(parameter.shape),
                "numel": parameter.numel(),
                **weight_statistics(parameter.detach()),
                "norm_gain": name.endswith("weight") and name.rsplit(".", 1)[0] in subject.anatomy.norms,
                "qk_gain": _qk_gain(subject, name),
                "grad_norm": _norm(grad),
                "grad_absmax": _number(grad.abs().max()) if grad is not None and grad.numel() else math.nan,
                "grad_nonfinite": int((~grad.isfinite()).sum()) if grad is not None else 0,
                "gap_bf16": relative_gap(before, after),
                "baseline_grad_norm": _norm(usual),
                "update_rms": step.update_rms if step else math.nan,
                "update_ratio": step.update_ratio if step else math.nan,
                "g2_over_v": step.g2_over_v if step else math.nan,
                "eps_share": step.eps_share if step else math.nan,
                "impossible_share": step.impossible_share if step else math.nan,
            }
        )
    return _frame(records, PARAMETER_COLUMNS)


def _norm(tensor: Tensor | None) -> float:
    return torch.linalg.vector_norm(tensor, dtype=torch.float32).item() if tensor is not None else math.nan


def _qk_gain(subject: Subject, parameter: str) -> str:
    owner = parameter.rsplit(".", 1)[0]
    for site in subject.anatomy.attention:
        if owner in (site.query_norm, site.key_norm):
            return "q" if owner == site.query_norm else "k"
    return ""


def weight_statistics(weight: Tensor) -> dict[str, Any]:
    """Size, spread and outliers of one stored tensor. NaN and Inf are counted and left out of nothing else."""
    flat = weight.reshape(-1)
    if flat.numel() == 0:
        return {"numel": 0, "outlier_count": 0, "outlier_indices": [], "nonfinite": 0}
    flat = flat.abs() if flat.is_complex() else flat
    low, high = (value.item() for value in flat.aminmax())
    absmax = max(abs(low), abs(high)) if low == low else math.nan
    nonfinite = 0 if math.isfinite(absmax) else int((~flat.isfinite()).sum())
    stride = max(1, flat.numel() // SAMPLE)
    sample = flat[::stride].float()
    median_abs = sample.abs().median().item()
    std, mean = (value.item() for value in torch.std_mean(flat.double() if nonfinite == 0 else flat, correction=0))
    limit = OUTLIER * median_abs
    far = flat.abs() > limit if nonfinite == 0 and median_abs > 0 and absmax > limit else None
    return {
        "rms": math.sqrt(std * std + mean * mean) if math.isfinite(std) else math.nan,
        "mean": mean,
        "std": std,
        "absmax": absmax,
        "absmax_index": _index(flat.abs().argmax(), weight),
        "median_abs": median_abs,
        "median": sample.median().item(),
        "outlier_count": int(far.sum()) if far is not None else 0,
        "outlier_indices": _largest(flat, weight, far),
        "nonfinite": nonfinite,
        "first_nonfinite_index": _index((~flat.isfinite()).int().argmax(), weight) if nonfinite else None,
        "constant": low if low == high else math.nan,
    }


def _largest(flat: Tensor, weight: Tensor, far: Tensor | None) -> list[tuple[int, ...]]:
    if far is None:
        return []
    places = flat.abs().topk(min(16, int(far.sum()))).indices
    return [_index(place, weight) for place in places]


def _index(flat_index: Tensor, weight: Tensor) -> tuple[int, ...]:
    return tuple(int(part) for part in torch.unravel_index(flat_index, weight.shape))


ROW_COLUMNS = (
    "row", "loss", "valid_targets", "tokens", "grad_norm", "cosine", "audit_score", "flags", "spans",
    "span_losses", "reason",
)  # fmt: skip


def row_table(batch: Batch, trace: Trace, audit: Any) -> pd.DataFrame:
    """The `rows` frame of `Measurements`; `audit` holds one entry per row in `rows`."""
    B, T = batch.ids_BT.shape
    norms, cosines = row_gradients(trace, B)
    tokens = batch.mask_BT.sum(-1).tolist() if batch.mask_BT is not None else [T] * B
    records = [
        {
            "row": row,
            "loss": loss,
            "valid_targets": int(trace.has_target_BT[row].sum()),
            "tokens": int(tokens[row]),
            "grad_norm": norms[row],
            "cosine": cosines[row],
            "audit_score": float(audit.rows[row].score),
            "flags": list(audit.rows[row].flags),
            "spans": [(int(s.start), int(s.end), s.kind, s.detail) for s in audit.rows[row].spans],
            "span_losses": [_span_loss(trace, row, int(s.start), int(s.end)) for s in audit.rows[row].spans],
            "reason": audit.rows[row].reason,
        }
        for row, loss in enumerate(trace.row_losses)
    ]
    return _frame(records, ROW_COLUMNS)


def _span_loss(trace: Trace, row: int, start: int, end: int) -> tuple[float, int]:
    """Mean loss and number of the targets inside a span of tokens: position t asks for token t + 1."""
    asked = slice(max(start - 1, 0), max(end - 1, 0))
    has_target = trace.has_target_BT[row, asked]
    return mean_loss(trace.token_loss_BT[row, asked], has_target), int(has_target.sum())


def row_gradients(trace: Trace, B: int) -> tuple[list[float], list[float]]:
    """Norm of each row's gradient, and its cosine to the sum of the others' (estimated from sketches)."""
    tap = trace.gradients
    if tap is None or len(tap.row_square) < B:
        return [math.nan] * B, [math.nan] * B
    norms = [math.sqrt(_number(tap.row_square[row])) for row in range(B)]
    total = sum(tap.row_sketch[row].double() for row in range(B))
    cosines = []
    for row in range(B):
        own = tap.row_sketch[row].double()
        rest = total - own
        size = own.norm() * rest.norm()
        cosines.append(_number((own @ rest) / size) if B > 1 and size > 0 else math.nan)
    return norms, cosines


EMBEDDING_COLUMNS = ("parameter", "token", "norm", "median_norm", "count", "grad_share", "rows")
# Only the ends of the table's spread are listed: the rules decide what is far.
FAR = 3.0


def embedding_table(subject: Subject, batch: Batch, trace: Trace, vocab_size: int) -> pd.DataFrame:
    """The `embedding_rows` frame of `Measurements`: used tokens whose row norm is 3 × off the table's median."""
    records = []
    for name in subject.anatomy.embeddings:
        table = subject.module.get_parameter(f"{name}.weight")
        if table.shape[0] != vocab_size or table.dim() != 2:
            continue
        norms = torch.linalg.vector_norm(table.detach(), dim=1, dtype=torch.float32).cpu()
        median = norms.median().item()
        ids = batch.ids_BT
        seen = ids if batch.mask_BT is None else ids[batch.mask_BT]
        used, counts = seen[(seen >= 0) & (seen < vocab_size)].unique(return_counts=True)
        ratio = norms[used] / max(median, 1e-30)
        far = ((ratio > FAR) | (ratio < 1 / FAR)).nonzero().flatten()
        order = far[(ratio[far].clamp_min(1e-30).log().abs()).argsort(descending=True)][:50]
        shares = _row_shares(trace, f"{name}.weight")
        for index in order.tolist():
            token = int(used[index])
            records.append(
                {
                    "parameter": f"{name}.weight",
                    "token": token,
                    "norm": norms[token].item(),
                    "median_norm": median,
                    "count": int(counts[index]),
                    "grad_share": shares[token].item() if shares is not None else math.nan,
                    "rows": (ids == token).any(1).nonzero().flatten().tolist(),
                }
            )
    return _frame(records, EMBEDDING_COLUMNS)


def _row_shares(trace: Trace, parameter: str) -> Tensor | None:
    grad = trace.gradients.total.get(parameter) if trace.gradients else None
    if grad is None:
        return None
    squares = grad.double().square().sum(1).cpu()
    return squares / squares.sum().clamp_min(1e-300)


TOKEN_COLUMNS = ("row", "position", "token", "target", "loss", "loss_bf16")


def token_table(batch: Batch, trace: Trace, reduced: Trace | None) -> pd.DataFrame:
    """The 50 targets with the largest loss; `position` is where the target was predicted."""
    valid = trace.has_target_BT.flatten().nonzero().flatten()
    losses = trace.token_loss_BT.flatten()[valid]
    T = batch.ids_BT.shape[1]
    records = []
    for place in valid[losses.nan_to_num(nan=math.inf).argsort(descending=True)[:50]].tolist():
        row, position = divmod(place, T)
        records.append(
            {
                "row": row,
                "position": position,
                "token": int(batch.ids_BT[row, position]),
                "target": int(batch.targets_BT[row, position]),
                "loss": trace.token_loss_BT[row, position].item(),
                "loss_bf16": reduced.token_loss_BT[row, position].item() if reduced else math.nan,
            }
        )
    return _frame(records, TOKEN_COLUMNS)


def precision_gap(reference: Trace, other: Trace) -> PrecisionGap:
    """Compare a replay in another precision with the fp32 replay of the same batch."""
    valid = reference.has_target_BT
    want, got = reference.token_loss_BT[valid].double(), other.token_loss_BT[valid].double()

    def gap(losses: Tensor | None) -> float | None:
        return None if losses is None else (losses[valid].double() - want).abs().mean().item()

    broken = {name: seen.broken_at for name, seen in other.modules.items() if _number(seen.nonfinite) > 0}
    first = min(broken, key=broken.__getitem__, default=None)
    return PrecisionGap(
        loss=other.loss,
        token_gap=(got - want).abs().mean().item() if got.numel() else math.nan,
        global_grad_norm=math.nan if other.global_grad_norm is None else other.global_grad_norm,
        nonfinite=int((~got.isfinite()).sum()) + sum(int(_number(s.nonfinite)) for s in other.modules.values()),
        first_nonfinite=first,
        rounding_gap=gap(reference.rounding_loss_BT),
        recentred_gap=gap(reference.recentred_loss_BT),
        grad_relative_error=_gradient_error(reference, other),
    )


def _gradient_error(reference: Trace, other: Trace) -> float | None:
    if reference.gradients is None or other.gradients is None:
        return None
    rows = sorted(reference.gradients.row_sketch)
    if not rows or rows != sorted(other.gradients.row_sketch):
        return None
    return relative_gap(
        torch.stack([reference.gradients.row_sketch[row] for row in rows]).sum(0),
        torch.stack([other.gradients.row_sketch[row] for row in rows]).sum(0),
    )


def offset_losses(trace: Trace) -> tuple[dict[int, float], list[dict[int, float]]]:
    """Loss with the targets moved by k positions: for the batch, and by row."""
    rows = [{k: total / count if count else math.nan for k, (total, count) in row.items()} for row in trace.offset_sums]
    offsets = trace.offset_sums[0].keys() if trace.offset_sums else ()
    batch = {}
    for k in offsets:
        count = sum(row[k][1] for row in trace.offset_sums)
        batch[k] = sum(row[k][0] for row in trace.offset_sums) / count if count else math.nan
    return batch, rows


def unigram_entropy(batches: list[Batch]) -> float:
    """Entropy in nats of the token counts pooled over the batches, padding left out."""
    seen = torch.cat([b.ids_BT.flatten() if b.mask_BT is None else b.ids_BT[b.mask_BT] for b in batches])
    share = seen.unique(return_counts=True)[1].double()
    share = share / share.sum()
    return -(share * share.log()).sum().item()


def bad_ids(batch: Batch, vocab_size: int) -> tuple[tuple[int, int, int], ...]:
    """(row, position, id) of every real token outside [0, vocab_size)."""
    wrong = (batch.ids_BT < 0) | (batch.ids_BT >= vocab_size)
    if batch.mask_BT is not None:
        wrong &= batch.mask_BT
    return tuple((row, position, int(batch.ids_BT[row, position])) for row, position in wrong.nonzero().tolist())


def softcaps(module: nn.Module) -> tuple[float | None, float | None]:
    """(attention, output) soft-caps that the model's configuration names."""
    config = getattr(module, "config", None)

    def cap(*names: str) -> float | None:
        for name in names:
            value = getattr(config, name, None)
            if isinstance(value, (int, float)) and value > 0:
                return float(value)
        return None

    return cap("attn_logit_softcapping", "attention_softcap"), cap("final_logit_softcapping", "output_softcap")
