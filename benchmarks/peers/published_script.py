"""A published diagnostic script, written anew from its thresholds, with the batch score and the clip that go with it.

What it says is read like this:

    output of an attention or MLP module over 60 000      fp16-overflow, attention-logit-growth (it advises QK-norm)
    … over 1000                                           init-scale, residual-growth, activation-outlier,
                                                          corrupt-weights ("explosion", initialisation and norms)
    gradient norm of one parameter over 50                the data, or the learning rate
    none over 1e-6                                        vanishing-gradient, init-scale
    batch score over 0.35 in the mean or 0.75 in one row  the data, at the rows over 0.35
    attention logit over 100                              attention-logit-growth, qk-norm-gain-growth

Comparisons with NaN are false there, and so they are here: a NaN in a module is not seen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from benchmarks.peers.material import DATA, Material, Saying
from stability_probe import replay
from stability_probe.taps.activations import first_tensor

NAME = "published script"
NEEDS = "torch"
FP16_EDGE, EXPLOSION, LARGE_GRADIENT, NO_GRADIENT = 60_000.0, 1000.0, 50.0, 1e-6
MEAN_SCORE, ROW_SCORE = 0.35, 0.75
TAU = 100.0  # of QK-clip
ORDINARY_BITS = 8.0  # unigram entropy of an ordinary document
GRAM = 4


def ask(material: Material) -> Saying:
    sayings = (
        of_numbers(module_peaks(material), gradient_norms(material)),
        of_batch(material.batch.ids_BT.tolist()),
        of_attention(attention_peaks(material)),
    )
    alarms = [saying for saying in sayings if saying.alarm]
    return Saying(
        told="; ".join(saying.told for saying in alarms) or "no clear anomaly",
        causes=frozenset().union(*(saying.causes for saying in alarms)),
        places=next((saying.places for saying in alarms if saying.places), ()),
        rows=next((saying.rows for saying in alarms if saying.rows), ()),
        alarm=bool(alarms),
    )


# --- its rules ------------------------------------------------------------------------------------


def of_numbers(peaks: Mapping[str, float], norms: Mapping[str, float]) -> Saying:
    """From the largest output by module and the gradient norm by parameter."""
    peak, norm = max(peaks.values(), default=0.0), max(norms.values(), default=0.0)
    loudest, steepest = (max(found, key=lambda name: found[name]) if found else "" for found in (peaks, norms))
    if peak > FP16_EDGE:
        causes = frozenset({"fp16-overflow", "attention-logit-growth"})
        return Saying(f"fp16 overflow likely ({peak:.0f})", causes, (loudest,), alarm=True)
    if peak > EXPLOSION:
        causes = frozenset({"init-scale", "residual-growth", "activation-outlier", "corrupt-weights"})
        return Saying(f"activation explosion ({peak:.0f})", causes, (loudest,), alarm=True)
    if norm > LARGE_GRADIENT:
        causes = frozenset({*DATA, "learning-rate-too-high"})
        return Saying(f"gradient explosion at {steepest} ({norm:.1f})", causes, (steepest,), alarm=True)
    if norm < NO_GRADIENT:
        return Saying(f"vanishing gradient ({norm:.1e})", frozenset({"vanishing-gradient", "init-scale"}), alarm=True)
    return Saying()


def of_batch(rows: Sequence[Sequence[int]]) -> Saying:
    scores = [row_score(row) for row in rows]
    if not scores or (sum(scores) / len(scores) <= MEAN_SCORE and max(scores) <= ROW_SCORE):
        return Saying()
    over = tuple(row for row, score in enumerate(scores) if score > MEAN_SCORE)
    return Saying(f"anomalous batch ({max(scores):.2f})", frozenset(DATA), rows=over, alarm=True)


def row_score(ids: Sequence[int]) -> float:
    """Half the share of 4-grams that were there before, half the lack of unigram entropy; in [0, 1]."""
    grams = [tuple(ids[at : at + GRAM]) for at in range(len(ids) - GRAM)]
    again = (len(grams) - len(set(grams))) / len(grams) if grams else 0.0
    shares = [count / len(ids) for count in Counter(ids).values()]
    bits = -sum(share * math.log2(share) for share in shares)
    return 0.5 * again + 0.5 * max(0.0, 1.0 - bits / ORDINARY_BITS)


def of_attention(peaks: Mapping[str, float]) -> Saying:
    hottest = max(peaks, key=lambda name: peaks[name], default="")
    if not hottest or not peaks[hottest] > TAU:
        return Saying()
    causes = frozenset({"attention-logit-growth", "qk-norm-gain-growth"})
    return Saying(f"attention logit {peaks[hottest]:.0f} at {hottest}", causes, (hottest,), alarm=True)


# --- what it measures -----------------------------------------------------------------------------


@torch.no_grad()
def module_peaks(material: Material) -> dict[str, float]:
    peaks: dict[str, float] = {}
    handles = []
    for name, module in material.module.named_modules():
        if "attn" in name or "mlp" in name:

            def hook(_module: object, _inputs: object, output: object, name: str = name) -> None:
                tensor = first_tensor(output)
                if tensor is not None:
                    peaks[name] = tensor.abs().max().item()

            handles.append(module.register_forward_hook(hook))
    try:
        material.with_loss()(**material.inputs)
    finally:
        for handle in handles:
            handle.remove()
    return peaks


def gradient_norms(material: Material) -> dict[str, float]:
    module = material.module
    module.zero_grad(set_to_none=True)
    material.with_loss()(**material.inputs).backward()
    norms = {name: p.grad.norm().item() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return norms


def attention_peaks(material: Material) -> dict[str, float]:
    """Largest attention logit by layer, as this package's tap sees it."""
    trace = replay.replay(replay.Subject.of(material.module), material.batch)
    return {f"layers.{layer}": totals.max_logit.max().item() for layer, totals in trace.heads.items()}
