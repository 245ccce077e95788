"""The model is told other positions than it was trained with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Plan, Rule, Suspect, Threshold
from stability_probe.rules._tables import CLEAR_NATS, CLEAR_SIGMAS, clear_margin, finite, is_number, plural, records
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements, PositionFacts

THRESHOLDS = {
    "clear": CLEAR_NATS,
    "clear_sigmas": CLEAR_SIGMAS,
    "fell": Threshold(
        0.3, "nats over the usual loss in the log", "settings of the code are suspected only where the run did better; "
        "positions stretched twofold cost a healthy model 0.35 nats",
        "SmolLM2-135M with position ids x 2: 2.97 against 2.625 nats",
    ),
    "sigmas": Threshold(
        3, "robust standard deviations of the logged loss", "decides only whether the settings are tried: a needless "
        "other base lowers no healthy loss",
        "a batch's loss is beyond 3 standard deviations once in 700 steps",
    ),
    "first": Threshold(
        2.0, "nats over ln V, first position", "the first token sees only itself and has no distance to misread: "
        "where it is far beyond a guess, something else is broken",
        "attention over one key is the same under every rotation; a healthy first token costs up to ln V + 1.5 "
        "(tests/lagged_language.py, where it cannot be known)",
    ),
    "rises": Threshold(
        1.0, "nats from the best positions to the later half", "more context lowers a healthy loss",
        "Kaplan et al., Scaling Laws for Neural Language Models, 2020, figure 20",
    ),
    "documents": Threshold(
        0.9, "of the breaks after a separator", "positions that start again at document starts are packing, and right",
        "transformers DataCollatorWithFlattening; flash-attention's variable-length batches",
    ),
}  # fmt: skip
# Bases that models are trained with: the original, code and long-context Llama, Qwen, and short-context variants.
USUAL_THETAS = (10_000.0, 500_000.0, 1_000_000.0, 100_000.0)
# Position interpolation divides all positions by one factor (Chen et al., Extending Context Window of Large Language
# Models via Positional Interpolation, 2023); 1 is none.
USUAL_STRETCHES = (1.0, 2.0, 4.0, 8.0)

PAGE = Page(
    title="Position encoding",
    claim="Positions reach the model shifted, reset or stretched, or the rotary settings are not those of training.",
    mechanism=(
        "Attention reads distances off the positions. If ids start again in the middle of a text, skip, or begin "
        "somewhere else, tokens look at the wrong neighbours; with another rotary base, or with query and key "
        "features in the other pair order, every distance is misread and most heads lose what they look for. The "
        "first tokens, which have little to look back at, stay as good as they were. The loss jumps at the restart "
        "that brought the new collator or converter, with weights that are sound."
    ),
    signature=(
        "Stored position ids with breaks inside documents; or a loss above the log's usual, with first positions that "
        "are as good as ever, that comes back with another rotary base or feature order."
    ),
    false_alarms=(
        "Packed documents start again at 0 after a separator, and are right to. A model without use for positions, or "
        "with relative ones, does not mind a shift: replaying with plain positions gains nothing then. Missing "
        "or corrupt weights cost as much at the first position as at the others. A hard batch is hard with any base."
    ),
    proof="The batch is replayed with positions 0, 1, 2 …, with the usual rotary bases, and with features reordered.",
    remedies=(
        Remedy("Build position ids from the attention mask, or leave them out: position_ids = mask.cumsum(-1) - 1."),
        Remedy("Copy rope_theta and the scaling settings from the configuration that the run trained with."),
        Remedy("Convert query and key weights between the paired and the halved rotary layout, once."),
    ),
    references=(
        "Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021, section 3.4",
        "transformers, convert_llama_weights_to_hf.py (permute of query and key weights)",
    ),
)  # fmt: skip


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    facts = m.positions
    if facts is None:
        return []
    return [*_stored(m, facts, t), *_settings(m, facts, t)]


def _stored(m: Measurements, facts: PositionFacts, t: dict[str, Threshold]) -> list[Suspect]:
    """Ids in the batch that are not 0, 1, 2 … within each document."""
    broken = facts.breaks and facts.at_documents < t["documents"].value
    if not (facts.stored and facts.taken) or not (broken or facts.first):
        return []
    what = f"{plural(len(facts.breaks), 'break')} inside rows" if broken else f"rows that begin at {facts.first}"
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"The batch's position ids do not count from 0 through each text: {what}.",
            location=Location(
                rows=facts.broken_rows if broken else tuple(int(row["row"]) for row in records(m.rows)),
                positions=tuple((row, at, at + 1) for row, at in facts.breaks) if broken else (),
            ),
            evidence=(
                Evidence("breaks in the stored position ids", len(facts.breaks), ""),
                Evidence("of them at the start of a document", facts.at_documents, "", threshold=t["documents"].value,
                         source=t["documents"].source),
                Evidence("first stored position id", facts.first, "", 0, "where rows begin"),
            ),
            plans=(Plan("set_positions", {}, "positions 0, 1, 2 … in every row"),),
            strength=float(len(facts.breaks) + bool(facts.first)),
        )
    ]  # fmt: skip


def _settings(m: Measurements, facts: PositionFacts, t: dict[str, Threshold]) -> list[Suspect]:
    """Rotary settings of the code, where the log says that the run did better, and the first positions are fine."""
    usual = m.log.usual_loss if m.log is not None else None
    if usual is None or facts.rotary_theta is None or len(facts.losses) < 3:
        return []
    if not m.loss >= usual + clear_margin(m, t, "fell"):
        return []
    first, later = facts.losses[0][2], facts.losses[-1][2]
    limit = math.log(m.vocab_size) + t["first"].value
    # Or positions just behind it are good, and it gets worse from there: distances are misread, and nothing else.
    rises = later >= min(finite(loss for _, _, loss, _ in facts.losses[:-1]), default=math.inf) + t["rises"].value
    if not (is_number(first) and is_number(later) and (first <= limit or rises)):
        return []
    other = [theta for theta in USUAL_THETAS if abs(theta / facts.rotary_theta - 1) > 0.01]
    now = facts.rotary_stretch
    plans = [Plan("change_rotary", {"theta": theta, "stretch": now}, f"rotary base {theta:g}") for theta in other]
    plans += [
        Plan("change_rotary", {"theta": facts.rotary_theta, "stretch": stretch}, f"positions divided by {stretch:g}")
        for stretch in USUAL_STRETCHES
        if abs(stretch / now - 1) > 0.01
    ]
    if not m.qk_norm and any(name.endswith(("q_proj.weight", "wq.weight")) for name in m.parameters["parameter"]):
        plans += [
            Plan("change_rotary", {"layout": layout}, f"query and key features reordered to {layout}")
            for layout in ("halves", "pairs")
        ]
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"The loss stands {m.loss - usual:.2f} nats above the log's usual, {later:.2f} in the later half "
            f"against {first:.2f} at the first position; rotary base {facts.rotary_theta:g}"
            + (f", positions divided by {facts.rotary_stretch:g}." if abs(facts.rotary_stretch - 1) > 0.01 else "."),
            location=Location(),
            evidence=(
                Evidence("loss of the first position", first, "nats", later, "later half of the positions", limit,
                         t["first"].source),
                Evidence("loss", m.loss, "nats", usual, "usual loss in the log"),
                Evidence("base of the rotary frequencies", facts.rotary_theta, ""),
                Evidence("what positions are divided by", facts.rotary_stretch, ""),
            ),
            plans=tuple(plans),
            measures=("loss",),
        )
    ]  # fmt: skip


_FLAT = ((0, 4, 5.9, 16), (4, 16, 5.7, 48), (16, 64, 5.8, 192), (64, 128, 5.8, 252))
_RUINED = ((0, 4, 9.8, 16), (4, 16, 9.6, 48), (16, 64, 9.9, 192), (64, 128, 9.7, 252))
_BETTER = {"step": 400, "usual_loss": 3.4, "loss_spread": 0.05}
RULE = Rule(
    slug="position-encoding",
    order=505,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case(
            "position ids start again inside a text",
            {
                "positions": {
                    "stored": True,
                    "taken": True,
                    "breaks": ((0, 64), (2, 64)),
                    "broken_rows": (0, 2),
                    "at_documents": 0.0,
                }
            },
            True,
        ),
        Case("rows begin at 512", {"positions": {"stored": True, "taken": True, "first": 512}}, True),
        Case(
            "another rotary base",
            {"positions": {"rotary_theta": 5e5, "losses": _FLAT}, "loss": 5.8, "log": _BETTER},
            True,
        ),
        Case(
            "positions divided by eight, and a loss that has risen",
            {"positions": {"rotary_theta": 1e4, "rotary_stretch": 8.0, "losses": _FLAT}, "loss": 5.8, "log": _BETTER},
            True,
        ),
        Case(
            "near miss: positions divided by eight, as they were in training",
            {"positions": {"rotary_theta": 1e4, "rotary_stretch": 8.0, "losses": _FLAT}},
            False,
        ),
        Case(
            "near miss: packed documents",
            {
                "positions": {
                    "stored": True,
                    "taken": True,
                    "breaks": ((0, 40), (0, 90)),
                    "broken_rows": (0,),
                    "at_documents": 1.0,
                }
            },
            False,
        ),
        Case(
            "near miss: odd ids that the model never gets",
            {"positions": {"stored": True, "taken": False, "first": 7}},
            False,
        ),
        Case(
            "near miss: the first positions are ruined too",
            {"positions": {"rotary_theta": 1e4, "losses": _RUINED}, "loss": 9.7, "log": _BETTER},
            False,
        ),
        Case(
            "near miss: a flat profile, and the log never had it better",
            {"positions": {"rotary_theta": 1e4, "losses": _FLAT}},
            False,
        ),
    ),
)
