"""What a crash leaves behind, and what a foreign or damaged checkpoint says; on one rank."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megalite.checkpoint.progress import Progress
from megalite.checkpoint.store import load_checkpoint, save_checkpoint
from megalite.config import Config, ModelConfig
from megalite.errors import UserError
from megalite.folders import make_writable

CONFIG = Config(model=ModelConfig(vocab_size=50))
FILE = "pp_00_tp_00.safetensors"


class Killed(BaseException):
    """The process ends here: nothing after it runs."""


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2, 3), value), "step": torch.tensor(value)}


@pytest.fixture
def save(tmp_path, topology):
    """Saves an iteration, whose tensors are filled with its number."""
    return lambda iteration: save_checkpoint(
        tmp_path, Progress(iteration, 8 * iteration), tensors(float(iteration)), CONFIG, topology
    )


@pytest.fixture
def load(tmp_path, topology):
    """Loads the latest; gives its iteration, which every tensor must hold too."""

    def load(expected: dict[str, torch.Tensor] | None = None) -> int | None:
        mine = expected or tensors(-1.0)
        progress = load_checkpoint(tmp_path, mine, CONFIG, topology)
        if progress is None:
            return None
        assert all((tensor == progress.iteration).all() for tensor in mine.values())
        assert progress.consumed_samples == 8 * progress.iteration
        return progress.iteration

    return load


def test_an_empty_or_missing_folder_holds_none(tmp_path, topology, load):
    assert load() is None
    assert load_checkpoint(tmp_path / "none", tensors(0.0), CONFIG, topology) is None


def test_loads_the_latest_saved(save, load):
    save(10)
    save(20)
    assert load() == 20
    save(15)
    assert load() == 15


STEPS = {
    "making the folder": (Path, "mkdir"),
    "writing the tensors": (safetensors.torch, "save_file"),
    "describing the run": (json, "dumps"),
    "writing run.json": (Path, "write_text"),
    "moving the folder": (Path, "rename"),
    "moving run.json": (os, "replace"),
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_crash_leaves_the_old_checkpoint(save, load, monkeypatch, step, after):
    """Killed before or after each first use of each step; then the same save works."""
    save(10)
    owner, name = STEPS[step]
    original = getattr(owner, name)

    def killed(*args, **options):
        if after:
            original(*args, **options)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killed)
        with pytest.raises(Killed):
            save(20)
    assert load() == 10
    save(20)
    assert load() == 20


@pytest.mark.parametrize(("after", "latest"), [(False, 10), (True, 20)])
def test_a_crash_as_latest_moves(save, load, monkeypatch, after, latest):
    save(10)
    replace = os.replace

    def killed(source, target):
        if after or Path(target).name != "latest":
            replace(source, target)
        if Path(target).name == "latest":
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(Killed):
            save(20)
    assert load() == latest


def test_a_crash_as_the_replaced_checkpoint_is_deleted(save, load, monkeypatch):
    """The latest is saved again: its new folder must stand before the old one goes."""
    save(10)
    rmtree = shutil.rmtree

    def killed(target, **options):
        had_files = Path(target).exists()
        rmtree(target, **options)
        if had_files:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(Killed):
            save(10)
    assert load() == 10


def test_latest_moves_once_everything_else_is_there(tmp_path, save, load, monkeypatch):
    save(10)
    replace, seen = os.replace, []

    def watched(source, target):
        if Path(target).name == "latest":
            seen.append(sorted(file.name for file in (tmp_path / "iter_0000020").iterdir()))
            assert load() == 10
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    save(20)
    assert seen == [[FILE, "run.json"]]


def test_a_second_save_of_an_iteration_replaces_the_first(tmp_path, save, load):
    save(10)
    (tmp_path / "iter_0000010" / "of the first").touch()
    save(10)
    assert load() == 10
    assert sorted(file.name for file in tmp_path.iterdir()) == ["iter_0000010", "latest"]
    assert sorted(file.name for file in (tmp_path / "iter_0000010").iterdir()) == [FILE, "run.json"]


def test_no_pickle_is_read_or_written(tmp_path, topology, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("pickle")

    # One rank agrees with itself: telling other ranks is no part of the file.
    monkeypatch.setattr(type(topology), "agreed", lambda _: nullcontext())
    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, refuse)
    save_checkpoint(tmp_path, Progress(1, 8), tensors(1.0), CONFIG, topology)
    assert load_checkpoint(tmp_path, tensors(0.0), CONFIG, topology) == Progress(1, 8)
    suffixes = {file.suffix for file in tmp_path.rglob("*") if file.is_file()}
    assert suffixes == {"", ".json", ".safetensors"}


def of_foreign_pickle(folder: Path) -> None:
    torch.save(tensors(10.0), folder / FILE)


DAMAGE = {
    "truncated tensors": lambda folder: os.truncate(folder / FILE, 60),
    "empty tensors": lambda folder: (folder / FILE).write_bytes(b""),
    "foreign tensors": of_foreign_pickle,
    "missing tensors": lambda folder: (folder / FILE).unlink(),
    "missing run.json": lambda folder: (folder / "run.json").unlink(),
    "truncated run.json": lambda folder: (folder / "run.json").write_text('{"format": 1, "prog'),
    "empty run.json": lambda folder: (folder / "run.json").write_text(""),
    "binary run.json": lambda folder: (folder / "run.json").write_bytes(b"\x80\x04\xff"),
    "a list": lambda folder: (folder / "run.json").write_text("[1, 2]"),
    "another program's": lambda folder: (folder / "run.json").write_text('{"format": 1, "model": {}}'),
    "no dicts": lambda folder: (folder / "run.json").write_text(
        '{"format": 1, "progress": {"iteration": 1, "consumed_samples": 8}, "model": 3, "layout": []}'
    ),
    "words for numbers": lambda folder: edit(folder, progress={"iteration": "ten", "consumed_samples": 8}),
    "another count": lambda folder: edit(folder, progress={"iteration": 10}),
    "a later format": lambda folder: edit(folder, format=99),
    "missing folder": lambda folder: folder.rename(folder.with_name("elsewhere")),
    "binary latest": lambda folder: (folder.parent / "latest").write_bytes(b"\x80\xff"),
    "latest is a folder": lambda folder: (
        (folder.parent / "latest").unlink(),
        (folder.parent / "latest").mkdir(),
    ),
    "another shape": lambda folder: rewrite(folder, weight=torch.zeros(1, 3)),
    "another dtype": lambda folder: rewrite(folder, weight=torch.zeros(2, 3, dtype=torch.float64)),
}


def edit(folder: Path, **parts) -> None:
    """Changes parts of run.json."""
    description = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(description | parts))


def rewrite(folder: Path, **other: torch.Tensor) -> None:
    """Changes tensors of the file."""
    safetensors.torch.save_file(tensors(10.0) | other, folder / FILE)


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_cannot_be_read_is_one_line_for_the_user(save, load, kind):
    DAMAGE[kind](save(10))
    with pytest.raises(UserError, match=r"^checkpoint .* cannot be read \(.+\): load another") as caught:
        load()
    assert "\n" not in str(caught.value)


def test_other_tensors_are_named(save, load):
    rewrite(save(10), more=torch.zeros(1))
    with pytest.raises(UserError, match=r"holds other tensors than this run: more and 0 more"):
        load()


def test_a_field_that_this_version_does_not_know_is_named(save, load):
    folder = save(10)
    model = json.loads((folder / "run.json").read_text())["model"]
    edit(folder, model=model | {"num_experts": 8})
    with pytest.raises(UserError, match=r"is of another model: num_experts 8 \(now None\); run with"):
        load()


def test_writable_folders_are_made_and_left_empty(tmp_path):
    make_writable(tmp_path / "a" / "b", "--save")
    make_writable(tmp_path / "a" / "b", "--save")
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("path", ["file", "file/below", "file/below/it"])
def test_a_folder_that_cannot_be_written_is_told_before(tmp_path, path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=rf"^--save {tmp_path / path} cannot be written \(.*\): give another"):
        make_writable(tmp_path / path, "--save")


@pytest.mark.parametrize(("field", "value"), [("seed", 99), ("global_batch_size", 16)])
def test_another_order_of_samples_is_told(tmp_path, topology, field, value):
    save_checkpoint(tmp_path, Progress(10, 80), tensors(10.0), CONFIG, topology)
    training = replace(CONFIG.training, **{field: value})
    with pytest.raises(UserError, match=rf"is of another run: {field} \d+ \(now {value}\)"):
        load_checkpoint(tmp_path, tensors(0.0), replace(CONFIG, training=training), topology)
