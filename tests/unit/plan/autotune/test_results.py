"""Results files, from which an interrupted tuning resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.errors import UserError
from megalite.plan.autotune.trial import DONE, FAILED, FILE, Results, Trial

ABOUT = {"flags": ("--lr", "1e-3"), "world size": 2}
GOOD, BAD = Trial(DONE, "", 0.5, 100.0, 2e9), Trial(FAILED, "error: no")


def test_each_trial_is_there_for_the_next_start(tmp_path: Path) -> None:
    results = Results(tmp_path, ABOUT)
    results.add("--tp 1", GOOD)
    assert Results(tmp_path, ABOUT).get("--tp 1") == GOOD
    results.add("--tp 2", BAD)
    again = Results(tmp_path, ABOUT)
    assert (len(again), again.get("--tp 2"), again.get("--tp 4")) == (2, BAD, None)
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


def test_another_tunings_results_are_not_mixed_in(tmp_path: Path) -> None:
    Results(tmp_path, ABOUT).add("--tp 1", GOOD)
    with pytest.raises(
        UserError, match=r"results of another tuning \(world size changed\): pass another --folder"
    ):
        Results(tmp_path, {**ABOUT, "world size": 4})


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"about": [1], "trials": []}', '{"about": {}, "trials": [{"layout": "x", "odd": 1}]}'],
)
def test_a_file_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UserError, match="is not a results file"):
        Results(tmp_path, ABOUT)


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be used"):
        Results(tmp_path / "file" / "folder", ABOUT)
