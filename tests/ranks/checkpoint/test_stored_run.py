"""Checkpoints in object storage: whole in any layout, after any kill, and through folders of each node."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megalite.checkpoint import manifest, tensor_files
from megalite.checkpoint.download import Download
from megalite.checkpoint.load import choose_checkpoint
from megalite.checkpoint.local_saves import LocalSaves
from megalite.checkpoint.manifest import TensorBytes
from megalite.checkpoint.save import Save
from megalite.checkpoint.saver import Saver
from megalite.checkpoint.stored_run import StoredRun, local_copy
from megalite.checkpoint.tensor_files import write_file
from megalite.cli.checkpoints import inspect
from megalite.distributed.topology import Topology
from megalite.frontends.command_line import parse
from megalite.utils.errors import UserError
from megalite.utils.object_store import ObjectFolder
from tests.live_ranks import run_ranks
from tests.object_server import ObjectServer, object_server, s3_in, settings_for
from tests.ranks.checkpoint.saving import (
    MODEL,
    config_of,
    contents_of,
    elements,
    full_disk,
    loaded,
    parallel,
    state,
    writer,
)

pytest.importorskip("obstore")

RUN = "s3://b/run"


class Killed(BaseException):
    """The process ends here: nothing after it runs."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with s3_in(tmp_path, monkeypatch) as server:
        yield server


def saved(topology: Topology, iteration: int, value: float, **fields: object) -> None:
    """A run that saves once."""
    config = config_of(RUN, **fields)
    saver = Saver(config.checkpoint, topology)
    saver.save(contents_of(config, topology, iteration), state(topology, value), is_last=True)


def start(topology: Topology, **fields: object) -> Saver:
    """The next start of the run."""
    saver = Saver(config_of(RUN, **fields).checkpoint, topology)
    saver.upload_staged()
    return saver


def checkpoints(server: ObjectServer) -> set[str]:
    return {name.split("/")[2] for name in server.objects if name.count("/") > 2}


def has_what_its_sums_name(server: ObjectServer) -> bool:
    """Whether every checkpoint with SHA256SUMS has contents of these digests."""
    digests = {hashlib.sha256(content).hexdigest() for content in server.objects.values()}
    sums = [content.decode() for name, content in server.objects.items() if name.endswith("/SHA256SUMS")]
    return all(line.split()[0] in digests for text in sums for line in text.splitlines())


def stage_of(folder: Path) -> list[Path]:
    """What the stage in a folder holds, but the empty folder of the run."""
    return [path for path in folder.glob("megalite-stage-*/*/*") if path.name != "metrics.jsonl"]


def save_and_load(topology: Topology, url: str, folder: Path, saves: bool) -> tuple[int, float] | None:
    """Each rank is a node of its own, with its own disk."""
    os.environ.update(settings_for(url))
    config = config_of(RUN, save_stage=str(folder / f"disk{topology.rank}"))
    if saves:
        with blocks_of(16), Saver(config.checkpoint, topology) as saver:
            saver.save(contents_of(config, topology, 10), state(topology, 1.0))
            saver.save(contents_of(config, topology, 20), state(topology, 2.0))
    return loaded(topology, config)


@pytest.mark.parametrize("layout", [(2, 1), (1, 2)])
def test_nodes_without_a_common_file_system_save_and_load_in_any_layout(
    tmp_path: Path, layout: tuple[int, int]
) -> None:
    (tp, dp), (other_tp, other_dp) = layout, layout[::-1]
    with object_server() as server:
        run = (server.url, tmp_path)
        assert run_ranks(save_and_load, parallel(tp, 1, dp).mesh, 2, *run, True) == [(20, 2.0)] * 2
        assert (
            run_ranks(save_and_load, parallel(other_tp, 1, other_dp).mesh, 2, *run, False) == [(20, 2.0)] * 2
        )
        assert run_ranks(save_and_load, parallel().mesh, 1, *run, False) == [(20, 2.0)]
    for disk in tmp_path.iterdir():
        assert not stage_of(disk)


@contextmanager
def killed_before(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends the block before its request of this number that changes the store, if there is one."""
    calls = 0

    def watched(name: str) -> None:
        original = getattr(ObjectFolder, name)

        def call(*args: object, **options: object) -> object:
            nonlocal calls
            if calls == number:
                raise Killed
            calls += 1
            return original(*args, **options)

        patch.setattr(ObjectFolder, name, call)

    with monkeypatch.context() as patch:
        for name in ("write", "upload", "delete"):
            watched(name)
        yield


@pytest.mark.parametrize(
    ("first", "second", "keep_last"),
    [(10, 20, 1), (10, 10, None), (20, 10, 1)],
)
def test_a_kill_at_any_request_leaves_a_whole_checkpoint(
    tmp_path: Path,
    server: ObjectServer,
    topology,
    monkeypatch,
    first: int,
    second: int,
    keep_last: int | None,
) -> None:
    """The next start goes on from the save, and the next save clears up."""
    number, was_killed = 0, True
    while was_killed:
        server.objects.clear()
        saved(topology, first, 1.0)
        was_killed = False
        try:
            with killed_before(number, monkeypatch):
                saved(topology, second, 2.0, keep_last=keep_last)
        except Killed:
            was_killed = True
        assert has_what_its_sums_name(server), number
        found = loaded(topology, config_of(RUN))
        assert found in ((first, 1.0), (second, 2.0)), number
        assert was_killed or found == (second, 2.0)
        start(topology)
        assert loaded(topology, config_of(RUN)) == (second, 2.0), number
        assert has_what_its_sums_name(server), number
        saved(topology, 30, 3.0)
        assert loaded(topology, config_of(RUN)) == (30, 3.0)
        for name in checkpoints(server):
            assert f"b/run/{name}/SHA256SUMS" in server.objects, number
        number += 1
    assert number > 5
    assert not stage_of(tmp_path / "tmp")


def test_a_save_of_the_same_iteration_replaces_the_files(server: ObjectServer, topology) -> None:
    for value in (1.0, 2.0):
        saved(topology, 10, value)
        assert loaded(topology, config_of(RUN)) == (10, value)
        assert len([name for name in server.objects if name.endswith(".safetensors")]) == 1


def test_retention_and_the_choice_are_those_of_a_folder(server: ObjectServer, topology) -> None:
    for iteration in (10, 20, 30, 40):
        saved(topology, iteration, iteration / 10, keep_last=2)
    assert checkpoints(server) == {"iter_0000030", "iter_0000040"}
    assert loaded(topology, config_of(RUN, load_iteration=30)) == (30, 3.0)
    with pytest.raises(
        UserError, match=r"--load s3://b/run has no checkpoint iter_0000020: it has iterations"
    ):
        loaded(topology, config_of(RUN, load_iteration=20))
    del server.objects["b/run/iter_0000040/SHA256SUMS"]
    assert loaded(topology, config_of(RUN)) == (30, 3.0)
    saved(topology, 20, 5.0)  # a run that was resumed from before 30
    assert loaded(topology, config_of(RUN)) == (20, 5.0)
    assert loaded(topology, config_of("s3://b/other")) is None


def test_withdrawn_checkpoints_are_not_loaded(server: ObjectServer, topology) -> None:
    for iteration in (10, 20, 30):
        saved(topology, iteration, iteration / 10)
    saver = Saver(config_of(RUN).checkpoint, topology)
    text = saver.withdraw(10, 30)
    assert text == (
        "the last good checkpoint is s3://b/run/iter_0000010 (withdrawn: unaudited_iter_0000020, "
        "unaudited_iter_0000030)"
    )
    assert loaded(topology, config_of(RUN)) == (10, 1.0)
    saved(topology, 20, 2.5, keep_last=2)
    assert loaded(topology, config_of(RUN)) == (20, 2.5)
    assert checkpoints(server) == {"iter_0000010", "iter_0000020", "iter_0000030"}


def test_wrong_bytes_are_read_again_once_and_then_named(server: ObjectServer, topology) -> None:
    saved(topology, 10, 1.0)
    server.requests.clear()
    assert loaded(topology, config_of(RUN)) == (10, 1.0)
    requests = len(server.requests)
    server.flips, server.flips_in = 1, ".safetensors"
    assert loaded(topology, config_of(RUN)) == (10, 1.0)
    assert (server.flips, len(server.requests)) == (0, 2 * requests + 1)
    (tensors,) = [name for name in server.objects if name.endswith(".safetensors")]
    damage(server, tensors)
    wrong = (
        rf"no complete checkpoint to load \(iter_0000010: {Path(tensors).name} has other contents than SHA"
    )
    with pytest.raises(UserError, match=wrong):
        loaded(topology, config_of(RUN))


def damage(server: ObjectServer, name: str) -> None:
    """Change the last byte of an object."""
    content = server.objects[name]
    server.objects[name] = content[:-1] + bytes([content[-1] ^ 1])


def truncate(server: ObjectServer, name: str) -> None:
    server.objects[name] = server.objects[name][:-1]


def truncate_to_a_block(server: ObjectServer, name: str) -> None:
    server.objects[name] = server.objects[name][:64]


def remove(server: ObjectServer, name: str) -> None:
    del server.objects[name]


@pytest.mark.parametrize("has_blocks", [True, False])
@pytest.mark.parametrize("harm", [damage, truncate, truncate_to_a_block, remove])
def test_a_damaged_checkpoint_is_skipped_as_in_a_folder(
    server: ObjectServer, topology, tmp_path: Path, caplog, has_blocks: bool, harm: Callable[..., None]
) -> None:
    """Also a checkpoint without digests of blocks, as one that was copied from a folder."""
    with blocks_of(64) if has_blocks else writer(lambda file, pieces, **_: write_file(file, pieces)):
        for iteration in (10, 20):
            saved(topology, iteration, iteration / 10)
    (tensors,) = [name for name in server.objects if "20/" in name and name.endswith(".safetensors")]
    harm(server, tensors)
    assert loaded(topology, config_of(RUN)) == (10, 1.0)
    assert f"iter_0000020 is damaged and skipped: {Path(tensors).name} " in caplog.text
    assert "checkpoint s3://b/run/iter_0000010 is loaded instead" in caplog.text
    with pytest.raises(UserError, match=r"pass another --load-iteration"):
        loaded(topology, config_of(RUN, load_iteration=20))
    assert not stage_of(tmp_path / "tmp")


@contextmanager
def blocks_of(num_bytes: int) -> Iterator[None]:
    """Blocks that even small files have several of."""
    with ExitStack() as stack:
        for module in (manifest, tensor_files):
            stack.enter_context(mock.patch.object(module, "BLOCK_BYTES", num_bytes))
        yield


def test_a_node_reads_the_header_and_the_blocks_that_it_needs(server: ObjectServer, topology) -> None:
    with blocks_of(64):
        saved(topology, 10, 1.0)
    (tensors,) = [name for name in server.objects if name.endswith(".safetensors")]
    file, content = Path(tensors).name, server.objects[tensors]
    header = 8 + int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8:header])["model.cut"]["data_offsets"]
    server.requests.clear()
    needs = {file: [TensorBytes("model.cut", 4, 1 << 60)]}
    found = choose_checkpoint(StoredRun.at(RUN), topology, needs=lambda _: needs)  # type: ignore[arg-type]
    assert found is not None and isinstance(found.download, Download)
    read = {at for each in server.requests if each.name == tensors for at in range(each.begin, each.end)}
    first, stop = (header + begin + 4) // 64 * 64, -(-(header + end) // 64) * 64
    expected = {*range(-(-header // 64) * 64), *range(first, stop)}
    assert read == {at for at in expected if at < len(content)} != set(range(len(content)))
    copy = (found.folder / file).read_bytes()
    assert len(copy) == len(content)
    assert copy[header + begin + 4 : header + end] == content[header + begin + 4 : header + end]
    server.requests.clear()
    found.download.fetch(found, needs)  # of another process
    assert not server.requests
    found.download.close()


@pytest.mark.parametrize("header", [b"[]", b'{"a": {"data_offsets": [0, -8]}}', b"{}", b"{"])
def test_a_header_that_is_wrong_is_damage(server: ObjectServer, topology, header: bytes) -> None:
    with blocks_of(64):
        saved(topology, 10, 1.0)
        (tensors,) = [name for name in server.objects if name.endswith(".safetensors")]
        content = len(header).to_bytes(8, "little") + header
        blocks = [hashlib.sha256(content[at : at + 64]).hexdigest() for at in range(0, len(content), 64)]
        server.objects[tensors] = content
        index = json.loads(server.objects["b/run/iter_0000010/index.json"])
        index["blocks"] = {Path(tensors).name: blocks}
        text = json.dumps(index).encode()
        sums = server.objects["b/run/iter_0000010/SHA256SUMS"].decode()
        old = hashlib.sha256(server.objects["b/run/iter_0000010/index.json"]).hexdigest()
        server.objects["b/run/iter_0000010/index.json"] = text
        changed = sums.replace(old, hashlib.sha256(text).hexdigest())
        server.objects["b/run/iter_0000010/SHA256SUMS"] = changed.encode()
    with pytest.raises(UserError, match=r"safetensors: (its header is damaged|\S+ is not in it)"):
        loaded(topology, config_of(RUN))


def test_a_failed_save_leaves_nothing_and_the_next_one_works(
    server: ObjectServer, topology, tmp_path: Path, caplog
) -> None:
    """A save that cannot be uploaded stays until the files of another one are whole."""
    config = config_of(RUN)
    with Saver(config.checkpoint, topology) as saver:
        saver.save(contents_of(config, topology, 10), state(topology, 1.0))
        saver.finish()
        with writer(full_disk):
            saver.save(contents_of(config, topology, 20), state(topology, 2.0))
        saver.finish()
        server.is_read_only = True
        saver.save(contents_of(config, topology, 30), state(topology, 3.0))
        saver.finish()
        with writer(full_disk):
            saver.save(contents_of(config, topology, 35), state(topology, 3.5))
        saver.finish()
        with mock.patch.object(StoredRun, "latest", side_effect=OSError(errno.EIO, "no answer")):
            saver.save(contents_of(config, topology, 36), state(topology, 3.6))
            saver.finish()
        assert "(rank 0: no answer): see that the store answers, free space in --save-stage" in caplog.text
        server.is_read_only = False
        assert checkpoints(server) == {"iter_0000010"}
        kept, begun = sorted(stage_of(tmp_path / "tmp"))
        assert kept.name[:13] == ".iter_0000030" and not list(begun.iterdir())
        saver.save(contents_of(config, topology, 40), state(topology, 4.0))
    assert loaded(topology, config) == (40, 4.0)
    assert not stage_of(tmp_path / "tmp")


@contextmanager
def failing(name: str, number: int) -> Iterator[list[str]]:
    """A store that refuses the write of this number of objects whose name ends so; yields the names."""
    original, seen = {each: getattr(ObjectFolder, each) for each in ("write", "upload")}, list[str]()

    def watched(kind: str) -> Callable[..., object]:
        def call(objects: ObjectFolder, what: str, *args: object, **options: object) -> object:
            if what.endswith(name):
                seen.append(what)
                if len(seen) == number:
                    raise OSError(errno.EIO, "no answer", what)
            return original[kind](objects, what, *args, **options)

        return call

    with ExitStack() as stack:
        for kind in original:
            stack.enter_context(mock.patch.object(ObjectFolder, kind, watched(kind)))
        yield seen


@pytest.mark.parametrize(
    ("refused", "is_complete"), [("SHA256SUMS", False), ("run.json", True), ("latest", True)]
)
def test_what_fails_after_a_checkpoint_is_complete_does_not_undo_it(
    server: ObjectServer, topology, refused: str, is_complete: bool
) -> None:
    """Also one that replaces an earlier save; what fails before leaves nothing, and counts for nothing."""
    config = config_of(RUN, keep_last=2)
    with Saver(config.checkpoint, topology) as saver:
        for iteration in (10, 20):
            saver.save(contents_of(config, topology, iteration), state(topology, iteration / 10))
        saver.finish()
        for iteration in (20, 30):
            with failing(refused, 1) as seen:
                saver.save(contents_of(config, topology, iteration), state(topology, 4.0))
                saver.finish()
            assert seen
            assert has_what_its_sums_name(server)
            exists = f"b/run/iter_00000{iteration}/SHA256SUMS" in server.objects
            assert exists == (is_complete or iteration == 20)
            found = loaded(topology, config_of(RUN, load_iteration=iteration)) if exists else None
            assert found == ((iteration, 4.0) if is_complete else (20, 2.0) if iteration == 20 else None)
        saver.save(contents_of(config, topology, 40), state(topology, 4.0))
    assert checkpoints(server) == (
        {"iter_0000030", "iter_0000040"} if is_complete else {"iter_0000020", "iter_0000040"}
    )


@pytest.mark.parametrize("reached", ["SHA256SUMS", "latest"])
def test_a_run_that_was_paused_does_not_replace_its_successors_checkpoint(
    server: ObjectServer, topology, tmp_path: Path, reached: str
) -> None:
    """It goes on between its check of the lease and its last writes."""
    old = config_of(RUN, save_stage=str(tmp_path / "old"))
    saver, write = Saver(old.checkpoint, topology), ObjectFolder.write

    def paused(objects: ObjectFolder, name: str, *args: object, **options: object) -> str:
        with mock.patch.object(ObjectFolder, "write", write):
            if name.endswith(reached):
                saved(topology, 10, 2.0, save_stage=str(tmp_path / "new"))
        return write(objects, name, *args, **options)  # type: ignore[arg-type]

    with mock.patch.object(ObjectFolder, "write", paused):
        saver.save(contents_of(old, topology, 10), state(topology, 1.0))
        saver.finish()
    assert loaded(topology, config_of(RUN)) == (10, 2.0)
    assert has_what_its_sums_name(server)


def test_parts_of_dead_uploads_are_deleted_at_the_next_start(server: ObjectServer, topology, caplog) -> None:
    """Not those of other runs."""

    def leave(*names: str) -> None:
        for name in names:
            upload = f"dead {len(server.uploads)}&+"
            server.uploads[upload], server.parts[upload] = name, {1: b"part"}

    def left() -> list[str]:
        return [server.uploads[upload] for upload in server.parts]

    leave("b/run/iter_0000010/a b+c", "b/run2/iter_0000010/d", "b/run/iter_0000020/a", "b/run/own")
    config = config_of(RUN)
    with Saver(config.checkpoint, topology) as saver:
        saver.save(contents_of(config, topology, 10), state(topology, 1.0))
        saver.finish()
        assert left() == ["b/run2/iter_0000010/d", "b/run/own"]
        leave("b/run/iter_0000030/a")
        saver.save(contents_of(config, topology, 20), state(topology, 2.0))
    assert len(left()) == 3
    with mock.patch.object(ObjectFolder, "_request", side_effect=OSError(5, "the store answers 501")):
        saved(topology, 30, 3.0)
    assert "can remain in s3://b/run (the store answers 501): give the bucket a rule for" in caplog.text
    assert loaded(topology, config) == (30, 3.0)


def test_training_does_not_wait_for_a_thread_that_has_failed(server: ObjectServer, topology) -> None:
    config = config_of(RUN)
    with Saver(config.checkpoint, topology) as saver:
        with mock.patch.object(Save, "run", side_effect=RuntimeError("a defect")):
            saver.save(contents_of(config, topology, 10), state(topology, 1.0))
        saver.finish()
        saver.save(contents_of(config, topology, 20), state(topology, 2.0))
    assert loaded(topology, config) == (20, 2.0)


def test_training_goes_on_while_files_are_uploaded(server: ObjectServer, topology) -> None:
    """The state changes as soon as the save returns; a save that is due then waits, and none is lost."""
    config, tensors, uploads = config_of(RUN), state(topology, 1.0), threading.Event()
    upload = ObjectFolder.upload

    def slow(*args: object) -> None:
        assert uploads.wait(60.0)
        upload(*args)  # type: ignore[arg-type]

    with mock.patch.object(ObjectFolder, "upload", slow), Saver(config.checkpoint, topology) as saver:
        saver.save(contents_of(config, topology, 10), tensors)
        for tensor in tensors.values():
            elements(tensor).fill_(-1.0)
        assert "b/run/latest" not in server.objects
        uploads.set()
        saver.save(contents_of(config, topology, 20), state(topology, 2.0))
    assert checkpoints(server) == {"iter_0000010", "iter_0000020"}
    assert loaded(topology, config_of(RUN, load_iteration=10)) == (10, 1.0)


def test_processes_of_a_node_download_each_file_once(server: ObjectServer, topology) -> None:
    saved(topology, 10, 1.0)
    run = StoredRun.at(RUN)
    assert run is not None
    server.delay = 0.02
    server.requests.clear()
    names = [name.rpartition("/")[2] for name in server.objects if "iter_" in name]
    store = run.objects, run.stage
    downloads = [Download(*store, "token") for _ in range(4)]
    threads = [
        threading.Thread(target=each.fetch_whole, args=("iter_0000010", dict.fromkeys(names)))
        for each in downloads
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fetched = [each.name.rpartition("/")[2] for each in server.requests if each.method == "GET"]
    assert sorted(fetched) == sorted(names)
    folder = downloads[0].folder
    downloads[0].close()
    assert (folder / "iter_0000010" / "run.json").exists()
    Download(*store, "another").close()  # cleans up after processes that were killed, not after these
    assert (folder / "iter_0000010" / "run.json").exists()
    for each in downloads[1:]:
        each.close()
    assert not folder.exists()
    folder.mkdir()
    Path(f"{folder}.lock").touch()
    Download(*store, "another").close()
    assert not folder.exists()


def test_tools_get_whole_copies(server: ObjectServer, topology, tmp_path: Path, capsys) -> None:
    def show(words: list[str]) -> dict[str, Any]:
        with pytest.raises(SystemExit):
            inspect(words)
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        return report

    for iteration in (10, 20, 30):
        saved(topology, iteration, iteration / 10)
    run, one = StoredRun.at(RUN), StoredRun.at(f"{RUN}/iter_0000010")
    assert run is not None and one is not None
    for source, options, names in (
        (run, {}, {"iter_0000030"}),
        (run, {"iteration": 20}, {"iter_0000020"}),
        (run, {"last": 2}, {"iter_0000020", "iter_0000030"}),
        (one, {}, {"iter_0000010"}),
    ):
        with local_copy(source, **options) as folder:  # type: ignore[arg-type]
            assert {path.parent.name for path in folder.glob("iter_*/run.json")} == names
            for name in names:
                assert choose_checkpoint(folder, topology, int(name[-7:])) is not None
        assert not folder.exists()
    with local_copy(tmp_path) as folder:
        assert folder == tmp_path
    with pytest.raises(OSError, match="of the caller"), local_copy(run) as folder:
        raise OSError("of the caller")
    server.requests.clear()
    report = show(["s3://b/run", "--json"])
    assert (report["folder"], report["iterations"]) == ("s3://b/run/iter_0000030", [10, 20, 30])
    assert (report["latest"], report["damage"]) == ("iter_0000030", [])
    assert max(each.end - each.begin for each in server.requests if "safetensors" in each.name) < 1000
    (tensors,) = [name for name in server.objects if "30/" in name and name.endswith(".safetensors")]
    name = tensors.rpartition("/")[2]
    server.objects[tensors] = server.objects[tensors][:-1] + b"x"
    assert show(["s3://b/run", "--json"])["damage"] == []
    (damage,) = show(["s3://b/run", "--json", "--verify"])["damage"]
    assert damage == f"{name} has other contents than SHA256SUMS says"
    del server.objects[tensors]
    assert f"{name} is missing" in show(["s3://b/run", "--json"])["damage"]
    with pytest.raises(UserError, match=r"s3://b/run has no iter_0000005: it has iter_0000010, iter_"):
        local_copy(run, 5).__enter__()
    with pytest.raises(UserError, match=r"s3://b/none holds no checkpoint of megalite"):
        local_copy(StoredRun(ObjectFolder("s3://b/none"), tmp_path)).__enter__()


def test_non_persistent_saves_belong_to_the_url(server: ObjectServer, topology, tmp_path: Path) -> None:
    own = {
        "non_persistent_save_interval": 1,
        "non_persistent_ckpt_type": "local",
        "non_persistent_local_ckpt_dir": str(tmp_path / "own"),
    }
    config = config_of(RUN, **own)
    saver = Saver(config.checkpoint, topology)
    saver.save(contents_of(config, topology, 10), state(topology, 1.0))
    saver.finish()
    saver.save_local(contents_of(config, topology, 11), state(topology, 1.1))
    again = Saver(config.checkpoint, topology)
    server.objects["b/run/iter_0000020/dp_000.safetensors"] = b"of an upload that nobody has ended"
    assert loaded(topology, config, again) == (11, pytest.approx(1.1))
    saved(topology, 20, 2.0)
    assert loaded(topology, config, again) == (20, 2.0)
    copied = {name.replace("b/run/", "b/copy/"): content for name, content in server.objects.items()}
    server.objects.update(copied)
    copy = dataclasses.replace(config.checkpoint, save="s3://b/copy", load="s3://b/copy")
    here, there = LocalSaves.of(config.checkpoint, topology), LocalSaves.of(copy, topology)
    assert here is not None and there is not None and here.folder != there.folder


def test_the_model_is_read_from_the_latest_checkpoint(server: ObjectServer, topology) -> None:
    flags = ["--use-checkpoint-args", "--load", RUN]
    for iteration in (10, 20):
        config = dataclasses.replace(
            config_of(RUN), model=dataclasses.replace(MODEL, hidden_size=iteration * 4)
        )
        saver = Saver(config.checkpoint, topology)
        saver.save(contents_of(config, topology, iteration), state(topology, 1.0), is_last=True)
    assert parse(flags)[0].model.hidden_size == 80
    assert parse([*flags, "--load-iteration", "10"])[0].model.hidden_size == 40
    server.objects["b/run/latest"] = b"iter_0000010\n"
    assert parse(flags)[0].model.hidden_size == 40
    server.objects.clear()
    config, notices = parse(flags)
    assert any("there is no checkpoint in --load s3://b/run yet" in notice for notice in notices)
