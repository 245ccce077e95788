"""Every format back as it was written, and what is no checkpoint told apart in words."""

import argparse
import json
import os

import pytest
import torch
from safetensors.torch import save_file

from stability_probe.checkpoints import read_checkpoint
from stability_probe.checkpoints.tensors import canonical, open_safetensors, without_wrappers
from stability_probe.errors import ProbeError
from stability_probe.models.nanogpt import NanoGPT

WEIGHTS = {"layers.0.weight": torch.arange(6.0).reshape(2, 3), "head.bias": torch.ones(2, dtype=torch.bfloat16)}
CONFIG = {"model_type": "llama", "vocab_size": 11}
OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0], "lr": 0.1}]}
ARGUMENTS = {"n_layer": 1, "n_head": 2, "n_embd": 4, "block_size": 8, "vocab_size": 7, "bias": False, "dropout": 0.0}


def assert_weights(checkpoint, want=WEIGHTS):
    assert set(checkpoint.tensors) == set(want)
    for name, tensor in want.items():
        assert checkpoint.tensors[name].dtype == tensor.dtype
        assert torch.equal(checkpoint.tensors[name], tensor)


def sharded(folder, save, names, index):
    """One tensor per shard, and the index that maps names to shards."""
    for (key, tensor), name in zip(WEIGHTS.items(), names, strict=True):
        save({key: tensor}, folder / name)
    places = dict(zip(WEIGHTS, names, strict=True))
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize("kind", ["safetensors", "bin", "safetensors shards", "bin shards"])
def test_transformers_folders(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    if kind == "safetensors":
        save_file(WEIGHTS, tmp_path / "model.safetensors")
    elif kind == "bin":
        torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    elif kind == "safetensors shards":
        names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        sharded(tmp_path, save_file, names, "model.safetensors.index.json")
    else:
        sharded(tmp_path, torch.save, ["a.bin", "b.bin"], "pytorch_model.bin.index.json")
    checkpoint = read_checkpoint(tmp_path)
    assert_weights(checkpoint)
    assert (checkpoint.format, checkpoint.config, checkpoint.step) == ("transformers", CONFIG, None)
    assert checkpoint.optimizer is None and checkpoint.notes == ()


def test_trainer_folders_bring_optimizer_and_step(tmp_path):
    folder = tmp_path / "checkpoint-420"
    folder.mkdir()
    save_file(WEIGHTS, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 420, "log_history": []}))
    torch.save(OPTIMIZER, folder / "optimizer.pt")
    torch.save({"_step_count": 1}, folder / "scheduler.pt")
    torch.save(argparse.Namespace(lr=1), folder / "training_args.bin")
    checkpoint = read_checkpoint(folder)
    assert checkpoint.step == 420 and checkpoint.optimizer["param_groups"][0]["lr"] == 0.1
    with pytest.raises(ProbeError, match="checkpoint-420"):
        read_checkpoint(tmp_path)  # the run's folder: the error names the checkpoint in it
    (folder / "optimizer.pt").write_bytes(b"broken")
    checkpoint = read_checkpoint(folder)
    assert checkpoint.optimizer is None and "optimizer state left out" in checkpoint.notes[0]


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/../../b.safetensors", "..\\x", "C:\\x"])
def test_shards_outside_the_folder_are_refused(tmp_path, name):
    folder = tmp_path / "ckpt"
    folder.mkdir()
    save_file(WEIGHTS, tmp_path / "outside.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ProbeError, match="refused"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "index", ["[]", "{}", '{"weight_map": {"w": 3}}', '{"weight_map": {"w": "lost.safetensors"}}', "{"]
)
def test_broken_shard_indices(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ProbeError):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("key", [None, "model", "state_dict", "module", "model_state_dict"])
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ""])
def test_plain_files(tmp_path, key, suffix):
    path = tmp_path / f"saved{suffix}"
    torch.save(WEIGHTS if key is None else {key: WEIGHTS}, path)
    checkpoint = read_checkpoint(path)
    assert_weights(checkpoint)
    assert (checkpoint.format, checkpoint.step, checkpoint.config) == ("plain", None, None)


@pytest.mark.parametrize("step", ["step", "iter_num", "global_step", "iteration", "iter"])
@pytest.mark.parametrize("optimizer", ["optimizer", "optimizer_state_dict"])
@pytest.mark.parametrize("count", [7, torch.tensor(7), 7.0])
def test_wrapped_files(tmp_path, step, optimizer, count):
    saved = {"model": WEIGHTS, optimizer: OPTIMIZER, step: count, "config": CONFIG, "best": 1.0}
    torch.save(saved, tmp_path / "ckpt.pt")
    checkpoint = read_checkpoint(tmp_path)  # the folder: it holds one checkpoint and nothing else
    assert_weights(checkpoint)
    assert (checkpoint.step, checkpoint.config) == (7, CONFIG)
    assert checkpoint.optimizer["state"][0]["exp_avg"].tolist() == [1, 1]


def test_a_namespace_counts_as_configuration(tmp_path):
    torch.save({"model": WEIGHTS, "args": argparse.Namespace(hidden=3)}, tmp_path / "a.pt")
    assert read_checkpoint(tmp_path / "a.pt").config == {"hidden": 3}


def test_a_safetensors_file_takes_the_configuration_beside_it(tmp_path):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    assert read_checkpoint(tmp_path).format == "plain"  # no config.json yet
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    checkpoint = read_checkpoint(tmp_path / "model.safetensors")
    assert_weights(checkpoint)
    assert checkpoint.config == CONFIG and "config.json" in checkpoint.notes[0]


def test_nanogpt(tmp_path):
    model = NanoGPT(1, 2, 4, 8, 7, False)
    state = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    saved = {"model": state, "optimizer": OPTIMIZER, "model_args": ARGUMENTS, "iter_num": 2000}
    torch.save(saved | {"best_val_loss": torch.tensor(3.0), "config": {"out_dir": "out"}}, tmp_path / "ckpt.pt")
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.format, checkpoint.step, checkpoint.config) == ("nanogpt", 2000, ARGUMENTS)
    assert_weights(checkpoint, model.state_dict())
    assert checkpoint.optimizer is not None
    assert checkpoint.notes == ("prefix '_orig_mod.' removed from the stored keys",)


def test_config_and_optimizer_may_be_given_apart(tmp_path):
    torch.save({"model": WEIGHTS, "config": {"old": 1}}, tmp_path / "a.pt")
    folder = tmp_path / "apart"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.save({"optimizer": OPTIMIZER}, folder / "optimizer.pt")
    by_folder = read_checkpoint(tmp_path / "a.pt", config=folder, optimizer=folder)
    by_file = read_checkpoint(tmp_path / "a.pt", config=folder / "config.json", optimizer=folder / "optimizer.pt")
    for checkpoint in (by_folder, by_file):
        assert checkpoint.config == CONFIG and checkpoint.optimizer["param_groups"] == OPTIMIZER["param_groups"]
    for wrong in ({"config": tmp_path / "a.pt"}, {"optimizer": tmp_path}, {"optimizer": tmp_path / "a.pt"}):
        with pytest.raises(ProbeError):
            read_checkpoint(tmp_path / "a.pt", **wrong)


def test_wrapper_components_come_off_wherever_they_stand():
    assert canonical("module._orig_mod.blocks.0._checkpoint_wrapped_module.w") == "blocks.0.w"
    assert canonical("_fsdp_wrapped_module.a._forward_module.module") == "a.module"  # the leaf is the tensor's name
    assert canonical("module_list.0.w") == "module_list.0.w"
    two = {"module.w": torch.ones(1), "w": torch.zeros(1), "n": torch.ones(1)}
    kept, notes = without_wrappers(two)
    assert set(kept) == set(two) and notes


def test_a_module_saved_whole_is_no_state_dict(tmp_path):
    torch.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "whole.pt")
    with pytest.raises(ProbeError, match="state_dict"):
        read_checkpoint(tmp_path / "whole.pt")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "bare.pt")
    with pytest.raises(ProbeError, match="Linear"):
        read_checkpoint(tmp_path / "bare.pt")


@pytest.mark.parametrize("saved", [[1, 2], "text", torch.ones(3), {"loss": 3.0}, {1: torch.ones(2)}, {}])
def test_files_without_weights(tmp_path, saved):
    torch.save(saved, tmp_path / "x.pt")
    with pytest.raises(ProbeError, match="cannot find a model's weights") as caught:
        read_checkpoint(tmp_path / "x.pt")
    assert caught.value.exit_code == 3


def test_a_pipe_is_no_checkpoint(tmp_path):
    os.mkfifo(tmp_path / "model.pt")
    with pytest.raises(ProbeError, match="neither a regular file nor a folder"):
        read_checkpoint(tmp_path / "model.pt")


def test_folders_without_a_checkpoint(tmp_path):
    with pytest.raises(ProbeError, match="no such file"):
        read_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ProbeError, match="no checkpoint in"):
        read_checkpoint(tmp_path)
    for name in ("a.pt", "b.pt"):
        torch.save(WEIGHTS, tmp_path / name)
    with pytest.raises(ProbeError, match=r"a\.pt, b\.pt"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 8, 20, 100, -1])
def test_truncated_safetensors(tmp_path, keep):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    raw = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(raw[:keep])
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ProbeError, match=r"model\.safetensors") as caught:
        read_checkpoint(tmp_path)
    assert caught.value.exit_code == 3


def test_safetensors_use_no_memory_of_their_own(tmp_path):
    """Opened tensors are mapped: anonymous memory grows by far less than their 32 MB."""
    save_file({"w": torch.ones(8 * 2**20)}, tmp_path / "big.safetensors")
    before = anonymous_bytes()
    tensors = open_safetensors(tmp_path / "big.safetensors")
    assert tensors["w"].sum() == 8 * 2**20
    assert anonymous_bytes() - before < 16 * 2**20


def anonymous_bytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))
