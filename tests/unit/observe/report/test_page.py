"""What the tables of the report page show."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from megalite.observe.report.page import page
from megalite.observe.report.run_folder import Run, open_run
from megalite.observe.report.run_history import HistoryRow, read_history
from megalite.observe.report.time_report import expert_table, metric_table, short_number, tables
from megalite.train.telemetry.metrics import ExpertUse, LayerLoads, loads_in
from megalite.train.telemetry.time_terms import COMPUTING, TimeComparison, TimeTerm
from megalite.train.trainer import LayoutChange
from tests.run_folder import iteration, write_metrics, write_restarted_run

EVEN, UNEVEN = LayerLoads((4, 4, 4), 1.0), LayerLoads((9, 3, 0), 0.5, dropped=2)


def _run(tmp_path: Path, *changes: dict[str, object]) -> Run:
    """A run with one iteration for each dict."""
    records = [iteration(number, 0.0, number, **each) for number, each in enumerate(changes, 1)]
    return open_run(write_metrics(tmp_path / "run.jsonl", records))


def test_every_metric_has_its_range_unknown_ones_too(tmp_path: Path) -> None:
    values: list[float | str] = [5.0, 500.0, "NaN", 1.0]
    run = _run(tmp_path, *({"new_figure": value} for value in values), {"lm_loss": "NaN"})
    rows = {name: cells for name, *cells in metric_table(run.history).rows}
    assert rows["new_figure"] == ["1", "5", "500", "1", "1"]
    assert rows["loss_scale"] == ["1", "1", "1", "1", "0"]
    assert rows["lm_loss"][-1] == "1" and "wall_time" not in rows and "iteration" not in rows


def test_of_a_repeated_iteration_the_last_values_count(tmp_path: Path) -> None:
    history = open_run(write_restarted_run(tmp_path)).history
    assert len(history.iterations) == 200
    assert {name: cells for name, *cells in metric_table(history).rows}["iteration_time_ms"][2] == "7500"


def test_the_last_task_scores_are_in_the_summary(tmp_path: Path) -> None:
    scores = [{"a/acc": 0.25, "b/em": 0.5}, {"a/acc": 0.75, "b/em": "NaN"}]
    tasks = [{"iteration": number, "scores": each} for number, each in enumerate(scores, 1)]
    rows = [iteration(1, 0.0, 1.0), {"tasks": tasks[0]}, iteration(2, 0.0, 2.0), {"tasks": tasks[1]}]
    run = open_run(write_metrics(tmp_path / "run.jsonl", [row | {"start_time": 0.0} for row in rows]))
    assert run.history.num_broken == 0
    assert "<td>a/acc 0.7500; b/em nan</td>" in page([run])


def test_bars_of_the_waterfall_start_where_the_last_one_ends(tmp_path: Path) -> None:
    shorter, longer = COMPUTING[:2]
    terms = [TimeTerm(shorter, 0.25, 0.5, ""), TimeTerm(longer, 0.75, 0.0, "")]
    text = page([_run(tmp_path, {})], [TimeComparison(terms, 1, "a plan")])
    bars = [
        ("expected", "0.00%;width:50.00%", "500.0 ms"),
        (shorter, "25.00%;width:25.00%", "-250.0 ms"),
        (longer, "25.00%;width:75.00%", "+750.0 ms"),
        ("measured", "0.00%;width:100.00%", "1000.0 ms"),
    ]
    (waterfall,) = (part for part in text.split("<table") if part.startswith(' class="waterfall"'))
    assert waterfall.count("<tr>") == len(bars)
    for row, (name, style, value) in zip(waterfall.split("<tr>")[1:], bars, strict=True):
        assert row.startswith(f"<th>{name}</th>") and f"margin-left:{style}" in row
        assert f"<td>{value}</td>" in row


def test_a_run_whose_only_loss_is_nan_has_a_page(tmp_path: Path) -> None:
    run = open_run(write_metrics(tmp_path / "run.jsonl", [{"iteration": 1, "lm_loss": "NaN"}]))
    assert "<h2>Where the time went</h2>" in page([run])


def test_phases_of_the_data_and_which_is_read(tmp_path: Path) -> None:
    run = _run(tmp_path, {})
    assert "Data of" not in page([run])
    phases = [[0, {"web": 3.0, "code <c>": 1.0}, None], [100, {"web": 1.0}, [300, {"web": 0.5, "math": 0.5}]]]
    mixture = {"names": ["web", "code <c>", "math"], "phases": phases, "exhausted": {"math": 90, "web": 400}}
    for record in (None, {"mixture": None}):
        description = {"model": {}, "progress": {"consumed_samples": 1}, "corpora": record}
        assert "Data of" not in page([replace(run, manifest=mock.Mock(description=description, tensors={}))])
    states = {0: ("now", "later"), 99: ("now", "later"), 100: ("over", "now")}
    for consumed, (first, second) in states.items():
        description = {"progress": {"consumed_samples": consumed}, "corpora": {"mixture": mixture}}
        text = page([replace(run, manifest=mock.Mock(description={"model": {}, **description}, tensors={}))])
        assert f"at sample {consumed}</h2>" in text
        assert f"<td>0</td><td>web 75.0%, code &lt;c&gt; 25.0%</td><td>{first}</td>" in text
        assert f"<td>from web 50.0%, math 50.0% to web 100.0%</td><td>{second}</td>" in text
        assert ("math ran out at sample 90" in text) == (consumed > 90)
        assert "web ran out" not in text


def test_loads_of_experts_are_multiples_of_the_mean() -> None:
    row = HistoryRow(7, {}, "experts", loads={"layers.0": EVEN, "layers.3": UNEVEN})
    assert expert_table(row).rows == (
        ("layers.0", "1.00", "0", "1.00", "1.000", "0"),
        ("layers.3", "2.25", "0", "0.00", "0.500", "2"),
    )
    nothing = HistoryRow(1, {}, "experts", loads={"layers.0": LayerLoads((0, 0), 0.0)})
    assert expert_table(nothing).rows == (("layers.0", "0.00", "0", "0.00", "0.000", "0"),)


def test_the_page_shows_the_last_loads(tmp_path: Path) -> None:
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
    assert "Experts of run" in html and "<td>layers.0</td><td>1.00</td>" in html
    assert "4 broken lines were skipped" in html


def test_changes_of_the_layout_are_those_of_iterations_that_count(tmp_path: Path) -> None:
    """A start that repeats iterations has changed the layout after them for nothing."""
    lines = []
    for start, number, layouts in (
        (0.0, 1, ("tp 2", "tp4")),
        (0.0, 2, None),
        (0.0, 3, ("tp 4", "lost")),
        (9.0, 3, ("tp 2", "pp4")),
    ):
        lines.append(iteration(number, start, start + number))
        if layouts is not None:
            change = LayoutChange(*layouts, 1.25, 2_500_000_000, num_lost=2 * (number == 3))._asdict()
            record = {"layout_change": {"iteration": number, **change}}
            lines.append(record | {"start_time": start, "wall_time": start + number})
    run = open_run(write_metrics(tmp_path / "run.jsonl", lines))
    assert run.history.num_broken == 0 and not run.history.evaluations
    (changes,) = (table for table in tables(run) if table.title == "Layout changes")
    assert changes.rows == (
        ("1", "tp 2", "tp4", "1.2", "2.5", ""),
        ("3", "tp 2", "pp4", "1.2", "2.5", "2 ranks lost"),
    )
    (slowest,) = (table for table in tables(run) if table.title == "Slowest iterations")
    notes = {cells[0]: cells[-1] for cells in slowest.rows}
    assert notes["2"] == "after a change of the layout"


def test_an_entropy_that_is_not_a_number_is_read() -> None:
    loads = loads_in({"layers": {"layers.0": {"tokens": [1, 2], "entropy": "NaN"}}})
    assert loads is not None and math.isnan(loads["layers.0"].entropy)
    assert expert_table(HistoryRow(1, {}, "experts", loads=loads)).rows[0][4] == "nan"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0.34567, "0.3457"), (1234.0, "1234"), (12345.0, "12.35k"), (123456.0, "123.5k")),
        *((1.5e6, "1.5M"), (2.5e-5, "2.5e-5"), (0.0, "0")),
    ],
)
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert short_number(value) == text
