"""Which checkpoint is loaded when files are lost or altered, and what is reported; on one rank."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.load import load_checkpoint
from megalite.checkpoint.manifest import RUN, SUMS
from megalite.checkpoint.progress import TrainingProgress
from megalite.config import CheckpointConfig, Config, ModelConfig, TrainingConfig
from megalite.tensor_parallel.parameter_spec import ParameterShard, ParameterSpec
from megalite.utils.errors import UserError
from tests.checkpoint_folder import edit_run, reseal
from tests.ranks.checkpoint.saving import save_checkpoint

CONFIG = Config(
    model=ModelConfig(num_layers=1, hidden_size=4, num_attention_heads=2, vocab_size=50),
    training=TrainingConfig(global_batch_size=8, train_iters=90),
)
FILE = "pp_00_tp_00.safetensors"
Tensors = dict[str, torch.Tensor | ParameterShard]
Save = Callable[[int], Path]
Load = Callable[..., int | None]


def tensors(value: float) -> Tensors:
    weight = ParameterShard(torch.full((6,), value), 0, (2, 3), ParameterSpec((2, 3)), is_replicated=True)
    return {"model.weight": weight, "optimizer.num_steps": torch.tensor(value)}


@pytest.fixture
def save(tmp_path, topology) -> Save:
    """Saves an iteration, whose tensors are filled with its number."""
    return lambda iteration: save_checkpoint(
        tmp_path, TrainingProgress(iteration, 8 * iteration), tensors(float(iteration)), CONFIG, topology
    )


@pytest.fixture
def load(tmp_path, topology) -> Load:
    """Loads; gives the iteration, which every tensor must hold too."""

    def load(iteration: int | None = None, folder: Path = tmp_path) -> int | None:
        mine = tensors(-1.0)
        config = replace(CONFIG, checkpoint=CheckpointConfig(load_iteration=iteration))
        plan = load_checkpoint(folder, mine, config, topology)
        if plan is None:
            return None
        loaded = plan.progress
        for tensor in mine.values():
            assert (
                (tensor.tensor if isinstance(tensor, ParameterShard) else tensor) == loaded.iteration
            ).all()
        return loaded.iteration

    return load


def truncated(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 3)


def swapped(name: str) -> Callable[[Path], object]:
    """The file is the one of the checkpoint before."""
    return lambda folder: shutil.copy(folder.with_name("iter_0000010") / name, folder / name)


def with_foreign_pickle(folder: Path) -> None:
    torch.save({"model.weight": torch.ones(2, 3)}, folder / FILE)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    **{f"truncated {name}": (truncated(name), f"{name} ") for name in (FILE, RUN, "index.json", SUMS)},
    **{
        f"missing {name}": (lambda folder, name=name: (folder / name).unlink(), f"{name} is missing")
        for name in (FILE, RUN, "index.json", "config.yaml", SUMS)
    },
    **{f"swapped {name}": (swapped(name), "other contents") for name in (FILE, RUN, SUMS)},
    "a pickle": (with_foreign_pickle, f"{FILE} has other contents than {SUMS} says"),
    "empty": (lambda folder: [file.unlink() for file in folder.iterdir()], "run.json is missing"),
    "missing folder": (shutil.rmtree, "latest names iter_0000020, which does not exist"),
    "of another iteration": (
        lambda folder: (shutil.rmtree(folder), shutil.copytree(folder.with_name("iter_0000010"), folder)),
        "run.json belongs to iteration 10",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_whole_one_before_is_loaded_and_what_is_damaged_is_named(save, load, caplog, kind: str) -> None:
    save(10)
    damage, named = DAMAGE[kind]
    damage(save(20))
    assert load() == 10
    assert named in caplog.text
    if kind == "missing folder":
        assert "the newest complete checkpoint is loaded" in caplog.text
        return
    skipped, instead = (record.getMessage() for record in caplog.records)
    assert "iter_0000020 is damaged and skipped: " in skipped
    assert instead.endswith("iter_0000010 is loaded instead")


def test_nothing_whole_is_reported_with_what_is_wrong_with_each(save, load, tmp_path) -> None:
    (save(10) / FILE).unlink()
    (save(20) / RUN).unlink()
    with pytest.raises(
        UserError, match=r"has no complete checkpoint to load \(.+\): load another, or"
    ) as caught:
        load()
    assert "iter_0000020: run.json is missing | iter_0000010: pp_00_tp_00.safetensors is" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"\x80\xff", b"../iter_0000010", b"iter_000001"])
def test_without_latest_the_newest_whole_one_is_loaded(save, load, tmp_path, caplog, content) -> None:
    save(10)
    save(20)
    truncated(FILE)(save(30))
    (tmp_path / "latest").unlink()
    if content is not None:
        (tmp_path / "latest").write_bytes(content)
    assert load() == 20
    assert f"{tmp_path / 'latest'} " in caplog.messages[0]
    assert "the newest complete checkpoint is loaded" in caplog.messages[0]


def test_latest_is_obeyed_and_newer_ones_are_reported(save, load, tmp_path, caplog) -> None:
    for iteration in (10, 20, 30):
        save(iteration)
    (tmp_path / "latest").write_text("iter_0000020\n")
    assert load() == 20
    assert "iter_0000030 is newer: pass --load-iteration 30" in caplog.text
    truncated(FILE)(tmp_path / "iter_0000020")
    assert load() == 10
    shutil.rmtree(tmp_path / "iter_0000010")
    assert load() == 30


def test_a_given_iteration_is_loaded_and_no_other(save, load, tmp_path) -> None:
    for iteration in (10, 20, 30):
        save(iteration)
    assert load(20) == 20
    assert load(10) == 10
    with pytest.raises(UserError, match=r"no checkpoint iter_0000025: it has iterations 10, 20, 30"):
        load(25)
    truncated(FILE)(tmp_path / "iter_0000020")
    with pytest.raises(UserError, match=r"iter_0000020: .* has other contents.*pass another"):
        load(20)
    with pytest.raises(UserError, match="it has none"):
        load(10, tmp_path / "none")


def test_a_later_format_is_not_passed_over(save, load) -> None:
    save(10)
    edit_run(save(20), format=99)
    with pytest.raises(
        UserError, match=r"iter_0000020 .*format 99, this version reads 3 to 5: upgrade megalite"
    ):
        load()
    assert load(10) == 10


def test_the_format_before_is_reported(load, tmp_path) -> None:
    folder = tmp_path / "iter_0000010"
    folder.mkdir()
    (folder / RUN).write_text(json.dumps({"format": 2, "progress": {}, "model": {}, "run": {}, "files": []}))
    (tmp_path / "latest").write_text("iter_0000010\n")
    with pytest.raises(UserError, match="it has format 2, this version reads 3 to 5: only the version"):
        load()


def test_a_folder_without_checkpoints_is_reported(save, load, tmp_path) -> None:
    assert load(folder=tmp_path / "none") is None
    (tmp_path / "empty").mkdir()
    assert load(folder=tmp_path / "empty") is None
    (tmp_path / "empty" / "model.safetensors").touch()
    with pytest.raises(
        UserError, match=r"no checkpoint of megalite: model.safetensors is Hugging Face's; try"
    ):
        load(folder=tmp_path / "empty")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is not a folder: pass the one that --save wrote"):
        load(folder=tmp_path / "file")
    with pytest.raises(UserError, match=rf"is one checkpoint: pass the folder above it, {tmp_path}, and"):
        load(folder=save(10))


def test_what_a_replaced_one_was_is_loaded_while_the_new_one_has_no_name(save, load, tmp_path) -> None:
    """Killed between the two renames of a second save of an iteration."""
    save(10).rename(tmp_path / ".iter_0000010.replaced")
    assert load() == 10
    assert load(10) == 10
    save(10)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["iter_0000010", "latest"]
    assert load() == 10


PARTS = ("progress", "run", "schedule", "model", "data")
SOME_SLOW = [*PARTS[:3], *(pytest.param(part, marks=pytest.mark.slow) for part in PARTS[3:])]


@pytest.mark.parametrize("part", [*PARTS, "tokenizer", "layout"])
def test_wrong_types_in_run_json_are_a_line_for_the_user(save, load, part: str) -> None:
    """Its writer made the digests fit; what is not requested does no harm."""
    folder = save(10)
    for value in (None, 3, "x", [], {}, {"iteration": 10, "x": []}, [[]]):
        edit_run(folder, **{part: value})
        with suppress(UserError):
            load()


@pytest.mark.parametrize(
    "part", [*PARTS[:3], *(pytest.param(part, marks=pytest.mark.slow) for part in PARTS[3:])]
)
def test_wrong_types_in_fields_are_a_line_for_the_user(save, load, part: str) -> None:
    folder = save(10)
    fields = json.loads((folder / RUN).read_text())[part]
    for name in [*fields, "more"]:
        for value in ("x", -1, [], {"a": 1}, 10**30, 0.5, None):
            edit_run(folder, **{part: fields | {name: value}})
            with suppress(UserError):
                load()


class Planted:
    """Pickled, it makes a file when it is loaded."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self):
        return Path.touch, (self.proof,)


READ = (FILE, RUN, "index.json", "config.yaml")


@pytest.mark.parametrize("name", [".metadata", "x.pt", "__0_0.distcp", *READ])
def test_a_planted_pickle_is_never_run(save, load, tmp_path, name: str) -> None:
    """With digests that fit, as a stranger would give it."""
    proof = tmp_path / "proof"
    folder = save(10)
    (folder / name).write_bytes(pickle.dumps(Planted(proof)))
    if name in READ:
        reseal(folder, name)
        with pytest.raises(UserError, match=rf"{name}"):
            load()
    else:
        assert load() == 10
    assert not proof.exists()
    pickle.loads((folder / name).read_bytes())
    assert proof.exists()  # it would have been


@pytest.mark.parametrize("kind", ["parent", "absolute", "link"])
def test_nothing_outside_the_folder_is_read(save, load, tmp_path, kind: str, monkeypatch) -> None:
    folder = save(10)
    secret = tmp_path / "secret.safetensors"
    (folder / FILE).rename(secret)
    if kind == "link":
        (folder / FILE).symlink_to(secret)
    else:
        name = f"../{secret.name}" if kind == "parent" else str(secret)
        for text in ("index.json", SUMS):
            (folder / text).write_text((folder / text).read_text().replace(FILE, name))
        reseal(folder, "index.json", name) if kind == "parent" else reseal(folder, "index.json")
    opened: list[str] = []
    monkeypatch.setattr("safetensors.safe_open", lambda path, **_: opened.append(str(path)))
    message = "it is a symbolic link" if kind == "link" else "its files are not in this folder"
    with pytest.raises(UserError, match=message):
        load()
    assert not opened


def test_no_pickle_is_read_or_written(tmp_path, topology, save, load, monkeypatch) -> None:
    def refuse(*_, **__):
        raise AssertionError("pickle")

    def gather(gathered: list[object], mine: object) -> None:
        gathered[:] = [mine]

    # One rank agrees with itself: what ranks tell each other is in no file.
    monkeypatch.setattr(type(topology), "agreed", lambda _: nullcontext())
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    monkeypatch.setattr("torch.distributed.broadcast_object_list", lambda *_: None)
    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, refuse)
    save(10)
    assert load() == 10
    suffixes = {file.suffix for file in tmp_path.rglob("*") if file.is_file()}
    assert suffixes == {"", ".json", ".yaml", ".safetensors"}
