"""Ids that the embedding table has no row for."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Rule, Suspect, Threshold
from stability_probe.rules._tables import plural
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

UINT16 = 65_536

THRESHOLDS = {
    "ids": Threshold(
        0, "ids outside the table", "a lookup past the table reads foreign memory or stops the kernel",
        "PyTorch, torch.nn.functional.embedding: indices must lie in [0, num_embeddings)",
    ),
}  # fmt: skip

PAGE = Page(
    title="Token id out of range",
    claim="The batch holds ids below zero or past the last row of the embedding table.",
    mechanism=(
        "On a CPU such a lookup raises an error. On a GPU it trips an assertion, or, in fused and sharded kernels, "
        "reads whatever lies behind the table: garbage activations, a loss that jumps, sometimes NaN. Usual sources "
        "are added tokens without a resized embedding, a tokenizer of another vocabulary, and ids stored in an "
        "integer type that is too narrow or was read with the wrong byte order."
    ),
    signature="Exact ids with row and position, known before any forward.",
    false_alarms=(
        "Negative values in labels are the usual mark for ignored targets; only input ids are judged. Ids that were "
        "wrapped into the table's range by a narrow integer type are in range and show as `tokenizer-mismatch`. A "
        "table padded beyond the tokenizer's vocabulary is wide enough by design."
    ),
    proof="None is needed: the ids are listed.",
    remedies=(
        Remedy("Write the shards again with the tokenizer of this model; compare the vocabulary's hash at start."),
        Remedy("Resize the embedding after adding tokens.", "model.resize_token_embeddings(len(tokenizer))"),
        Remedy("Store ids of a vocabulary above 65 536 in 32 bits."),
    ),
    references=(
        "PyTorch, torch.nn.functional.embedding",
        "nanoGPT, data/openwebtext/prepare.py: ids as uint16, which holds vocabularies up to 65 536",
    ),
)  # fmt: skip


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    if len(m.bad_ids) <= t["ids"].value:
        return []
    row, position, token = m.bad_ids[0]
    rows = sorted({bad[0] for bad in m.bad_ids})
    commonest, count = Counter(bad[2] for bad in m.bad_ids).most_common(1)[0]
    evidence = [
        Evidence("ids outside the embedding table", len(m.bad_ids), "", 0, "a batch of this vocabulary",
                 t["ids"].value, t["ids"].source),
        Evidence(f"id at row {row}, position {position}", token, "", f"0 … {m.vocab_size - 1}", "rows of the table"),
    ]  # fmt: skip
    if count > 1:
        evidence.append(Evidence("commonest of them", commonest, f"{count} times"))
    if any(bad[2] < 0 for bad in m.bad_ids):
        evidence.append(Evidence("negative ids among the inputs", sum(bad[2] < 0 for bad in m.bad_ids), "",
                                 reference="labels only", reference_name="where negative values belong"))  # fmt: skip
    if m.vocab_size < UINT16 and max(bad[2] for bad in m.bad_ids) < UINT16:
        wrapped = "all of them fit 16 bits"
        evidence.append(Evidence("range of the ids", wrapped, "", reference_name="an unsigned 16-bit store"))
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"{plural(len(m.bad_ids), 'id')} outside 0…{m.vocab_size - 1}, first {token} at row {row}, "
            f"position {position}.",
            location=Location(
                rows=tuple(rows), positions=tuple((row, at, at + 1) for row, at, _ in m.bad_ids[:50])
            ),
            evidence=tuple(evidence),
            strength=float(len(m.bad_ids)),
            decisive=True,
        )
    ]  # fmt: skip


RULE = Rule(
    slug="token-id-out-of-range",
    order=204,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case("one id past the table", {"bad_ids": ((2, 31, 1000),)}, True),
        Case("a negative id among the inputs", {"bad_ids": ((0, 0, -100), (0, 1, -100))}, True),
        Case("near miss: the last id of the table", {"bad_ids": ()}, False),
        Case("near miss: a vocabulary above 65 536 whose ids are in range", {"vocab_size": 151_936}, False),
    ),
)
