"""The verdicts: what is flagged, what is left alone, where the span is; edge cases; labels; copies; text."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stability_probe.audit import encodings
from stability_probe.audit.baseline import Baseline
from stability_probe.audit.batch import audit_batch, should_skip_batch
from stability_probe.audit.encodings import encoded_share
from stability_probe.audit.result import RowAudit
from stability_probe.audit.rows import audit_rows
from stability_probe.audit.text import preserved_bigrams
from stability_probe.audit.vocabulary import Vocabulary
from stability_probe.errors import ProbeError

V = 5000
EOS, PAD = 0, 1


def ordinary(rows: int, length: int, seed: int = 0) -> np.ndarray:
    """Ids with a word-like frequency order and no structure; 0 and 1 stay free for EOS and padding."""
    return 2 + np.random.default_rng(seed).zipf(1.3, (rows, length)) % (V - 2)


def slugs(row: RowAudit) -> set[str]:
    return {note.slug for note in row.notes if note.severity in ("high", "critical")}


def detectors(row: RowAudit) -> set[str]:
    return {note.detector for note in row.notes if note.severity in ("high", "critical")}


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    import pydoc_data.topics

    text = list(pydoc_data.topics.topics.values())[:60]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=2000, initial_alphabet=alphabet, special_tokens=["<|endoftext|>", "<|pad|>"], show_progress=False
        ),
    )
    return tokenizer


def english(bpe: Tokenizer, length: int, start: int = 0) -> np.ndarray:
    import pydoc_data.topics

    text = "\n".join(list(pydoc_data.topics.topics.values())[60:])
    return np.array(bpe.encode(text[start : start + 12 * length]).ids[:length])


def test_ordinary_rows_are_left_alone() -> None:
    result = audit_rows(ordinary(16, 2048), vocab_size=V, eos_id=EOS)
    assert not result.skip and not result.drop_rows
    assert all(row.score < 0.25 and row.reason == "" for row in result.rows)


def test_a_planted_run_is_named_with_its_span() -> None:
    ids = ordinary(32, 1024)
    ids[5, 300:500] = np.resize([7, 8], 200)
    result = audit_rows(ids, vocab_size=V)
    assert result.drop_rows == (5,) and not result.skip
    row = result.rows[5]
    assert row.score == 1.0 and row.flags == ("repeated-tokens",)
    assert any(abs(span.start - 300) <= 1 and abs(span.end - 500) <= 1 for span in row.spans)
    assert "repeat" in row.reason


def test_spans_count_padding_on_either_side_and_holes() -> None:
    ids = ordinary(1, 400)[0]
    ids[100:240] = 9
    given_ids, mask = np.full((2, 600), PAD), np.zeros((2, 600), int)
    given_ids[0, 200:], mask[0, 200:] = ids, 1
    given_ids[1, :400], mask[1, :400] = ids, 1
    mask[1, 3] = 0
    result = audit_rows(given_ids, mask_BT=mask, vocab_size=V)
    for row, start in ((0, 300), (1, 100)):
        (run,) = [span for span in result.rows[row].spans if span.kind == "period-1 repeat"]
        assert (run.start, run.end) == (start, start + 140)
        assert result.rows[row].tokens == 400 - row


def test_eighty_percent_padding_is_healthy_with_mask_or_labels_or_pad_id() -> None:
    ids = ordinary(8, 512)
    ids[:, 100:] = PAD
    labels = ids.copy()
    labels[:, 100:] = -100
    for options in ({"mask_BT": ids != PAD}, {"labels_BT": labels}, {"pad_id": PAD}):
        result = audit_rows(ids, vocab_size=V, **options)
        assert not result.drop_rows, options
        assert {row.tokens for row in result.rows} == {100}
        assert all(row.reference_score > 0.7 for row in result.rows)  # the published score condemns every one


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64, np.uint16, np.uint8, np.uint32])
def test_every_integer_type_gives_the_same_verdict(dtype: Any) -> None:
    ids = ordinary(4, 256) % 250
    ids[1, 40:200] = 3
    expected = audit_rows(ids, vocab_size=250)
    assert audit_rows(ids.astype(dtype), vocab_size=250) == expected
    torch = pytest.importorskip("torch")
    if dtype in (np.int16, np.int32, np.int64):
        transposed = torch.from_numpy(np.ascontiguousarray(ids.astype(dtype).T)).T
        assert not transposed.is_contiguous()
        assert audit_rows(transposed, vocab_size=250) == expected
        if torch.cuda.is_available():
            assert audit_rows(transposed.cuda(), vocab_size=250) == expected


@pytest.mark.parametrize("shape", [(0, 0), (0, 7), (3, 0), (1, 1), (2, 3), (2, 4), (2, 5), (1, 63), (1, 64), (1, 65)])
def test_tiny_and_empty_batches(shape: tuple[int, int]) -> None:
    ids = np.arange(shape[0] * shape[1]).reshape(shape)
    result = audit_rows(ids, labels_BT=ids, vocab_size=max(1, ids.size), eos_id=EOS, pad_id=PAD)
    assert len(result.rows) == shape[0]
    assert audit_rows(ids).skip is False


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 4), st.integers(0, 90), st.integers(1, 300), st.integers(0, 2**32 - 1),
    st.sampled_from([np.int16, np.int64, np.uint16]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_nothing_crashes_and_the_score_is_the_maximum(
    rows: int, length: int, largest: int, seed: int, dtype: Any, with_labels: bool, with_mask: bool
) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1 if dtype != np.uint16 else 0, largest, (rows, length)).astype(dtype)
    labels = np.where(rng.random(ids.shape) < 0.3, -100, ids.astype(np.int64)) if with_labels else None
    mask = rng.random(ids.shape) < 0.7 if with_mask else None
    result = audit_rows(ids, labels_BT=labels, mask_BT=mask, vocab_size=200, eos_id=0, pad_id=1)
    for row in result.rows:
        assert row.score == max((note.score for note in row.notes), default=0.0)
        assert set(row.flags) == slugs(row)
        assert all(0 <= span.start < span.end <= length for span in row.spans)
    assert result == audit_rows(ids, labels_BT=labels, mask_BT=mask, vocab_size=200, eos_id=0, pad_id=1)


def test_permuting_rows_permutes_the_verdicts() -> None:
    ids = ordinary(12, 300)
    ids[2, 10:150], ids[9, :] = 4, np.resize(np.arange(20), 300)
    order = np.random.default_rng(3).permutation(12)
    before, after = audit_rows(ids, vocab_size=V), audit_rows(ids[order], vocab_size=V)
    assert [after.rows[i].flags for i in range(12)] == [before.rows[j].flags for j in order]
    assert [after.rows[i].score for i in range(12)] == [before.rows[j].score for j in order]


@pytest.mark.parametrize("size", [32, 512])
def test_a_bad_row_is_judged_the_same_alone_and_among_many(size: int) -> None:
    healthy = ordinary(size, 256)
    bad = {
        "run": np.full(256, 9),
        "period": np.resize(np.arange(100, 120), 256),
        "noise": np.random.default_rng(0).choice([3, 50, 700, 90, 11], 256),
        "eos": np.where(np.arange(256) % 4 == 3, EOS, healthy[0]),
    }
    for name, row in bad.items():
        alone = audit_rows(row[None], vocab_size=V, eos_id=EOS).rows[0]
        batch = healthy.copy()
        batch[size // 3] = row
        result = audit_rows(batch, vocab_size=V, eos_id=EOS)
        among = result.rows[size // 3]
        assert alone.flags and (among.flags, among.score, among.spans) == (alone.flags, alone.score, alone.spans), name
        assert result.drop_rows == (size // 3,) and not result.skip


def test_renaming_ids_changes_no_verdict() -> None:
    ids = ordinary(6, 400)
    ids[2, 10:150] = 4
    renamed = np.random.default_rng(3).permutation(V)[ids]
    for one, other in zip(audit_rows(ids, vocab_size=V).rows, audit_rows(renamed, vocab_size=V).rows, strict=True):
        assert (one.flags, one.spans, one.reference_score) == (other.flags, other.spans, other.reference_score)
        assert one.unigram_entropy_bits == pytest.approx(other.unigram_entropy_bits)


def test_small_vocabularies_of_characters_are_not_condemned() -> None:
    import argparse
    import inspect

    code = np.frombuffer(inspect.getsource(argparse).encode()[:16384], np.uint8)
    words = " ".join(inspect.getdoc(argparse) or "" for _ in range(1)) + (argparse.__doc__ or "") * 2
    text = np.frombuffer(words.encode()[:2048], np.uint8)
    for length in (16, 32, 64, 256):
        sampled = np.random.default_rng(0).permutation(len(code) // length)[:8]
        assert not audit_rows(
            code[: len(code) // length * length].reshape(-1, length)[sampled], vocab_size=256
        ).drop_rows
        assert not audit_rows(text[: length * 2].reshape(2, length)[:1], vocab_size=256).drop_rows
    random_ids = np.random.default_rng(0).integers(0, 256, (4, 64))
    assert not audit_rows(random_ids, vocab_size=256).drop_rows
    assert audit_rows(np.full((1, 64), 5), vocab_size=256).rows[0].flags == ("repeated-tokens",)


def test_a_row_of_more_than_a_million_tokens() -> None:
    row = ordinary(1, 1_100_000)
    row[0, 900_000:1_050_000] = np.resize(np.arange(400), 150_000)
    (found,) = audit_rows(row, vocab_size=V).rows
    assert found.flags == ("repeated-tokens",)
    assert any((span.start, span.end) == (900_000, 1_050_000) for span in found.spans)


def test_few_ids_in_random_order_are_noise_but_a_matrix_is_not() -> None:
    rng = np.random.default_rng(0)
    noise, matrix = ordinary(1, 1024), ordinary(1, 1024)
    noise[0, 100:400] = rng.choice([3, 50, 700, 90, 11], 300)
    matrix[0, 100:400] = np.stack([rng.choice([3, 50], 150), np.full(150, 9)], 1).ravel()
    assert detectors(audit_rows(noise, vocab_size=V).rows[0]) == {"D3"}
    assert not audit_rows(matrix, vocab_size=V).drop_rows


def test_high_entropy_only_where_the_vocabulary_could_have_less() -> None:
    uniform = np.random.default_rng(0).integers(0, 50_000, (1, 2048))
    assert detectors(audit_rows(uniform, vocab_size=50_000).rows[0]) == {"D10"}
    assert not audit_rows(uniform % 256, vocab_size=50_000).drop_rows


def test_separators() -> None:
    often = ordinary(1, 256)
    often[:, 3::4] = EOS
    assert detectors(audit_rows(often, eos_id=EOS, vocab_size=V).rows[0]) == {"D11"}
    only = np.full((1, 256), EOS)
    for pad in (None, EOS, PAD):
        assert slugs(audit_rows(only, eos_id=EOS, pad_id=pad, vocab_size=V).rows[0]) == {"repeated-tokens"}
    normal = ordinary(1, 256)
    normal[:, 60::60] = EOS
    assert not audit_rows(normal, eos_id=EOS, vocab_size=V).drop_rows


def test_copies_and_near_copies_but_not_the_first() -> None:
    ids = ordinary(20, 512)
    ids[4] = ids[11] = ids[2]
    ids[7] = ids[3]
    ids[7, 200:260] = ordinary(1, 60, seed=9)
    result = audit_rows(ids, vocab_size=V)
    assert result.drop_rows == (4, 7, 11)
    assert {slug for row in result.drop_rows for slug in result.rows[row].flags} == {"duplicate-examples"}


def test_ids_out_of_range() -> None:
    ids = ordinary(20, 128)
    ids[6, 9], ids[8, 3], ids[9, 100] = V, -100, 2**40
    result = audit_rows(ids, vocab_size=V)
    assert result.drop_rows == (6, 8, 9)
    assert all(result.rows[row].score == 1.0 for row in result.drop_rows)
    assert result.rows[6].spans[0].start == 9
    padded = audit_rows(np.where(ids < 0, -1, ids), mask_BT=np.ones_like(ids), vocab_size=2**41)
    assert padded.drop_rows == (8,)


def test_nothing_but_padding_is_no_valid_labels() -> None:
    ids = ordinary(3, 64)
    mask = np.ones_like(ids)
    mask[1] = 0
    assert audit_rows(ids, mask_BT=mask, vocab_size=V).rows[1].flags == ("no-valid-labels",)
    labels = ids.copy()
    labels[2] = -100
    assert audit_rows(ids, labels_BT=labels, vocab_size=V).rows[2].flags == ("no-valid-labels",)


@pytest.mark.parametrize("shift", [-2, -1, 0, 1, 2, 3])
@pytest.mark.parametrize("convention", ["auto", "shifted", "unshifted"])
def test_labels_belong_to_the_ids_at_one_of_two_shifts(shift: int, convention: str) -> None:
    ids = ordinary(4, 128)
    labels = np.roll(ids, -shift, axis=1)
    result = audit_rows(ids, labels_BT=labels, labels=convention, vocab_size=V)
    right = {"auto": (0, 1), "unshifted": (0,), "shifted": (1,)}[convention]
    assert ("label-misalignment" in result.rows[0].flags) == (shift not in right)
    assert result.skip == (shift not in right)


def test_one_misaligned_row_among_others_and_a_fault_of_the_whole_batch() -> None:
    ids = ordinary(32, 128)
    labels = ids.copy()
    labels[5] = np.roll(ids[5], -1)
    result = audit_rows(ids, labels_BT=labels, vocab_size=V)
    assert result.drop_rows == (5,) and not result.skip
    everywhere = audit_rows(ids, labels_BT=np.roll(ids, 1, axis=1), vocab_size=V)
    assert everywhere.skip and "label-misalignment" in everywhere.reason
    assert all("label-misalignment" in row.flags for row in everywhere.rows)


def test_padding_in_the_loss_and_masked_eos() -> None:
    ids = ordinary(6, 200)
    ids[:, 50] = EOS
    ids[:, 120:] = PAD
    right = np.where(ids == PAD, -100, ids)
    right[:, 0] = -100
    for labels, shift in ((right, 0), (np.append(right[:, 1:], np.full((6, 1), -100), 1), 1)):
        assert not audit_rows(ids, labels_BT=labels, vocab_size=V, eos_id=EOS, pad_id=PAD).drop_rows
        trained = labels.copy()
        trained[3] = np.append(ids[3, shift:], [-100] * shift)
        found = audit_rows(ids, labels_BT=trained, vocab_size=V, eos_id=EOS)
        assert found.drop_rows == (3,) and "padding-in-loss" in found.rows[3].flags
        masked = labels.copy()
        masked[2, 50 - shift] = -100
        found = audit_rows(ids, labels_BT=masked, vocab_size=V, eos_id=EOS, pad_id=PAD)
        assert found.drop_rows == (2,) and found.rows[2].flags == ("padding-in-loss",)


def test_prompts_without_labels_are_still_content() -> None:
    ids = ordinary(4, 300)
    labels = ids.copy()
    labels[:, :200] = -100
    ids[1, 20:150] = 6
    result = audit_rows(ids, labels_BT=labels, vocab_size=V)
    assert result.drop_rows == (1,) and result.rows[0].tokens == 300


def test_the_round_trip(bpe: Tokenizer) -> None:
    good = np.stack([english(bpe, 700, start) for start in (0, 9000, 18000, 27000)])
    assert not audit_rows(good, tokenizer=bpe).drop_rows
    bad = good.copy()
    bad[2] = np.random.default_rng(0).permutation(bad[2])
    result = audit_rows(bad, tokenizer=bpe)
    assert result.drop_rows == (2,) and result.rows[2].flags == ("garbage-tokens",)
    moved = audit_rows((good + 700) % 2000, tokenizer=bpe)
    assert moved.skip and all(row.flags[0] == "tokenizer-mismatch" for row in moved.rows)


@given(st.lists(st.integers(0, 5), max_size=40), st.lists(st.integers(0, 5), max_size=40))
def test_preserved_bigrams_agree_with_counters(one: list[int], other: list[int]) -> None:
    from collections import Counter

    inner = one[2 : max(2, len(one) - 2)]
    own, back = Counter(itertools.pairwise(inner)), Counter(itertools.pairwise(other))
    kept, total = preserved_bigrams(np.array(one, np.int64), np.array(other, np.int64))
    assert kept == sum((own & back).values()) and total == max(0, len(inner) - 1)


def test_a_tokenizer_of_another_size_and_ids_it_does_not_know(bpe: Tokenizer) -> None:
    ids = np.stack([english(bpe, 300), english(bpe, 300, 9000)])
    ids[0, 5] = 40_000
    result = audit_rows(ids, tokenizer=bpe, vocab_size=50_000)
    assert "token-id-out-of-range" not in result.rows[0].flags
    assert audit_rows(ids, tokenizer=bpe).rows[0].flags[0] == "token-id-out-of-range"
    assert audit_rows(ids, tokenizer=object()).notes  # a slow tokenizer is said, not used


RUSSIAN = "Съешь же ещё этих мягких французских булок, да выпей чаю. Машинное обучение требует данных. " * 8
JAPANESE = "損失が急に増えたとき、原因はデータにあるのかもしれません。日本語の文章です。" * 12
GERMAN = "Die Prüfung ist gründlich, und Größe allein beweist nichts über Ursachen der Störung. " * 8
FRENCH = "L’élève a été très étonné : le modèle préféré était déjà prêt à l’été. " * 8


@pytest.mark.parametrize(
    "text", [RUSSIAN, JAPANESE, GERMAN, FRENCH, "plain ASCII " * 50, "naïve café “quoted” — €5 " * 30]
)
def test_right_text_is_no_mojibake_and_wrong_readings_are(text: str) -> None:
    assert encodings.mojibake(text) is None
    if text in (RUSSIAN, JAPANESE):
        for wrong in ("latin-1", "cp1252", "cp1251"):
            assert encodings.mojibake(text.encode().decode(wrong, "replace")), wrong
    if text == RUSSIAN:
        assert encodings.mojibake(text.encode("cp1251", "ignore").decode("latin-1"))


def test_encoded_text_and_markup() -> None:
    import base64
    import uuid

    rng = np.random.default_rng(0)
    assert encodings.encoded_share(base64.encodebytes(rng.bytes(2000)).decode())[1] > 0.95
    assert encodings.encoded_share("\n".join(str(uuid.UUID(bytes=rng.bytes(16))) for _ in range(40)))[1] > 0.6
    for one in ("={:02X}", "%{:02x}", "\\x{:02x}"):
        written = "".join(one.format(byte) for byte in rng.bytes(400))
        assert encodings.encoded_share(written) == ("escaped bytes", 1.0) and encodings.long_encoded_share(written) == 1
        spaced = " and ".join(one.format(byte) for byte in rng.bytes(400))  # one in an address, say
        assert encodings.encoded_share(spaced)[1] < 0.05
    assert encodings.encoded_share(base64.b32encode(rng.bytes(2000)).decode())[1] > 0.95
    for healthy in (
        GERMAN,
        "ACGTTGCAACGT" * 9,
        "ISO8859CHARSETTABLEENTRYNUMBERTWENTY " * 9,
        "VILLAGE_TRONIC_PICASSO_IV_Z2_RAM1 = 0x1234 " * 9,
        "thisIsAVeryLongCamelCaseIdentifierName " * 9,
    ):
        assert encodings.encoded_share(healthy)[1] < 0.05
    assert encodings.encoded_share("12345678901234567890 + 98765432109876543210 = 111111111011111111100\n" * 5)[1] == 0
    assert encodings.markup_share('<li class="nav"><a href="/x">x</a></li>' * 9) > 0.9
    assert encodings.markup_share("if (a < b && c > d) return a <= b;" * 9) == 0


def test_a_baseline_takes_back_what_is_usual_in_it_and_ranks_the_rest() -> None:
    rng = np.random.default_rng(0)

    def matrices(count: int) -> np.ndarray:
        return np.stack([np.stack([rng.choice([3, 50], 256), np.full(256, 9)], 1).ravel() for _ in range(count)])

    healthy = Baseline.of([(matrices(200), None)])
    batch = matrices(8)
    assert any(note.severity == "medium" for row in audit_rows(batch, vocab_size=V).rows for note in row.notes)
    calibrated = audit_rows(batch, vocab_size=V, baseline=healthy)
    assert all(note.severity == "info" for row in calibrated.rows for note in row.notes)
    assert all(row.p_value is not None and row.p_value > 0.02 for row in calibrated.rows)
    text = audit_rows(ordinary(4, 512), vocab_size=V, baseline=healthy)
    assert all(row.p_value is not None and row.p_value <= 5 / 201 for row in text.rows)


def test_surprisal_under_a_large_baseline() -> None:
    healthy = Baseline.of([(ordinary(300, 4096), None)])
    strange = ordinary(3, 512, seed=5)
    strange[1] = np.random.default_rng(1).integers(2000, V, 512)
    found = audit_rows(strange, vocab_size=V, baseline=healthy)
    assert ["D9" in {note.detector for note in row.notes} for row in found.rows] == [False, True, False]
    assert np.isnan(Baseline.of([(ordinary(3, 512), None)]).surprisal_limit)


def test_wrong_input_is_refused_in_words() -> None:
    for ids, options in (
        (np.zeros((2, 3, 4), int), {}),
        (np.full((2, 3), 0.5), {}),
        (np.zeros((2, 3), int), {"labels_BT": np.zeros((2, 4), int)}),
        (np.zeros((2, 3), int), {"mask_BT": np.zeros((3, 3), int)}),
    ):
        with pytest.raises(ProbeError) as error:
            audit_rows(ids, **options)
        assert error.value.exit_code == 3


def test_in_a_training_loop() -> None:
    torch = pytest.importorskip("torch")
    ids = torch.from_numpy(ordinary(20, 128))
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    assert not should_skip_batch(batch, vocab_size=V)
    assert not should_skip_batch((ids[:, :-1], ids[:, 1:]), vocab_size=V)
    batch["input_ids"][:5] = 7
    assert should_skip_batch(batch, vocab_size=V)
    assert audit_batch(batch["input_ids"]).drop_rows == (0, 1, 2, 3, 4)


def test_importing_the_package_stays_light() -> None:
    script = (
        "import sys, stability_probe; assert 'numpy' not in sys.modules and 'torch' not in sys.modules;"
        "from stability_probe import audit_batch, should_skip_batch; assert 'torch' not in sys.modules;"
        "import stability_probe.audit.command, stability_probe.audit.dataset; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_vocabulary_knows_bytes_digits_and_special_tokens(bpe: Tokenizer) -> None:
    vocabulary = Vocabulary.of(bpe)
    assert vocabulary.size == 2000 and vocabulary.eos_id == 0 and vocabulary.pad_id == 1
    for text in (" the", "12", "日"):
        ids = bpe.encode(text).ids
        assert sum(int(vocabulary.bytes_of_id[i]) for i in ids) == len(text.encode())
    assert all(vocabulary.is_digits[i] for i in bpe.encode("2024").ids)
    assert vocabulary.bytes_of_id[0] == 0


@pytest.mark.parametrize(
    ("runs", "severity"),
    [
        ([(100, 240)], "high"),  # one loop over 12 % of the row
        ([(100, 85), (400, 85), (900, 85), (1300, 40)], "medium"),  # a table of tests: three short runs, 12 %
        ([(100, 170), (400, 170), (800, 170), (1300, 100)], "high"),  # scattered, but over a quarter of the row
    ],
)
def test_scattered_short_runs_are_worth_a_look_and_a_loop_is_a_finding(
    runs: list[tuple[int, int]], severity: str
) -> None:
    ids = ordinary(1, 2048, seed=3)
    for start, tokens in runs:
        ids[0, start : start + tokens] = np.resize(np.arange(17) + start, tokens)
    notes = [note for note in audit_rows(ids, vocab_size=50_000).rows[0].notes if note.detector == "D2"]
    assert [note.severity for note in notes] == [severity]


def with_line(bpe: Tokenizer, line: str, around: int) -> np.ndarray:
    import pydoc_data.topics

    text = pydoc_data.topics.topics["class"]
    return np.array(bpe.encode(f"{text[:around]}\n{line}\n{text[around : 2 * around]}").ids)


def test_a_ruled_line_is_no_repetition_fault_unless_it_rules_the_row(bpe: Tokenizer) -> None:
    """The signs # and z are in no longer token of themselves, so a line of them is spelt."""
    row = with_line(bpe, 40 * "#", 400)
    assert not slugs(audit_rows(row[None], tokenizer=bpe).rows[0])
    assert slugs(audit_rows(row[None]).rows[0]) == {"repeated-tokens"}  # without the tokenizer nobody can tell
    assert slugs(audit_rows(with_line(bpe, 40 * "z", 400)[None], tokenizer=bpe).rows[0]) == {"repeated-tokens"}
    assert slugs(audit_rows(with_line(bpe, 40 * "#", 40)[None], tokenizer=bpe).rows[0]) == {"repeated-tokens"}
    assert slugs(audit_rows(with_line(bpe, 90 * "#", 900)[None], tokenizer=bpe).rows[0]) == {"repeated-tokens"}


def test_a_near_copy_of_a_short_row() -> None:
    rows = ordinary(6, 96)
    rows[4] = rows[1]
    rows[4, [10, 50, 90]] = [77, 78, 79]
    assert [row.row for row in audit_rows(rows).rows if "duplicate-examples" in slugs(row)] == [4]
    rows[4, 5::6] = 80  # every sixth token another: no longer a copy
    assert not any(slugs(row) for row in audit_rows(rows).rows)


def test_labelled_ends_of_text_at_the_end_of_a_row_are_padding_that_is_learned() -> None:
    ids = ordinary(4, 96)
    ids[2, 50:] = EOS
    found = audit_rows(ids, labels_BT=ids, labels="unshifted", eos_id=EOS).rows
    assert [row.row for row in found if slugs(row)] == [2]
    assert slugs(found[2]) == {"padding-in-loss"}
    ignored = (
        np.where(np.arange(96) >= 51, -100, ids) * (np.arange(4) == 2)[:, None] + ids * (np.arange(4) != 2)[:, None]
    )
    assert not any(slugs(row) for row in audit_rows(ids, labels_BT=ignored, labels="unshifted", eos_id=EOS).rows)
    ids[2] = EOS
    assert slugs(audit_rows(ids, labels_BT=ids, labels="unshifted", eos_id=EOS).rows[2]) == {"repeated-tokens"}


def test_a_short_row_of_nothing_but_hexadecimal(bpe: Tokenizer) -> None:
    blob = np.random.default_rng(0).bytes(600).hex()
    for length, severity in ((96, "high"), (200, "critical")):
        ids = np.array(bpe.encode(blob).ids[:length])[None]
        notes = {note.detector: note.severity for note in audit_rows(ids, tokenizer=bpe).rows[0].notes}
        assert notes["D16"] == severity
    table = "\n".join(f"{at:04X} {at + 37:04X}" for at in range(0x2C60, 0x2D60))  # as of Unicode's properties
    ids = np.array(bpe.encode(table).ids[:96])[None]
    assert not slugs(audit_rows(ids, tokenizer=bpe).rows[0])


@pytest.mark.parametrize(
    ("tails", "flags"),
    [
        ({0: 30, 2: 51}, "padding-in-loss"),  # two documents that end where they end
        ({0: 40, 2: 40}, "repeated-tokens"),  # at the same place: planted, or cut
        ({2: 51}, "repeated-tokens"),  # one row alone says nothing about its id
    ],
)
def test_the_id_that_fills_the_tails_is_padding_where_nothing_names_one(tails: dict[int, int], flags: str) -> None:
    ids = ordinary(4, 128, seed=8)
    for row, tail in tails.items():
        ids[row, -tail:] = 49_000
    labels = np.concatenate([ids[:, 1:], np.full((4, 1), -100)], axis=1)
    rows = audit_rows(ids, labels_BT=labels, labels="shifted", vocab_size=50_000).rows
    assert [row.row for row in rows if flags in row.flags] == list(tails)
    assert flags == "padding-in-loss" or not any("padding-in-loss" in row.flags for row in rows)


def test_a_token_of_the_text_that_fills_two_tails_is_no_padding() -> None:
    ids = ordinary(4, 128, seed=8)
    ids[:, ::6] = 7
    ids[0, -30:], ids[2, -51:] = 7, 7
    labels = np.concatenate([ids[:, 1:], np.full((4, 1), -100)], axis=1)
    rows = audit_rows(ids, labels_BT=labels, labels="shifted", vocab_size=50_000).rows
    assert not any("padding-in-loss" in row.flags for row in rows) and "repeated-tokens" in rows[2].flags


@pytest.mark.parametrize("width", [8, 2600])
def test_binary_literals_are_not_hexadecimal(width: int) -> None:
    text = " ".join("0b" + "01101001" * (width // 8) for _ in range(max(1, 2600 // width)))
    assert encoded_share(text)[1] == 0.0
    assert encoded_share("3f9a 77c1 0be2 " * 90)[1] > 0.9
