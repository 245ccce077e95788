"""Report files: whole or not at all, and read back only when they are what they say."""

from __future__ import annotations

import copy
import dataclasses
import errno
import json
import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stability_probe import reports
from stability_probe.errors import ProbeError
from stability_probe.reports import check_destination, render, saved, write
from stability_probe.schema import to_json
from tests.report_samples import SAMPLES, repeated


@pytest.mark.parametrize("name", ["run.md", "run.json", "run.txt", "RUN.JSON"])
def test_the_extension_chooses_the_format(tmp_path, name):
    write(repeated(), tmp_path / name)
    text = (tmp_path / name).read_text(encoding="utf-8")
    format_ = {"md": "markdown", "json": "json", "txt": "terminal"}[name.lower().split(".")[1]]
    assert text == render(repeated(), format_)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("name", "told"), [("run.html", "not available yet"), ("run.pdf", "no format"), ("run", "no format")]
)
def test_other_extensions_are_wrong_usage(tmp_path, name, told):
    for refuse in (lambda path: write(repeated(), path), check_destination):
        with pytest.raises(ProbeError) as caught:
            refuse(tmp_path / name)
        assert caught.value.exit_code == 2 and told in caught.value.why and ".json" in caught.value.hint
    assert not list(tmp_path.iterdir())


def test_a_destination_is_refused_before_the_work(tmp_path):
    check_destination(tmp_path / "run.md")
    (tmp_path / "folder.md").mkdir()
    for path in (tmp_path / "nowhere" / "run.md", tmp_path / "folder.md"):
        with pytest.raises(ProbeError) as caught:
            check_destination(path)
        assert caught.value.exit_code == 2


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch, call):
    path = tmp_path / "run.md"
    path.write_text("the report of yesterday")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(reports.os, call, full)
    with pytest.raises(ProbeError) as caught:
        write(repeated(), path)
    assert caught.value.exit_code == 4
    assert "No space left" in caught.value.why
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.md"]
    assert path.read_text() == "the report of yesterday"


def test_a_disk_that_fills_up_half_way(tmp_path):
    """A real refusal of the kernel in the middle of the file: the size limit of the process."""
    code = (
        "import resource, sys; sys.path.insert(0, 'tests')\n"
        "from report_samples import repeated\n"
        "from stability_probe.reports import write\n"
        "from stability_probe.errors import ProbeError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: write(repeated(), sys.argv[1])\n"
        "except ProbeError as error: sys.exit(error.exit_code)\n"
    )
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run.json")], env=environment)
    assert done.returncode == 4
    assert not list(tmp_path.iterdir())


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link.md").symlink_to(tmp_path / "real.md")
    write(repeated(), tmp_path / "link.md")
    assert (tmp_path / "link.md").is_symlink() and (tmp_path / "real.md").is_file()


def test_a_device_stays_a_device_and_says_that_it_is_full(tmp_path):
    pipe = tmp_path / "run.md"
    pipe.symlink_to("/dev/full")
    with pytest.raises(ProbeError) as refused:
        write(repeated(), pipe)
    assert refused.value.exit_code == 4
    assert os.path.exists("/dev/full")
    assert not os.path.isfile("/dev/full")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.md"]


def test_new_reports_get_ordinary_permissions(tmp_path):
    before = os.umask(0o022)
    try:
        write(repeated(), tmp_path / "run.md")
    finally:
        os.umask(before)
    assert (tmp_path / "run.md").stat().st_mode & 0o777 == 0o644


def test_unknown_format():
    with pytest.raises(ProbeError, match="markdwn") as caught:
        render(repeated(), "markdwn")
    assert "markdown" in caught.value.hint


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_saved_report_is_read_back(tmp_path, sample):
    report = SAMPLES[sample]()
    write(report, tmp_path / "run.json")
    assert to_json(saved.load(tmp_path / "run.json")) == json.loads(json.dumps(to_json(report)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"schema_version": 2}',
        '{"schema_version": 1}',
        "[" * 100_000,
        '{"rows": [], "skip": false}',
        "\ud7ff",
    ],
)
def test_what_is_not_a_report_is_refused(tmp_path, text):
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(ProbeError) as caught:
        saved.load(tmp_path / "run.json")
    assert caught.value.exit_code == 3


def test_what_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "bytes.json", tmp_path / "absent.json", tmp_path):
        with pytest.raises(ProbeError) as caught:
            saved.load(path)
        assert caught.value.exit_code == 3


def _places(value, path=()):
    """The paths of every value inside plain JSON data."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*path, key))


SMALL = dataclasses.replace(repeated(), tables={name: rows[:1] for name, rows in repeated().tables.items()})
PLAIN = json.loads(json.dumps(to_json(SMALL)))
PLACES = [path for path in _places(PLAIN) if path]
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**400),
    st.floats(),
    st.text(),
    st.just([]),
    st.just({}),
    st.just([[1]]),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.sampled_from(PLACES), junk=JUNK)
def test_a_tampered_report_renders_or_is_refused(tmp_path, place, junk):
    data = copy.deepcopy(PLAIN)
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = junk
    (tmp_path / "run.json").write_text(json.dumps(data), encoding="utf-8")
    try:
        report = saved.load(tmp_path / "run.json")
    except ProbeError as error:
        assert error.exit_code == 3
        return
    for format_ in ("terminal", "markdown", "json"):
        assert render(report, format_)
