"""Charts of the report: which there are, and what each shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megalite.errors import UserError
from megalite.report.chart import Chart, figure_of, short_number
from megalite.report.page import page
from megalite.report.panels import charts_of
from megalite.report.run_folder import Run, open_run
from tests.run_folder import iteration, write_metrics, write_restarted_run


def _run(tmp_path: Path, *changes: dict[str, object]) -> Run:
    """A run with one iteration for each dict."""
    records = [iteration(number, 0.0, number, **each) for number, each in enumerate(changes, 1)]
    return open_run(write_metrics(tmp_path / "run.jsonl", records))


def test_metrics_that_never_change_are_a_line(tmp_path: Path) -> None:
    found, constants = charts_of([_run(tmp_path, {"loss_scale": 8.0}, {"loss_scale": 8.0})], "iteration")
    assert "Loss scale: 8 throughout" in constants and "MFU: 38 % throughout" in constants
    assert [chart.title for chart in found][:1] == ["Training loss"]
    assert "Loss scale" not in [chart.title for chart in found]


def test_the_load_of_the_machine_is_beside_the_loss(tmp_path: Path) -> None:
    rates = ["disk_read", "disk_write", "network_receive", "network_send"]
    rates += ["infiniband_receive", "infiniband_send"]
    names = ["gpu_percent", "cpu_percent", *(f"{name}_mb_per_second" for name in rates)]
    rows = [{name: float(number + i) for i, name in enumerate(names)} for number in (1, 2)]
    found, _ = charts_of([_run(tmp_path, *rows)], "iteration")
    drawn = {
        f"{chart.title}: {curve.part} ({chart.unit})": curve.series.y.tolist()
        for chart in found
        for curve in chart.curves
        if "machine" in chart.title
    }
    machine = "of the reporting machine"
    assert drawn == {
        f"Load {machine}: GPU (%)": [1.0, 2.0],
        f"Load {machine}: CPU, all cores (%)": [2.0, 3.0],
        f"Disk {machine}: read (MB/s)": [3.0, 4.0],
        f"Disk {machine}: write (MB/s)": [4.0, 5.0],
        f"Network {machine}: receive (MB/s)": [5.0, 6.0],
        f"Network {machine}: send (MB/s)": [6.0, 7.0],
        f"InfiniBand {machine}: receive (MB/s)": [7.0, 8.0],
        f"InfiniBand {machine}: send (MB/s)": [8.0, 9.0],
    }


def test_an_unknown_metric_has_a_chart(tmp_path: Path) -> None:
    found, _ = charts_of([_run(tmp_path, {"new_figure": 1.0}, {"new_figure": 2.0})], "iteration")
    (chart,) = [chart for chart in found if chart.title == "new figure"]
    assert chart.curves[0].series.y.tolist() == [1.0, 2.0]


def test_each_task_score_is_a_curve(tmp_path: Path) -> None:
    scores = [{"a/acc": 0.25, "b/em": 0.5}, {"a/acc": 0.75, "b/em": "NaN"}]
    tasks = [{"iteration": number, "scores": each} for number, each in enumerate(scores, 1)]
    rows = [iteration(1, 0.0, 1.0), {"tasks": tasks[0]}, iteration(2, 0.0, 2.0), {"tasks": tasks[1]}]
    run = open_run(write_metrics(tmp_path / "run.jsonl", [row | {"start_time": 0.0} for row in rows]))
    assert run.history.num_broken == 0
    found, _ = charts_of([run], "iteration")
    (chart,) = [chart for chart in found if chart.title == "Task scores"]
    assert [curve.part for curve in chart.curves] == ["a/acc", "b/em"]
    assert chart.curves[0].series.x.tolist() == [1, 2] and chart.curves[0].series.y.tolist() == [0.25, 0.75]
    assert chart.num_not_finite == 1
    assert "Validation loss" not in [chart.title for chart in found]


def _traces(charts: list[Chart], kind: str) -> list[dict[str, Any]]:
    return [trace for trace in figure_of(charts, ["run"], "iteration")["data"] if trace["mode"] == kind]


def test_a_spike_is_outside_of_the_chart_and_mentioned(tmp_path: Path) -> None:
    changes: list[dict[str, object]] = [{"lm_loss": 3.0 + number % 7 / 10} for number in range(400)]
    changes[200] = {"lm_loss": 500.0}
    changes[300] = {"lm_loss": "NaN"}
    found, _ = charts_of([_run(tmp_path, *changes)], "iteration")
    assert found[0].note() == "1 of 399 values are outside, up to 500; 1 NaN or infinite (triangles)"
    axis = figure_of(found, ["run"], "iteration")["layout"]["yaxis"]
    assert axis["range"][0] < 3.0 and 3.6 < axis["range"][1] < 5.0
    (triangles,) = _traces(found, "markers")
    assert triangles["x"].tolist() == [301] and triangles["text"] == ["nan"]
    assert 500.0 in _traces(found, "lines")[1]["y"]  # zooming out still shows it; number 0 is for the legend


@pytest.mark.parametrize(
    ("losses", "has_log"), [((4.0, 2.0), True), ((2.1, 2.0), False), ((4.0, 0.0), False)]
)
def test_a_logarithmic_scale_only_if_it_is_of_use(
    tmp_path: Path, losses: tuple[float, ...], has_log: bool
) -> None:
    found, _ = charts_of([_run(tmp_path, *({"lm_loss": loss} for loss in losses))], "iteration")
    menus = figure_of(found, ["run"], "iteration")["layout"]["updatemenus"]
    scales = [button["args"][0].get("yaxis.type") for menu in menus for button in menu["buttons"]]
    assert scales == (["linear", "log"] if has_log else [None, None])


def test_the_x_axis_may_count_tokens(tmp_path: Path) -> None:
    found, _ = charts_of([open_run(write_restarted_run(tmp_path))], "tokens")
    loss, validation = found[0].curves[0], found[1].curves[0]
    assert (loss.series.x[0], loss.series.x[-1]) == (1024.0, 200 * 1024.0)
    assert validation.series.x.tolist() == [100 * 1024.0, 200 * 1024.0]
    assert loss.restarts == (101 * 1024.0,)


def test_lost_values_and_restarts_are_drawn(tmp_path: Path) -> None:
    found, _ = charts_of([open_run(write_restarted_run(tmp_path))], "iteration")
    figure = figure_of(found, ["run"], "iteration")
    lost = next(trace for trace in figure["data"] if trace["name"] == "training loss, lost")
    assert lost["x"].tolist() == list(range(101, 131)) and lost["line"]["dash"] == "dash"
    (restart,) = figure["layout"]["shapes"]
    assert restart["x0"] == restart["x1"] == 101.0


def test_a_run_of_one_iteration(tmp_path: Path) -> None:
    found, _ = charts_of([_run(tmp_path, {})], "iteration")
    json.dumps(figure_of(found, ["run"], "iteration"), default=list, allow_nan=False)


def test_a_run_whose_only_loss_is_nan_has_a_page(tmp_path: Path) -> None:
    run = open_run(write_metrics(tmp_path / "run.jsonl", [{"iteration": 1, "lm_loss": "NaN"}]))
    assert charts_of([run], "iteration") == ([], [])
    assert "<h2>Where the time went</h2>" in page([run])


def test_the_page_without_plotly_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UserError, match=r"^the report needs plotly: pip install plotly$"):
        page([_run(tmp_path, {})])


def test_numbers_have_four_digits() -> None:
    values = (0.34567, 1234.0, 12345.0, 123456.0, 1.5e6, 2.5e-5, 0.0)
    assert [short_number(each) for each in values] == [
        *("0.3457", "1234", "12.35k", "123.5k", "1.5M", "2.5e-5", "0"),
    ]
