"""Traces in Chrome's format: lanes, boxes in boxes, shares, and what is none."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megalite.errors import UserError
from megalite.report.trace_picture import is_pipeline_trace, read_trace, trace_figure
from megalite.train.tracing import Lane, TraceSpan, write_trace


def _event(lane: int, name: str, kind: str, start: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": kind, "pid": 0, "tid": lane, "ts": start, "dur": length}


def _bars(figure: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Name and milliseconds of each box."""
    for trace in figure["data"]:
        yield from zip(trace["hovertext"], trace["x"], strict=True)


@pytest.mark.parametrize("time", ["NaN", "Infinity", "1e308"])
def test_times_that_are_not_finite_are_a_mistake(tmp_path: Path, time: str) -> None:
    file = tmp_path / "trace.json"
    file.write_text(f'[{{"ph": "X", "ts": {time}, "dur": {time}}}, {{"ph": "X", "ts": 0, "dur": 1}}]')
    with pytest.raises(UserError, match="not in Chrome's trace format"):
        read_trace(file)


def test_own_traces_are_read(tmp_path: Path) -> None:
    """What training writes, with waits inside of its actions."""
    spans = [
        TraceSpan("iteration 5", "iteration", 1.0, 2.0),
        TraceSpan("F0", "forward", 1.0, 1.5, 0, 0),
        TraceSpan("all_reduce", "tp wait", 1.2, 1.3),
    ]
    lanes = [Lane(rank, {"pp": rank, "dp": 0, "tp": 0}, spans) for rank in range(2)]
    file = tmp_path / "pipeline_trace_5-5.json"
    write_trace(file, lanes, {"verdict": {"tp wait": 0.1, "compute": 0.9}})
    assert is_pipeline_trace(file)
    trace = read_trace(file)
    assert [name.split(" ")[:2] for name in trace.lanes] == [["rank", "0"], ["rank", "1"]]
    assert [box.depth for box in trace.boxes if box.lane == 0] == [0, 1, 2]
    assert trace.shares() == pytest.approx({"iteration": 0.5, "forward": 0.4, "tp wait": 0.1})
    assert trace.verdict == "tp wait 10%, compute 90%"
    figure, legend, _ = trace_figure(trace)
    assert sum(pair == ("F0", pytest.approx(500.0)) for pair in _bars(figure)) == 2
    assert [text for _, text in legend][-1] == "nothing 0.0%"
    names = [each["hovertext"][0] for each in figure["data"]]
    assert names == ["iteration 5", "F0", "all_reduce"]  # drawn over one another in this order


def test_the_last_of_several_iterations_is_drawn(tmp_path: Path) -> None:
    """Between them was an evaluation, which is in nobody's share."""
    events = [
        event
        for lane in range(2)
        for start, number in ((0.0, 1), (9000.0, 2))
        for event in (
            _event(lane, f"iteration {number}", "iteration", start, 1000.0),
            _event(lane, f"F{number}", "forward", start, 500.0),
        )
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(events))
    trace = read_trace(file)
    assert trace.shares() == pytest.approx({"iteration": 0.5, "forward": 0.5})
    figure, _, note = trace_figure(trace)
    assert {name for name, _ in _bars(figure)} == {"iteration 2", "F2"} and note == "iteration 2"


def test_a_lane_a_process_and_a_list_without_an_object(tmp_path: Path) -> None:
    events = [_event(0, "B", "b", 10.0, 5.0), {**_event(0, "A", "a", 0.0, 10.0), "pid": 1}]
    events.append({"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "rank <1>"}})
    file = tmp_path / "trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps(events).encode()))
    trace = read_trace(file)
    assert trace.lanes == ("rank 0", "rank <1>")
    assert trace.shares() == pytest.approx({"a": 1 / 3, "b": 1 / 6})
    assert trace_figure(trace)[0]["layout"]["yaxis"]["ticktext"] == ["rank 0", "rank &lt;1&gt;"]


def test_a_long_trace_is_cut_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps([_event(0, "A", "a", 10.0 * i, 10.0) for i in range(5000)]))
    figure, _, note = trace_figure(read_trace(file))
    assert len(list(_bars(figure))) == 4000
    assert note == "the first 40 of 50 ms are shown"


def test_the_profilers_own_are_not_of_the_pipeline(tmp_path: Path) -> None:
    assert not is_pipeline_trace(tmp_path / "run.1234.pt.trace.json")


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", '{"traceEvents": [{"ph": "M", "name": "x"}]}'),
        *('[{"ph": "X", "name": "no time"}]', '[{"ph": "X", "name": "x", "ts": "a"}]'),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "trace.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"trace\.json"):
        read_trace(file)
