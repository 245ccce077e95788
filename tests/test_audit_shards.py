"""Every shard format against the rows that were written, and the data-set run: killed, resumed, in parallel."""

from __future__ import annotations

import csv
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from stability_probe.audit import dataset, shards
from stability_probe.audit.blocks import Settings, Unit, audit_unit
from stability_probe.audit.shards import base
from stability_probe.errors import ProbeError

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 5000, 1000).astype(np.uint16)
DOCUMENTS = [RNG.integers(0, 5000, n) for n in (5, 300, 1, 64)]


def read(path: Path, row_tokens: int = 100, encode: base.Encode | None = None) -> list[list[int]]:
    module = shards.format_of(path)
    found = [
        (offset, ids.tolist())
        for start, stop in module.units(path, row_tokens)
        for offset, ids in module.rows(path, start, stop, row_tokens, encode)
    ]
    offsets = [offset for offset, _ in found]
    assert offsets == sorted(set(offsets))
    return [ids for _, ids in found]


def stream(row_tokens: int = 100) -> list[list[int]]:
    return [TOKENS[i : i + row_tokens].tolist() for i in range(0, len(TOKENS), row_tokens)]


def test_npy_and_npz_and_safetensors(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    np.save(tmp_path / "a.npy", TOKENS)
    np.save(tmp_path / "b.npy", TOKENS.reshape(10, 100).astype(np.int64))
    np.savez(tmp_path / "c.npz", input_ids=TOKENS)
    save_file({"tokens": TOKENS.astype(np.int32)}, tmp_path / "d.safetensors")
    save_file({"tokens": TOKENS.reshape(10, 100)}, tmp_path / "e.safetensors")
    for name in ("a.npy", "b.npy", "c.npz", "d.safetensors", "e.safetensors"):
        assert read(tmp_path / name) == stream(), name


def test_bin_of_nanogpt_and_llm_c(tmp_path: Path) -> None:
    TOKENS.tofile(tmp_path / "train.bin")
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(TOKENS)
    (tmp_path / "fineweb.bin").write_bytes(header.tobytes() + TOKENS.tobytes())
    assert read(tmp_path / "train.bin") == stream()
    assert read(tmp_path / "fineweb.bin", 300) == stream(300)


def write_megatron(path: Path, documents: list[np.ndarray]) -> None:
    lengths = np.array([len(d) for d in documents], "<i4")
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1] * 4)]).astype("<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(documents), len(documents) + 1)
    index = np.arange(len(documents) + 1, dtype="<i8")
    path.with_suffix(".idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + index.tobytes())
    path.write_bytes(np.concatenate(documents).astype("<i4").tobytes())


def test_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stability_probe.audit.shards import megatron

    write_megatron(tmp_path / "data.bin", DOCUMENTS)
    assert read(tmp_path / "data.bin") == [d.tolist() for d in DOCUMENTS]
    assert shards.expand([str(tmp_path)]) == [tmp_path / "data.bin"]
    monkeypatch.setattr(megatron, "UNIT_TOKENS", 100)
    assert len(megatron.units(tmp_path / "data.bin", 0)) > 1
    assert read(tmp_path / "data.bin") == [d.tolist() for d in DOCUMENTS]


@pytest.mark.parametrize("encoding", ["bytes", "ndarray", "ndarray:int32", "ndarray:int64:4"])
def test_mds(tmp_path: Path, encoding: str) -> None:
    documents = [RNG.integers(0, 5000, 4 if encoding.endswith(":4") else n) for n in (4, 300, 1)]

    def column(ids: np.ndarray) -> bytes:
        kind = encoding.split(":")
        dtype = np.dtype(kind[1] if len(kind) > 1 else "int64")
        body = ids.astype(dtype).tobytes()
        if kind[0] == "bytes" or len(kind) == 3:
            return body
        shape = bytes([1 << 2 | 1]) + struct.pack("<H", len(ids))
        return (b"" if len(kind) == 2 else bytes([65])) + shape + body

    samples = []
    for ids in documents:
        name, raw = b"some id", column(ids)
        samples.append(struct.pack("<II", len(name), len(raw)) + name + raw)
    offsets = np.cumsum([4 + 4 * (len(samples) + 1), *map(len, samples)]).astype("<u4")
    (tmp_path / "shard.00000.mds").write_bytes(struct.pack("<I", len(samples)) + offsets.tobytes() + b"".join(samples))
    info = {"column_names": ["id", "tokens"], "column_encodings": ["str", encoding], "column_sizes": [None, None]}
    info |= {"raw_data": {"basename": "shard.00000.mds"}, "format": "mds"}
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [info]}))
    assert read(tmp_path / "shard.00000.mds") == [d.tolist() for d in documents]
    info["column_encodings"] = ["str", "pkl"]
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [info]}))
    with pytest.raises(ProbeError, match="cannot read") as error:
        read(tmp_path / "shard.00000.mds")
    assert "pickle" in error.value.why


def test_litdata_and_datatrove(tmp_path: Path) -> None:
    lit = tmp_path / "lit"
    lit.mkdir()
    head = np.zeros(1 + 3 + 1, "<u4").tobytes()
    (lit / "chunk-0-0.bin").write_bytes(head + TOKENS.astype("<i4").tobytes())
    chunk = {"filename": "chunk-0-0.bin", "chunk_size": 3, "chunk_bytes": 1, "dim": 1000}
    config = {"data_format": ["no_header_tensor:16"], "compression": None}
    (lit / "index.json").write_text(json.dumps({"chunks": [chunk], "config": config}))
    assert read(lit / "chunk-0-0.bin") == stream()
    for width, dtype in ((2, "<u2"), (4, "<u4")):
        path = tmp_path / f"0000{width}.ds"
        TOKENS.astype(dtype).tofile(path)
        np.array([400, 1000], "<u8").tofile(tmp_path / f"{path.name}.index")
        assert read(path) == stream()


def test_parquet_and_jsonl_of_ids_and_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    lists = [d.tolist() for d in DOCUMENTS]
    with (tmp_path / "a.jsonl").open("w") as file:
        file.writelines(json.dumps({"input_ids": ids}) + "\n" for ids in lists)
    texts = [f"document {i} " * i for i in range(9)]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    monkeypatch.setattr("stability_probe.audit.shards.jsonl.UNIT_BYTES", 97)
    assert read(tmp_path / "a.jsonl") == lists
    assert read(tmp_path / "t.jsonl", encode=encode) == [list(t.encode()) for t in texts]
    with pytest.raises(ProbeError, match="cannot read"):
        read(tmp_path / "t.jsonl")
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.table({"input_ids": lists}), tmp_path / "a.parquet", row_group_size=2)
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "t.parquet", row_group_size=4)
    assert read(tmp_path / "a.parquet") == lists
    assert read(tmp_path / "t.parquet", encode=encode) == [list(t.encode()) for t in texts]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.npy", b"\x93NUMPY\x01\x00garbage"),
        ("a.npz", b"PK\x03\x04garbage"),
        ("a.bin", b"odd"),
        ("a.idx", b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 2**60, 1)),
        ("a.mds", b"\xff\xff\xff\xff"),
        ("a.jsonl", b"[" * 100_000),
        ("b.jsonl", b'{"input_ids": [1.5, "x"]}\n'),
        ("a.parquet", b"PAR1"),
        ("a.safetensors", b"\xff" * 20),
        ("a.txt", b"hello"),
    ],
)
def test_damaged_shards_are_refused_in_words(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ProbeError) as error:
        read(tmp_path / name)
    assert error.value.exit_code == 3


def two_shards(folder: Path) -> list[Path]:
    rows = np.random.default_rng(1).zipf(1.2, (40, 256)) % 5000
    rows[7, 20:200] = 9
    rows[33, :] = np.resize(np.arange(20), 256)
    paths = [folder / "a.npy", folder / "b.npy"]
    np.save(paths[0], rows[:20].astype(np.uint16))
    np.save(paths[1], rows[20:].astype(np.uint16))
    return paths


SETTINGS = Settings(row_tokens=256, vocab_size=5000)


def test_flagged_rows_are_named_by_shard_and_offset(tmp_path: Path) -> None:
    paths = two_shards(tmp_path)
    for suffix in ("csv", "parquet"):
        if suffix == "parquet":
            pytest.importorskip("pyarrow")
        found = dataset.audit_dataset(paths, SETTINGS, tmp_path / f"out.{suffix}", workers=1)
        assert (found.rows, found.tokens, found.flagged) == (40, 40 * 256, 2)
        assert [(Path(r["shard"]).name, r["offset"]) for r in found.records] == [("a.npy", 7), ("b.npy", 13)]
    with (tmp_path / "out.csv").open() as file:
        assert [(row["offset"], row["flags"]) for row in csv.DictReader(file)] == [
            ("7", "repeated-tokens"),
            ("13", "repeated-tokens"),
        ]
    assert not list(tmp_path.glob("*.part")) and not list(tmp_path.glob("*.tmp"))


def test_two_processes_find_what_one_finds(tmp_path: Path) -> None:
    paths = two_shards(tmp_path)
    one = dataset.audit_dataset(paths, SETTINGS, workers=1)
    two = dataset.audit_dataset(paths, SETTINGS, workers=2)
    key = [(r["shard"], r["offset"], r["score"]) for r in one.records]
    assert sorted(key) == sorted((r["shard"], r["offset"], r["score"]) for r in two.records)
    assert (one.rows, one.tokens) == (two.rows, two.tokens)


@pytest.mark.parametrize("torn", [0, 1, 30])
def test_a_killed_run_goes_on_and_counts_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: int
) -> None:
    monkeypatch.setattr(base, "UNIT_TOKENS", 256 * 4)
    monkeypatch.setattr("stability_probe.audit.shards.base.UNIT_TOKENS", 256 * 4)
    paths = two_shards(tmp_path)
    whole = dataset.audit_dataset(paths, SETTINGS, tmp_path / "whole.csv", workers=1)
    calls = 0

    def dies(unit: Unit, settings: Settings) -> object:
        nonlocal calls
        calls += 1
        if calls > 4:
            raise KeyboardInterrupt
        return audit_unit(unit, settings)

    monkeypatch.setattr(dataset, "audit_unit", dies)
    with pytest.raises(KeyboardInterrupt):
        dataset.audit_dataset(paths, SETTINGS, tmp_path / "out.csv", workers=1)
    part = tmp_path / "out.csv.part"
    if torn:  # the kill came while the last line was being written
        part.write_bytes(part.read_bytes()[:-torn])
    monkeypatch.setattr(dataset, "audit_unit", audit_unit)
    found = dataset.audit_dataset(paths, SETTINGS, tmp_path / "out.csv", workers=1)
    assert found.resumed_units == (3 if torn else 4)
    assert (found.rows, found.tokens, found.flagged) == (whole.rows, whole.tokens, whole.flagged)
    assert (tmp_path / "out.csv").read_text() == (tmp_path / "whole.csv").read_text()


def test_other_options_do_not_take_over_an_old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = two_shards(tmp_path)

    def dies(unit: Unit, settings: Settings) -> object:
        if unit.path.endswith("b.npy"):
            raise KeyboardInterrupt
        return audit_unit(unit, settings)

    monkeypatch.setattr(dataset, "audit_unit", dies)
    with pytest.raises(KeyboardInterrupt):
        dataset.audit_dataset(paths, SETTINGS, tmp_path / "out.csv", workers=1)
    monkeypatch.setattr(dataset, "audit_unit", audit_unit)
    other = Settings(row_tokens=256, vocab_size=4000)
    found = dataset.audit_dataset(paths, other, tmp_path / "out.csv", workers=1)
    assert found.resumed_units == 0 and found.rows == 40


def test_datatrove_filter_with_its_local_executor(tmp_path: Path) -> None:
    pytest.importorskip("datatrove")
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.base import PipelineStep
    from datatrove.pipeline.writers import JsonlWriter
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from stability_probe.audit.datatrove_block import TokenAuditFilter

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.save(str(tmp_path / "tokenizer.json"))
    good = "The audit keeps an ordinary sentence about trains, weather and a small red house by the sea. "
    documents = [Document(good, "good"), Document("spam " * 400, "bad")]
    run = LocalPipelineExecutor(
        pipeline=[
            documents,
            TokenAuditFilter(str(tmp_path / "tokenizer.json"), exclusion_writer=JsonlWriter(str(tmp_path / "out"))),
            JsonlWriter(str(tmp_path / "kept"), compression=None),
        ],
        tasks=1,
        logging_dir=str(tmp_path / "logs"),
    )
    assert issubclass(TokenAuditFilter, PipelineStep)
    run.run()
    kept = [json.loads(line) for path in (tmp_path / "kept").glob("*.jsonl") for line in path.open()]
    assert [record["id"] for record in kept] == ["good"]
    assert list((tmp_path / "out").glob("*"))
