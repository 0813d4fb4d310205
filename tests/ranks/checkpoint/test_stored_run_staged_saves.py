"""Uploads that a run has not ended: the next start ends them, on whatever nodes, or says why it cannot."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest

from megalite.checkpoint.folder import SaveError
from megalite.checkpoint.saver import Saver
from megalite.checkpoint.stored_run import StoredRun
from megalite.distributed.topology import Topology
from megalite.utils.errors import UserError
from megalite.utils.log import log
from megalite.utils.object_store import ObjectFolder
from tests.live_ranks import run_ranks
from tests.object_server import ObjectServer, object_server, s3_in, settings_for
from tests.ranks.checkpoint.saving import config_of, contents_of, loaded, parallel, state

pytest.importorskip("obstore")

RUN = "s3://b/run"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with s3_in(tmp_path, monkeypatch) as server:
        yield server


def save(saver: Saver, topology: Topology, iteration: int, *, is_last: bool = False) -> None:
    contents = contents_of(config_of(RUN), topology, iteration)
    saver.save(contents, state(topology, iteration / 10), is_last=is_last)


def saver_of(topology: Topology, **fields: object) -> Saver:
    return Saver(config_of(RUN, **fields).checkpoint, topology)


def leave(topology: Topology, iteration: int, refused: str, **fields: object) -> None:
    """The last save of a run whose store refuses objects with this in their names."""
    upload = ObjectFolder.upload

    def refuse(objects: ObjectFolder, name: str, file: Path) -> None:
        if refused in name:
            raise OSError(errno.EIO, "no answer", name)
        upload(objects, name, file)

    with (
        mock.patch.object(ObjectFolder, "upload", refuse),
        pytest.raises(SaveError, match="cannot be upload"),
    ):
        save(saver_of(topology, **fields), topology, iteration, is_last=True)


def start(topology: Topology, **fields: object) -> tuple[tuple[int, float] | None, list[str]]:
    """The next start: what it loads, and what it has reported before."""
    messages = list[str]()

    def note(record: object) -> bool:
        messages.append(record.getMessage())  # type: ignore[attr-defined]
        return True

    log.setLevel(logging.INFO)
    log.addFilter(note)
    try:
        saver_of(topology, **fields).upload_staged()
    finally:
        log.removeFilter(note)
    stored = StoredRun.at(RUN, str(fields.get("save_stage") or "") or None)
    assert stored is not None and not stored.staged()
    return loaded(topology, config_of(RUN, **fields)), messages


def end_and_leave(topology: Topology, url: str, folder: Path, refused: str) -> None:
    """Each rank is a node of its own, with its own disk."""
    os.environ.update(settings_for(url))
    disk = str(folder / f"disk{topology.rank}")
    save(saver_of(topology, save_stage=disk), topology, 10, is_last=True)
    leave(topology, 20, refused, save_stage=disk)


def start_on(topology: Topology, url: str, folder: Path, disks: str):
    os.environ.update(settings_for(url))
    return start(topology, save_stage=str(folder / f"disk{disks[topology.rank]}"))


@pytest.mark.parametrize(
    ("refused", "disks", "reason"),
    [
        pytest.param("dp_", "10", "", id="nodes have changed places"),
        pytest.param("dp_", "102", "", id="a node has been added"),
        pytest.param("run.json", "0", "", id="a node is lost that had uploaded its file"),
        pytest.param(
            "dp_001", "02", r"no node has its \S+dp_001\S+, and it was not uploaded", id="one is lost"
        ),
        pytest.param("run.json", "1", "no node has its SHA256SUMS", id="rank 0's node is lost"),
    ],
)
def test_a_save_is_finished_if_each_file_is_on_a_node_or_in_the_store(
    tmp_path: Path, refused: str, disks: str, reason: str
) -> None:
    with object_server() as server:
        run_ranks(end_and_leave, parallel(1, 1, 2).mesh, 2, server.url, tmp_path, refused)
        world = len(disks)
        results = run_ranks(start_on, parallel(1, 1, world).mesh, world, server.url, tmp_path, disks)
        assert [found for found, _ in results] == [(10, 1.0) if reason else (20, 2.0)] * world
        said = " | ".join(results[0][1])
        wanted = f"checkpoint iter_0000020 in .+ is removed: {reason}" if reason else "which an earlier start"
        assert re.search(wanted, said), said


def test_only_what_is_missing_in_the_store_is_uploaded(server: ObjectServer, topology) -> None:
    leave(topology, 10, "run.json")
    server.writes.clear()
    assert start(topology)[0] == (10, 1.0)
    assert not [name for _, name in server.writes if name.endswith(".safetensors")]


def test_what_cannot_be_finished_is_removed_with_the_reason(server: ObjectServer, topology, tmp_path) -> None:
    stage = StoredRun.at(RUN)
    assert stage is not None
    leave(topology, 10, "safetensors")
    (tensors,) = stage.staged()[0].glob("*.safetensors")
    content = tensors.read_bytes()
    tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    found, messages = start(topology)
    assert found is None
    assert f"is removed: {tensors.name} has other contents than SHA256SUMS says" in messages[-1]
    leave(topology, 10, "safetensors")
    (stage.staged()[0] / "index.json").write_text("{}")
    assert "is removed: index.json has other contents than SHA256SUMS says" in start(topology)[1][-1]
    # Another run, or this one on other nodes, has saved since.
    leave(topology, 20, "safetensors")
    other = str(tmp_path / "other")
    save(saver_of(topology, save_stage=other), topology, 10, is_last=True)
    found, messages = start(topology)
    assert found == (10, 1.0)
    assert "is removed: the latest in s3://b/run is iter_0000010, which has changed since" in messages[-1]
    # The store has it, and its process has ended before it has deleted its files.
    with mock.patch.object(shutil, "rmtree"):
        save(saver_of(topology), topology, 20, is_last=True)
    server.writes.clear()
    assert start(topology) == ((20, 2.0), [])
    assert not server.writes


def test_a_start_that_cannot_upload_says_what_to_do_and_keeps_the_files(server, topology) -> None:
    leave(topology, 10, "safetensors")
    server.is_read_only = True
    with pytest.raises(
        UserError, match=r"left, cannot be uploaded \(Permission denied: .+ or delete \S+partial"
    ):
        start(topology)
    server.is_read_only = False
    stored = StoredRun.at(RUN)
    assert stored is not None
    (stored.stage / ".iter_0000020.5f3a.partial").touch()
    with pytest.raises(UserError, match=r"iter_0000020, which .+ \(Not a directory: .+ or delete"):
        start(topology)
    (stored.stage / ".iter_0000020.5f3a.partial").unlink()
    assert start(topology)[0] == (10, 1.0)


def test_a_withdrawn_save_is_not_uploaded(server: ObjectServer, topology) -> None:
    save(saver_of(topology), topology, 10, is_last=True)
    leave(topology, 20, "safetensors")
    saver_of(topology).withdraw(10, 20)
    assert start(topology) == ((10, 1.0), [])


def test_the_end_of_a_run_waits_for_uploads_as_long_as_it_may(server: ObjectServer, topology, caplog) -> None:
    """The last save is the one that the next start uploads, though one before it was not uploaded either."""
    upload, goes_on = ObjectFolder.upload, threading.Event()

    def held_up(*args: object) -> None:
        assert goes_on.wait(60.0)
        with suppress(FileNotFoundError):
            upload(*args)  # type: ignore[arg-type]

    with mock.patch.object(ObjectFolder, "upload", held_up):
        with saver_of(topology, exit_upload_seconds=0.05) as saver:
            save(saver, topology, 10)
            save(saver, topology, 20, is_last=True)
        assert saver.has_left
        for iteration, what in ((10, "the last save takes its place"), (20, "it stays in")):
            line = f"iter_00000{iteration} is not uploaded within --exit-upload-seconds 0.05: {what}"
            assert line in caplog.text
        uploads = [thread for thread in threading.enumerate() if thread.name == "save-checkpoint"]
        goes_on.set()
        for thread in uploads:
            thread.join()
        assert not [name for name in server.objects if name.endswith(("SHA256SUMS", "latest"))]
    assert start(topology)[0] == (20, 2.0)
    with saver_of(topology, exit_upload_seconds=60.0) as saver:
        save(saver, topology, 30)
    assert not saver.has_left
    assert loaded(topology, config_of(RUN)) == (30, 3.0)


def test_an_upload_that_has_failed_is_an_error_also_with_a_limit(server: ObjectServer, topology) -> None:
    config = dataclasses.replace(config_of(RUN).checkpoint, exit_upload_seconds=60.0)
    server.is_read_only = True
    saver = Saver(config, topology)
    with pytest.raises(
        SaveError, match="the next start of the run uploads them unless a later save is whole"
    ):
        save(saver, topology, 10, is_last=True)
    assert not saver.has_left
