"""Incident folders: what they may say, what they may not reach, and how everything is read together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stability_probe.errors import ProbeError
from stability_probe.incident import Incident, Request, _learning_rate, load_incident, request_from_folder
from stability_probe.measure import LogFacts
from stability_probe.models.decoder import MODEL_TYPE, Decoder, DecoderConfig

SHAPE = {"vocab_size": 50, "n_layer": 1, "n_head": 2, "d_model": 8, "max_positions": 32}
X = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return Decoder(DecoderConfig.from_dict({"model_type": MODEL_TYPE, **SHAPE})).state_dict()


@pytest.fixture
def folder(tmp_path: Path, weights) -> Path:
    """An incident with everything in it, and a secret beside it that it must not reach."""
    root = tmp_path / "incident"
    (root / "ckpt").mkdir(parents=True)
    (root / "ckpt" / "config.json").write_text(json.dumps({"model_type": MODEL_TYPE, **SHAPE}))
    optimizer = {"state": {}, "param_groups": [{"lr": 1e-4}, {"lr": torch.tensor(3e-4)}]}
    torch.save({"model": weights, "optimizer": optimizer}, root / "ckpt" / "model.pt")
    torch.save({"input_ids": X, "labels": X}, root / "batch.pt")
    torch.save(X, root / "healthy.pt")
    log = [{"step": s, "loss": 3.0, "grad_norm": 1.0, "lr": 2e-4} for s in range(1, 11)]
    (root / "log.jsonl").write_text("\n".join(map(json.dumps, log)))
    (root / "model.py").write_text("raise RuntimeError('this code must not run')")
    (tmp_path / "secret.pt").write_bytes((root / "batch.pt").read_bytes())
    write(root, FULL)
    return root


FULL = {
    "ckpt": "ckpt/model.pt", "batch": "batch.pt", "baseline": ["healthy.pt"], "log": ["log.jsonl"], "step": 10,
    "model": None, "config": "ckpt/config.json", "labels": "unshifted", "lr": 5e-4, "grad_clip": 1.0,
    "tokenizer": None, "precision": "bf16-true", "source": {"shard": "s0"},
}  # fmt: skip


def write(folder: Path, content: object) -> None:
    (folder / "incident.json").write_text(content if isinstance(content, str) else json.dumps(content))


def test_a_folder_becomes_a_request(folder):
    request = request_from_folder(folder)
    assert request.ckpt == folder / "ckpt/model.pt"
    assert (request.batch, request.baselines, request.logs) == (
        folder / "batch.pt", (folder / "healthy.pt",), (folder / "log.jsonl",),
    )  # fmt: skip
    assert (request.step, request.lr, request.grad_clip, request.labels) == (10, 5e-4, 1.0, "unshifted")
    assert (request.run_precision, dict(request.source), request.notes) == ("bf16-true", {"shard": "s0"}, ())
    assert request.model is None and not request.model_from_folder


def test_the_least_that_a_folder_must_say(folder):
    write(folder, {"ckpt": "ckpt", "batch": "batch.pt", "log": "log.jsonl"})
    request = request_from_folder(str(folder))
    assert request == Request(ckpt=folder / "ckpt", batch=folder / "batch.pt", logs=(folder / "log.jsonl",))


def test_what_is_typed_overrides_the_folder(folder, tmp_path):
    typed = Request(
        batch=tmp_path / "secret.pt", step=0, labels="shifted", lr=1.0, max_rows=2, device="cpu", confirm=False
    )
    request = request_from_folder(folder, typed)
    assert (request.batch, request.step, request.labels, request.lr) == (tmp_path / "secret.pt", 0, "shifted", 1.0)
    assert (request.max_rows, request.device, request.confirm) == (2, "cpu", False)
    assert (request.grad_clip, request.ckpt) == (1.0, folder / "ckpt/model.pt")
    assert request_from_folder(folder, Request(labels="auto")).labels == "unshifted"


def test_unknown_keys_are_noted_with_the_nearest_known_one(folder):
    write(folder, {**FULL, "lables": "shifted"})
    assert request_from_folder(folder).notes == (
        "incident.json: unknown key 'lables' is not used (did you mean labels?)",
    )


ESCAPES = ["../secret.pt", "ckpt/../../secret.pt", "/etc/hostname", "..", "link.pt", "linked/secret.pt"]


@pytest.mark.parametrize("key", ["ckpt", "batch", "baseline", "log", "config", "optimizer", "tokenizer"])
@pytest.mark.parametrize("path", ESCAPES[:4])
def test_paths_that_leave_the_folder_are_refused(folder, key, path):
    write(folder, {**FULL, key: [path] if key in ("baseline", "log") else path})
    with pytest.raises(ProbeError, match="refused the path") as caught:
        request_from_folder(folder)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("where", ["batch", "beside the checkpoint", "a folder", "incident.json"])
def test_links_that_leave_the_folder_are_refused(folder, tmp_path, where):
    if where == "batch":
        (folder / "link.pt").symlink_to(tmp_path / "secret.pt")
        write(folder, {**FULL, "batch": "link.pt"})
    elif where == "beside the checkpoint":
        (folder / "ckpt" / "optimizer.pt").symlink_to("../../secret.pt")
    elif where == "a folder":
        (folder / "linked").symlink_to(tmp_path)
        write(folder, {**FULL, "batch": "linked/secret.pt"})
    else:
        (folder / "incident.json").rename(tmp_path / "elsewhere.json")
        (folder / "incident.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ProbeError, match="refused the path"):
        request_from_folder(folder)


def test_links_inside_the_folder_are_fine_and_loops_are_refused(folder):
    (folder / "same.pt").symlink_to("batch.pt")
    write(folder, {**FULL, "batch": "same.pt"})
    assert request_from_folder(folder).batch == folder / "same.pt"
    (folder / "loop").symlink_to("loop")
    with pytest.raises(ProbeError):
        load_incident(request_from_folder(folder, Request(batch=folder / "loop")))


def test_a_folder_that_is_itself_reached_by_a_link_is_read(folder, tmp_path):
    (tmp_path / "alias").symlink_to(folder)
    assert request_from_folder(tmp_path / "alias").batch == tmp_path / "alias" / "batch.pt"


@pytest.mark.parametrize("model", ["model.py:build", "os:getcwd", "/tmp/x.py:build"])
def test_code_named_by_a_folder_needs_consent(folder, model):
    write(folder, {**FULL, "model": model})
    with pytest.raises(ProbeError, match="did not load") as caught:
        request_from_folder(folder)
    assert caught.value.exit_code == 3 and "--trust-code" in caught.value.hint


def test_consent_or_a_typed_model(folder):
    write(folder, {**FULL, "model": "model.py:build"})
    request = request_from_folder(folder, Request(trust_code=True))
    assert request.model == f"{folder / 'model.py'}:build" and request.model_from_folder
    request = request_from_folder(folder, Request(model="mine:build"))
    assert request.model == "mine:build" and not request.model_from_folder
    write(folder, {**FULL, "model": "../model.py:build"})
    with pytest.raises(ProbeError, match="refused the path"):
        request_from_folder(folder, Request(trust_code=True))


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1}, {"step": 1.5}, {"step": True}, {"step": "10"}, {"lr": 0}, {"lr": -1e-3}, {"lr": "3e-4"},
        {"lr": True}, {"lr": float("nan")}, {"grad_clip": float("inf")}, {"labels": "both"}, {"labels": ["shifted"]},
        {"precision": "fp7"}, {"precision": {}}, {"batch": 3}, {"batch": ""}, {"batch": "a\0b"},
        {"batch": ["batch.pt"]}, {"baseline": [1]}, {"baseline": {"a": 1}}, {"model": 3}, {"lr": 10**400},
    ],
)  # fmt: skip
def test_values_of_the_wrong_kind_are_refused(folder, change):
    write(folder, {**FULL, **change})
    with pytest.raises(ProbeError) as caught:
        request_from_folder(folder)
    assert caught.value.exit_code == 3
    assert next(iter(change)) in f"{caught.value.problem} {caught.value.why}"


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", "[" * 100_000, '{"ckpt": "c"'])
def test_a_broken_incident_file_is_refused(folder, content):
    write(folder, content)
    with pytest.raises(ProbeError) as caught:
        request_from_folder(folder)
    assert caught.value.exit_code == 3


def test_no_folder_and_no_file(tmp_path):
    for path, says in ((tmp_path / "none", "no such folder"), (tmp_path, "holds no incident.json")):
        with pytest.raises(ProbeError, match=says):
            request_from_folder(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(ESCAPES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(FULL)), JSON))
def test_whatever_a_folder_says_no_path_leaves_it(tmp_path_factory, content):
    root = tmp_path_factory.getbasetemp() / "any"
    root.mkdir(exist_ok=True)
    write(root, content)
    try:
        request = request_from_folder(root)
    except ProbeError as error:
        assert error.exit_code == 3
        return
    named = [request.ckpt, request.batch, request.config, request.optimizer, request.tokenizer]
    for path in [*named, *request.baselines, *request.logs]:
        assert path is None or Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))
    assert request.model is None


def test_everything_is_read_together(folder):
    incident = load_incident(request_from_folder(folder, Request(device="cpu")))
    assert isinstance(incident, Incident)
    assert incident.model.vocab_size == 50
    assert torch.equal(incident.batch.ids_BT, X) and incident.batch.convention == "unshifted"
    assert len(incident.baselines) == 1 and torch.equal(incident.baselines[0].ids_BT, X)
    assert incident.log is not None and incident.log.usual_loss == 3.0 and incident.log.logged_lr == 2e-4
    assert (incident.lr, incident.grad_clip, incident.run_precision) == (5e-4, 1.0, "bf16-true")
    assert incident.device == "cpu" and incident.tokenizer is None and dict(incident.source) == {"shard": "s0"}


def test_the_learning_rate_falls_back_to_the_log_and_then_to_the_optimizer(folder):
    write(folder, {key: value for key, value in FULL.items() if key != "lr"})
    incident = load_incident(request_from_folder(folder))
    assert incident.lr == 2e-4 and any("as logged" in note for note in incident.notes)
    incident = load_incident(request_from_folder(folder, Request(step=11)))
    assert incident.lr == pytest.approx(3e-4) and any("stored with the optimizer" in note for note in incident.notes)


def test_an_unknown_precision_of_the_run_is_assumed_and_said(folder):
    write(folder, {key: value for key, value in FULL.items() if key != "precision"})
    incident = load_incident(request_from_folder(folder))
    assert incident.run_precision == "bf16" and any("is assumed" in note for note in incident.notes)
    incident = load_incident(request_from_folder(folder, Request(precisions=("nvfp4", "fp16"))))
    assert incident.run_precision == "fp16"


def test_limits_apply_to_batch_and_baseline_and_ragged_rows_take_the_models_pad_id(folder):
    torch.save([[1, 2, 3], [4]], folder / "batch.pt")
    (folder / "config.json").write_text(json.dumps({"pad_token_id": 7}))
    (folder / "model.py").write_text(
        "from stability_probe.models.decoder import Decoder, DecoderConfig\n"
        f"def build(): return Decoder(DecoderConfig(**{SHAPE}))\n"
    )
    typed = Request(
        config=folder / "config.json", model=f"{folder / 'model.py'}:build", max_rows=2, max_positions=2, labels="auto"
    )
    incident = load_incident(request_from_folder(folder, typed))
    assert incident.batch.ids_BT.tolist() == [[1, 2], [4, 7]]
    assert incident.baselines[0].ids_BT.shape == (2, 2)
    assert any("positions are used" in note for note in incident.notes)


def test_the_log_that_a_trainer_keeps_in_its_checkpoint_is_found(folder):
    write(folder, {key: value for key, value in FULL.items() if key != "log"})
    state = folder / "ckpt" / "trainer_state.json"
    state.write_text(json.dumps({"log_history": [{"step": 9, "loss": 2.5}]}))
    incident = load_incident(request_from_folder(folder))
    assert incident.log.usual_loss == 2.5 and incident.log_paths == (state,)
    state.write_text("{")
    incident = load_incident(request_from_folder(folder))
    assert incident.log_paths == ()
    assert incident.log is None and any("was not used" in note for note in incident.notes)


def test_a_step_that_the_log_does_not_hold_is_said(folder):
    """`usual` values are still those before it, so nothing else would tell."""
    log = folder / "steps.jsonl"
    log.write_text("".join(json.dumps({"step": step, "loss": 2.5}) + "\n" for step in range(0, 100, 10)))
    told = {
        step: [note for note in load_incident(Request(ckpt=folder / "ckpt", batch=folder / "batch.pt", logs=(log,),
                                                      step=step)).notes if "says nothing" in note]
        for step in (50, 55, 5000)
    }  # fmt: skip
    assert told[50] == []
    assert "step 55: it holds steps 0–90, without this one" in told[55][0]
    assert "step 5000: it holds steps 0–90, give the part that holds it" in told[5000][0]


@pytest.mark.parametrize("name", ["ckpt", "batch", "config", "optimizer", "tokenizer", "baselines", "logs"])
def test_a_missing_input_is_named_before_anything_is_read(folder, name):
    (folder / "ckpt" / "model.pt").write_bytes(b"not read yet")
    missing = folder / "bacth.pt"
    request = request_from_folder(folder, Request(**{name: (missing,) if name.endswith("s") else missing}))
    with pytest.raises(ProbeError, match=r"cannot read the .*bacth.pt") as caught:
        load_incident(request)
    assert "batch.pt" in caught.value.hint


def test_a_name_that_no_file_system_allows_is_a_missing_file(folder):
    write(folder, {**FULL, "batch": "b" * 5000})
    with pytest.raises(ProbeError, match="cannot read the batch"):
        load_incident(request_from_folder(folder))


@pytest.mark.parametrize("lr", [1e308, float("nan"), float("inf"), -1.0])
def test_a_learning_rate_that_no_step_can_be_taken_with_is_refused(folder, lr):
    with pytest.raises(ProbeError, match="cannot use the learning rate"):
        load_incident(request_from_folder(folder, Request(lr=lr)))


@pytest.mark.parametrize("lacking", ["ckpt", "batch"])
def test_both_a_checkpoint_and_a_batch_are_needed(folder, lacking):
    write(folder, {key: value for key, value in FULL.items() if key != lacking})
    with pytest.raises(ProbeError, match="was given"):
        load_incident(request_from_folder(folder))


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "meta:x"])
def test_a_device_that_is_not_there_is_refused(folder, device):
    with pytest.raises(ProbeError, match="cannot use the device"):
        load_incident(request_from_folder(folder, Request(device=device)))


def tokenizer_json(path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(path))


def test_a_tokenizer_beside_the_checkpoint_is_found_and_a_named_one_wins(folder):
    tokenizer_json(folder / "ckpt" / "tokenizer.json")
    assert load_incident(request_from_folder(folder)).tokenizer.get_vocab_size() == 2
    for named in (folder / "ckpt", folder / "ckpt" / "tokenizer.json"):
        assert load_incident(request_from_folder(folder, Request(tokenizer=named))).tokenizer is not None


def test_a_broken_tokenizer_is_a_note_unless_it_was_named(folder):
    pytest.importorskip("tokenizers")
    (folder / "ckpt" / "tokenizer.json").write_text('{"model": 3}')
    incident = load_incident(request_from_folder(folder))
    assert incident.tokenizer is None and any("tokenizer.json" in note for note in incident.notes)
    with pytest.raises(ProbeError, match="cannot read the tokenizer"):
        load_incident(request_from_folder(folder, Request(tokenizer=folder / "ckpt")))
    with pytest.raises(ProbeError, match=r"holds no tokenizer\.json"):
        load_incident(request_from_folder(folder, Request(tokenizer=folder)))


def test_labels_shifted_twice_are_honoured_through_the_folder(folder):
    twice = torch.cat([X[:, 1:], X[:, :1]], dim=1)
    torch.save({"input_ids": X, "labels": twice}, folder / "batch.pt")
    batch = load_incident(request_from_folder(folder)).batch
    assert batch.convention == "unshifted"
    assert torch.equal(batch.targets_BT[:, :-2], X[:, 2:])


def test_reading_a_folder_imports_nothing_heavy(folder):
    code = (
        "import sys; from stability_probe.incident import request_from_folder; request_from_folder(sys.argv[1]); "
        "print(sorted({'torch', 'pandas', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("stored", "logged", "taken"),
    [
        (3e-4, 1e-4, 1e-4),  # a schedule has moved on since the checkpoint
        (6e-2, 4e-4, 6e-2),  # no schedule does that: a resumed run would step with it
        (6e-2, None, 6e-2),
        (None, 4e-4, 4e-4),
        (6e-2, 0.0, 0.0),  # a warm-up's first step
    ],
)
def test_the_learning_rate_is_the_logs_unless_the_stored_one_is_far_above(stored, logged, taken):
    log = LogFacts(step=5, usual_loss=3.0, loss_spread=0.1, logged_lr=logged)
    optimizer = None if stored is None else {"param_groups": [{"lr": stored / 2}, {"lr": stored}]}
    rate, notes = _learning_rate(Request(), log, optimizer)
    assert rate == taken
    assert (f"{logged:g}" if logged is not None else "") in notes[0]
