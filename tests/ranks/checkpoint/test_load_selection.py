"""Ranks that see different folders agree all the same."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.checkpoint import manifest as manifest_module
from megalite.checkpoint.load import choose_checkpoint
from megalite.config import ParallelConfig
from megalite.utils.errors import UserError
from tests.checkpoint_folder import write_checkpoint
from tests.live_ranks import run_ranks

Answer = tuple[str | None, list[str]]


def choose(topology, folders: list[Path]) -> Answer:
    """Each rank's choice in its own folder, or its error, and which files it has read through."""
    read: list[str] = []
    original = manifest_module.sha256_of

    def watched(file: Path) -> str:
        read.append(file.name)
        return original(file)

    manifest_module.sha256_of = watched  # in this process alone
    try:
        chosen = choose_checkpoint(folders[topology.rank], topology)
    except UserError as error:
        return str(error), []
    return (chosen.folder.name if chosen else None), sorted(name for name in read if name.startswith("part_"))


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, list[Answer]]:
    """By case, all in one start of the ranks; the second rank sees a folder of its own."""
    root = tmp_path_factory.mktemp("choice")
    cases = []
    for case, change in CASES.items():
        folders = [root / case / "0", root / case / "1"]
        for iteration in (10, 20):
            write_checkpoint(folders[0], iteration)
        shutil.copytree(folders[0], folders[1])
        change(*folders)
        cases.append(folders)
    found = run_ranks(choose_each, ParallelConfig(data_parallel_size=2).mesh, 2, cases)
    return dict(zip(CASES, zip(*found, strict=True), strict=True))


def choose_each(topology, cases: list[list[Path]]) -> list[Answer]:
    return [choose(topology, folders) for folders in cases]


def damage_odd_file(*folders: Path) -> None:
    """Of those that the second rank reads."""
    for folder in folders:
        os.truncate(folder / "iter_0000020" / "part_1.safetensors", 60)


def write_other(_: Path, second: Path) -> None:
    shutil.rmtree(second)
    for iteration in (10, 20):
        write_checkpoint(second, iteration, files=[])


CASES: dict[str, Callable[[Path, Path], object]] = {
    "alike": lambda first, second: None,
    "damaged": damage_odd_file,
    "text lost on one": lambda first, second: (second / "iter_0000020" / "index.json").unlink(),
    "one empty": lambda first, second: (shutil.rmtree(second), second.mkdir()),
    "the other missing": lambda first, second: shutil.rmtree(first),
    "both empty": lambda first, second: (shutil.rmtree(first), shutil.rmtree(second)),
    "other contents": write_other,
    "all lost on one": lambda first, second: [
        (second / name / "run.json").unlink() for name in ("iter_0000010", "iter_0000020")
    ],
}


def test_the_files_are_shared_out(answers) -> None:
    first, second = answers["alike"]
    assert first == ("iter_0000020", ["part_0.safetensors", "part_2.safetensors"])
    assert second == ("iter_0000020", ["part_1.safetensors", "part_3.safetensors"])


@pytest.mark.parametrize("case", ["damaged", "text lost on one"])
def test_what_one_rank_finds_damaged_no_rank_loads(answers, case: str) -> None:
    assert [chosen for chosen, _ in answers[case]] == ["iter_0000010"] * 2


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("one empty", "(ranks 1 see no checkpoint): pass a folder on a file system that all"),
        ("the other missing", "(ranks 0 see no checkpoint): pass a folder on a file system"),
        ("other contents", "(iter_0000020 differs from rank to rank): pass a folder on a file system"),
        ("all lost on one", "iter_0000020: run.json is missing on ranks 1 | iter_0000010: run.json is"),
    ],
)
def test_different_folders_are_reported_by_all(answers, case: str, message: str) -> None:
    for line, _ in answers[case]:
        assert message in line


def test_an_empty_folder_holds_none(answers) -> None:
    assert [chosen for chosen, _ in answers["both empty"]] == [None, None]
