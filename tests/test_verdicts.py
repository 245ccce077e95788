"""A tenth of the benchmark of verdicts, drawn by seed; and the benchmark's own arithmetic.

The models are trained on first use and kept in ~/.cache/stability_probe (a minute or two for the tenth).
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import get_args

import pytest

from benchmarks.verdicts import (
    CONFUSERS,
    Result,
    below_floor,
    confusion,
    diagnose,
    found,
    located,
    mistaken,
    share,
    summary,
)
from fixtures.fresh_runs import SMOLLM2
from fixtures.verdict_faults import FAULTS
from fixtures.verdict_healthy import HEALTHY
from fixtures.verdict_incident import Incident, Split, Truth
from fixtures.verdict_incidents import FRESH, INCIDENTS, drawn
from stability_probe.schema import Location

SEED = 2  # draws one of the known misses
TENTH = [*drawn(0.1, SEED), *drawn(0.1, SEED, "fresh")]


@functools.cache
def result(name: str) -> Result:
    return diagnose(next(incident for incident in TENTH if incident.name == name))


@pytest.mark.parametrize("name", [incident.name for incident in TENTH])
def test_no_crash_and_no_false_alarm(name):
    told = result(name)
    assert not told.problem, told.problem
    if told.incident.truth.healthy:
        assert told.right, told.told


def test_a_tenth_is_named_and_located():
    results = [result(incident.name) for incident in TENTH]
    missed = [r for r in results if not r.right]
    told = [f"{r.incident.name}: {r.named[0]}, {r.told}" for r in missed]
    # Of so few one miss is within what the full benchmark gives on the first two splits, and one in ten on the third.
    assert sum(r.incident.split == "fresh" for r in missed) <= 1, told
    assert sum(r.incident.split != "fresh" for r in missed) <= 1, told
    assert share(located(results)) >= 0.9, [r.told for r in results if r.located is False]


# --- the catalogue --------------------------------------------------------------------------------


def test_the_catalogue_is_as_large_as_it_says():
    assert len(INCIDENTS) >= 80 and len(HEALTHY) >= 25
    assert len({incident.name for incident in INCIDENTS}) == len(INCIDENTS)
    assert Counter(incident.split for incident in INCIDENTS)["held-out"] >= 60


def test_splits_share_no_seed_of_text():
    seeds = {
        split: {i.seed for i in INCIDENTS if i.split == split and not i.model.startswith("hot")}
        for split in get_args(Split)
    }
    assert not seeds["choose"] & seeds["held-out"]
    assert not seeds["fresh"] & (seeds["choose"] | seeds["held-out"])
    assert not seeds["later"] & (seeds["choose"] | seeds["held-out"] | seeds["fresh"])
    for late in ("last", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh"):
        assert not seeds[late] & set().union(*(own for split, own in seeds.items() if split != late))


def test_every_cause_of_a_fault_is_in_the_catalogue():
    from stability_probe.judge import load_rules

    known = {rule.slug for rule in load_rules()} | {"unexplained"}
    assert {cause for incident in INCIDENTS for cause in incident.truth.causes} <= known | {"none"}


@pytest.mark.parametrize("seed", [0, 1])
def test_the_draw_is_a_share_of_faults_and_of_controls(seed):
    chosen = drawn(0.1, seed)
    assert chosen == drawn(0.1, seed)
    healthy = sum(incident.truth.healthy for incident in chosen)
    assert healthy == round(0.1 * len(HEALTHY)) and len(chosen) - healthy == round(0.1 * len(FAULTS))
    assert drawn(1.0, seed) == [*FAULTS, *HEALTHY]
    assert drawn(1.0, seed, "fresh") == [incident for incident in FRESH if incident.model != SMOLLM2]


def test_an_incident_that_is_not_what_it_claims_counts_as_a_crash():
    def never(_scene: object) -> None:
        raise AssertionError("the loss did not rise")

    told = diagnose(Incident("empty claim", "choose", "llama", Truth(("corrupt-weights",)), check=never))
    assert not told.right and "did not rise" in told.problem


# --- the arithmetic -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("truth", "where", "right"),
    [
        (Truth(("x",), rows=(2,)), Location(rows=(2,)), True),
        (Truth(("x",), rows=(2,)), Location(rows=(2, 3)), False),
        (Truth(("x",), layer=1, heads=((1, 3),)), Location(layer=1, heads=((1, 3), (1, 2))), True),
        (Truth(("x",), layer=1, heads=((1, 3),)), Location(layer=1, heads=((1, 2),)), False),
        (Truth(("x",), parameters=("a.mlp.",)), Location(parameters=("a.mlp.up.weight",)), True),
        (Truth(("x",), parameters=("a.mlp.",)), Location(parameters=("b.mlp.up.weight",)), False),
        (Truth(("x",), start=8), Location(positions=((2, 10, 96),)), True),
        (Truth(("x",), start=8), Location(positions=((2, 40, 96),)), False),
    ],
)
def test_a_place_is_right_where_it_holds_what_is_asked_for(truth, where, right):
    assert found(truth, where) is right


def made(cause: str, *named: str, where: bool | None = None, split: str = "choose") -> Result:
    incident = Incident(f"{cause} {named}", split, "llama", Truth((cause,)))  # type: ignore[arg-type]
    return Result(incident, named, "confirmed", where, 5.0, "")


def test_the_summary_counts_hits_places_and_false_alarms():
    results = [
        made("a", "a", where=True),
        made("a", "b", "a"),
        made("none", "none", split="held-out"),
        made("none", "b", split="held-out"),
    ]
    rows = {line.split()[0]: line for line in summary(results).splitlines()[1:]}
    assert "50.0% (1/2)" in rows["choose"] and "100.0% (2/2)" in rows["choose"] and "100.0% (1/1)" in rows["choose"]
    assert "1/2" in rows["held-out"] and "50.0% (2/4)" in rows["all"]
    assert "5 x one forward" in summary(results)
    assert "= 1, b 1" in confusion(results).splitlines()[0]


def test_each_split_has_a_floor_of_its_own():
    right = [made("a", "a", split="seventh") for _ in range(12)]
    assert below_floor([*right, made("a", "b", split="seventh")]) == []
    assert below_floor([*right, *(made("a", "b", split="seventh") for _ in range(2))]) == ["seventh"]
    assert below_floor([*right, *(made("a", "a") for _ in range(12)), made("a", "b")]) == ["choose"]
    assert below_floor([made("a", "a", where=False, split="last")]) == ["last"]


def test_confusers_are_mistaken_in_either_direction():
    results = [
        made("padding-in-loss", "repeated-tokens"),
        made("repeated-tokens", "padding-in-loss"),
        made("padding-in-loss", "padding-in-loss"),
        made("padding-in-loss", "logit-drift"),
    ]
    assert [told.partition(":")[0] for told in mistaken(results)] == [
        "padding-in-loss called repeated-tokens",
        "repeated-tokens called padding-in-loss",
    ]


def test_confusers_are_causes():
    from stability_probe.judge import load_rules

    known = {rule.slug for rule in load_rules()} | {"none"}
    assert {cause for pair in CONFUSERS for cause in pair} <= known
