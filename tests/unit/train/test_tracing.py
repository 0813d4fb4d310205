"""What a trace of iterations says of a rank's time, and how ranks' clocks are put on one."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megalite.config import LoggingConfig
from megalite.observer import Wait
from megalite.pipeline.action import Action, Kind
from megalite.train.telemetry.marks import HostMarks
from megalite.train.tracing.chrome import Lane, write_trace
from megalite.train.tracing.clocks import Meetings, Offset, clock_offsets
from megalite.train.tracing.pipeline_trace import trace_path
from megalite.train.tracing.spans import Recorder, Span
from megalite.train.tracing.verdict import Verdict, verdict_of


def iteration(start: float, end: float, number: int = 1) -> Span:
    return Span(f"iteration {number}", "iteration", start, end)


def forward(start: float, end: float, microbatch: int = 0) -> Span:
    return Span(f"forward {microbatch}", "forward", start, end, microbatch, 0)


RANKS = [
    [  # 10 s, of which 2 + 1 wait along pp, 1 is data
        iteration(0, 10),
        Span("batch-generator", "data", 0, 1),
        forward(0, 4),
        Span("all-reduce", "tp wait", 2, 2.5),
        Span("forward-recv", "pp wait", 5, 7),
        Span("optimizer", "part", 8, 10),
        Span("all-reduce", "other wait", 8, 8.5),
        Span("all-reduce", "pp wait", 9, 10),
    ],
    [  # 2 iterations of 5 s
        iteration(100, 105, 1),
        iteration(120, 125, 2),
        Span("reduce-scatter", "dp wait", 121, 124),
    ],
]


def test_the_shares_of_a_trace_known_by_hand() -> None:
    verdict = verdict_of(RANKS)
    assert verdict.shares == pytest.approx(
        {
            "bubble": 3 / 20,
            "tp wait": 0.5 / 20,
            "dp wait": 3 / 20,
            "data": 1 / 20,
            "other waits": 0.5 / 20,
            "compute": 12 / 20,
        }
    )
    assert sum(verdict.shares.values()) == pytest.approx(1)
    assert str(verdict) == "bubble 15%, tp wait 3%, dp wait 15%, data 5%, other waits 2%, compute 60%"


def test_the_percents_add_up_to_a_hundred() -> None:
    thirds = Verdict({"bubble": 1 / 3, "tp wait": 1 / 3, "compute": 1 / 3})
    assert str(thirds) == "bubble 34%, tp wait 33%, compute 33%"
    assert str(Verdict({"bubble": 0.004, "compute": 0.996})) == "bubble 0%, compute 100%"


def test_nothing_traced_is_no_division_by_zero() -> None:
    assert verdict_of([[]]).shares["compute"] == 1


def test_clocks_of_two_machines() -> None:
    """Rank 1's clock is 100 s ahead; in the second meeting nobody was late."""
    first = Meetings("a", (1.0, 5.0), (3.0, 5.2))
    second = Meetings("b", (102.9, 105.1), (103.1, 105.3))
    same, other = clock_offsets([first, second])
    assert same == Offset(0.0, 0.0)
    assert other.seconds == pytest.approx(-100.1)  # between 5.0 - 105.3 and 3.0 - 102.9
    assert other.error == pytest.approx(0.2)
    assert abs(other.seconds + 100) <= other.error


def test_ranks_of_one_machine_narrow_each_others_bounds() -> None:
    first = Meetings("a", (1.0,), (2.0,))
    second, third = Meetings("b", (101.4,), (102.4,)), Meetings("b", (100.9,), (101.1,))
    _, one, two = clock_offsets([first, second, third])
    assert one == two
    assert (one.seconds, one.error) == pytest.approx((-99.75, 0.35))  # -100.1 from third, -99.4 from second


def test_ranks_of_rank_0s_machine_have_its_clock() -> None:
    late = Meetings("a", (9.0,), (9.5,))
    assert clock_offsets([Meetings("a", (1.0,), (9.4,)), late]) == [Offset(0.0, 0.0)] * 2


def test_what_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def tick() -> float:
        nonlocal now
        now += 1.0
        return now

    monkeypatch.setattr(time, "perf_counter", tick)
    recorder = Recorder(HostMarks(), HostMarks())  # 1 and 2
    action = Action(Kind.BACKWARD, 3, 1)
    with recorder.iteration(7):  # 3
        for what in (action, Wait("pp", "backward-recv")):
            recorder.begins(what)
        recorder.ends(Wait("pp", "backward-recv"))
        recorder.ends(action)
        recorder.begins("batch-generator")
        recorder.begins(Wait("world", "all-reduce"))  # broken off by an exception
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
    lanes = [Lane(rank, (rank, 0, 0), spans) for rank, spans in enumerate(RANKS)]
    write_trace(path, lanes, {"verdict": {"bubble": 0.15}})
    trace = json.loads(path.read_text())
    assert trace["otherData"]["verdict"]["bubble"] == 0.15
    names = {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert names == {0: "rank 0 · pp 0 tp 0 dp 0", 1: "rank 1 · pp 1 tp 0 dp 0"}
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
    asked = {"trace_pipeline": "5:6"}
    assert trace_path(LoggingConfig(tensorboard_dir="tb"), "runs") is None
    assert trace_path(LoggingConfig(tensorboard_dir="tb", **asked), "runs") == Path(
        "tb/pipeline_trace_5-6.json"
    )
    assert trace_path(LoggingConfig(**asked), "runs") == Path("runs/pipeline_trace_5-6.json")
    named = LoggingConfig(tensorboard_dir="tb", trace_pipeline_path="x.json", **asked)
    assert trace_path(named, "runs") == Path("x.json")
