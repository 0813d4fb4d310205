"""A run that is killed before any of a save's calls to the system: something whole is loaded."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.folder import iterations_in
from megalite.checkpoint.saver import Saver
from tests.ranks.checkpoint.saving import config_of, contents_of, elements, loaded, state

MORE = ((10, 20, None), (10, 10, 1), (20, 10, None), (20, 10, 1))
CALLS = ("open", "mkdir", "write", "fsync", "rename", "replace", "unlink", "rmdir")


class Killed(BaseException):
    """The process ends here: nothing after it runs."""


@contextmanager
def killed_before(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends the block before its call of this number that changes the disk, if there is one."""
    calls = 0

    def watched(original: Callable) -> Callable:
        def call(*args, **options):
            nonlocal calls
            if calls == number:
                raise Killed
            calls += 1
            return original(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, watched(getattr(os, name)))
        yield


@pytest.mark.parametrize(
    ("first", "second", "keep_last"),
    [(10, 20, 1), (10, 10, None), *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_a_kill_at_any_call_leaves_a_whole_checkpoint(
    tmp_path: Path, topology, monkeypatch, first: int, second: int, keep_last: int | None
) -> None:
    """The next save then works, and clears up."""
    number, was_killed = 0, True
    while was_killed:
        folder = tmp_path / str(number)
        folder.mkdir()
        config = config_of(folder, keep_last=keep_last)
        saver = Saver(config.checkpoint, topology)
        saver.save(contents_of(config, topology, first), state(topology, 1.0))
        was_killed = False
        try:
            with killed_before(number, monkeypatch):
                saver.save(contents_of(config, topology, second), state(topology, 2.0))
        except Killed:
            was_killed = True
        found = loaded(topology, config)
        assert found in ((first, 1.0), (second, 2.0)), number
        assert was_killed or found == (second, 2.0)
        saver = Saver(config.checkpoint, topology)
        saver.save(contents_of(config, topology, 30), state(topology, 3.0))
        assert loaded(topology, config) == (30, 3.0)
        aside = {entry.name for entry in folder.iterdir() if entry.name.startswith(".")}
        assert aside <= set(iterations_in(folder).values())  # what was replaced, where nothing came instead
        number += 1
    assert number > 15


def test_no_pickle_is_written_or_read(tmp_path: Path, topology, monkeypatch) -> None:
    def refuse(*_, **__):
        raise AssertionError("pickle")

    config = config_of(tmp_path)
    saver = Saver(config.checkpoint, topology)
    # One rank agrees with itself: the messages to other ranks are not in the files.
    monkeypatch.setattr(type(topology), "agreed", lambda _: nullcontext())
    for name in ("all_gather_object", "broadcast_object_list"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, **__: None)
    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, refuse)
    saver.save(contents_of(config, topology, 10), state(topology, 1.0))
    assert loaded(topology, config) == (10, 1.0)
    suffixes = {file.suffix for file in tmp_path.rglob("*") if file.is_file()}
    assert suffixes == {"", ".json", ".yaml", ".safetensors"}


def test_a_kill_leaves_other_checkpoints_alone(tmp_path: Path, topology, monkeypatch) -> None:
    """What was whole before has the same bytes afterwards."""
    config = dataclasses.replace(config_of(tmp_path))
    saver = Saver(config.checkpoint, topology)
    saver.save(contents_of(config, topology, 10), state(topology, 1.0))
    before = {file.name: file.read_bytes() for file in (tmp_path / "iter_0000010").iterdir()}
    tensors = state(topology, 2.0)
    for number in range(4):
        with pytest.raises(Killed), killed_before(number, monkeypatch):
            saver.save(contents_of(config, topology, 20), tensors)
        saver = Saver(config.checkpoint, topology)
    assert {file.name: file.read_bytes() for file in (tmp_path / "iter_0000010").iterdir()} == before
    assert all(
        (elements(tensor) == elements(state(topology, 2.0)[name])).all() for name, tensor in tensors.items()
    )
