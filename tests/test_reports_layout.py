"""What a reader sees: the verdict first, nothing past the edge, colours only where asked for."""

from __future__ import annotations

import dataclasses
import re

import pytest
from markdown_it import MarkdownIt
from rich.cells import cell_len

from stability_probe.reports import render, sections, words
from stability_probe.schema import Evidence, Location, Outcome, Ranked, Report
from tests.report_samples import SAMPLES, healthy, latent, repeated, unexplained

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("sample", SAMPLES)
def test_no_line_passes_the_edge(sample, width, colour):
    for line in render(SAMPLES[sample](), "terminal", width=width, colour=colour).splitlines():
        assert cell_len(ESCAPE.sub("", line)) <= width


@pytest.mark.parametrize("sample", SAMPLES)
def test_colour_changes_nothing_but_colour(sample):
    plain = render(SAMPLES[sample](), "terminal", width=80, colour=False)
    coloured = render(SAMPLES[sample](), "terminal", width=80, colour=True)
    assert "\x1b" not in plain
    assert "\x1b[" in coloured
    assert [line.rstrip() for line in ESCAPE.sub("", coloured).splitlines()] == plain.splitlines()


@pytest.mark.parametrize("format_", ["terminal", "markdown"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_cause_status_place_and_action_come_first(sample, format_):
    report = SAMPLES[sample]()
    head = "\n".join(render(report, format_).splitlines()[:14])
    verdict = report.verdict
    assert verdict.cause in head
    assert words.title(verdict.cause) in head
    assert sections.sure(report) in head
    assert words.where(verdict.location) in re.sub(r"\s*│\s*\n│\s*", " ", head)
    assert sections.do_now(report)[0][:30] in head


def test_a_baseline_stands_beside_each_number():
    text = render(repeated(), "terminal", width=120)
    line = next(line for line in text.splitlines() if line.startswith("loss of row 3"))
    assert re.search(r"21\.3 nats\s+3\.44\s+–$", line)


def test_rivals_say_why_they_lost():
    text = render(repeated(), "terminal", width=120)
    assert re.search(r"label-misalignment +7 % +realigning the labels removes 7 % of the excess", text)


def test_a_found_suspect_that_nobody_tried_is_a_rival_too():
    report = dataclasses.replace(healthy(), outcomes=(Outcome("boilerplate", "found", "row 2 is a template"),))
    assert re.search(r"boilerplate +– +row 2 is a template", render(report, "terminal", width=120))


def test_healthy_reads_as_reassurance():
    text = render(healthy(), "terminal", width=120)
    assert "healthy: no excess that needs explaining" in text
    assert text.index("Why this is healthy") < text.index("Checklist")
    assert "massive activation" in text
    assert "Rivals" not in text


def alone(report):
    return dataclasses.replace(report, inputs={**report.inputs, "baseline": [], "log": []})


LACKING = (
    Outcome("stale-second-moment", "skipped", "no optimizer state; give it with --optimizer"),
    Outcome("epsilon-floor", "skipped", "no optimizer state; give it with --optimizer"),
    Outcome("data-shift", "skipped", "give --baseline, or the log with --log"),
    Outcome("router-collapse", "skipped", "the model is dense"),
    Outcome("not-reproduced", "skipped", "give the log with --log and the step with --step"),
    Outcome("corrupt-weights", "clear", "no sign of it"),
)


@pytest.mark.parametrize(("format_", "layout"), [("terminal", {"width": 80}), ("markdown", {})])
def test_no_fault_without_anything_to_compare_with_says_so_first(format_, layout):
    report = dataclasses.replace(alone(healthy()), outcomes=LACKING)
    text = re.sub(r"[\s│*]+", " ", "\n".join(render(report, format_, **layout).splitlines()[:16])).replace("\\", "")
    assert "nothing was given to compare with" in text and "healthy: no excess" not in text
    assert "No baseline and no log" in text
    told = "4 of 6 causes could not be checked; what would check them: --optimizer (2), --log (2), --baseline (1)"
    assert told in text
    assert "Nothing." not in text


def test_no_fault_beside_a_baseline_only_names_what_was_not_given():
    report = dataclasses.replace(healthy(), outcomes=LACKING)
    assert sections.is_compared(report)
    assert sections.lacking(report) == (
        "4 of 6 causes could not be checked; what would check them: --optimizer (2), --log (2), --step (1)."
    )
    assert "lacks" in render(report, "terminal", width=80)


def test_a_cause_that_no_further_option_would_check_is_named():
    """The log was given and does not hold the step: to ask for --log and --step again would be wrong."""
    given = {**healthy().inputs, "log": ["run.jsonl"], "step": 5000}
    report = dataclasses.replace(healthy(), inputs=given, outcomes=LACKING[3:])
    assert sections.lacking(report) == "1 of 3 causes could not be checked: not-reproduced (see the notes)."


def test_a_cause_that_was_found_needs_no_list_of_what_is_lacking():
    assert sections.lacking(alone(dataclasses.replace(repeated(), outcomes=LACKING))) == ""


def test_the_same_reason_is_given_once():
    report = dataclasses.replace(repeated(), outcomes=LACKING)
    for format_ in ("terminal", "markdown"):
        text = render(report, format_)
        assert text.count("no optimizer state") == 1
    assert "stale-second-moment, epsilon-floor skipped: no optimizer state" in render(report, "terminal", width=120)


def test_a_question_that_does_not_arise_has_a_mark_of_its_own():
    text = render(healthy(), "terminal", width=120)
    assert re.search(r"\n +– +A fix is known +nothing was found to fix", text)
    assert "➖ A fix is known" in render(healthy(), "markdown")
    counts = re.search(r"Checklist: (\d+) pass, (\d+) fail, (\d+) unknown, (\d+) n\.a\.", text)
    assert sum(map(int, counts.groups())) == len(healthy().checklist) == 25


@pytest.mark.parametrize("status", ["decisive", "likely"])
def test_what_the_log_has_and_the_replay_has_not_is_no_stored_proof(status):
    said = words.certainty("not-reproduced", status, None)
    assert "stored data" not in said and "it was replayed" in said
    assert "stored data" in words.certainty("nonfinite-weights", "decisive", None)
    assert "two replays" in words.certainty("nondeterministic-replay", "decisive", None)


@pytest.mark.parametrize(
    ("threshold", "source", "told"),
    [
        (1.0, "QK-clip's τ, Kimi K2 report (2025)", "QK-clip's τ, Kimi K2 report"),
        (None, "whatever", ""),
        (0.5, "stability_probe/audit/result.py (bands); benchmarks", ""),
        (1.0, "word " * 30, ("word " * 11).strip() + " …"),
    ],
)
def test_where_a_limit_comes_from_is_told_in_a_few_words(threshold, source, told):
    assert sections.limit_source(Evidence("x", 1.0, threshold=threshold, source=source)) == told


def test_unexplained_lists_what_was_tried():
    text = render(unexplained(), "terminal", width=120)
    assert "the best repair removes 31 % of the excess" in text
    assert text.index("What was tried") < text.index("Checklist")
    for tried in ("rows 1, 2 dropped", "learning-rate-too-high", "fp16-overflow"):
        assert tried in text
    assert "residual-growth crashed: KeyError" in text


@pytest.mark.parametrize("format_", ["terminal", "markdown"])
def test_every_unknown_box_says_what_to_supply(format_):
    text = render(repeated(), format_, **({"width": 160} if format_ == "terminal" else {}))
    for box in repeated().checklist:
        if box.status == "unknown":
            assert box.needs and box.needs in re.sub(r"\s+", " ", text)


def test_the_guilty_rows_come_first_and_are_marked():
    heads = render(latent(), "terminal", width=120).split("Attention heads")[1].splitlines()
    assert heads[2].split()[:4] == ["▶", "17", "2", "379.2"]
    parameters = render(latent(), "terminal", width=120).split("Parameters,")[1].splitlines()
    assert parameters[2].startswith("▶  model.layers.17.self_attn.q_proj.weight")


def test_columns_that_say_nothing_are_left_out():
    text = render(repeated(), "terminal", width=120)
    assert "update ratio" not in text and "non-finite  seconds" in text and "> fp16" not in text


def test_markdown_is_whole():
    """A parser of the same dialect finds the tables and the folds, and every table row is as wide as its head."""
    for sample in SAMPLES.values():
        text = render(sample(), "markdown")
        assert text.count("<details>") == text.count("</details>") > 0
        tokens = MarkdownIt("commonmark").enable("table").parse(text)
        assert sum(token.type == "table_open" for token in tokens) >= 6
        for block in re.findall(r"(?:^\|.*\|\n)+", text, re.M):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_an_empty_report_renders():
    empty = Report("0", {}, dataclasses.replace(healthy().verdict, healthy_notes=()), (), (), (), (), {})
    for format_ in ("terminal", "markdown", "json"):
        assert "none" in render(empty, format_)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (0, "0"), (0.0, "0"), (23281.4, "23281"), (3.94159, "3.942"), (1e-5, "1.00e-05"),
        (1.5e9, "1.50e+09"),
        (float("nan"), "NaN"), (float("inf"), "∞"), (float("-inf"), "−∞"), (134515008, "134515008"), ("bf16", "bf16"),
        (10**400, "1e+300"), (-0.5, "-0.5"),
    ],
)  # fmt: skip
def test_numbers(value, text):
    assert words.number(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (1.0, "100 %"),
        (0.9999, "> 99.9 %"),
        (0.997, "99.7 %"),
        (0.97, "97 %"),
        (0.0, "0 %"),
        (0.001, "< 0.5 %"),
        (None, "–"),
    ],
)
def test_percent_never_rounds_up_to_all_nor_down_to_nothing(share, text):
    assert words.percent(share) == text


def test_where_names_the_two_most_telling_places():
    at = Location("layers.3", 3, (3, 4), ((3, 1),), (2, 5), ((2, 0, 1),), ("layers.3.w[0, 1]",))
    assert words.where(at) == "row 2, token 0 · row 5"
    assert words.where(Location(layer=4)) == "layer 4"
    assert words.where(Location(layer=3, heads=((3, 0), (3, 1), (3, 2), (3, 4)))) == (
        "layer 3 head 0, layer 3 head 1, layer 3 head 2 and 1 more"
    )
    assert words.where(Location()) == ""


def test_a_ranked_cause_without_a_reason_shows_its_summary():
    verdict = dataclasses.replace(
        repeated().verdict, ranked=(Ranked("logit-drift", "likely", 0.3, "mean log Z is 500", Location()),)
    )
    text = render(dataclasses.replace(repeated(), verdict=verdict, interventions=()), "terminal", width=120)
    assert re.search(r"logit-drift +30 % +mean log Z is 500", text)


def test_spans_that_overlap_are_one_place():
    at = Location(rows=(1,), positions=((1, 20, 128), (1, 16, 128), (0, 3, 4), (1, 200, 210)))
    assert words.where(at) == "row 0, token 3, row 1, tokens 16–127, row 1, tokens 200–209"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_value_in_words_does_not_squeeze_the_table(width):
    told = "repeated-tokens: 84% of the row repeats with a period up to 512 (most: positions 20–128)"
    evidence = (Evidence("audit of row 1", told, "", 0.5, told, 0.5, told), *repeated().outcomes[0].evidence)
    ranked = (dataclasses.replace(repeated().verdict.ranked[0], evidence=evidence),)
    report = dataclasses.replace(repeated(), verdict=dataclasses.replace(repeated().verdict, ranked=ranked))
    shown = render(report, "terminal", width=width).split("Evidence")[1].split("What to do")[0]
    assert len(shown.splitlines()) < 40


def test_the_worst_token_comes_first_whoever_is_guilty():
    tokens = render(repeated(), "terminal", width=120).split("Tokens, highest")[1].splitlines()
    assert [line.split()[:2] for line in tokens[2:4]] == [["3", "1403"], ["0", "17"]]
