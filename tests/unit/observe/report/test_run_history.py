"""Which of a run's lines count, through restarts of every kind."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megalite.observe.report.run_history import History, HistoryRow, read_history, segments_of
from megalite.utils.errors import UserError


def _row(iteration: int, start: float | None = None, loss: float = 0.0, interval: int = 1) -> HistoryRow:
    values = {"lm_loss": loss, "num_iterations": float(interval)}
    return HistoryRow(iteration, values | ({} if start is None else {"start_time": start}))


def test_an_iteration_that_was_made_again_counts_once() -> None:
    rows = [_row(i, loss=1.0) for i in range(1, 8)] + [_row(i, loss=2.0) for i in range(5, 11)]
    first, second = segments_of(rows)
    assert [row.iteration for row in first.kept] == [1, 2, 3, 4]
    assert [row.iteration for row in first.lost] == [5, 6, 7]
    assert [row.iteration for row in History([first, second]).iterations] == list(range(1, 11))


def test_a_line_of_several_iterations_is_lost_with_the_first_of_them() -> None:
    """Killed after 160, saved at 100: the line of 120 stands for 101 to 120."""
    rows = [_row(i, interval=20) for i in (20, 40, 60, 80, 100, 120, 140, 160, 120, 140)]
    first, _ = segments_of(rows)
    assert [row.iteration for row in first.lost] == [120, 140, 160]


def test_a_restart_that_loses_nothing_is_told_by_its_start() -> None:
    assert len(segments_of([_row(1, 10.0), _row(2, 10.0), _row(3, 20.0)])) == 2
    assert len(segments_of([_row(1), _row(2), _row(3)])) == 1


def test_lines_of_a_process_that_outlived_its_launcher() -> None:
    """Both write at the same time, and what the later one made counts."""
    rows = [_row(1, 10.0), _row(2, 10.0), _row(2, 20.0), _row(3, 10.0), _row(3, 20.0)]
    first, second = segments_of(rows)
    assert [row.iteration for row in first.lost] == [2, 3]
    assert [row.iteration for row in second.kept] == [2, 3]


def test_an_evaluation_that_was_lost_does_not_count() -> None:
    def evaluation(iteration: int, loss: float) -> HistoryRow:
        return HistoryRow(iteration, {"lm_loss": loss}, "valid")

    rows = [_row(1), _row(2), evaluation(2, 9.0), _row(3), evaluation(3, 9.0), _row(2), evaluation(2, 1.0)]
    found = History(segments_of(rows)).evaluations
    assert [(row.iteration, row.values["lm_loss"]) for row in found] == [(2, 1.0)]


def test_broken_lines_and_words_for_numbers(tmp_path: Path) -> None:
    lines = [
        json.dumps(
            {"iteration": 1, "lm_loss": "NaN", "mfu": None, "skipped": True, "grad_norm": "-Infinity"}
        ),
        '{"iteration": 2, "lm_lo',
        json.dumps({"validation": {"iteration": 2, "split": "valid", "name": "books", "lm_loss": 3.0}}),
        json.dumps({"validation": {"iteration": 2, "split": "valid", "weights": "ema", "lm_loss": 2.0}}),
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("\n".join(lines))
    history = read_history(file)
    (row,) = history.iterations
    assert math.isnan(row.values["lm_loss"]) and row.values["grad_norm"] == -math.inf
    assert row.values["skipped"] == 1.0 and "mfu" not in row.values
    assert [each.name for each in history.evaluations] == ["valid books", "valid ema"]
    assert history.num_broken == 1


@pytest.mark.parametrize("text", ["", "not json\n", '{"validation": {"iteration": 2, "lm_loss": 3.0}}\n'])
def test_a_file_without_figures_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match="has no metrics of an iteration: pass the file of --metrics-file"):
        read_history(file)


def test_numbers_that_nothing_can_be_made_of(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    odd = f'{{"iteration": 1, "lm_loss": {10**400}, "num_iterations": "NaN", "wall_time": 1e400}}'
    file.write_text(f'{odd}\n{{"iteration": {10**30}, "lm_loss": 1.0}}\n')
    history = read_history(file)
    (row,) = history.iterations
    assert dict(row.values) == {"iteration": 1.0, "lm_loss": math.inf}
    assert history.num_broken == 1
