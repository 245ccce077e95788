"""Laws of the rules: the order of rows and tables is no evidence, and their arithmetic has slower twins."""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stability_probe.judge import Case, Rule, Suspect, judge, load_rules
from stability_probe.rules import _cases
from stability_probe.rules._tables import median, quantile
from stability_probe.rules.attention_logit_growth import RULE as GROWTH
from stability_probe.rules.attention_scale import uniform_entropy
from stability_probe.rules.corrupt_weights import flipped_bit
from stability_probe.rules.data_shift import rank_chance, student
from stability_probe.rules.label_misalignment import RULE as LABELS
from stability_probe.rules.label_misalignment import _testified
from stability_probe.rules.logit_drift import bf16_spacing
from stability_probe.rules.not_reproduced import clean_factor
from stability_probe.rules.position_encoding import RULE as POSITIONS
from stability_probe.rules.qk_norm_gain_growth import RULE as GAINS
from stability_probe.rules.qk_norm_gain_growth import _grown
from tests.rule_tables import measurements_from

RULES = load_rules()
# Cases that give a `rows` table: what they conclude may name rows.
ROW_CASES = [(rule, case) for rule in RULES for case in rule.cases if case.fires and "rows" in case.tables]


def renamed(suspect: Suspect, new: dict[int, int]) -> tuple[object, ...]:
    """What a suspect says about rows, with the rows under their new numbers, as sets."""
    place = suspect.location
    return (
        suspect.cause,
        suspect.latent,
        suspect.decisive,
        frozenset(new[row] for row in place.rows),
        frozenset((new[row], start, end) for row, start, end in place.positions),
        tuple(sorted(plan.intervention for plan in suspect.plans)),
    )


@given(st.sampled_from(ROW_CASES), st.permutations(range(_cases.ROWS)))
@settings(max_examples=30, deadline=None)
def test_permuting_rows_permutes_the_location_only(example: tuple[Rule, Case], order: list[int]) -> None:
    rule, case = example
    table = case.tables["rows"]
    moved = [{**table[old], "row": new} for new, old in enumerate(order)]
    tables = {**case.tables, "rows": moved}
    if "row_offset_losses" in tables:
        tables["row_offset_losses"] = [tables["row_offset_losses"][old] for old in order]
    new = {old: place for place, old in enumerate(order)}
    same = {row: row for row in range(_cases.ROWS)}
    if "blind" in tables:
        named = {key: tuple(new[row] for row in tables["blind"].get(key, ())) for key in ("rows", "padded_rows")}
        tables["blind"] = {**tables["blind"], **named}
    before = {renamed(s, new) for s in judge((rule,), measurements_from(case.tables))[0]}
    after = {renamed(s, same) for s in judge((rule,), measurements_from(tables))[0]}
    assert before == after


@given(st.permutations(range(_cases.ROWS)))
@settings(max_examples=8, deadline=None)
def test_a_misaligned_row_is_found_wherever_it_stands(order: list[int]) -> None:
    right, wrong = {-1: 8.1, 0: 3.4, 1: 6.6}, {-1: 3.4, 0: 8.9, 1: 9.3}
    losses = [wrong if old == 0 else right for old in order]
    flagged = _cases.rows({order.index(0): {"flags": ["label-misalignment"], "audit_score": 1.0}})
    (suspect,) = judge((LABELS,), measurements_from({"row_offset_losses": losses, "rows": flagged}))[0]
    assert suspect.location.rows == (order.index(0),)
    assert suspect.plans[0].arguments == {"offset": -1, "rows": [order.index(0)]}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.slug)
def test_the_order_of_tables_without_execution_order_is_no_evidence(rule: Rule) -> None:
    for case in rule.cases:
        m = measurements_from(case.tables)
        turned = dataclasses.replace(
            m, heads=m.heads.iloc[::-1], parameters=m.parameters.iloc[::-1], embedding_rows=m.embedding_rows.iloc[::-1]
        )
        assert bool(judge((rule,), turned)[0]) is case.fires, case.name


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.slug)
def test_empty_tables_are_no_evidence_and_no_crash(rule: Rule) -> None:
    empty = {name: [] for name in ("modules", "heads", "parameters", "rows", "embedding_rows", "tokens")}
    nothing = {**empty, "precisions": {}, "offset_losses": {}, "loss": math.nan, "log_z_mean": math.nan}
    suspects, (outcome,) = judge((rule,), measurements_from(nothing))
    assert not suspects
    assert outcome.status in ("clear", "skipped"), outcome.reason


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.slug)
def test_numbers_that_are_not_finite_crash_no_rule(rule: Rule) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        tables = {
            "loss": bad,
            "global_grad_norm": bad,
            "grad_nonfinite": True,
            "loss_nonfinite": True,
            "offset_losses": dict.fromkeys(range(-2, 4), bad),
            "heads": [{**row, "max_logit": bad, "entropy": bad} for row in _cases.heads()],
            "modules": _cases.modules(everywhere={"absmax": bad, "rms": bad, "grad_norm": bad, "gap_bf16": bad}),
            "parameters": _cases.parameters(everywhere={"grad_norm": bad, "g2_over_v": bad, "update_ratio": bad}),
            "rows": _cases.rows({row: {"loss": bad, "grad_norm": bad} for row in range(4)}),
            "embedding_rows": [{"norm": bad, "grad_share": bad}],
            "precisions": {"bf16": {"loss": bad, "token_gap": bad, "rounding_gap": bad}},
            "log": {"step": 4, "usual_loss": 3.4, "loss_spread": 0.1, "logged_loss": bad, "logged_grad_norm": bad},
            "step_effect": {"damage": bad, "damage_by_lr": {0.5: bad, 0.25: bad}},
            "log_z_mean": bad,
        }
        _, (outcome,) = judge((rule,), measurements_from(tables))
        assert outcome.status != "crashed", (bad, outcome.reason)


@given(st.floats(1.0, 6.0))
@settings(deadline=None, max_examples=15)
def test_sinks_are_never_named(scale: float) -> None:
    heads = [{**row, "max_logit": scale * 8.0, "entropy": 0.001, "top_key_share": 1.0} for row in _cases.heads()]
    assert not judge((GROWTH,), measurements_from({"heads": heads}))[0]


@given(st.floats(101.0, 5000.0), st.sampled_from([(layer, head) for layer in range(4) for head in range(4)]))
@settings(deadline=None, max_examples=15)
def test_a_clip_to_tau_ends_at_tau(max_logit: float, place: tuple[int, int]) -> None:
    heads = _cases.heads({place: {"max_logit": max_logit, "entropy": 0.1}})
    (suspect,) = judge((GROWTH,), measurements_from({"heads": heads}))[0]
    assert suspect.location.heads == (place,)
    assert suspect.plans[0].arguments["gammas"][place] * max_logit == pytest.approx(100.0)


def fp32_bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def from_bits(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


@given(st.floats(2.0**-13, 0.25, width=32))
def test_a_flipped_top_exponent_bit_is_flipped_back(value: float) -> None:
    flipped = from_bits(fp32_bits(value) ^ (1 << 30))
    assert flipped > 1e34
    found = flipped_bit(flipped, 0.25)
    assert found == (7, pytest.approx(value))


def test_not_every_large_value_is_one_flipped_bit() -> None:
    assert flipped_bit(82.0, 0.25) is None
    assert flipped_bit(math.inf, 0.25) is None
    assert flipped_bit(0.0, 0.25) is None


@given(st.floats(0.01, 60000.0))
def test_bf16_spacing_is_the_distance_to_the_next_number(value: float) -> None:
    below = from_bits(fp32_bits(value) >> 16 << 16)  # bf16 is the upper half of fp32
    above = from_bits((fp32_bits(value) >> 16) + 1 << 16)
    assert bf16_spacing(value) == pytest.approx(above - below)


@pytest.mark.parametrize(
    ("ratio", "said"),
    [(8.0, "8 = 2^3"), (0.25, "1/4 = 1/2^2"), (3.01, "3"), (65536.0, "65536 = 2^16"), (1.0, ""), (2.6, ""), (0.0, "")],
)
def test_clean_factors(ratio: float, said: str) -> None:
    assert clean_factor(ratio, 0.02) == said


@pytest.mark.parametrize(
    ("reason", "move"),
    [
        ("labels[t] is ids[t+2] for 100% of the labels; expected the next token (shifted)", -1),
        ("labels[t] is ids[t+1] for 98% of the labels; expected the token itself (unshifted)", -1),
        ("labels[t] is ids[t] for 100% of the labels; expected the next token (shifted)", 1),
        ("labels agree with the ids at no shift from -2 to 3 (best 3%)", None),
    ],
)
def test_the_labels_say_how_far_the_targets_must_move(reason: str, move: int | None) -> None:
    assert _testified(reason) == move


def test_uniform_entropy_is_the_seeds() -> None:
    # 512 positions: the later half sees 257 to 512 keys, between ln 256 = 5.55 and ln 512 = 6.24 nats.
    assert uniform_entropy(512) == pytest.approx(sum(math.log(k) for k in range(257, 513)) / 256)
    assert 5.55 < uniform_entropy(512) < 6.24


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_quantiles_bracket_the_median(values: list[float]) -> None:
    assert quantile(values, 0.0) == min(values)
    assert quantile(values, 1.0) == max(values)
    assert quantile(values, 0.25) <= median(values) <= quantile(values, 0.75) or len(values) < 4


@pytest.mark.parametrize(("on_baseline", "latent"), [(370.0, True), (62.0, False), (float("nan"), True)])
def test_a_head_that_only_this_batch_makes_hot_is_no_latent_danger(on_baseline: float, latent: bool) -> None:
    hot = {"max_logit": 379.0, "entropy": 0.28, "baseline_max_logit": on_baseline}
    (rule,) = [rule for rule in RULES if rule.slug == "attention-logit-growth"]
    suspects, _ = judge((rule,), measurements_from({"heads": _cases.heads({(2, 1): hot})}))
    assert [suspect.latent for suspect in suspects] == [latent]


@pytest.mark.parametrize(("log_z", "latent"), [(300.0, [True]), (130.0, [True]), (70.0, [False]), (60.0, [])])
def test_a_router_whose_choice_is_lost_in_rounding_is_a_latent_danger(log_z: float, latent: list[bool]) -> None:
    (rule,) = [rule for rule in RULES if rule.slug == "router-collapse"]
    tables = next(case.tables for case in rule.cases if case.name == "logits in the hundreds")
    routers = (tables["routers"][0], {**tables["routers"][1], "log_z": log_z})
    suspects, _ = judge((rule,), measurements_from({"routers": routers}))
    assert [suspect.latent for suspect in suspects] == latent


def test_the_margin_of_few_rows_is_near_that_of_students_t() -> None:
    """Twin: the quantiles of t that leave out 0.27 % (GUM 1995, table G.2)."""
    exact = {3: 9.22, 4: 6.62, 5: 5.51, 10: 3.96, 20: 3.42, 40: 3.20}
    for freedom, known in exact.items():
        assert student(3.0, freedom) == pytest.approx(known, rel=0.07)
    assert student(3.0, 1.2) == student(3.0, 3.0)
    assert student(3.0, math.inf) == 3.0


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.lists(st.integers(10, 19), min_size=1, max_size=4))
def test_the_rank_chance_is_the_share_of_orders(own: list[int], other: list[int]) -> None:
    """Against every way to deal the rows out, one by one."""
    mine, theirs = [2.0 * x for x in own], [3.0 * x - 20 for x in other]
    assume(len({*mine, *theirs}) == len(mine) + len(theirs))
    won = sum(a > b for a in mine for b in theirs)
    dealt = 0
    rows = [*mine, *theirs]
    hands = list(itertools.combinations(range(len(rows)), len(mine)))
    for hand in hands:
        rest = [rows[at] for at in range(len(rows)) if at not in hand]
        dealt += sum(rows[at] > b for at in hand for b in rest) >= won
    assert rank_chance(mine, theirs) == pytest.approx(dealt / len(hands))


def test_many_rows_are_not_ranked() -> None:
    assert rank_chance([2.0] * 21, [1.0] * 3) == 1.0
    assert rank_chance([2.0] * 6, [1.0] * 6) == pytest.approx(1 / 924)


def test_gains_under_the_published_limit_are_no_danger_of_their_own() -> None:
    """Qwen3-0.6B has a gain of 96.5 in its first layer: heads of 47 there must be asked about, and never condemned."""
    heads = {(2, head): {"max_logit": 46.0 + head, "entropy": 0.4} for head in range(4)}
    tables = {"qk_norm": True, "heads": _cases.heads(heads), "parameters": _grown(2, 96.5)}
    (found,) = GAINS.examine(measurements_from(tables), GAINS.thresholds)
    assert not found.latent
    changes = [plan.arguments["gammas"][2] for plan in found.plans]
    assert len(set(changes)) == len(changes) and all(factor < 1 for factor in changes)


def test_another_base_keeps_the_stretch_and_every_other_stretch_is_tried() -> None:
    losses = ((0, 4, 5.9, 16), (4, 16, 5.7, 48), (16, 64, 5.8, 192), (64, 128, 5.8, 252))
    tables = {
        "positions": {"rotary_theta": 5e5, "rotary_stretch": 8.0, "losses": losses}, "loss": 5.8,
        "log": {"step": 400, "usual_loss": 3.4, "loss_spread": 0.05},
    }  # fmt: skip
    (found,) = POSITIONS.examine(measurements_from(tables), POSITIONS.thresholds)
    tried = [(p.arguments["theta"], p.arguments["stretch"]) for p in found.plans if "theta" in p.arguments]
    assert (1e4, 8.0) in tried and {s for theta, s in tried if theta == 5e5} == {1.0, 2.0, 4.0}
