"""Folders that cannot be written to are told before a run starts."""

from __future__ import annotations

import pytest

from megalite.errors import UserError
from megalite.folders import make_writable


def test_writable_folders_are_made_and_left_empty(tmp_path):
    make_writable(tmp_path / "a" / "b", "--save")
    make_writable(tmp_path / "a" / "b", "--save")
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("path", ["file", "file/below", "file/below/it"])
def test_a_folder_that_cannot_be_written_is_told_before(tmp_path, path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=rf"^--save {tmp_path / path} cannot be written \(.*\): give another"):
        make_writable(tmp_path / path, "--save")
