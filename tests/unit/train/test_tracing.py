"""Test the trace of iterations: spans, time breakdown, clock offsets and file."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megalite.config import LoggingConfig
from megalite.distributed.axis import Wait
from megalite.pipeline.schedules import Action, ActionKind
from megalite.train.telemetry.timers import WallClock
from megalite.train.tracing import (
    ClockOffset,
    ClockSamples,
    Lane,
    Recorder,
    TimeBreakdown,
    TraceSpan,
    clock_offsets,
    seconds_by_action,
    time_breakdown,
    trace_path,
    write_trace,
)


def iteration(start: float, end: float, number: int = 1) -> TraceSpan:
    return TraceSpan(f"iteration {number}", "iteration", start, end)


def forward(start: float, end: float, microbatch: int = 0) -> TraceSpan:
    return TraceSpan(f"forward {microbatch}", "forward", start, end, microbatch, 0)


RANKS = [
    [  # 10 s, of which 2 + 1 wait along pp, 1 is data
        iteration(0, 10),
        TraceSpan("batch-generator", "data", 0, 1),
        forward(0, 4),
        TraceSpan("all-reduce", "tp wait", 2, 2.5),
        TraceSpan("forward-recv", "pp wait", 5, 7),
        TraceSpan("optimizer", "part", 8, 10),
        TraceSpan("all-reduce", "other wait", 8, 8.5),
        TraceSpan("all-reduce", "pp wait", 9, 10),
    ],
    [  # 2 iterations of 5 s
        iteration(100, 105, 1),
        iteration(120, 125, 2),
        TraceSpan("reduce-scatter", "dp wait", 121, 124),
    ],
]


def test_the_shares_of_a_trace_known_by_hand() -> None:
    breakdown = time_breakdown(RANKS)
    assert breakdown.shares == pytest.approx(
        {
            "bubble": 3 / 20,
            "tp wait": 0.5 / 20,
            "dp wait": 3 / 20,
            "data": 1 / 20,
            "other waits": 0.5 / 20,
            "compute": 12 / 20,
        }
    )
    assert sum(breakdown.shares.values()) == pytest.approx(1)
    assert str(breakdown) == "bubble 15%, tp wait 3%, dp wait 15%, data 5%, other waits 2%, compute 60%"


def test_actions_do_not_include_their_waits() -> None:
    spans = [
        iteration(0, 20),
        TraceSpan("batch-generator", "data", 0, 1),
        forward(1, 5),
        TraceSpan("batch-generator", "data", 1, 2),
        TraceSpan("forward-recv", "pp wait", 2, 3.5),
        TraceSpan("forward-recv", "pp wait", 5, 6),
        forward(6, 8, 1),
        TraceSpan("backward 0", "backward", 8, 12, 0, 0),
        TraceSpan("optimizer", "part", 12, 20),
        TraceSpan("all-reduce", "tp wait", 13, 15),
    ]
    assert seconds_by_action(spans) == {("forward", 0): 1.75, ("backward", 0): 4.0}


def test_the_percents_add_up_to_a_hundred() -> None:
    thirds = TimeBreakdown({"bubble": 1 / 3, "tp wait": 1 / 3, "compute": 1 / 3})
    assert str(thirds) == "bubble 34%, tp wait 33%, compute 33%"
    assert str(TimeBreakdown({"bubble": 0.004, "compute": 0.996})) == "bubble 0%, compute 100%"


def test_an_empty_trace_does_not_divide_by_zero() -> None:
    assert time_breakdown([[]]).shares["compute"] == 1


def test_clocks_of_two_machines() -> None:
    """Test a clock that is 100 s ahead; no rank is late in the second collective."""
    first = ClockSamples("a", (1.0, 5.0), (3.0, 5.2))
    second = ClockSamples("b", (102.9, 105.1), (103.1, 105.3))
    same, other = clock_offsets([first, second])
    assert same == ClockOffset(0.0, 0.0)
    assert other.seconds == pytest.approx(-100.1)  # between 5.0 - 105.3 and 3.0 - 102.9
    assert other.error == pytest.approx(0.2)
    assert abs(other.seconds + 100) <= other.error


def test_ranks_of_one_machine_narrow_each_others_bounds() -> None:
    first = ClockSamples("a", (1.0,), (2.0,))
    second, third = ClockSamples("b", (101.4,), (102.4,)), ClockSamples("b", (100.9,), (101.1,))
    _, one, two = clock_offsets([first, second, third])
    assert one == two
    assert (one.seconds, one.error) == pytest.approx((-99.75, 0.35))  # -100.1 from third, -99.4 from second


def test_ranks_of_rank_0s_machine_have_its_clock() -> None:
    late = ClockSamples("a", (9.0,), (9.5,))
    assert clock_offsets([ClockSamples("a", (1.0,), (9.4,)), late]) == [ClockOffset(0.0, 0.0)] * 2


def test_recorded_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def tick() -> float:
        nonlocal now
        now += 1.0
        return now

    monkeypatch.setattr(time, "perf_counter", tick)
    recorder = Recorder(WallClock(), WallClock())  # 1 and 2
    action = Action(ActionKind.BACKWARD, 3, 1)
    with recorder.iteration(7):  # 3
        for what in (action, Wait("pp", "backward-recv")):
            recorder.begins(what)
        recorder.ends(Wait("pp", "backward-recv"))
        recorder.ends(action)
        recorder.begins("batch-generator")
        recorder.begins(Wait("world", "all-reduce"))  # interrupted by an exception
        recorder.ends("batch-generator")
    assert [(span.name, span.category, span.microbatch, span.chunk) for span in recorder.spans()] == [
        ("iteration 7", "iteration", None, None),
        ("backward 3 of chunk 1", "backward", 3, 1),
        ("backward-recv", "pp wait", None, None),
        ("batch-generator", "data", None, None),
    ]
    assert [span.seconds for span in recorder.spans()] == [8, 3, 1, 2]


def test_the_file_has_a_lane_for_each_rank(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    lanes = [Lane(rank, {"pp": rank, "dp": 0, "tp": 0}, spans) for rank, spans in enumerate(RANKS)]
    write_trace(path, lanes, {"verdict": {"bubble": 0.15}})
    trace = json.loads(path.read_text())
    assert trace["otherData"]["verdict"]["bubble"] == 0.15
    names = {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert names == {0: "rank 0 · pp 0 dp 0 tp 0", 1: "rank 1 · pp 1 dp 0 tp 0"}
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == sum(map(len, RANKS))
    assert complete[2] == {
        "ph": "X",
        "name": "forward 0",
        "cat": "forward",
        "pid": 0,
        "tid": 0,
        "ts": 0.0,
        "dur": 4e6,
        "args": {"microbatch": 0, "chunk": 0},
    }
    assert list(tmp_path.iterdir()) == [path]


def test_where_the_file_goes() -> None:
    requested = {"trace_pipeline": "5:6"}
    assert trace_path(LoggingConfig(tensorboard_dir="tb", **requested), "runs") == Path(
        "tb/pipeline_trace_5-6.json"
    )
    assert trace_path(LoggingConfig(**requested), "runs") == Path("runs/pipeline_trace_5-6.json")
    named = LoggingConfig(tensorboard_dir="tb", trace_pipeline_path="x.json", **requested)
    assert trace_path(named, "runs") == Path("x.json")
