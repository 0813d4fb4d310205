"""Where a run's time went, by the second."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.observe.report.run_folder import open_run
from megalite.observe.report.time_report import Table, duration, tables, time_spent, time_summary
from tests.run_folder import iteration, write_metrics, write_restarted_run


@pytest.fixture
def found(tmp_path: Path) -> dict[str, Table]:
    return {table.title: table for table in tables(open_run(write_restarted_run(tmp_path)))}


def test_every_second_is_accounted_for(tmp_path: Path) -> None:
    spent = time_spent(open_run(write_restarted_run(tmp_path)).history)
    assert spent == pytest.approx(
        {
            "training": 50.0 + 49.5 + 7.5,
            "repeated": 15.0,
            "evaluation": 2.0 + 2.0,
            "saving and other": 4.0,
            "down": 60.0,
        }
    )
    assert time_summary(spent).startswith("3 min 10 s: training 56%, repeated 8%,")


def test_an_evaluation_between_two_lines(tmp_path: Path) -> None:
    """Its second stands between 20 iterations of one line and 10 that the next line tells."""
    lines = [
        iteration(20, 0.0, 10.0, num_iterations=20),
        {
            "validation": {"iteration": 30, "split": "valid", "lm_loss": 1.0},
            "start_time": 0.0,
            "wall_time": 16.0,
        },
        iteration(40, 0.0, 21.0, num_iterations=20),
    ]
    spent = time_spent(open_run(write_metrics(tmp_path / "m.jsonl", lines)).history)
    assert spent == pytest.approx({"training": 20.0, "evaluation": 1.0})


def test_old_files_without_times(tmp_path: Path) -> None:
    line = iteration(1, 0.0, 1.0)
    del line["wall_time"], line["start_time"]
    history = open_run(write_metrics(tmp_path / "m.jsonl", [line])).history
    assert time_spent(history) == {}
    assert "no wall-clock times" in time_summary({})


def test_the_slowest_and_what_they_were(found: dict[str, Table]) -> None:
    first = found["Slowest iterations"].rows[0]
    assert first[:3] == ("150", "7,500", "15.00")
    notes = {row[0]: row[4] for row in found["Slowest iterations"].rows}
    assert notes["1"] == "the first"


def test_starts_saves_and_lines_of_the_log(found: dict[str, Table]) -> None:
    (first, second) = found["Starts"].rows
    assert first[:1] + first[2:] == ("1", "", "")
    assert second[:1] + second[2:] == ("101", "1 min 0 s", "30 iterations")
    ((iteration_, written, _, seconds),) = found["Checkpoints"].rows
    assert (iteration_, written, seconds) == ("100", "1970-01-01 00:17:35", "3.0")
    assert found["From its logs"].rows == (("train.log", "straggler: rank 3 (n1) computes 9 ms"),)


def test_times_of_a_checkpoint_that_does_not_have_them_are_not_taken_from_its_files(tmp_path: Path) -> None:
    folder = write_restarted_run(tmp_path)
    (folder / "checkpoints" / "iter_0000100" / "run.json").write_text("{}")
    (table,) = (table for table in tables(open_run(folder)) if table.title == "Checkpoints")
    ((_, written, _, seconds),) = table.rows
    assert (written, seconds) == ("", "")


def test_durations() -> None:
    assert [duration(each) for each in (5.25, 61.0, 7325.0, 90_000.0)] == [
        "5.2 s",
        "1 min 1 s",
        "2 h 2 min",
        "1 d 1 h",
    ]
