"""Safe file access: folders are checked before a run starts, and links are followed on request alone."""

from __future__ import annotations

import resource
import stat
from pathlib import Path

import pytest

from megalite.utils.errors import UserError
from megalite.utils.files import make_writable, read_regular, replace_file, write_output


def test_writable_folders_are_made_and_left_empty(tmp_path):
    make_writable(tmp_path / "a" / "b", "--save")
    make_writable(tmp_path / "a" / "b", "--save")
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("path", ["file", "file/below", "file/below/it"])
def test_a_folder_that_cannot_be_written_is_told_before(tmp_path, path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=rf"^--save {tmp_path / path} cannot be written \(.*\): pass another"):
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


def test_a_file_is_replaced_once_the_new_one_is_whole(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(OSError, match="full"):
        _replace(file, OSError("the disk is full"))
    with pytest.raises(UserError):
        _replace(file, None, refuse)
    assert file.read_text() == "old"
    with replace_file(file) as stream:
        stream.write(b"new")
        stream.flush()
        assert file.read_text() == "old"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "new"}


def test_an_output_that_does_not_fit_on_the_disk_leaves_the_old_file(tmp_path):
    output = tmp_path / "report.html"
    output.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # writing fails as on a full disk
    try:
        with pytest.raises(
            UserError, match=rf"^--output {output} cannot be written \(File too large\): pass "
        ):
            write_output(output, "a longer page", "--output")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"report.html": "old"}


def test_an_output_may_be_a_link_or_a_stream(tmp_path, capfd):
    (tmp_path / "link").symlink_to("file")
    write_output(tmp_path / "link", "a page", "--output")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "a page"
    write_output(Path("/dev/stdout"), b"a page", "--output")
    assert capfd.readouterr().out == "a page"


def test_an_output_keeps_its_mode(tmp_path):
    (tmp_path / "script").touch(0o750)
    write_output(tmp_path / "script", "#!/bin/sh", "--output")
    assert stat.S_IMODE((tmp_path / "script").stat().st_mode) == 0o750


def _replace(file, error, before_rename=lambda: None):
    with replace_file(file, before_rename=before_rename) as stream:
        stream.write(b"new")
        if error:
            raise error


def refuse():
    raise UserError("no")
