"""Bad input through the command line: a message in three parts, the right exit code, no partial report, no code run."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import stat
import threading
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fixtures import incidents, plant
from fixtures.incidents import saved
from fixtures.tiny import MODELS_FILE, tiny
from fixtures.tiny_text import VOCABULARY
from stability_probe import cli

UNREADABLE, FAILED = 3, 4


@pytest.fixture(scope="module")
def batch_file(tmp_path_factory):
    return saved(incidents.healthy_batch(("code",) * 2, 32), tmp_path_factory.mktemp("batch") / "batch.pt")


@pytest.fixture
def folder(tmp_path):
    """A sound checkpoint folder to break."""
    return Path(shutil.copytree(tiny("llama").folder, tmp_path / "ckpt"))


def replay(ckpt, batch, *more):
    return CliRunner().invoke(
        cli.app, ["replay", "--ckpt", str(ckpt), "--batch", str(batch), "--quiet", *map(str, more)]
    )


def assert_refused(result, code, *said):
    """Exit code, the three parts, and no traceback."""
    assert result.exit_code == code, result.output
    text = result.output
    assert "why" in text and "try" in text, text
    assert "Traceback" not in text, text
    for words in said:
        assert words in " ".join(text.split()), text


class Bomb:
    """Unpickled without care it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 5, 200, 100_000])
def test_a_truncated_safetensors_file(kept, folder, batch_file, tmp_path):
    weights = folder / incidents.WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:kept])
    result = replay(folder, batch_file, "--out", tmp_path / "report.json")
    assert_refused(result, UNREADABLE, "model.safetensors")
    assert not (tmp_path / "report.json").exists()


def test_a_pickle_that_would_run_code_as_checkpoint(batch_file, tmp_path):
    trap = tmp_path / "ran"
    path = tmp_path / "model.pt"
    torch.save({"model": {"w": torch.ones(2)}, "extra": Bomb(trap)}, path)
    assert_refused(replay(path, batch_file), UNREADABLE)
    assert not trap.exists()


def test_a_bare_pickle_that_would_run_code_as_checkpoint(batch_file, tmp_path):
    trap = tmp_path / "ran"
    path = tmp_path / "model.pt"
    path.write_bytes(pickle.dumps(Bomb(trap)))
    assert_refused(replay(path, batch_file), UNREADABLE)
    assert not trap.exists()


def test_a_pickle_that_would_run_code_as_batch(tmp_path):
    trap = tmp_path / "ran"
    path = tmp_path / "batch.pt"
    torch.save([Bomb(trap)], path)
    assert_refused(replay(tiny("llama").ckpt, path), UNREADABLE)
    assert not trap.exists()


def test_a_hostile_optimizer_beside_a_sound_checkpoint_runs_nothing(folder, batch_file, tmp_path):
    trap = tmp_path / "ran"
    torch.save({"state": Bomb(trap), "param_groups": []}, folder / "optimizer.pt")
    result = replay(folder, batch_file)
    assert result.exit_code in (0, UNREADABLE), result.output
    assert not trap.exists()


def test_a_checkpoint_of_another_architecture(folder, batch_file):
    """GPT-2's weights under Llama's configuration."""
    shutil.copy(tiny("gpt2").folder / incidents.WEIGHTS_FILE, folder / incidents.WEIGHTS_FILE)
    assert_refused(replay(folder, batch_file), UNREADABLE, "does not fit")


def test_a_model_function_of_another_architecture(batch_file):
    result = replay(tiny("llama").ckpt, batch_file, "--model", f"{MODELS_FILE}:decoder")
    assert_refused(result, UNREADABLE, "does not fit")


def test_a_folder_without_a_checkpoint(batch_file, tmp_path):
    (tmp_path / "notes.txt").write_text("nothing here")
    assert_refused(replay(tmp_path, batch_file), UNREADABLE)


def test_a_checkpoint_that_does_not_exist(batch_file, tmp_path):
    assert_refused(replay(tmp_path / "nowhere", batch_file), UNREADABLE, "nowhere")


def test_a_vocabulary_that_the_file_cannot_hold_is_refused_before_memory_is_taken(folder, batch_file):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 10**12}))
    result = replay(folder, batch_file)
    assert_refused(result, UNREADABLE, "vocab_size is 1,000,000,000,000", "--config")
    assert "allocate" not in result.output


def test_an_empty_tensor_of_the_checkpoint_is_named(folder, batch_file):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / incidents.WEIGHTS_FILE)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**weights, name: torch.zeros(0, 64)}, folder / incidents.WEIGHTS_FILE, metadata={"format": "pt"})
    result = replay(folder, batch_file, "--format", "json")
    assert result.exit_code == 0, result.output
    verdict = json.loads(result.stdout)["verdict"]
    assert (verdict["cause"], verdict["location"]["parameters"]) == ("checkpoint-mismatch", [name])
    assert "(0, 64)" in verdict["summary"]


SILENT = """
class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no words")
"""


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        (SILENT + "raise Silent", UNREADABLE),
        (SILENT + "def make():\n    raise Silent", UNREADABLE),
        (
            SILENT + "from fixtures.tiny_models import decoder\n"
            "def fail(*_):\n    raise Silent\n"
            "def make():\n    model = decoder()\n    model.register_forward_pre_hook(fail)\n    return model",
            FAILED,
        ),
    ],
    ids=["import", "function", "forward"],
)
def test_an_exception_that_cannot_say_what_it_is(code, exit_code, batch_file, tmp_path):
    (tmp_path / "model.py").write_text(code)
    result = replay(tiny("decoder").ckpt, batch_file, "--model", f"{tmp_path / 'model.py'}:make")
    assert_refused(result, exit_code, "Silent: its message cannot be read")
    assert "bug in probe" not in result.output


# --- batches --------------------------------------------------------------------------------------


def test_labels_of_another_shape(tmp_path):
    batch = incidents.healthy_batch(("code",) * 2, 32)
    path = saved({**batch, "labels": batch["labels"][:, :20]}, tmp_path / "batch.pt")
    assert_refused(replay(tiny("llama").ckpt, path), UNREADABLE, "labels")


EMPTY = torch.zeros(0, dtype=torch.long)
IDS = torch.arange(64).reshape(2, 32)


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ({"input_ids": IDS, "labels": EMPTY}, "labels"),
        ({"input_ids": IDS, "attention_mask": EMPTY.reshape(0, 32)}, "attention_mask"),
        ({"input_ids": IDS, "position_ids": EMPTY.reshape(2, 0)}, "position_ids"),
        ({"input_ids": IDS, "loss_mask": EMPTY}, "loss_mask"),
        ((IDS, EMPTY.reshape(0, 32)), "targets"),
        ({"input_ids": EMPTY}, "empty"),
    ],
)
def test_an_empty_tensor_of_the_batch_is_named(batch, named, tmp_path):
    torch.save(batch, tmp_path / "batch.pt")
    assert_refused(replay(tiny("llama").ckpt, tmp_path / "batch.pt"), UNREADABLE, named)


def test_ids_above_the_vocabulary_are_a_verdict(tmp_path):
    """The replay goes on without them: what is wrong is in the report, not in an exit code."""
    batch = plant.id_at(incidents.healthy_batch(("code",) * 2, 32), 1, 3, VOCABULARY)
    result = replay(tiny("llama").ckpt, saved(batch, tmp_path / "batch.pt"), "--format", "json")
    assert result.exit_code == 0, result.output
    verdict = json.loads(result.stdout)["verdict"]
    assert verdict["cause"] == "token-id-out-of-range"
    assert verdict["location"]["positions"] == [[1, 3, 4]]


def test_ids_far_above_the_vocabulary_in_a_model_function(tmp_path):
    batch = plant.id_at(incidents.healthy_batch(("code",) * 2, 32), 1, 3, 2**40)
    made = tiny("decoder")
    path = saved(batch, tmp_path / "batch.pt")
    result = replay(made.ckpt, path, "--model", made.model, "--format", "json", "--fail-on", "found")
    assert result.exit_code == 1, result.output
    assert json.loads(result.stdout)["verdict"]["cause"] == "token-id-out-of-range"


def test_more_positions_than_the_model_has(tmp_path):
    """GPT-2's learned table ends at 256."""
    path = saved(incidents.healthy_batch(("code",), 300), tmp_path / "batch.pt")
    result = replay(tiny("gpt2").ckpt, path)
    assert result.exit_code in (UNREADABLE, FAILED), result.output
    assert "256" in result.output and "Traceback" not in result.output


# --- incident folders -----------------------------------------------------------------------------


@pytest.fixture
def incident(tmp_path):
    """An incident folder that names code to build its model."""
    home = tmp_path / "incident"
    home.mkdir()
    shutil.copy(tiny("decoder").ckpt, home / "ckpt.pt")
    saved(incidents.healthy_batch(("code",) * 2, 32), home / "batch.pt")
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w').close()\nfrom fixtures.tiny_models import decoder\n"
    (home / "model.py").write_text(code)
    content = {"ckpt": "ckpt.pt", "batch": "batch.pt", "model": "model.py:decoder", "labels": "unshifted"}
    (home / "incident.json").write_text(json.dumps(content))
    return home, ran


def test_code_of_an_incident_folder_does_not_run_by_itself(incident):
    home, ran = incident
    result = CliRunner().invoke(cli.app, ["replay", str(home), "--quiet"])
    assert_refused(result, UNREADABLE, "--trust-code")
    assert not ran.exists()


def test_code_of_an_incident_folder_runs_with_consent(incident):
    home, ran = incident
    result = CliRunner().invoke(cli.app, ["replay", str(home), "--quiet", "--trust-code", "--format", "json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["verdict"]["cause"] == "none"
    assert ran.exists()


# --- where the report goes ------------------------------------------------------------------------


def test_a_full_disk_leaves_no_partial_report(batch_file, tmp_path, monkeypatch):
    """The disk is full when the report's bytes go to it: an older report stays, nothing else is left."""
    out = tmp_path / "reports" / "report.json"
    out.parent.mkdir()
    out.write_text("older")

    def full(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert_refused(replay(tiny("llama").ckpt, batch_file, "--out", out), FAILED, "No space left")
    assert [path.name for path in out.parent.iterdir()] == ["report.json"]
    assert out.read_text() == "older"


def test_a_device_is_not_replaced_by_a_report(batch_file, tmp_path):
    """A link to a pipe (a device behaves alike): whatever is said, the pipe is still one afterwards."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    link = tmp_path / "report.json"
    link.symlink_to(pipe)
    # Opened for both, so that neither end waits for the other; drained, because a pipe holds 64 KiB.
    end = os.open(pipe, os.O_RDWR)
    reader = threading.Thread(target=lambda: [None for _ in iter(lambda: os.read(end, 65_536), b"stop")])
    reader.start()
    try:
        result = replay(tiny("llama").ckpt, batch_file, "--out", link)
    finally:
        time.sleep(0.05)  # what was written is read before the mark that ends the reading
        os.write(end, b"stop")
        reader.join(timeout=10)
        os.close(end)
    assert "Traceback" not in result.output
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_an_output_folder_that_does_not_exist_is_refused_before_the_replay(batch_file, tmp_path):
    result = replay(tiny("llama").ckpt, batch_file, "--out", tmp_path / "missing" / "report.json")
    assert result.exit_code in (2, UNREADABLE), result.output
    assert "Traceback" not in result.output
