"""Nothing that a pickle asks for is run, and what people really save still comes through."""

import argparse
import collections
import os
import pathlib
import pickle
import subprocess

import numpy as np
import pytest
import torch

from stability_probe.checkpoints.safe import InertObject, load_pickle_safely, read_json
from stability_probe.errors import ProbeError

ZIP_AND_LEGACY = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


class FilledByKey(dict):
    pass


def saved(tmp_path, obj, zipped=True):
    path = tmp_path / "saved.pt"
    torch.save(obj, path, _use_new_zipfile_serialization=zipped)
    return path


@ZIP_AND_LEGACY
@pytest.mark.parametrize("function", [os.system, os.popen, eval, exec, subprocess.getoutput, pathlib.Path.touch])
def test_code_in_a_pickle_never_runs(tmp_path, zipped, function):
    trace = tmp_path / "trace"
    argument = {eval: f"open({str(trace)!r}, 'w')", exec: f"open({str(trace)!r}, 'w')"}.get(function, f"touch {trace}")
    if function is pathlib.Path.touch:
        argument = trace
    path = saved(tmp_path, {"model": {"w": torch.ones(2)}, "evil": Calls(function, argument)}, zipped)
    try:
        assert not isinstance(load_pickle_safely(path)["evil"], (int, str))
    except ProbeError as error:
        assert error.exit_code == 3
        assert "weights_only" not in str(error)  # torch's own advice would be to switch the safety off
    assert not trace.exists()


def test_the_hostile_pickle_would_have_run_otherwise(tmp_path):
    trace = tmp_path / "trace"
    torch.load(saved(tmp_path, Calls(os.system, f"touch {trace}")), weights_only=False)
    assert trace.exists()


@ZIP_AND_LEGACY
def test_what_training_scripts_save(tmp_path, zipped):
    obj = {
        "args": argparse.Namespace(lr=0.1, w=torch.arange(3)),
        "path": pathlib.PurePosixPath("/a/b"),
        "queue": collections.deque([1, 2], maxlen=5),
        "defaults": collections.defaultdict(list, {"x": [1]}),
        "slice": slice(1, 5, 2),
        "ordered": collections.OrderedDict(a=1),
        "plain": [None, True, 2.5, "é", {1, 2}, (3,)],
    }
    found = load_pickle_safely(saved(tmp_path, obj, zipped))
    assert isinstance(found["args"], InertObject) and found["args"].inert_name == "argparse.Namespace"
    assert found["args"].state["lr"] == 0.1 and found["args"].state["w"].tolist() == [0, 1, 2]
    assert found["path"] == "/a/b"
    assert found["queue"] == [1, 2]
    assert found["defaults"] == {"x": [1]}
    assert found["slice"] == slice(1, 5, 2)
    assert found["ordered"] == {"a": 1} and found["plain"] == obj["plain"]


@ZIP_AND_LEGACY
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        np.array(["ab", "c"]),
        np.array([True, False]),
        np.arange(3, dtype=">i4"),
        np.array(3.5),
        np.zeros((0, 4)),
    ],
    ids=str,
)
def test_numpy_arrays_are_rebuilt(tmp_path, zipped, array):
    found = load_pickle_safely(saved(tmp_path, [array], zipped))[0]
    assert isinstance(found, np.ndarray) and found.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(found, array)


def test_numpy_scalars_are_rebuilt(tmp_path):
    scalars = [np.float32(3.5), np.int64(7), np.bool_(True)]
    assert load_pickle_safely(saved(tmp_path, scalars)) == scalars


def test_numpy_arrays_of_objects_are_refused(tmp_path):
    with pytest.raises(ProbeError):
        load_pickle_safely(saved(tmp_path, np.array([1, None], dtype=object)))


def test_numpy_scalar_of_a_struct_with_pointers_is_refused(tmp_path):
    forged = Calls(np._core.multiarray.scalar, np.dtype("V8"), b"A" * 8)
    with pytest.raises(ProbeError):
        load_pickle_safely(saved(tmp_path, forged))


def test_subclasses_of_dict_come_back_as_dicts(tmp_path):
    found = load_pickle_safely(saved(tmp_path, {"batch": FilledByKey(ids=torch.arange(2))}))
    assert found["batch"]["ids"].tolist() == [0, 1]


@ZIP_AND_LEGACY
def test_tensors_of_zip_files_are_mapped_not_read(tmp_path, zipped, monkeypatch):
    path, asked, load = saved(tmp_path, {"w": torch.ones(4)}, zipped), {}, torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: asked.update(kwargs) or load(*args, **kwargs))
    assert load_pickle_safely(path)["w"].tolist() == [1, 1, 1, 1]
    assert asked["mmap"] is zipped and asked["weights_only"] is True


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04", b"PK\x03\x04garbage", b"garbage", pickle.dumps({"a": 1}), b"\x80\x02.", b"\x80\x02c", b"["],
)
def test_broken_files_are_an_error_in_words(tmp_path, content):
    path = tmp_path / "broken.pt"
    path.write_bytes(content)
    with pytest.raises(ProbeError) as caught:
        load_pickle_safely(path)
    assert caught.value.exit_code == 3 and str(path) in caught.value.problem


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
@ZIP_AND_LEGACY
def test_truncated_files_are_an_error_in_words(tmp_path, share, zipped):
    path = saved(tmp_path, {"w": torch.randn(50, 50)}, zipped)
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * share)])
    with pytest.raises(ProbeError):
        load_pickle_safely(path)


def test_missing_files(tmp_path):
    with pytest.raises(ProbeError, match="cannot read"):
        load_pickle_safely(tmp_path / "nowhere.pt")
    with pytest.raises(ProbeError):
        read_json(tmp_path / "nowhere.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ProbeError):
        read_json(tmp_path / "bad.json")
