"""The training-loop examples of docs/batch-audit.md, run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

DOCS = Path(__file__).parent.parent / "docs" / "batch-audit.md"


def _example(containing: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    return next(block for block in blocks if containing in block)


def _batch(bad_row: int | None = None) -> dict[str, Any]:
    ids = torch.tensor(list(Path(__file__).with_name("test_edges.py").read_bytes())[: 12 * 256]).view(12, 256)
    if bad_row is not None:
        ids[bad_row, 20:240] = 7
    return {"input_ids": ids, "labels": ids.clone()}


def test_the_loop_masks_the_row_and_keeps_the_batch():
    batch = _batch(bad_row=5)
    exec(_example("for step, batch in enumerate(loader)"), {"loader": [batch]})
    assert bool((batch["labels"][5] == -100).all())
    assert bool((batch["labels"][4] != -100).all())


def test_the_callback_in_a_real_trainer(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # the Trainer asks for it
    source = _example("class AuditCallback").partition("\naudit = AuditCallback")[0]
    names: dict[str, Any] = {}
    exec(source, names)
    rows = [{key: value[row] for key, value in _batch(bad_row=5).items()} for row in range(12)]
    audit = names["AuditCallback"](transformers.default_data_collator, vocab_size=512)
    config = transformers.GPT2Config(vocab_size=512, n_positions=256, n_embd=16, n_layer=1, n_head=2)
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=transformers.TrainingArguments(
            str(tmp_path),
            max_steps=1,
            per_device_train_batch_size=12,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
        ),
        train_dataset=rows,
        data_collator=audit,
        callbacks=[audit],
    )
    trainer.train()
    assert len(audit.found) == 1
    assert "'audit/flagged_batches': 1" in capsys.readouterr().out


def test_the_callback_without_a_trainer():
    pytest.importorskip("transformers")
    names: dict[str, Any] = {}
    exec(_example("class AuditCallback").partition("\naudit = AuditCallback")[0], names)
    audit = names["AuditCallback"](lambda examples: examples, vocab_size=512)
    assert bool((audit(_batch(bad_row=3))["labels"][3] == -100).all())
    logs: dict[str, float] = {}
    audit.on_log(SimpleNamespace(), SimpleNamespace(), SimpleNamespace(), logs=logs)
    assert logs == {"audit/flagged_batches": 1}
