"""Which charts there are, and what each says of what it does not show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megalite.reporting.chart import figure
from megalite.reporting.panels import charts
from megalite.reporting.run import Run, open_run
from tests.run_folder import iteration, write_metrics, write_restarted_run


def _run(tmp_path: Path, *changes: dict[str, object]) -> Run:
    """A run of as many iterations."""
    records = [iteration(number, 0.0, number, **each) for number, each in enumerate(changes, 1)]
    return open_run(write_metrics(tmp_path / "run.jsonl", records))


def test_figures_that_never_change_are_a_line(tmp_path: Path) -> None:
    found, constants = charts([_run(tmp_path, {"loss_scale": 8.0}, {"loss_scale": 8.0})], "iteration")
    assert "Loss scale: 8 throughout" in constants and "MFU: 38 % throughout" in constants
    assert [chart.title for chart in found][:1] == ["Training loss"]
    assert "Loss scale" not in [chart.title for chart in found]


def test_a_figure_that_nobody_knows_has_a_chart(tmp_path: Path) -> None:
    found, _ = charts([_run(tmp_path, {"new_figure": 1.0}, {"new_figure": 2.0})], "iteration")
    (chart,) = [chart for chart in found if chart.title == "new figure"]
    assert chart.curves[0].series.y.tolist() == [1.0, 2.0]


def test_a_spike_is_left_outside_and_told(tmp_path: Path) -> None:
    changes = [{"lm_loss": 3.0 + number % 7 / 10} for number in range(400)]
    changes[200] = {"lm_loss": 500.0}
    changes[300] = {"lm_loss": "NaN"}
    found, _ = charts([_run(tmp_path, *changes)], "iteration")
    text = figure(found[0])
    assert "1 of 399 values lie outside, as far as 500; 1 NaN or infinite (triangles)" in text
    assert text.count('class="strange"') == text.count("<svg class=") == 2
    assert '"y":[' in text and "500" in text  # the pointer still tells it


@pytest.mark.parametrize(("losses", "num_scales"), [((4.0, 2.0), 2), ((2.1, 2.0), 1), ((4.0, 0.0), 1)])
def test_a_logarithmic_scale_where_it_shows_anything(
    tmp_path: Path, losses: tuple[float, ...], num_scales: int
) -> None:
    found, _ = charts([_run(tmp_path, *({"lm_loss": loss} for loss in losses))], "iteration")
    assert figure(found[0]).count("<svg class=") == num_scales


def test_the_x_axis_may_count_tokens(tmp_path: Path) -> None:
    found, _ = charts([open_run(write_restarted_run(tmp_path))], "tokens")
    loss, validation = found[0], found[1]
    assert loss.x_range == (1024.0, 200 * 1024.0)
    assert validation.curves[0].series.x.tolist() == [100 * 1024.0, 200 * 1024.0]
    assert loss.curves[0].restarts == (101 * 1024.0,)


def test_a_run_of_one_iteration(tmp_path: Path) -> None:
    found, _ = charts([_run(tmp_path, {})], "iteration")
    assert not re.search("nan|inf", figure(found[0]).replace("linear", ""))
