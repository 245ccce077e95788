"""Recall and false alarms of the token audit on the labelled classes, side by side with what others use.

    python -m benchmarks.audit_recall                    # the reported table: text not used for choosing thresholds
    python -m benchmarks.audit_recall --part choose      # the part that thresholds were chosen on
    python -m benchmarks.audit_recall --templates        # the numbers behind D4's thresholds

The peers see the same rows in the same run. A row counts as found where
  ours       it carries a flag (high or critical); for the navigation list medium is enough
  published  its published anomaly score passes 0.35, the published limit
  OLMo       an n-gram of at most 13 ids stands at least 32 times in a row (written anew from the rule)
  Gopher     datatrove's repetition or quality filter drops the decoded row (default limits; words split at
             white space instead of by spaCy)
  zlib       the decoded text compresses to under 0.2 or over 0.8 of its bytes
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections import Counter
from collections.abc import Callable

import numpy as np

from fixtures.audit_corpus import BAD, HEALTHY, Corpus, LabelledRows
from fixtures.tiny_text import EOS_ID, PAD_ID
from stability_probe.audit.result import AuditResult
from stability_probe.audit.rows import audit_rows
from stability_probe.audit.shapes import template
from stability_probe.audit.vocabulary import Vocabulary

ROWS = 12
# What no detector can see in 256 tokens: a tenth of them is a run of 25; templates need 512 tokens to be told from
# code; a fifth of random ids, or ids folded where few are beyond the fold, break fewer bigrams than a cut row does.
NOT_AT_256 = (
    "n-gram tiled over 10%",
    "spam template, slots filled",
    "same log line, new timestamps",
    "HTML navigation list",
    "uniform random ids 20%",
    "ids folded to 13 bits",
)
# What is no fault of one row's text but of its labels, its ids or its neighbours: text filters never see it.
MEDIUM_IS_ENOUGH = ("HTML navigation list",)

Judge = Callable[[LabelledRows], list[bool]]


def ours(vocabulary: Vocabulary, medium_too: bool = False) -> Judge:
    def judge(rows: LabelledRows) -> list[bool]:
        result = audited(rows, vocabulary)
        if not medium_too:
            return [bool(row.flags) for row in result.rows]
        return [any(note.severity != "info" for note in row.notes) for row in result.rows]

    return judge


def audited(rows: LabelledRows, vocabulary: Vocabulary) -> AuditResult:
    return audit_rows(
        rows.ids,
        labels_BT=rows.labels,
        mask_BT=rows.mask,
        labels="unshifted",
        tokenizer=vocabulary,
        eos_id=EOS_ID,
        pad_id=PAD_ID,
    )


def published(rows: LabelledRows) -> list[bool]:
    """The published loop with plain counters."""
    found = []
    for row in rows.ids.tolist():
        grams = Counter(tuple(row[i : i + 4]) for i in range(len(row) - 4))
        repeated = sum(count - 1 for count in grams.values() if count > 1) / max(1, len(row) - 4)
        share = np.array(list(Counter(row).values())) / len(row)
        found.append(0.5 * repeated + 0.5 * max(0.0, 1.0 + float((share * np.log2(share)).sum()) / 8) > 0.35)
    return found


def olmo(rows: LabelledRows) -> list[bool]:
    """Period by period: a run of x[i] = x[i − p] of at least 31 p."""
    found = []
    for row in rows.ids:
        hit = False
        for period in range(1, 14):
            if len(row) < 32 * period:
                break
            edges = np.flatnonzero(np.concatenate([[True], row[period:] != row[:-period], [True]]))
            hit |= bool((np.diff(edges) - 1 >= 31 * period).any())
        found.append(hit)
    return found


def gopher(vocabulary: Vocabulary) -> Judge | None:
    """None where datatrove is not installed."""
    try:
        from datatrove.data import Document
        from datatrove.pipeline.filters import gopher_quality_filter, gopher_repetition_filter
    except ImportError as error:
        print(f"Gopher rules not run: {error}")
        return None
    # Their default splitter needs spaCy; the Gopher paper's own words are what stands between white space.
    for module in (gopher_quality_filter, gopher_repetition_filter):
        module.split_into_words = lambda text, language="eng": text.split()
    filters = (gopher_repetition_filter.GopherRepetitionFilter(), gopher_quality_filter.GopherQualityFilter())

    def judge(rows: LabelledRows) -> list[bool]:
        found = []
        for ids, mask in zip(rows.ids, rows.mask, strict=True):
            document = Document(vocabulary.decode(ids[mask != 0].astype(np.int32)), "0")
            found.append(not all(one.filter(document) is True for one in filters))
        return found

    return judge


def compression(vocabulary: Vocabulary) -> Judge:
    def judge(rows: LabelledRows) -> list[bool]:
        found = []
        for ids, mask in zip(rows.ids, rows.mask, strict=True):
            raw = vocabulary.decode(ids[mask != 0].astype(np.int32)).encode()
            ratio = len(zlib.compress(raw)) / max(1, len(raw))
            found.append(ratio < 0.2 or ratio > 0.8)
        return found

    return judge


def expected(name: str, found: list[bool]) -> list[bool]:
    """Of copies, the first is not to be found."""
    return found[1:] if name == "ten copies of a row" else found


def table(part: str, length: int) -> None:
    corpus = Corpus(part, length)  # type: ignore[arg-type]
    vocabulary = Vocabulary.of(corpus.bpe)
    judges: dict[str, Judge] = {"ours": ours(vocabulary), "published": published, "OLMo": olmo}
    gopher_rules = gopher(vocabulary)
    if gopher_rules:
        judges["Gopher"] = gopher_rules
    judges["zlib"] = compression(vocabulary)
    print(f"\n### T = {length}, part “{part}”, {ROWS} rows a class\n")
    print(f"| class | {' | '.join(judges)} |\n| --- | {' | '.join('---:' for _ in judges)} |")
    seconds, tokens = dict.fromkeys(judges, 0.0), 0
    rates: dict[str, dict[str, float]] = {name: {} for name in judges}
    alarms: list[str] = []
    for name in (*HEALTHY, *BAD):
        rows = corpus.rows(name, ROWS)
        tokens += rows.ids.size
        cells = []
        for who, judge in judges.items():
            if who == "ours" and name in MEDIUM_IS_ENOUGH:
                judge = ours(vocabulary, medium_too=True)
            began = time.perf_counter()
            found = judge(rows)
            seconds[who] += time.perf_counter() - began
            rates[who][name] = float(np.mean(expected(name, found)))
            cells.append(f"{rates[who][name]:.2f}")
        if name in HEALTHY and rates["ours"][name]:
            alarms += [f"{name}: {row.reason}" for row in audited(rows, vocabulary).rows if row.flags]
        print(f"| {'' if name in HEALTHY else '✗ '}{name} | {' | '.join(cells)} |")
    seen = [name for name in BAD if length >= 512 or name not in NOT_AT_256]
    for title, names in (("healthy, mean", list(HEALTHY)), ("bad, mean recall", list(BAD)), ("… of the visible", seen)):
        print(f"| **{title}** | {' | '.join(f'{np.mean([rates[w][n] for n in names]):.3f}' for w in judges)} |")
    print(f"| M tokens/s (with tokenizer) | {' | '.join(f'{tokens / seconds[w] / 1e6:.2f}' for w in judges)} |")
    for alarm in alarms:
        print(f"\nfalse alarm: {alarm}")


def dilution(part: str, length: int) -> None:
    """One bad row in 32 and in 512: still found, with no more alarms among the healthy?"""
    corpus = Corpus(part, length, seed=1)  # type: ignore[arg-type]
    vocabulary = Vocabulary.of(corpus.bpe)
    print(f"\n### One bad row in a batch, T = {length}, part “{part}”\n")
    print("| class | in 32 | healthy flagged | batch kept | in 512 | healthy flagged | batch kept |")
    print("| --- | --- | ---: | --- | --- | ---: | --- |")
    totals: dict[int, list[bool]] = {32: [], 512: []}
    for name in BAD:
        cells = []
        for size in totals:
            rows, at = corpus.diluted(name, size)
            judged = audited(rows, vocabulary)
            row = judged.rows[at]
            hit = bool(row.flags) or (name in MEDIUM_IS_ENOUGH and any(note.severity != "info" for note in row.notes))
            others = sum(bool(other.flags) for other in judged.rows if other.row != at)
            totals[size].append(hit)
            cells += ["found" if hit else "missed", str(others), "no" if judged.skip else "yes"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(f"| **found** | {np.mean(totals[32]):.3f} | | | {np.mean(totals[512]):.3f} | | |")


def templates(part: str) -> None:
    """Coverage by 16-grams that come back eight times, and how evenly, of every class."""
    corpus = Corpus(part, 2048)  # type: ignore[arg-type]
    for name in (*HEALTHY, *BAD):
        rows = corpus.rows(name, 48)
        seen = [template(ids[mask != 0].astype(np.int32)) for ids, mask in zip(rows.ids, rows.mask, strict=True)]
        even = max((one.stamped for one in seen if one.spread <= 0.15), default=0.0)
        spread = min((one.spread for one in seen if one.stamped >= 0.6), default=np.nan)
        print(f"{name:32s} evenly stamped up to {even:.2f}; spread of the stamped from {spread:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("choose", "report"), default="report")
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 256, 64])
    parser.add_argument("--dilution", type=int, nargs="*", default=[256])
    parser.add_argument("--templates", action="store_true")
    options = parser.parse_args()
    if options.templates:
        templates(options.part)
        return
    for length in options.lengths:
        table(options.part, length)
    for length in options.dilution:
        dilution(options.part, length)


if __name__ == "__main__":
    main()
