"""What each number and each detector means, for the foot of a report."""

from __future__ import annotations

NUMBERS = {
    "score": "the worst finding, never a mean: critical 1, high 0.5–0.99, medium 0.25–0.49, info below",
    "flags": "causes with a high or critical finding; such a row is to be dropped or masked, not proven guilty",
    "H": "entropy of the row's token ids, bits; English text of 2 048 tokens has 7–8.5",
    "dup": "share of 4-grams that repeat an earlier one; prose 0.05–0.2, code 0.2–0.5",
    "ref": "the published anomaly score, padding included, for comparison only",
    "p": "how rare a row like this is among the baseline's, over all features",
}
DETECTORS = {
    "D0": "ids outside the vocabulary; rows of nothing but padding",
    "D1": "an n-gram of up to 13 tokens, 32 times in a row or more (critical from 100)",
    "D2": "a period of up to 512 tokens, four times or more, over a tenth of the row",
    "D3": "64 tokens with at most 7 different ids; high where their order is random too",
    "D4": "a row stamped from one template, or mostly 16-grams that occur twice",
    "D5": "one id fills 30 % of the row, or two fill half",
    "D6": "share of bigrams that survive decoding and encoding again",
    "D7": "bytes of text per token",
    "D8": "mojibake: text read in the wrong encoding",
    "D9": "surprisal under the baseline's unigrams",
    "D10": "nearly all ids different",
    "D11": "EOS too often, or several in a row",
    "D12": "copies and near copies of an earlier row",
    "D13": "labels: misaligned, on padding, or missing",
    "D14": "very long runs of digits",
    "D15": "HTML or XML markup, with D4",
    "D16": "base64 or hexadecimal instead of text",
}
CANDIDATE = (
    "A flagged row is a candidate, not a cause: the same tokens may pass without a spike from another state of the "
    "model. `probe replay` drops the row and measures whether the excess goes."
)
