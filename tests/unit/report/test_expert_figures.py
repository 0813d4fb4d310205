"""Figures of experts show loads as multiples of the mean, for the iterations that count."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megalite.report.expert_figures import load_figure, load_summary, violation_figure
from megalite.report.page import page
from megalite.report.run_folder import open_run
from megalite.report.run_history import HistoryRow, read_history
from megalite.train.telemetry.expert_use import ExpertUse, LayerLoads, loads_in
from tests.run_folder import iteration, write_metrics

EVEN, UNEVEN = LayerLoads((4, 4, 4), 1.0), LayerLoads((9, 3, 0), 0.5, dropped=2)


def _row(number: int, **layers: LayerLoads) -> HistoryRow:
    return HistoryRow(
        number, {}, "experts", loads={name.replace("_", "."): each for name, each in layers.items()}
    )


def test_loads_are_multiples_of_the_mean() -> None:
    rows = [_row(number, layers_0=EVEN, layers_3=UNEVEN) for number in range(1, 101)]
    figure = load_figure(rows)
    assert figure["data"][-1]["z"] == [[1.0, 1.0, 1.0], [2.25, 0.75, 0.0]]
    assert list(figure["data"][-1]["y"]) == ["layers.0", "layers.3"]
    steps = figure["layout"]["sliders"][0]["steps"]
    assert len(steps) == len(figure["data"]) == 34 and steps[-1]["label"] == "100"
    assert all(step["args"][1].count(True) == 1 for step in steps)
    assert [trace["visible"] for trace in figure["data"]].index(True) == 33
    assert violation_figure(rows[:2])["data"][0]["z"] == [[1.0, 1.0], [2.25, 2.25]]
    assert "2.25 times the mean, in layers.3; the lowest entropy is 0.500" in load_summary(rows[0])


def test_no_tokens_at_all() -> None:
    row = _row(1, layers_0=LayerLoads((0, 0), 0.0))
    assert load_figure([row])["data"][0]["z"] == [[0.0, 0.0]]
    assert row.loads["layers.0"].max_violation == -1.0


def test_the_page_shows_what_the_run_wrote_last(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    lines = []
    for start, number, loads in ((0.0, 1, UNEVEN), (0.0, 2, UNEVEN), (9.0, 2, EVEN)):  # restarted at 2
        lines.append(iteration(number, start, number))
        record = ExpertUse(number, 8 * number, {"layers.0": loads}).record()
        lines.append({"experts": record, "start_time": start})
    for broken in ({"tokens": "?"}, {"tokens": [1.5], "entropy": 1.0}, {"tokens": [1]}, "?"):
        lines.append({"experts": {"iteration": 3, "layers": {"layers.0": broken}}})
    file = write_metrics(tmp_path / "run.jsonl", lines)
    history = read_history(file)
    assert [row.loads["layers.0"] for row in history.expert_use] == [UNEVEN, EVEN]
    assert not history.evaluations and history.num_broken == 4
    html = page([open_run(file)])
    assert "Experts of run" in html and "the largest load is 1.00 times the mean" in html
    assert json.dumps([2.25, 0.75, 0.0], separators=(",", ":")) in html


def test_an_entropy_that_is_not_a_number_is_read() -> None:
    loads = loads_in({"layers": {"layers.0": {"tokens": [1, 2], "entropy": "NaN"}}})
    assert loads is not None and math.isnan(loads["layers.0"].entropy)
    assert load_figure([HistoryRow(1, {}, "experts", loads=loads)])
