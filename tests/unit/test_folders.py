"""Folders that cannot be written to are told before a run starts."""

from __future__ import annotations

import pytest

from megalite.errors import UserError
from megalite.folders import make_writable, read_regular


def test_writable_folders_are_made_and_left_empty(tmp_path):
    make_writable(tmp_path / "a" / "b", "--save")
    make_writable(tmp_path / "a" / "b", "--save")
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("path", ["file", "file/below", "file/below/it"])
def test_a_folder_that_cannot_be_written_is_told_before(tmp_path, path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=rf"^--save {tmp_path / path} cannot be written \(.*\): give another"):
        make_writable(tmp_path / path, "--save")


def test_what_a_link_leads_to_is_read_where_it_is_asked_for(tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 4, follow=True) == b"text"
    with pytest.raises(OSError, match="symbolic link"):
        read_regular(tmp_path / "link", 4)
    with pytest.raises(OSError, match="more than 3 bytes"):
        read_regular(tmp_path / "file", 3)
    (tmp_path / "device").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="not a regular file"):
        read_regular(tmp_path / "device", 4, follow=True)
