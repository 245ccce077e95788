"""Are the verdicts right? Diagnoses the catalogue of incidents of fixtures/verdict_incidents.py, one after another.

    python -m benchmarks.verdicts                          # all of them (minutes); exit code 1 under the floors
    python -m benchmarks.verdicts --share 0.1 --seed 3     # a tenth, drawn by seed
    python -m benchmarks.verdicts --split held-out --only nanoGPT
    python -m benchmarks.verdicts --split fresh            # other architectures and texts; SmolLM2 where it is cached
    python -m benchmarks.verdicts --split later            # a third set of both, made before any rule was run on it
    python -m benchmarks.verdicts --split last             # a fourth, made in the same way
    python -m benchmarks.verdicts --split sixth            # and two more
    python -m benchmarks.verdicts --split seventh
    python -m benchmarks.verdicts --split eighth
    python -m benchmarks.verdicts --split ninth
    python -m benchmarks.verdicts --split tenth
    python -m benchmarks.verdicts --split eleventh

The first run trains the models (minutes); they are kept in ~/.cache/stability_probe.
Before each diagnosis the incident's naive check runs; one that is not what it claims to be counts as a crash.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from fixtures.verdict_incident import Incident, Split, Truth
from fixtures.verdict_incidents import INCIDENTS, drawn
from stability_probe.pipeline import run
from stability_probe.schema import Location, Report

# Least top-1 and location accuracy: on the splits that rules may be looked at on, and on those that were made without
# any rule at hand, where five points less are asked for: what is clear there was nobody's threshold.
FLOORS = {split: (0.97, 0.95) if split in ("choose", "held-out") else (0.92, 0.9) for split in get_args(Split)}
# Causes that look alike, as the pages of the rules tell them ("False alarms, and what separates them").
CONFUSERS = (
    ("nonfinite-weights", "fp16-overflow"), ("corrupt-weights", "activation-outlier"), ("corrupt-weights", "none"),
    ("checkpoint-mismatch", "none"), ("checkpoint-mismatch", "corrupt-weights"),
    ("checkpoint-mismatch", "position-encoding"), ("optimizer-state-mismatch", "stale-second-moment"),
    ("no-valid-labels", "fully-masked-rows"), ("label-misalignment", "learning-rate-too-high"),
    ("padding-in-loss", "repeated-tokens"), ("tokenizer-mismatch", "garbage-tokens"),
    ("tokenizer-mismatch", "data-shift"), ("garbage-tokens", "data-shift"), ("repeated-tokens", "none"),
    ("duplicate-examples", "boilerplate"), ("boilerplate", "none"), ("numeric-runs", "none"),
    ("fp16-overflow", "attention-logit-growth"), ("fp16-overflow", "fully-masked-rows"),
    ("bf16-precision-loss", "logit-drift"), ("bf16-update-stagnation", "none"),
    ("attention-logit-growth", "attention-scale"), ("attention-logit-growth", "qk-norm-gain-growth"),
    ("attention-logit-growth", "none"), ("logit-drift", "residual-growth"), ("logit-drift", "softcap-mismatch"),
    ("embedding-row-outlier", "none"), ("residual-growth", "none"), ("activation-outlier", "none"),
    ("vanishing-gradient", "none"), ("init-scale", "learning-rate-too-high"),
    ("stale-second-moment", "garbage-tokens"), ("stale-second-moment", "epsilon-floor"),
    ("stale-second-moment", "learning-rate-too-high"),
)  # fmt: skip
SLACK = 13  # tokens by which a span may begin early or late: the longest period of a repetition


@dataclass(frozen=True)
class Result:
    """What the diagnosis said of one incident.

    Attributes:
        named: the causes, the verdict's first; ("none",) where nothing was named.
        located: whether the place is right; None where none is asked for or the cause is wrong.
        times_bare: seconds of the whole diagnosis over those of one forward and backward.
        problem: why there is no report, or which rule crashed.
    """

    incident: Incident
    named: tuple[str, ...]
    status: str
    located: bool | None
    times_bare: float
    told: str
    problem: str = ""

    @property
    def right(self) -> bool:
        return not self.problem and self.named[0] in self.incident.truth.causes

    @property
    def right_in_two(self) -> bool:
        return not self.problem and any(name in self.incident.truth.causes for name in self.named[:2])


def diagnose(incident: Incident) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        try:
            request = incident.make(Path(folder))
        except AssertionError as error:
            return Result(incident, ("crashed",), "", None, float("nan"), "", f"not what it claims to be: {error}")
        began = time.perf_counter()
        try:
            report = run(request)
        except Exception as error:  # noqa: BLE001 a crash is a result: it is counted, and the others still run
            return Result(incident, ("crashed",), "", None, float("nan"), "", f"{type(error).__name__}: {error}")
        seconds = time.perf_counter() - began
    return judged(incident, report, seconds)


def judged(incident: Incident, report: Report, seconds: float) -> Result:
    verdict = report.verdict
    ranked = [entry.cause for entry in verdict.ranked]
    named = (verdict.cause, *(cause for cause in ranked if cause != verdict.cause))
    right = verdict.cause in incident.truth.causes
    asked = places_of(incident.truth)
    bare = [record.seconds for record in report.replays[:1]]
    crashed = [outcome.rule for outcome in report.outcomes if outcome.status == "crashed"]
    return Result(
        incident,
        named,
        verdict.status or "",
        found(incident.truth, verdict.location) if right and asked else None,
        seconds / max(bare[0], 1e-9) if bare else float("nan"),
        f"{verdict.summary} {verdict.location}",
        f"crashed: {', '.join(crashed)}" if crashed else "",
    )


def places_of(truth: Truth) -> bool:
    """Whether the truth says where."""
    return any(
        (truth.rows is not None, truth.layer is not None, truth.heads, truth.parameters, truth.start is not None)
    )


def found(truth: Truth, where: Location) -> bool:
    """Whether the location holds everything that the truth asks for."""
    starts = [start for _, start, _ in where.positions]
    return (
        (truth.rows is None or tuple(sorted(where.rows)) == truth.rows)
        and (truth.layer is None or where.layer == truth.layer)
        and set(truth.heads) <= set(where.heads)
        and all(any(name.startswith(wanted) for name in where.parameters) for wanted in truth.parameters)
        and (truth.start is None or any(abs(start - truth.start) <= SLACK for start in starts))
    )


# --- the table ------------------------------------------------------------------------------------


def line(result: Result) -> str:
    mark = "ok  " if result.right and result.located is not False else "MISS"
    where = {True: "place ok", False: "PLACE", None: ""}[result.located]
    incident = result.incident
    wanted = " or ".join(incident.truth.causes)
    said = result.problem or f"{result.named[0]} {result.status}".strip()
    return f"{mark} {incident.split:8s} {incident.name:58s} {wanted:26s} -> {said} {where}".rstrip()


def share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits) if hits else float("nan")


def counted(hits: Sequence[bool]) -> str:
    return f"{share(hits):6.1%} ({sum(hits)}/{len(hits)})" if hits else "      -"


def false_alarms(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.incident.truth.healthy and not result.right]


def located(results: Sequence[Result]) -> list[bool]:
    return [result.located for result in results if result.located is not None]


def summary(results: Sequence[Result]) -> str:
    rows = [
        f"{'':10s} {'incidents':>9s}  {'top-1':>15s}  {'top-2':>15s}  {'location':>15s}  {'false alarms':>12s}  crashes"
    ]
    for name in (*FLOORS, "all"):
        own = [result for result in results if name in ("all", result.incident.split)]
        healthy = [result for result in own if result.incident.truth.healthy]
        rows.append(
            f"{name:10s} {len(own):9d}  {counted([r.right for r in own]):>15s}  "
            f"{counted([r.right_in_two for r in own]):>15s}  {counted(located(own)):>15s}  "
            f"{f'{len(false_alarms(own))}/{len(healthy)}':>12s}  {sum(bool(r.problem) for r in own):7d}"
        )
    slowdowns = [result.times_bare for result in results if result.times_bare == result.times_bare]
    if slowdowns:
        rows.append(f"median time of a diagnosis: {statistics.median(slowdowns):.0f} x one forward and backward")
    return "\n".join(rows)


def confusion(results: Sequence[Result]) -> str:
    """Each cause with what was said of its incidents, the right answer as `=`."""
    rows = []
    for cause in sorted({result.incident.truth.causes[0] for result in results}):
        own = [result for result in results if result.incident.truth.causes[0] == cause]
        said = Counter("=" if result.right else result.named[0] for result in own)
        rows.append(f"{cause:28s} {', '.join(f'{name} {count}' for name, count in said.most_common())}")
    return "\n".join(rows)


def mistaken(results: Sequence[Result]) -> list[str]:
    """Incidents of one cause of a pair of confusers that were called the other."""
    pairs = {*CONFUSERS, *((other, one) for one, other in CONFUSERS)}
    wrong = [result for result in results if not result.right]
    return [
        f"{result.incident.truth.causes[0]} called {result.named[0]}: {result.incident.name} ({result.incident.split})"
        for result in wrong
        if any((cause, result.named[0]) in pairs for cause in result.incident.truth.causes)
    ]


def below_floor(results: Sequence[Result]) -> list[str]:
    """The splits on which too few verdicts, or too few places, are right."""
    poor = []
    for split, (top_1, location) in FLOORS.items():
        own = [result for result in results if result.incident.split == split]
        if share([r.right for r in own]) < top_1 or share(located(own)) < location:
            poor.append(split)
    return poor


def main() -> None:
    parser = argparse.ArgumentParser(description="How often are the verdicts right?")
    parser.add_argument("--share", type=float, default=1.0, help="of the incidents, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", choices=list(FLOORS))
    parser.add_argument("--only", default="", help="incidents whose name or cause holds this")
    parser.add_argument("--misses", action="store_true", help="say more of each miss")
    options = parser.parse_args()
    chosen = [i for i in INCIDENTS if options.split in (None, i.split)]
    if options.share < 1:
        chosen = drawn(options.share, options.seed, options.split)
    chosen = [i for i in chosen if options.only in f"{i.name} {i.truth.causes[0]}"]
    results = []
    for incident in chosen:
        results.append(diagnose(incident))
        print(line(results[-1]), flush=True)
        if options.misses and line(results[-1]).startswith("MISS"):
            print(f"     named {', '.join(results[-1].named)}: {results[-1].told}")
    print(f"\n{confusion(results)}\n\n{summary(results)}")
    print("\n".join(["", f"{len(CONFUSERS)} pairs that look alike, mistaken for each other:", *mistaken(results)]))
    full = options.share >= 1 and not options.only
    if full and (below_floor(results) or false_alarms(results) or any(r.problem for r in results)):
        sys.exit(1)


if __name__ == "__main__":
    main()
