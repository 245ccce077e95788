"""Keys that did not fit the model: missing, mis-shaped, untied, or tensors left at their initial value."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Plan, Rule, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._tables import (
    CLEAR_NATS,
    CLEAR_SIGMAS,
    NAMED_AT_MOST,
    Record,
    clear_margin,
    is_number,
    layer_of,
    layers_of,
    median,
    plural,
    records,
    reference_loss,
    siblings,
)
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.checkpoints.base import KeyReport
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "clear": CLEAR_NATS,
    "clear_sigmas": CLEAR_SIGMAS,
    "zero_share": Threshold(
        0.5, "of the parameters", "no recipe stores half of a model's matrices as exact zeros; a zero-initialised head "
        "or output projection is one kind of tensor, and still has a gradient",
        "Yang et al., Tensor Programs V, 2022 (zero-initialised heads)",
    ),
    "excess": Threshold(
        0.5, "nats over the usual loss", "ordinary batches of one run differ by less",
        "python benchmarks/healthy_ranges.py: rows of the same kind of text differ by under 0.5 nats in the mean of 8",
    ),
    "sigmas": Threshold(
        6, "robust standard deviations of the logged loss", "the spike rule of long runs",
        "OLMo-core, train/callbacks: skip step at 6 standard deviations over 128 steps",
    ),
    "near_ln_v": Threshold(
        0.8, "x ln V", "without a log or baseline: only a model that predicts next to nothing counts",
        "a uniform guess costs ln V; trained models are below half of it",
    ),
    "moved_siblings": Threshold(
        0.75, "of the sibling layers", "one tensor at its initial value is odd only where the others left it",
        "an untrained model has all of them there; python benchmarks/healthy_ranges.py finds no constant tensor",
    ),
    "moved_by": Threshold(
        0.05, "rms distance of the siblings from the constant",
        "bf16 weights move in steps of 2^-8 near 1: a few such steps in some layers are stagnation, not a lost tensor",
        "bf16 has 8 significant bits; SmolLM2-135M's gains moved by 0.3 and more",
    ),
}  # fmt: skip

PAGE = Page(
    title="Checkpoint does not match the model",
    claim="Some tensors of the model did not come from this checkpoint, or came from the wrong place.",
    mechanism=(
        "A renamed module, a changed shape, a broken tie or a lenient load leaves tensors at their random or initial "
        "values. The run resumes with part of its network replaced by noise: the loss starts far above where it was, "
        "often near ln V, and then trains down again, which in a chart looks like a spike at the restart."
    ),
    signature=(
        "Names that the file lacks, or shapes that differ. A norm weight that is exactly 1, or a bias exactly 0, "
        "in one layer while the same tensor of the other layers has moved. A head that should equal the embedding "
        "and does not."
    ),
    false_alarms=(
        "An untrained model has every gain at 1: the siblings have not moved either, and the log starts at ln V. "
        "Keys that the model has no place for do no harm by themselves. A tied head that the file leaves out is the "
        "usual way to save it. A flipped exponent bit under RMSNorm also gives exactly ln V with zero gradient: look "
        "at `corrupt-weights` first. Added blocks whose output projection starts at zero are a known way to deepen "
        "a model and cost nothing."
    ),
    proof=(
        "Where the right values are at hand the tensor is tied again, or filled from the neighbouring layer, and the "
        "batch replayed. A missing tensor that the forward uses, with the loss far above the run's usual, needs no "
        "more proof."
    ),
    remedies=(
        Remedy("Fix the key map of the loader and load again; the named tensors are the ones to check."),
        Remedy("Load strictly, so that the next mismatch stops the run.", "model.load_state_dict(state, strict=True)"),
        Remedy("Compare the loss of the first step after a restart with the last one before it, and stop above 0.1."),
    ),
    references=(
        "PyTorch, torch.nn.Module.load_state_dict: strict, missing_keys, unexpected_keys",
        "Press and Wolf, Using the Output Embedding to Improve Language Models, 2017 (tied heads)",
        "Wu et al., LLaMA Pro: Progressive LLaMA with Block Expansion, 2024 (blocks that start at zero)",
    ),
)


def _loss_shows_it(m: Measurements, t: dict[str, Threshold]) -> tuple[bool, Evidence]:
    """Whether the loss is far above where this run should be, and the number that says so."""
    usual, name = reference_loss(m)
    if m.log is None or m.log.usual_loss is None:  # the baseline batch runs on the same broken model
        limit, name, usual = (
            t["near_ln_v"].value * math.log(m.vocab_size),
            "ln of the vocabulary",
            math.log(m.vocab_size),
        )
        source = t["near_ln_v"].source
    else:
        limit = (usual or 0.0) + clear_margin(m, t, "excess")
        source = t["sigmas"].source
    shown = not math.isfinite(m.loss) or m.loss >= limit
    return shown, Evidence("loss of this batch", m.loss, "nats", usual, name, limit, source)


def _keys(m: Measurements, keys: KeyReport, t: dict[str, Threshold]) -> Iterator[Suspect]:
    by_name = {row["parameter"]: row for row in records(m.parameters)}
    shown, loss = _loss_shows_it(m, t)
    shapes = tuple(f"{name}: stored {stored}, model {model}" for name, stored, model in keys.misshaped)
    lost = {
        "missing from the file": keys.missing,
        "stored with another shape": tuple(name for name, _, _ in keys.misshaped),
        "left without a value": keys.uninitialised,
    }
    for what, names in lost.items():
        # A tensor that got no gradient was not used by the forward: it cannot be why the loss is high.
        used = [name for name in names if name not in by_name or by_name[name]["grad_norm"] != 0]
        if not used:
            continue
        near = difflib.get_close_matches(used[0], keys.unexpected, n=1, cutoff=0.6)
        hint = f"; the file holds {near[0]}, which the model has no place for" if near else ""
        hint = f" ({shapes[0].partition(': ')[2]})" if what == "stored with another shape" else hint
        rows = [by_name[name] for name in used if name in by_name]
        more = f" and {plural(len(used) - 1, 'more tensor')}" if len(used) > 1 else ""
        yield Suspect(
            cause=RULE.slug,
            summary=f"{used[0]}{more} {what}{hint}.",
            location=Location(
                layer=layer_of(rows[0]) if rows else None,
                layers=layers_of(rows),
                parameters=tuple(used[:NAMED_AT_MOST]),
            ),
            evidence=(Evidence(f"tensors {what}", len(used), "", 0, "a checkpoint that fits"), loss),
            strength=100.0 + len(used),
            decisive=shown,
            latent=not shown,
        )


def _untied(m: Measurements, keys: KeyReport) -> Iterator[Suspect]:
    for first, second in keys.untied:
        yield Suspect(
            cause=RULE.slug,
            summary=f"{first} and {second} are tied by the configuration, but their stored values differ.",
            location=Location(parameters=(first, second)),
            evidence=(Evidence("tied tensors that differ", f"{first} / {second}", "", "equal", "the configuration"),),
            plans=(
                Plan("retie", {"parameter": second, "source": first}, f"{second} set to a copy of {first}"),
                Plan("retie", {"parameter": first, "source": second}, f"{first} set to a copy of {second}"),
            ),
            strength=50.0,
        )


def _left_at_init(m: Measurements, t: dict[str, Threshold]) -> Iterator[Suspect]:
    rows = records(m.parameters)
    for row in rows:
        initial = row["constant"]
        others = siblings(rows, row)
        if row["numel"] < 2 or initial not in (0.0, 1.0) or len(others) < 2 or row["grad_norm"] == 0:
            continue
        moved = [other for other in others if not is_number(other["constant"])]
        distance = median(math.hypot(other["mean"] - initial, other["std"]) for other in moved)
        if len(moved) < t["moved_siblings"].value * len(others) or not distance > 0:
            continue
        nearest = min(moved, key=lambda other: abs(other["layer"] - row["layer"]))
        name = row["parameter"]
        yield Suspect(
            cause=RULE.slug,
            summary=f"{name} is exactly {initial:g} everywhere; {len(moved)} of {len(others)} sibling layers moved.",
            location=Location(layer=layer_of(row), layers=layers_of([row]), parameters=(name,)),
            evidence=(
                Evidence(
                    f"every element of {name}", initial, "", median(other["mean"] for other in moved),
                    "mean of the sibling layers", f"{t['moved_siblings'].value:g} of the siblings moved",
                    t["moved_siblings"].source,
                ),
                Evidence("rms distance of the siblings from it", distance, "", threshold=t["moved_by"].value,
                         source=t["moved_by"].source),
            ),
            plans=(
                Plan(
                    "retie", {"parameter": name, "source": nearest["parameter"]},
                    f"{name} filled from {nearest['parameter']}",
                ),
            ),
            strength=distance,
            # A zero matrix may be a block that was added on purpose; a lone gain of exactly 1 never is.
            latent=bool(row["norm_gain"]) and distance >= t["moved_by"].value,
            exact=True,
        )  # fmt: skip


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    found: list[Suspect] = []
    if m.keys is not None:
        found += [*_keys(m, m.keys, t), *_untied(m, m.keys)]
    return sorted([*found, *_left_at_init(m, t), *_all_zero(m, t)], key=lambda suspect: -suspect.strength)


def _all_zero(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    """Matrices of exact zeros throughout: an interrupted write, or a cast that rounded them away."""
    matrices = [row for row in records(m.parameters) if len(row["shape"]) >= 2]
    zero = [row for row in matrices if row["constant"] == 0.0]
    if not matrices or len(zero) < t["zero_share"].value * len(matrices):
        return []
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"{len(zero)} of {len(matrices)} weight matrices hold nothing but zeros; the loss is {m.loss:.2f} "
            f"nats (ln V = {math.log(m.vocab_size):.2f}).",
            location=Location(parameters=tuple(row["parameter"] for row in zero[:NAMED_AT_MOST])),
            evidence=(
                Evidence("weight matrices of exact zeros", len(zero), f"of {len(matrices)}",
                         threshold=t["zero_share"].value, source=t["zero_share"].source),
                Evidence("gradient norm", m.global_grad_norm),
            ),
            strength=100.0,
            decisive=True,
        )
    ]  # fmt: skip


_NORM = "model.layers.2.input_layernorm.weight"
_LEFT: Record = {"constant": 1.0, "mean": 1.0, "std": 0.0, "rms": 1.0, "absmax": 1.0, "median": 1.0, "median_abs": 1.0}
_USUAL = {"step": 400, "usual_loss": 3.4, "loss_spread": 0.05}

RULE = Rule(
    slug="checkpoint-mismatch",
    order=103,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case(
            "every matrix is zero",
            {"parameters": _cases.parameters(everywhere={**_LEFT, "constant": 0.0}), "global_grad_norm": 0.0},
            True,
        ),
        Case(
            "near miss: a head that starts at zero",
            {"parameters": _cases.parameters({"lm_head.weight": {**_LEFT, "constant": 0.0}})},
            False,
        ),
        Case(
            "the last norm is missing, and the loss says so",
            {"keys": {"missing": ("model.norm.weight",), "unexpected": ("norm.weight",)}, "loss": 6.4, "log": _USUAL},
            True,
        ),
        Case(
            "the head was stored with another vocabulary",
            {"keys": {"misshaped": (("lm_head.weight", (1008, 64), (1000, 64)),)}, "loss": 6.9},
            True,
        ),
        Case("a tie is broken", {"keys": {"untied": (("model.embed_tokens.weight", "lm_head.weight"),)}}, True),
        Case("one norm left at exactly 1", {"parameters": _cases.parameters({_NORM: _LEFT})}, True),
        Case(
            "near miss: keys that the model has no place for", {"keys": {"unexpected": ("rotary_emb.inv_freq",)}}, False
        ),
        Case(
            "near miss: an untrained model, every gain at 1",
            {
                "parameters": [
                    {**row, **(_LEFT if row["norm_gain"] else {})} for row in _cases.parameters()
                ],
                "loss": 6.9,
            },
            False,
        ),
        Case(
            "near miss: a missing tensor that the forward never uses",
            {
                "keys": {"missing": (_NORM,)},
                "parameters": _cases.parameters({_NORM: {"grad_norm": 0.0}}),
            },
            False,
        ),
    ),
)  # fmt: skip
