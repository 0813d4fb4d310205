"""Test the note for a scheduler: it is written and deleted, and failures do not end the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megalite.train.stopping import REQUEUE_FILE, RequeueNote


def test_it_exists_until_it_is_removed(tmp_path: Path) -> None:
    note = RequeueNote(str(tmp_path / "made"))
    note.write("SIGUSR1")
    assert (tmp_path / "made" / REQUEUE_FILE).read_text() == "SIGUSR1\n"
    note.remove()
    note.remove()
    assert not list((tmp_path / "made").iterdir())


def test_without_a_folder_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RequeueNote(None).write("SIGUSR1")
    RequeueNote(None).remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [lambda file: file.symlink_to("target"), os.mkfifo])
def test_a_link_is_not_followed_and_a_pipe_not_waited_for(tmp_path: Path, make, caplog) -> None:
    (tmp_path / "target").write_text("mine")
    make(tmp_path / REQUEUE_FILE)
    RequeueNote(str(tmp_path)).write("SIGUSR1")
    assert f"{REQUEUE_FILE} cannot be written" in caplog.text
    assert (tmp_path / "target").read_text() == "mine"


def test_a_folder_in_its_place_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / REQUEUE_FILE).mkdir()
    note = RequeueNote(str(tmp_path))
    note.write("SIGUSR1")
    note.remove()
    written, deleted = (record.getMessage() for record in caplog.records)
    assert f"{REQUEUE_FILE} cannot be written" in written
    assert f"{REQUEUE_FILE} cannot be deleted" in deleted
