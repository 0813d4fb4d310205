"""Lines, JSON and page of a fit."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from megalite.config import Config
from megalite.plan.ladder.finished_runs import FinishedRun
from megalite.plan.ladder.fit_report import (
    LadderFit,
    compute_figure,
    fit_ladder,
    fit_lines,
    fit_page,
    fit_record,
)
from megalite.plan.ladder.sizes import LadderRun


def _run(name: str, parameters: int, ratio: float) -> LadderRun:
    tokens = int(ratio * parameters)
    return LadderRun(name, Config(), 256, parameters, 2 * parameters, tokens, 6.0 * parameters * tokens)


def _loss(run: LadderRun) -> float:
    return 1.5 + 20 * run.parameters**-0.3 + 30 * run.tokens**-0.25


def _ladder(ratios: tuple[float, ...]) -> LadderFit:
    sizes = (10**5, 3 * 10**5, 10**6, 3 * 10**6)
    runs = [_run(f"n{size}-{ratio:g}", size, ratio) for size in sizes for ratio in ratios]
    return fit_ladder([FinishedRun(run, _loss(run)) for run in runs], [_run("large", 10**8, 20)])


@pytest.fixture(scope="module")
def square() -> LadderFit:
    return _ladder((5, 20, 80))


@pytest.fixture(scope="module")
def line() -> LadderFit:
    return _ladder((20,))


def test_the_terms_of_size_need_several_ratios(square: LadderFit, line: LadderFit) -> None:
    assert square.by_size is not None and line.by_size is None
    assert square.by_size.exponents[0].value == pytest.approx(0.3, rel=1e-4)
    assert any(text.startswith("L(N, D) is not fitted") for text in fit_lines(line))
    assert any(
        text.startswith("L(N, D) = 1.5000 + 20 N^-0.3000 + 30 D^-0.2500 (") for text in fit_lines(square)
    )


def test_the_prediction_is_in_lines_and_json(square: LadderFit) -> None:
    target = square.targets[0]
    record = json.loads(json.dumps(fit_record(square), allow_nan=False))
    (found,) = record["predictions"]
    assert found["run"] == "large" and found["flops"] == target.flops
    assert found["by_size"]["value"] == pytest.approx(_loss(target), rel=1e-4)
    assert len(record["runs"]) == 12 and record["runs"][0]["loss"] == _loss(square.runs[0].run)
    *_, text = fit_lines(square)
    assert re.fullmatch(
        r"large, 1\.20e\+18 FLOPs: predicted loss \S+ \(\S+ to \S+\); by L\(N, D\) \S+ \(\S+ to \S+\)", text
    )


def test_the_page_needs_no_network(line: LadderFit) -> None:
    text = fit_page(line, "a <ladder>")
    body = re.sub(r"<script>.*?</script>", "", text, count=1, flags=re.DOTALL)
    assert "<title>a &lt;ladder&gt;</title>" in text
    assert not re.search(r"(src|href)=.http", body)
    assert "L(C) = " in body and "n3000000-20" in body


def test_the_figure_shows_runs_law_interval_and_predictions(line: LadderFit) -> None:
    traces = {trace["name"]: trace for trace in compute_figure(line)["data"]}
    assert list(traces) == ["95% interval of a run", "law", "runs", "predictions"]
    assert traces["runs"]["y"] == [each.loss for each in line.runs]
    assert traces["law"]["x"][-1] > line.targets[0].flops
    three = fit_ladder(line.runs[:3], [])
    assert [trace["name"] for trace in compute_figure(three)["data"]] == ["law", "runs"]
    assert "There is no interval: the law has as many unknowns as there are runs." in fit_lines(three)


def test_intervals_grow_away_from_the_runs(line: LadderFit) -> None:
    noisy = [replace(each, loss=each.loss * (1.01, 0.99)[index % 2]) for index, each in enumerate(line.runs)]
    law = fit_ladder(noisy, []).by_compute
    near, far = (law.predict([flops]) for flops in (line.runs[0].run.flops, line.targets[0].flops))
    assert near.low and near.high and far.low and far.high
    assert far.high / far.low > near.high / near.low > 1


def test_a_floor_that_the_runs_say_nothing_about_is_not_determined(line: LadderFit) -> None:
    losses = (2.0013, 1.9987, 2.0064, 1.99, 1.9946)
    runs = [FinishedRun(_run(f"n{size}", 10**size, 20), loss) for size, loss in enumerate(losses, 5)]
    text = "\n".join(fit_lines(fit_ladder(runs, [])))
    assert "(95% intervals: floor not determined; exponent of C not determined)" in text
