"""The checkpoints in a folder, the order in which they are tried, and which are deleted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.checkpoint.folder import (
    LocalRun,
    Retention,
    iterations_in,
    list_checkpoints,
    outdated,
    put_in_place,
    remove_leftovers,
)
from tests.checkpoint_folder import make_pipe


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)


def test_a_missing_or_empty_folder_has_none(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "none") == ((), ())
    assert list_checkpoints(tmp_path) == ((), ())


def test_what_is_aside_or_foreign_does_not_count(tmp_path: Path) -> None:
    make(tmp_path, "iter_0000010", "iter_10", ".iter_0000020.partial", ".iter_0000030.deleted", "tensorboard")
    (tmp_path / "iter_0000040").touch()
    assert iterations_in(tmp_path) == {10: "iter_0000010"}


def test_iterations_of_eight_digits_come_last(tmp_path: Path) -> None:
    make(tmp_path, "iter_10000000", "iter_9999999")
    assert list(iterations_in(tmp_path)) == [9_999_999, 10_000_000]


@pytest.mark.parametrize(
    ("latest", "expected"),
    [
        (30, "iter_0000030 iter_0000020 iter_0000010"),
        (20, "iter_0000020 iter_0000010 iter_0000030"),
        (40, "iter_0000030 iter_0000020 iter_0000010"),
        (None, "iter_0000030 iter_0000020 iter_0000010"),
    ],
)
def test_the_latest_comes_first_and_newer_ones_last(tmp_path: Path, latest: int, expected: str) -> None:
    make(tmp_path, "iter_0000020", "iter_0000010", "iter_0000030")
    if latest:
        (tmp_path / "latest").write_text(f"iter_{latest:07d}\n")
    names, notices = list_checkpoints(tmp_path)
    assert " ".join(names) == expected
    if latest is None:
        assert notices == (f"{tmp_path}/latest is missing: the newest complete checkpoint is loaded",)
    elif latest == 20:
        (notice,) = notices
        assert notice.endswith("iter_0000030 is newer: pass --load-iteration 30 to load that instead")
    elif latest == 40:
        assert "latest names iter_0000040, which does not exist: the newest" in notices[0]
    else:
        assert not notices


@pytest.mark.parametrize("content", [b"", b"iter_10", b"../iter_0000010", b"iter_0000010\0", b"10"])
def test_a_latest_that_names_none_is_reported(tmp_path: Path, content: bytes) -> None:
    make(tmp_path, "iter_0000010")
    (tmp_path / "latest").write_bytes(content)
    names, (notice,) = list_checkpoints(tmp_path)
    assert names == ("iter_0000010",)
    assert notice.startswith(f"{tmp_path}/latest ")


LATEST_THAT_IS_NONE = {
    "latest cannot be read (it is not a regular file)": Path.mkdir,
    "it is not a regular file": make_pipe,
    "it is a symbolic link": lambda file: file.symlink_to("/dev/zero"),
    "it has more than 256 bytes": lambda file: file.write_text("iter_" + 5000 * "1"),
    "it is not text": lambda file: file.write_bytes(b"\x80"),
    "names no checkpoint": lambda file: file.write_text("iter_" + 100 * "1"),
}


@pytest.mark.parametrize("problem", LATEST_THAT_IS_NONE)
def test_a_latest_that_is_anything_is_reported(tmp_path: Path, problem: str) -> None:
    make(tmp_path, "iter_0000010")
    LATEST_THAT_IS_NONE[problem](tmp_path / "latest")
    names, (notice,) = list_checkpoints(tmp_path)
    assert names == ("iter_0000010",)
    assert problem in notice
    assert len(notice) < 300 + len(str(tmp_path))


def test_a_latest_that_is_endless_is_not_read(tmp_path: Path) -> None:
    make(tmp_path, "iter_0000010")
    with (tmp_path / "latest").open("wb") as sparse:
        sparse.truncate(1 << 40)
    assert "it has more than 256 bytes" in list_checkpoints(tmp_path).notices[0]


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("num_steps", range(6))
def test_a_kill_while_a_checkpoint_is_replaced_leaves_a_whole_one(
    tmp_path: Path, monkeypatch, num_steps: int
) -> None:
    """At each step; whatever the step before left, the same move then works."""
    for name in ("iter_0000010", ".iter_0000010.partial", ".iter_0000010.replaced"):
        make(tmp_path, name)
        (tmp_path / name / "content").write_text("whole")
    steps = iter(range(num_steps))

    def counted(original):
        def step(*args, **options):
            if next(steps, None) is None:
                raise Killed
            return original(*args, **options)

        return step

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
        try:
            put_in_place(tmp_path / ".iter_0000010.partial", tmp_path / "iter_0000010")
            assert num_steps >= 4
        except Killed:
            assert num_steps < 4
    ((iteration, name),) = iterations_in(tmp_path).items()
    assert iteration == 10
    assert (tmp_path / name / "content").read_text() == "whole"
    remove_leftovers(tmp_path)
    assert iterations_in(tmp_path) == {10: name}
    make(tmp_path, ".iter_0000010.partial")
    put_in_place(tmp_path / ".iter_0000010.partial", tmp_path / "iter_0000010")
    assert [entry.name for entry in tmp_path.iterdir()] == ["iter_0000010"]


def test_leftovers_go(tmp_path: Path) -> None:
    make(
        tmp_path, "iter_0000010", ".iter_0000010.replaced", ".iter_0000020.replaced", ".iter_0000030.partial"
    )
    make(tmp_path, ".iter_0000040.deleted", ".iter_0000040.mine", "tensorboard")
    remove_leftovers(tmp_path)
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {"iter_0000010", ".iter_0000020.replaced", ".iter_0000040.mine", "tensorboard"}


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "gone"),
    [
        (None, None, []),
        (1, None, [10, 20, 30, 40]),
        (2, None, [10, 20, 30]),
        (5, None, []),
        (9, None, []),
        (None, 20, [10, 30]),
        (2, 20, [10, 30]),
        (1, 100, [10, 20, 30, 40]),
        (3, 20, [10]),
    ],
)
def test_what_is_kept(keep_last: int | None, keep_every: int | None, gone: list[int]) -> None:
    """Of 10 to 50, and 60 and 70 that are of another course of the run."""
    assert outdated([70, 10, 30, 20, 50, 40, 60], 50, keep_last, keep_every) == gone


@pytest.mark.parametrize(
    ("confirmed", "gone"),
    [(10, [20, 30, 40]), (29, [10, 30, 40]), (50, [10, 20, 30, 40]), (5, [10, 20, 30, 40])],
)
def test_the_last_confirmed_one_is_kept(confirmed: int, gone: list[int]) -> None:
    assert outdated([10, 20, 30, 40, 50], 50, 1, None, confirmed) == gone
    assert outdated([10, 20, 30, 40, 50], 50, None, None, confirmed) == []


@given(
    st.sets(st.integers(0, 50)),
    st.integers(0, 50),
    st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 9),
)
def test_the_newest_always_stays(iterations, newest, keep_last, keep_every) -> None:
    gone = outdated(iterations | {newest}, newest, keep_last, keep_every)
    assert max(gone, default=-1) < newest
    kept = sorted(iteration for iteration in iterations | {newest} if iteration <= newest)
    for iteration in kept[-(keep_last or 1) :]:
        assert iteration not in gone


def test_pruned_ones_are_gone(tmp_path: Path) -> None:
    make(tmp_path, "iter_0000010", ".iter_0000020.replaced", "iter_0000030", ".iter_0000010.deleted/x")
    assert LocalRun(tmp_path).prune(30, Retention(keep_last=1), cleans_up=False) == [
        "iter_0000010",
        ".iter_0000020.replaced",
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["iter_0000030"]
