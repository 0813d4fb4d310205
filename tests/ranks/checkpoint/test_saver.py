"""Saves in the background and saves that fail, over ranks: of one mind, one at a time, and none lost."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist

from megalite.checkpoint import save
from megalite.checkpoint.folder import iterations_in
from megalite.checkpoint.lease import HeldLease, LeaseLost, hold_folder
from megalite.checkpoint.save import SaveAgreement
from megalite.checkpoint.saver import HostCopy, Saver
from megalite.utils.errors import UserError
from megalite.utils.log import log
from tests.live_ranks import run_ranks
from tests.ranks.checkpoint.saving import (
    Gate,
    config_of,
    contents_of,
    defect,
    elements,
    full_disk,
    loaded,
    parallel,
    state,
    writer,
)


class _Lines(logging.Handler):
    """What is logged, as text."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _listen() -> list[str]:
    handler = _Lines()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    return handler.lines


def _digests(checkpoint: Path) -> dict[str, str]:
    """Return the digests of a checkpoint's files, of run.json without the times of writing."""
    contents = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    run = json.loads(contents["run.json"])
    assert run.pop("written").keys() == {"start_time", "end_time"}
    contents["run.json"] = json.dumps(run).encode()
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def save_while_training_goes_on(topology, folder: Path) -> list[str]:
    """The state is overwritten, and a second save requested, while no file of the first is written yet."""
    config, lines, gate = config_of(folder, async_save=True), _listen(), Gate()
    tensors = state(topology, 1.0)
    with Saver(config.checkpoint, topology) as saver:
        with writer(gate):
            saver.save(contents_of(config, topology, 10), tensors)
            saver.before_update()
            assert gate.reached.wait(600.0)
            for tensor in tensors.values():
                elements(tensor).fill_(-1.0)
            saver.poll()
            saver.save(contents_of(config, topology, 20), tensors)  # skipped
            assert not iterations_in(folder)
            gate.open()
            saver.finish()
        saver.poll()
        saver.save(contents_of(config, topology, 30), state(topology, 3.0))
        saver.save(contents_of(config, topology, 40), state(topology, 4.0), is_last=True)
    return lines


def ask_for_a_second_save_of_each_kind(topology, folder: Path) -> list[str]:
    own = {"non_persistent_save_interval": 1, "non_persistent_local_ckpt_dir": str(folder / "own")}
    config, lines, gate = config_of(folder, async_save=True, **own), _listen(), Gate()
    tensors = state(topology, 1.0)
    with Saver(config.checkpoint, topology) as saver, writer(gate):
        saver.save(contents_of(config, topology, 10), tensors)
        assert gate.reached.wait(600.0)
        saver.save(contents_of(config, topology, 20), tensors)
        saver.save_local(contents_of(config, topology, 30), tensors)
        gate.open()
    return [line for line in lines if "is not saved" in line]


def test_a_skipped_save_names_its_interval_flag(tmp_path: Path) -> None:
    persistent, own = run_ranks(ask_for_a_second_save_of_each_kind, parallel(1, 1, 1).mesh, 1, tmp_path)[0]
    assert persistent.endswith("pass a larger --save-interval")
    assert own.endswith("pass a larger --non-persistent-save-interval")


def save_at_once(topology, folder: Path) -> None:
    config = config_of(folder)
    Saver(config.checkpoint, topology).save(contents_of(config, topology, 10), state(topology, 1.0))


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 1), (1, 2)])
def test_a_save_in_the_background_is_that_of_its_moment(tmp_path: Path, tp: int, dp: int) -> None:
    folders = [tmp_path / name for name in ("background", "at once")]
    for folder in folders:
        folder.mkdir()
    lines = run_ranks(save_while_training_goes_on, parallel(tp, 1, dp).mesh, tp * dp, folders[0])[0]
    run_ranks(save_at_once, parallel(tp, 1, dp).mesh, tp * dp, folders[1])
    background, at_once = (_digests(folder / "iter_0000010") for folder in folders)
    for own in ("config.yaml", "SHA256SUMS"):  # they tell the folder and the flag
        del background[own], at_once[own]
    assert background == at_once
    assert list(iterations_in(folders[0])) == [10, 30, 40]
    assert (folders[0] / "latest").read_text() == "iter_0000040\n"
    messages = [line.replace(str(folders[0]), "SAVE") for line in lines]
    assert messages[0] == "saving checkpoint SAVE/iter_0000010 in the background"
    assert re.match(
        r"iteration 20 is not saved: SAVE/iter_0000010 is still being written after \d+ s", messages[1]
    )
    assert messages[2:] == [
        "saved checkpoint SAVE/iter_0000010",
        "saving checkpoint SAVE/iter_0000030 in the background",
        "saved checkpoint SAVE/iter_0000030",
        "saved checkpoint SAVE/iter_0000040",
    ]


def save_through_failures(topology, folder: Path, is_async: bool, failing) -> list[str]:
    """The last rank fails, then the folder is lost, then all is well again."""
    config, lines = config_of(folder, async_save=is_async, keep_last=1), _listen()
    fails = topology.rank == topology.world_size - 1
    with Saver(config.checkpoint, topology) as saver:
        saver.save(contents_of(config, topology, 10), state(topology, 1.0))
        saver.finish()
        with writer(failing) if fails else nullcontext():
            saver.save(contents_of(config, topology, 20), state(topology, 2.0))
            saver.finish()
        assert loaded(topology, config) == (10, 1.0)
        assert {entry.name for entry in folder.iterdir()} == {"iter_0000010", "latest"}
        _rename(topology, folder, folder.with_name("lost"))
        saver.save(contents_of(config, topology, 30), state(topology, 3.0))
        saver.finish()
        assert not folder.exists()
        _rename(topology, folder.with_name("lost"), folder)
        saver.save(contents_of(config, topology, 40), state(topology, 4.0))
        saver.finish()
    assert loaded(topology, config) == (40, 4.0)
    assert list(iterations_in(folder)) == [40]
    return [line.replace(str(folder), "SAVE") for line in lines]


def _rename(topology, folder: Path, target: Path) -> None:
    dist.barrier()
    if topology.rank == 0:
        folder.rename(target)
    dist.barrier()


@pytest.mark.parametrize("is_async", [False, True])
def test_training_outlives_failures_and_the_next_save_tries_again(tmp_path: Path, is_async: bool) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lines = run_ranks(save_through_failures, parallel(dp=2).mesh, 2, folder, is_async, full_disk)[0]
    messages = [line for line in lines if "cannot be written" in line]
    assert messages == [
        f"checkpoint SAVE/iter_00000{iteration} cannot be written ({why}): free space or change --save; "
        "every rank must see the folder; training continues, and the next save tries again"
        for iteration, why in (
            (20, "rank 1: No space left on device"),
            (30, "rank 0: No such file or directory: SAVE"),
        )
    ]
    assert "deleted checkpoint SAVE/iter_0000010" in lines


def test_a_defect_in_the_thread_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lines = run_ranks(save_through_failures, parallel(dp=2).mesh, 2, folder, True, defect)[0]
    (message,) = [line for line in lines if "a defect" in line]
    assert "iter_0000020 cannot be written (rank 1 failed:" in message
    assert "ZeroDivisionError" in message


def fail_for_good(topology, folder: Path, is_last: bool, fields: dict[str, bool]) -> str:
    config = config_of(folder, **fields)
    try:
        with (
            Saver(config.checkpoint, topology) as saver,
            writer(full_disk) if topology.rank == 1 else nullcontext(),
        ):
            saver.save(contents_of(config, topology, 20), state(topology, 2.0), is_last=is_last)
            saver.finish()
    except UserError as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize(
    ("is_last", "fields"),
    [
        (True, {}),
        (True, {"async_save": True}),
        (False, {"exit_on_save_failure": True}),
        (False, {"exit_on_save_failure": True, "async_save": True}),
    ],
)
def test_a_failing_last_save_ends_every_rank(tmp_path: Path, is_last: bool, fields: dict[str, bool]) -> None:
    first, second = run_ranks(fail_for_good, parallel(tp=2).mesh, 2, tmp_path, is_last, fields)
    assert first == second
    assert first.startswith(f"checkpoint {tmp_path}/iter_0000020 cannot be written (rank 1: No space left")
    assert not list(tmp_path.iterdir())


def stop_after(topology, folder: Path, is_async: bool, fails: bool) -> str:
    """A run that is stopped right after an interval's save, which was not known to be the last."""
    config = config_of(folder, async_save=is_async)
    try:
        with (
            writer(full_disk) if fails and topology.rank == 1 else nullcontext(),
            Saver(config.checkpoint, topology) as saver,
        ):
            saver.save(contents_of(config, topology, 20), state(topology, 2.0))
    except UserError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_run_that_is_stopped_after_a_save_waits_for_it(tmp_path: Path, is_async: bool) -> None:
    assert run_ranks(stop_after, parallel(dp=2).mesh, 2, tmp_path, is_async, False) == ["saved"] * 2
    assert (tmp_path / "latest").read_text() == "iter_0000020\n"
    (tmp_path / "latest").unlink()
    (message, _) = run_ranks(stop_after, parallel(dp=2).mesh, 2, tmp_path, is_async, True)
    assert "iter_0000020 cannot be written (rank 1: No space left on device)" in message


def test_an_error_in_training_lets_the_save_come_to_its_end(tmp_path: Path, topology) -> None:
    config, gate = config_of(tmp_path, async_save=True), Gate()

    def train() -> None:
        with Saver(config.checkpoint, topology) as saver:
            saver.save(contents_of(config, topology, 10), state(topology, 1.0))
            gate.open()
            raise RuntimeError("training broke")

    with writer(gate), pytest.raises(RuntimeError, match="training broke"):
        train()
    assert loaded(topology, config) == (10, 1.0)


def test_a_run_that_can_save_no_more_ends(tmp_path: Path, topology, monkeypatch) -> None:
    """The store went with the launcher: no later save could be agreed on."""

    def lost(*_) -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    monkeypatch.setattr(SaveAgreement, "from_all", lost)
    config = config_of(tmp_path)
    saver = Saver(config.checkpoint, topology)
    with pytest.raises(UserError, match=r"store .* is gone \(Connection reset by peer\)"):
        saver.save(contents_of(config, topology, 10), state(topology, 1.0))


def test_a_large_share_is_two_files(tmp_path: Path, topology, monkeypatch) -> None:
    monkeypatch.setattr(save, "_SPLIT_BYTES", 100)
    config = config_of(tmp_path)
    Saver(config.checkpoint, topology).save(contents_of(config, topology, 10), state(topology, 1.0))
    names = sorted(file.name for file in (tmp_path / "iter_0000010").glob("*.safetensors"))
    assert names == ["pp_00_tp_00_0.safetensors", "pp_00_tp_00_1.safetensors"]
    assert loaded(topology, config) == (10, 1.0)


def test_nothing_is_written_to_before_it_is_replicated(tmp_path: Path, topology, monkeypatch) -> None:
    config, may_copy = config_of(tmp_path, async_save=True), threading.Event()
    fill = HostCopy.fill

    def held_up(copy: HostCopy) -> None:
        assert may_copy.wait(600.0)
        fill(copy)

    monkeypatch.setattr(HostCopy, "fill", held_up)
    tensors = state(topology, 1.0)
    with Saver(config.checkpoint, topology) as saver:

        def update() -> None:
            saver.before_update()
            for tensor in tensors.values():
                elements(tensor).fill_(-1.0)

        saver.save(contents_of(config, topology, 10), tensors)
        training = threading.Thread(target=update)
        training.start()
        training.join(0.2)
        assert training.is_alive()  # it waits: no clock makes this fail
        may_copy.set()
        training.join()
        saver.finish()
    assert (elements(tensors["model.cut"]) == -1.0).all()
    assert loaded(topology, config) == (10, 1.0)


def test_memory_for_the_copy_is_used_again(tmp_path: Path, topology) -> None:
    config = config_of(tmp_path, async_save=True)
    with Saver(config.checkpoint, topology) as saver:
        places = set()
        for iteration in (10, 20, 30):
            saver.save(contents_of(config, topology, iteration), state(topology, float(iteration)))
            places.add(saver._copy._memory.data_ptr())
            saver.finish()
    assert len(places) == 1
    shutil.rmtree(tmp_path)


def lose_the_folder(topology, folder: Path, is_local: bool) -> tuple[list[str], str]:
    """Another run takes the folder over while a save's files are written."""
    own = {"non_persistent_save_interval": 1, "non_persistent_local_ckpt_dir": str(folder / "own")}
    config = config_of(folder, async_save=True, **(own if is_local else {}))
    gate, successor = Gate(), None
    lines = _listen()
    os.environ["SLURM_JOB_ID"] = "812"
    with hold_folder(str(folder), topology) as lease, writer(gate):
        saver = Saver(config.checkpoint, topology, lease)
        save = saver.save_local if is_local else saver.save
        save(contents_of(config, topology, 10), state(topology, 1.0))
        assert gate.reached.wait(600.0)
        dist.barrier()
        if topology.rank == 0:
            os.environ["SLURM_RESTART_COUNT"] = "1"
            successor = HeldLease.take(folder)
            (folder / "iter_0000010").mkdir()
            (folder / ".iter_0000010.replaced").mkdir()
        dist.barrier()
        gate.open()
        with pytest.raises(LeaseLost) as lost:
            saver.finish()
    dist.barrier()
    if successor is not None:
        successor.check()
        successor.release()
    return [line for line in lines if "taken over" not in line], str(lost.value)


@pytest.mark.parametrize("is_local", [False, True])
def test_a_run_that_has_lost_its_folder_names_nothing(tmp_path: Path, is_local: bool) -> None:
    outcomes = run_ranks(lose_the_folder, parallel(dp=2).mesh, 2, tmp_path, is_local)
    for lines, error in outcomes:
        assert len(lines) == 1
        assert "in the background" in lines[0]
        assert error.startswith(f"--save {tmp_path} was taken over by another run (process")
    left = {entry.name for entry in tmp_path.iterdir()} - {"own", "run_id"}
    assert left == {"iter_0000010", ".iter_0000010.replaced"}
    assert not list((tmp_path / "iter_0000010").iterdir())
    assert not list(tmp_path.glob("own/*/*/*"))


def test_a_save_follows_no_link(tmp_path: Path, topology) -> None:
    """At every name that can be known before; the link's target stays unchanged."""
    save, elsewhere = tmp_path / "save", tmp_path / "elsewhere"
    config = config_of(
        save, non_persistent_save_interval=1, non_persistent_local_ckpt_dir=str(tmp_path / "l")
    )
    elsewhere.mkdir()
    (elsewhere / "file").write_text("mine")
    save.mkdir()
    for name in ("latest", ".latest.partial", "run_id", ".run_id.partial"):
        (save / name).symlink_to(elsewhere / "file")
    for name in (".iter_0000010.partial", ".iter_0000010.replaced", "iter_0000020"):
        (save / name).symlink_to(elsewhere)
    saver = Saver(config.checkpoint, topology)
    saver.save(contents_of(config, topology, 10), state(topology, 1.0))
    assert (save / "latest").read_text() == "iter_0000010\n"
    assert {file.name: file.read_text() for file in elsewhere.iterdir()} == {"file": "mine"}
    assert loaded(topology, config) == (10, 1.0)
