"""A few elements, or one tensor, far outside what the sibling layers hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Plan, Rule, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._tables import Record, element, layer_of, layers_of, median, plural, records, siblings, times
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

_HEALTHY = "python benchmarks/healthy_ranges.py (SmolLM2-135M)"

THRESHOLDS = {
    "elements": Threshold(
        16, "elements", "a fault in memory hits single words; whole rows or heads that grew are other causes",
        "Hochschild et al., Cores that don't count, HotOS 2021, section 2",
    ),
    "share": Threshold(
        1e-3, "of the tensor", "sixteen of a small tensor's elements would be a pattern, not a stray fault",
        "two elements are always allowed; 1e-3 is 4 of a 64 x 64 matrix",
    ),
    "x_median": Threshold(
        1e3, "x median |w|", "trained weights are heavy-tailed: the largest ratio in a healthy model is 79",
        _HEALTHY,
    ),
    "x_siblings": Threshold(
        30, "x largest |w| in sibling layers", "healthy siblings' largest weights lie within 6x of each other, and "
        "the lone large weights that healthy models depend on are a few times their siblings'",
        f"{_HEALTHY}; Yu et al., The Super Weight in Large Language Models, 2024, section 3",
    ),
    "latent_x_siblings_matrix": Threshold(
        100, "x median of the siblings' largest |w|", "in a matrix: healthy layers' largest are within 3.6 x of their "
        "median, and gradients are shared by too many weights for one to run away",
        _HEALTHY,
    ),
    "latent_x_siblings": Threshold(
        1e3, "x median of the siblings' largest |w|", "in a bias or gain: single large entries occur in some layers",
        _HEALTHY,
    ),
    "latent_x_median": Threshold(
        1e5, "x median |w|", "the same where a tensor has no sibling: a hundred times the suspicion limit",
        _HEALTHY,
    ),
    "row_share": Threshold(
        0.25, "of one row", "a row that is large as a whole is an embedding row that grew, not a flipped bit",
        "a row x 1000 puts 3 of 4 of its elements over 300 x the median (normal weights)",
    ),
    "tensor_high": Threshold(
        100, "x median rms of siblings", "healthy siblings' rms lies between 0.12x and 2x their median", _HEALTHY
    ),
    "tensor_low": Threshold(
        1e-3, "x median rms of siblings", "healthy siblings' rms lies between 0.12x and 2x their median", _HEALTHY
    ),
    "tensor_latent": Threshold(
        1e4, "x median rms of siblings", "far past any growth by training, which spreads over layers", _HEALTHY
    ),
}  # fmt: skip

PAGE = Page(
    title="Corrupt weights",
    claim="A few stored weights, or one whole tensor, hold values that training cannot have put there.",
    mechanism=(
        "A bit that flips in memory, on a bus or in a cache changes one word; a flip of the top exponent bit turns "
        "0.03 into about 1e37. Memory that was allocated and never filled gives a whole tensor of nonsense. The loss "
        "jumps at the step that first uses it and stays up. Under RMSNorm a huge value is divided back to one, so "
        "the output can also fall to a constant: loss exactly ln V and a gradient of zero."
    ),
    signature=(
        "One to a few elements a thousand times the tensor's median and thirty times everything that the same tensor "
        "holds in the other layers; or a tensor whose rms is a hundred times, or a thousandth, of its siblings'. "
        "Where one exponent bit turns the value back into a plausible one, the evidence says so."
    ),
    false_alarms=(
        "Weights behind massive activations and outlier features are large too, but below a thousand times the "
        "median, and the sibling layers have their like. A row of the embedding that is large as a whole is "
        "`embedding-row-outlier`. A tensor that is exactly 0 or 1 everywhere is `checkpoint-mismatch`."
    ),
    proof=(
        "The elements are set to the tensor's median (or the tensor is rescaled to its siblings' rms) and the batch "
        "is replayed: a healthy model never gains from it."
    ),
    remedies=(
        Remedy("Restore the tensor from another data-parallel replica or from the previous checkpoint."),
        Remedy("Test the node that held it before it trains again.", "dcgmi diag -r 3"),
        Remedy("Write a checksum beside each shard, and verify it on load: the fault may be in storage."),
    ),
    references=(
        "Hochschild et al., Cores that don't count, HotOS 2021",
        "Grattafiori et al., The Llama 3 Herd of Models, 2024, section 3.3.4 (faulty hardware, silent corruption)",
        "Yu et al., The Super Weight in Large Language Models, 2024 (single weights that a healthy model needs)",
    ),
)


def flipped_bit(value: float, plausible_absmax: float) -> tuple[int, float] | None:
    """The fp32 exponent bit whose flip turns |value| into a plausible weight, and that weight.

    bf16 has the same exponent field. Plausible means between 1e-4 of `plausible_absmax` and itself.
    """
    if not (math.isfinite(value) and value > 0 and plausible_absmax > 0):
        return None
    field = math.frexp(value)[1] + 126  # frexp's mantissa is in [0.5, 1), the format's in [1, 2)
    for bit in reversed(range(8)):
        if field >> bit & 1 and 1e-4 * plausible_absmax <= (was := math.ldexp(value, -(1 << bit))) <= plausible_absmax:
            return bit, was
    return None


def _fills_a_row(record: Record, share: float) -> bool:
    """Whether the outliers are most of one row (first index) of a matrix."""
    indices, shape = record["outlier_indices"], record["shape"]
    if len(shape) < 2 or len(indices) < 3:
        return False
    rows = [index[0] for index in indices]
    fullest = max(rows.count(row) for row in set(rows))
    return fullest >= max(3.0, share * min(shape[-1], 16))  # the table lists 16 indices at most


def _stray_elements(rows: list[Record], t: dict[str, Threshold]) -> Iterator[Suspect]:
    for row in rows:
        few = min(t["elements"].value, max(2.0, t["share"].value * row["numel"]))
        ratio = times(row["absmax"], row["median_abs"])
        if not 1 <= row["outlier_count"] <= few or row["median_abs"] == 0 or not ratio >= t["x_median"].value:
            continue
        # A matrix without siblings is an embedding or a head: there, outliers in one row are that row's affair.
        others = [other["absmax"] for other in siblings(rows, row)]
        usual = median(others)
        if others:
            if not row["absmax"] >= t["x_siblings"].value * _second_largest(others):
                continue
        elif _fills_a_row(row, t["row_share"].value):
            continue
        limit = t["latent_x_siblings_matrix" if len(row["shape"]) > 1 else "latent_x_siblings"].value
        latent = row["absmax"] >= limit * usual if others else ratio >= t["latent_x_median"].value
        yield _stray_suspect(row, ratio, usual, latent, t)


def _second_largest(values: list[float]) -> float:
    """The largest sibling, unless it is itself far off: two corrupt tensors must not excuse each other."""
    ordered = sorted(values)
    return ordered[-2] if len(ordered) > 2 and ordered[-1] > 1e3 * ordered[-2] else ordered[-1]


def _stray_suspect(row: Record, ratio: float, usual: float, latent: bool, t: dict[str, Threshold]) -> Suspect:
    name, indices = row["parameter"], [tuple(int(i) for i in index) for index in row["outlier_indices"]]
    worst = tuple(int(i) for i in row["absmax_index"])
    indices = [worst, *(index for index in indices if index != worst)]
    plausible = usual if math.isfinite(usual) else 100 * row["median_abs"]
    flip = flipped_bit(row["absmax"], plausible)
    said = f"; flipping exponent bit {flip[0]} back gives {flip[1]:.2g}" if flip else ""
    compared = f"{times(row['absmax'], usual):.3g} x the siblings'" if math.isfinite(usual) else f"{ratio:.3g} x median"
    more = f" and {plural(len(indices) - 1, 'more element')}" if len(indices) > 1 else ""
    evidence = [
        Evidence(
            f"largest |w| in {name}", row["absmax"], "", reference=plausible,
            reference_name="median of the sibling layers' largest" if math.isfinite(usual) else "100 x median |w|",
            threshold=t["x_siblings"].value if math.isfinite(usual) else t["x_median"].value,
            source=t["x_siblings"].source,
        ),
        Evidence(
            f"largest |w| / median |w| in {name}", ratio, "x", threshold=t["x_median"].value,
            source=t["x_median"].source,
        ),
        Evidence(f"elements over 300 x the median in {name}", int(row["outlier_count"]), f"of {int(row['numel'])}"),
    ]  # fmt: skip
    if flip:
        evidence.append(Evidence(f"exponent bit {flip[0]} of {element(name, worst)} flipped back", flip[1], ""))
    return Suspect(
        cause=RULE.slug,
        summary=f"{element(name, worst)}{more} has magnitude {row['absmax']:.3g}, {compared}{said}.",
        location=Location(
            layer=layer_of(row),
            layers=layers_of([row]),
            parameters=tuple(element(name, index) for index in indices),
        ),
        evidence=tuple(evidence),
        plans=(
            Plan(
                "replace_elements",
                {"parameter": name, "indices": indices},
                f"{plural(len(indices), 'element')} of {name} set to its median",
            ),
        ),
        strength=math.log10(ratio),
        latent=latent,
    )


def _odd_tensors(rows: list[Record], stray: set[str], t: dict[str, Threshold]) -> Iterator[Suspect]:
    for row in rows:
        others = [other["rms"] for other in siblings(rows, row)]
        usual = median(others)
        if row["parameter"] in stray or not usual > 0 or row["rms"] == 0 or math.isfinite(row["constant"]):
            continue
        ratio = row["rms"] / usual
        high = ratio >= t["tensor_high"].value and row["rms"] >= t["tensor_high"].value * max(others) / 10
        # With a single sibling nobody can say which of the two is the small one.
        low = ratio <= t["tensor_low"].value and len(others) > 1
        if not (high or low):
            continue
        side = "high" if high else "low"
        limit = t[f"tensor_{side}"]
        name = row["parameter"]
        yield Suspect(
            cause=RULE.slug,
            summary=f"{name} has rms {row['rms']:.3g}, {ratio:.3g} x the median of its sibling layers.",
            location=Location(layer=layer_of(row), layers=layers_of([row]), parameters=(name,)),
            evidence=(
                Evidence(
                    f"rms of {name}", row["rms"], "", reference=usual, reference_name="median of sibling layers",
                    threshold=limit.value, source=limit.source,
                ),
            ),
            plans=(
                Plan(
                    "rescale_tensor", {"parameter": name, "factor": 1 / ratio},
                    f"{name} scaled to its siblings' rms of {usual:.3g}",
                ),
            ),
            strength=abs(math.log10(ratio)),
            latent=ratio >= t["tensor_latent"].value,
        )  # fmt: skip


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    rows = [row for row in records(m.parameters) if not row["nonfinite"]]
    stray = list(_stray_elements(rows, t))
    names = {parameter.partition("[")[0] for suspect in stray for parameter in suspect.location.parameters}
    return sorted([*stray, *_odd_tensors(rows, names, t)], key=lambda suspect: -suspect.strength)


_K = "model.layers.1.self_attn.k_proj.weight"
_EMBED = "model.embed_tokens.weight"


def _stray(name: str, absmax: float, *indices: tuple[int, ...]) -> list[Record]:
    change = {
        "absmax": absmax,
        "absmax_index": indices[0],
        "outlier_count": len(indices),
        "outlier_indices": [*indices],
    }
    return _cases.parameters({name: change})


_RECURRING: Record = {"absmax": 60.0, "outlier_count": 2, "outlier_indices": [(0, 1), (0, 2)]}
RULE = Rule(
    slug="corrupt-weights",
    order=102,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case("the top exponent bit of one weight flipped", {"parameters": _stray(_K, 0.03 * 2.0**128, (5, 9))}, True),
        Case("one weight x 4096 in a single layer", {"parameters": _stray(_K, 0.02 * 4096, (5, 9))}, True),
        Case(
            "one element of the embedding, far beyond its own table", {"parameters": _stray(_EMBED, 9e3, (7, 2))}, True
        ),
        Case(
            "a tensor of uninitialised memory",
            {"parameters": _cases.parameters({_K: {"rms": 3e4, "absmax": 2e5, "std": 3e4}})},
            True,
        ),
        Case(
            "near miss: heavy-tailed healthy weights, 79 x the median",
            {"parameters": _cases.parameters(everywhere={"absmax": 79 * 0.034})},
            False,
        ),
        Case(
            "near miss: a lone large weight that healthy models have, 20 x its siblings' largest",
            {"parameters": _stray(_K, 5.0, (5, 9))},
            False,
        ),
        Case(
            "near miss: outlier weights that recur in every layer",
            {"parameters": [{**row, **(_RECURRING if row["layer"] >= 0 else {})} for row in _cases.parameters()]},
            False,
        ),
        Case(
            "near miss: an embedding row that is large as a whole",
            {"parameters": _stray(_EMBED, 60.0, *((7, column) for column in range(16)))},
            False,
        ),
    ),
)
