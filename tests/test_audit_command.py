"""`batch-audit` end to end, and reports that nothing read from a file can act in."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from stability_probe.audit import command, render
from stability_probe.errors import ProbeError

torch = pytest.importorskip("torch")


def saved_batch(folder: Path, name: str = "batch.pt") -> Path:
    ids = 2 + torch.from_numpy(np.random.default_rng(0).zipf(1.3, (32, 256)) % 4000)
    ids[7, 50:200] = 9
    path = folder / name
    torch.save({"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}, path)
    return path


def run(capsys: pytest.CaptureFixture[str], *paths: Path, **options: Any) -> dict[str, Any]:
    assert command.run_batch_audit([str(p) for p in paths], format="json", **options) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_the_json_is_what_the_interface_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(capsys, saved_batch(tmp_path))
    assert report["skip"] is False and "row 7" in report["reason"] and len(report["rows"]) == 32
    row = report["rows"][7]
    assert row["file"].endswith("batch.pt") and row["row"] == 7 and row["score"] == 1.0
    assert row["flags"] == ["repeated-tokens"] and report["rows"][0]["flags"] == []
    assert {"start": 50, "end": 200, "kind": "period-1 repeat", "detail": "150 repeats"} in row["spans"]
    assert {"detector", "severity", "slug", "detail"} <= row["notes"][0].keys()
    assert {"unigram_entropy_bits", "duplicate_ngram_fraction", "reference_score"} <= row.keys()
    assert report["drop_rows"] == [[row["file"], 7]]


def test_batches_and_shards_in_one_call_and_every_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = 2 + np.random.default_rng(1).zipf(1.3, 2048 * 6) % 4000
    rows[2048 * 4 + 10 : 2048 * 4 + 500] = 77
    rows.astype(np.uint16).tofile(tmp_path / "train.bin")
    outs = [str(tmp_path / name) for name in ("o.json", "o.md", "o.txt", "o.csv")]
    report = run(capsys, saved_batch(tmp_path), tmp_path / "train.bin", out=outs)
    assert report["rows_total"] == 38 and report["rows_flagged"] == 2
    assert ["train.bin", 4] in [[Path(file).name, row] for file, row in report["drop_rows"]]
    assert json.loads((tmp_path / "o.json").read_text()) == report
    for name in ("o.md", "o.txt"):
        text = (tmp_path / name).read_text()
        assert "repeated-tokens" in text and "candidate, not a cause" in text and "D1" in text
    assert "train.bin,4,2048" in (tmp_path / "o.csv").read_text()


def test_a_baseline_gives_p_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "healthy.npy", 2 + np.random.default_rng(2).zipf(1.3, (200, 256)) % 4000)
    report = run(capsys, saved_batch(tmp_path), baseline=[str(tmp_path / "healthy.npy")])
    others = [row["p_value"] for row in report["rows"] if row["row"] != 7]
    assert report["rows"][7]["p_value"] == pytest.approx(5 / 201) and np.median(others) > 0.1


def test_bad_calls_are_refused_in_words(tmp_path: Path) -> None:
    batch = str(saved_batch(tmp_path))
    for paths, options, code in (
        ([], {}, 3),
        ([str(tmp_path / "nothing*.bin")], {}, 3),
        ([batch], {"out": ["x.pdf"]}, 2),
        ([batch], {"tokenizer": tmp_path / "none"}, 3),
        ([batch], {"out": [str(tmp_path / "no" / "such" / "o.json")]}, 3),
    ):
        with pytest.raises(ProbeError) as error:
            command.run_batch_audit(paths, **options, quiet=True)
        assert error.value.exit_code == code


def test_quiet_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.run_batch_audit([saved_batch(tmp_path)], quiet=True)
    assert capsys.readouterr().out == ""


HOSTILE = [
    *("\x1b[2J\x1b]0;pwned\x07", "[bold red]x[/]", "[link=http://x]", "](http://x)", "<script>x</script>"),
    *("| a | b |", "`` ` ``", "\u202eevil", "\x9b31m", "@team #1", "\r\n## head", "![x](y)", "&lt;", "\\x1b"),
    *("\ud800", "a\u0301" * 9),
]
hostile_text = st.lists(st.sampled_from(HOSTILE) | st.text(max_size=6), max_size=5).map("".join)


def report_of(text: str, file: str) -> dict[str, Any]:
    note = {"detector": "D1", "severity": "high", "slug": "repeated-tokens", "detail": text, "spans": []}
    row = {"file": file, "row": 3, "score": 0.9, "flags": ["repeated-tokens"], "notes": [note], "spans": []}
    row |= {"tokens": 5, "unigram_entropy_bits": 1.0, "duplicate_ngram_fraction": 0.5, "reference_score": 0.1}
    row["previews"] = [text]
    report = {"rows": [row], "skip": True, "reason": text, "notes": [text], "files": 2}
    return report | {"rows_total": 1, "rows_flagged": 1, "tokens_total": 5}


@settings(max_examples=60, deadline=None)
@given(hostile_text, hostile_text)
def test_previews_never_act(text: str, file: str) -> None:
    report = report_of(text, file)
    stream = io.StringIO()
    render.terminal(report, Console(file=stream, width=100, force_terminal=False, no_color=True))
    plain = stream.getvalue()
    coloured = io.StringIO()
    render.terminal(report, Console(file=coloured, width=100, force_terminal=True, color_system="truecolor"))
    # Only the colours that rich itself wrote may be escapes.
    without_sgr = re.sub(r"\x1b\[[0-9;]*m", "", coloured.getvalue())
    for shown in (plain, without_sgr, render.markdown(report), render.plain_text(report)):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", shown)
    if "[bold red]x[/]" in text:
        assert "[bold red]" in plain.replace("\n", "")  # shown as it is, not taken as markup
    parsed = _markdown_tokens(render.markdown(report))
    assert parsed <= {"heading", "paragraph", "table", "bullet_list", "list_item", "inline"}, parsed


def _markdown_tokens(text: str) -> set[str]:
    """Block kinds of the document, and a failure where inline HTML, a link or an image came out of a file."""
    from markdown_it import MarkdownIt

    kinds = set()
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        kinds.add(re.sub("_(open|close)$", "", token.type))
        for child in token.children or ():
            assert child.type not in ("link_open", "image"), child
            if child.type == "html_inline":
                assert child.content in ("<code>", "</code>"), child.content
    return {kind for kind in kinds if not re.match("t(head|body|r|h|d)$", kind)}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 255), min_size=1, max_size=40))
def test_decoded_previews_are_clean_whatever_the_bytes(values: list[int]) -> None:
    class Bytes:
        size = 256

        def decode(self, ids: np.ndarray) -> str:
            return bytes(ids.tolist()).decode("latin-1")

    shown = command.preview(values, Bytes())  # type: ignore[arg-type]
    assert not re.search("[\x00-\x1f\x7f-\x9f\xad]", shown)


def test_shards_with_flagged_rows_say_drop_them(tmp_path, capsys):
    words = np.frombuffer(Path(command.__file__).read_bytes(), np.uint8)
    rows = np.resize(words, (5, 2048)).astype(np.uint16)
    np.save(tmp_path / "clean.npy", rows)
    assert command.run_batch_audit([tmp_path / "clean.npy"], quiet=False) == 0
    assert "DROP ROWS" not in capsys.readouterr().out
    rows[3, 100:900] = 7
    np.save(tmp_path / "dirty.npy", rows)
    assert command.run_batch_audit([tmp_path / "dirty.npy"], quiet=False) == 0
    said = capsys.readouterr().out
    assert said.startswith("DROP ROWS 1 of 5 rows of 1 shard are flagged")
    assert "1 row flagged" in said


def test_flat_ids_are_said_to_be_one_row(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    torch.save(torch.arange(200), tmp_path / "flat.pt")
    command.run_batch_audit([tmp_path / "flat.pt"])
    assert "one row" in capsys.readouterr().out
