"""Words for what the schema holds as numbers and slugs, shared by the reports that people read."""

from __future__ import annotations

import math
from typing import Any

from stability_probe.schema import Location, Report, Status

_TITLES = {
    "none": "No fault found",
    "unexplained": "A real excess, not explained",
    "not-reproduced": "The replay does not show the spike",
    "nondeterministic-replay": "The same replay twice differs",
    "nonfinite-weights": "Non-finite weights",
    "token-id-out-of-range": "Token id out of range",
    "qk-norm-gain-growth": "QK-norm gains have grown",
    "fp16-overflow": "fp16 overflow",
    "bf16-precision-loss": "bf16 precision loss",
    "bf16-update-stagnation": "bf16 update stagnation",
}

_NOW = {
    "none": "Nothing. If the run did spike, replay the step where its log does, or another rank's batch.",
    "unexplained": "Read what was tried below; add --baseline and --log where they are missing.",
    "not-reproduced": "Look outside the checkpoint and the batch: the data order, the kernels, the hardware.",
}

_MEASURES = {
    "loss": "loss (nats)",
    "grad_norm": "gradient norm",
    "nonfinite": "non-finite values",
    "precision_gap": "precision gap (nats)",
    "step_damage": "damage of one step (nats)",
    "lost_progress": "share of one step's progress that is lost",
}


def title(cause: str) -> str:
    """The cause in words: `repeated-tokens` is "Repeated tokens"."""
    words = cause.replace("-", " ")
    return _TITLES.get(cause, words[:1].upper() + words[1:])


def is_found(cause: str) -> bool:
    """Whether a verdict names something to act on. `none` does not; `unexplained` does: the excess is real."""
    return cause != "none"


def certainty(cause: str, status: Status | None, explained: float | None) -> str:
    """How sure the verdict is, in one line."""
    share = "" if explained is None else percent(explained)
    if cause == "none":
        return "healthy: no excess that needs explaining"
    if cause == "unexplained":
        return f"the best repair removes {share} of the excess" if share else "no repair removes the excess"
    if cause == "not-reproduced":
        return "decisive: it was replayed, and the replay is healthy where the log is not"
    if cause == "nondeterministic-replay" and status == "decisive":
        return "decisive: nothing was changed between two replays, and they differ"
    if status == "decisive":
        return "decisive: the stored data prove it, no replay needed"
    if status == "confirmed":
        return f"confirmed: undoing it removes {share} of the excess" if share else "confirmed"
    if status == "likely":
        return f"likely: undoing it removes {share} of the excess" if share else "likely: its repair could not be tried"
    if status == "latent":
        return "latent: dangerous, though this batch shows no excess yet"
    return "unconfirmed: the repair was not tried (--no-confirm)"


def do_now(report: Report) -> tuple[str, str | None]:
    """The first thing to do, and its command."""
    verdict = report.verdict
    if verdict.remedies:
        return verdict.remedies[0].action, verdict.remedies[0].command
    return _NOW.get(verdict.cause, f"Read `probe explain {verdict.cause}`."), None


def measure(name: str) -> str:
    return _MEASURES.get(name, name)


# --- numbers ------------------------------------------------------------------------------------


def number(value: Any) -> str:
    """Four significant digits, no exponent between 1e-3 and 1e6; an en dash for what was not measured."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**12 else f"{max(-(10**300), min(value, 10**300)):.4g}"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return str(round(value)) if abs(value) >= 1000 else f"{value:.4g}"


def percent(share: float | None) -> str:
    """A share as a percentage. Only 1 itself is "100 %": 0.997 is "99.7 %", 0.9999 is "> 99.9 %"."""
    if share is None or math.isnan(share):
        return "–"
    if 0.995 <= share < 1:
        return "> 99.9 %" if share > 0.999 else f"{100 * share:.1f} %"
    if 0 < share < 0.005:
        return "< 0.5 %"
    return f"{100 * share:.0f} %"


def with_unit(value: Any, unit: str) -> str:
    text = number(value)
    return f"{text} {unit}" if unit and value is not None else text


# --- places -------------------------------------------------------------------------------------


def places(location: Location, most: int | None = None) -> list[tuple[str, str]]:
    """The facets of a location as (name, text), most telling first; `most` items of each, None for all."""
    spans = [f"row {row}, {span(start, end)}" for row, start, end in merged(location.positions)]
    spanned = {row for row, _, _ in location.positions}
    rows = [f"{row}" for row in location.rows if row not in spanned]
    heads = [f"layer {layer} head {head}" for layer, head in location.heads]
    layers = [f"{layer}" for layer in location.layers or (() if location.layer is None else (location.layer,))]
    facets = [
        ("tokens", _listed(spans, most)),
        ("rows", _listed(rows, most)),
        ("heads", _listed(heads, most)),
        ("parameters", _listed(list(location.parameters), most)),
        ("module", location.module or ""),
        ("layers", _listed(layers, most)),
    ]
    return [(name, text) for name, text in facets if text]


def where(location: Location) -> str:
    """The place in one line, for the verdict: the two most telling facets."""
    facets = places(location, most=3)
    if {name for name, _ in facets} - {"layers"}:  # heads, modules and parameters already tell their layer
        facets = [facet for facet in facets if facet[0] != "layers" or not location.heads]
    named = {"tokens": "", "heads": "", "parameters": "", "module": "", "rows": "row ", "layers": "layer "}
    return " · ".join(named[name] + text for name, text in facets[:2])


def span(start: int, end: int) -> str:
    """A half-open span as people say it: [811, 1400) is "tokens 811–1399"."""
    return f"token {start}" if end - start <= 1 else f"tokens {start}–{end - 1}"


def merged(positions: tuple[tuple[int, int, int], ...]) -> list[tuple[int, int, int]]:
    """The spans in order of row and start, those of one row that overlap or touch as one."""
    out: list[tuple[int, int, int]] = []
    for row, start, end in sorted(positions):
        if out and out[-1][0] == row and start <= out[-1][2]:
            out[-1] = (row, out[-1][1], max(end, out[-1][2]))
        else:
            out.append((row, start, end))
    return out


def _listed(items: list[str], most: int | None) -> str:
    shown = items if most is None else items[:most]
    more = len(items) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
