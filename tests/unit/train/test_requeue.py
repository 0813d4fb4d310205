"""The note for a scheduler: left, taken away, and no reason to end where neither can be done."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.train.stopping.requeue import NAME, RequeueNote


def test_it_is_there_until_it_is_removed(tmp_path: Path) -> None:
    note = RequeueNote(str(tmp_path / "made"))
    note.write("SIGUSR1")
    assert (tmp_path / "made" / NAME).read_text() == "SIGUSR1\n"
    note.remove()
    note.remove()
    assert not list((tmp_path / "made").iterdir())


def test_without_a_folder_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RequeueNote(None).write("SIGUSR1")
    RequeueNote(None).remove()
    assert not list(tmp_path.iterdir())


def test_what_stands_in_its_way_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / NAME).mkdir()
    note = RequeueNote(str(tmp_path))
    note.write("SIGUSR1")
    note.remove()
    written, deleted = (record.getMessage() for record in caplog.records)
    assert f"{NAME} cannot be written" in written
    assert f"{NAME} cannot be deleted" in deleted
