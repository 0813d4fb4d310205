"""Test the trace file of a run of several ranks."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.config import Config, DataConfig, LoggingConfig, ParallelConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.topology import Topology
from megalite.log import log
from megalite.pipeline.schedules import SCHEDULES
from megalite.train.callbacks.pipeline_trace import pipeline_trace
from megalite.train.trainer import start_trainer
from tests.live_ranks import run_ranks

MICROBATCHES = 4
WAITS = {
    "pp": {"forward-recv", "backward-recv", "forward-send", "backward-send", "all-reduce"},
    "tp": {"all-reduce", "all-gather", "reduce-scatter"},
    "dp": {"all-reduce", "all-gather", "reduce-scatter"},
}
LAYOUTS = {
    "pp2": ParallelConfig(1, 2),
    "pp2 interleaved": ParallelConfig(
        1, 2, pipeline_schedule="interleaved", num_virtual_stages_per_pipeline_rank=2
    ),
    "pp2 zb-h1": ParallelConfig(1, 2, pipeline_schedule="zb-h1"),
    "tp2": ParallelConfig(2, 1, sequence_parallel=True),
    "dp2": ParallelConfig(1, 1, 2, zero_stage=1),
}


def _run(topology: Topology, config: Config) -> tuple[list[str], int]:
    """Return the log lines, and the number of observers that remain at the end."""
    lines: list[str] = []
    log.setLevel("INFO")
    log.addFilter(lambda record: lines.append(record.getMessage()) or True)  # type: ignore[func-returns-value]
    trainer = start_trainer(config, topology)
    with pipeline_trace(trainer) as trace:
        for number in range(1, 5):
            with trace.iteration(number):
                trainer.step()
            trace.after(number)
    return lines, sum(map(len, trainer.observer_lists()))


def _config(layout: str, folder: Path, iterations: str = "2:3") -> Config:
    parallel = replace(LAYOUTS[layout], distributed_backend="gloo")
    samples = MICROBATCHES * (parallel.data_parallel_size or 1)
    return Config(
        model=replace(PRESETS["gpt-tiny"], vocab_size=64, seq_length=16, num_layers=4),
        parallel=parallel,
        data=DataConfig(mock_data=True),
        training=TrainingConfig(global_batch_size=samples, train_iters=4, eval_iters=0),
        logging=LoggingConfig(trace_pipeline=iterations, tensorboard_dir=str(folder)),
    )


def _trace(layout: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    config = _config(layout, folder)
    ranks = run_ranks(_run, config.parallel.mesh, 2, config)
    assert [left for _, left in ranks] == [0, 0]
    lines = [line for lines, _ in ranks for line in lines]
    return json.loads((folder / "pipeline_trace_2-3.json").read_text()), lines


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_lane_for_each_rank_with_all_that_it_did(layout: str, tmp_path: Path) -> None:
    trace, lines = _trace(layout, tmp_path)
    breakdown, file = lines
    assert breakdown.startswith("pipeline trace of iterations 2-3: bubble ")
    assert file.startswith(f"pipeline trace: {tmp_path}/pipeline_trace_2-3.json (2 lanes; clocks ")
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    lanes = [[event for event in events if event["tid"] == rank] for rank in range(2)]
    assert len(lanes[0]) + len(lanes[1]) == len(events)
    for rank, lane in enumerate(lanes):
        iterations = [event for event in lane if event["cat"] == "iteration"]
        assert [event["name"] for event in iterations] == ["iteration 2", "iteration 3"]
        for of_iteration in iterations:
            inside = [event for event in lane if _is_inside(event, of_iteration)]
            assert _actions(inside) == _scheduled(layout, rank)
            assert _names(inside, "data") == {"batch-generator"}
            assert {"forward-backward", "optimizer", "optimizer-inner-step"} <= _names(inside, "part")
        assert all(any(_is_inside(event, each) for each in iterations) for event in lane)
    shares = trace["otherData"]["verdict"]
    assert sum(shares.values()) == pytest.approx(1)
    assert all(0 <= share <= 1 for share in shares.values())
    axis = layout.split()[0][:2]
    waits = {"pp wait", "tp wait", "dp wait"} & {event["cat"] for event in events}
    assert waits == {f"{axis} wait"}
    assert WAITS[axis] <= _names(events, f"{axis} wait")
    assert shares["bubble" if axis == "pp" else f"{axis} wait"] > 0


def test_waits_are_named(tmp_path: Path) -> None:
    """Test the waits of the last stage for hidden states, and of the first stage for gradients."""
    trace, _ = _trace("pp2", tmp_path)
    names = [
        Counter(
            e["name"]
            for e in trace["traceEvents"]
            if e["ph"] == "X" and e["tid"] == rank and e["cat"] == "pp wait"
        )
        for rank in range(2)
    ]
    twice = 2 * MICROBATCHES  # iterations
    ends = {"all-reduce": 2, "embedding-grads-all-reduce": 2}
    assert names[0] == {"forward-send": twice, "backward-recv": twice, **ends}
    assert names[1] == {"backward-send": twice, "forward-recv": twice, **ends}


def test_a_run_that_ends_before_says_so(tmp_path: Path) -> None:
    config = _config("pp2", tmp_path, "7:8")
    (lines, _), _ = run_ranks(_run, config.parallel.mesh, 2, config)
    assert lines == ["--trace-pipeline 7:8: no trace, as the run had no such iteration"]
    assert not list(tmp_path.iterdir())


def test_a_run_that_ends_within_the_range_writes_its_iterations(tmp_path: Path) -> None:
    config = _config("pp2", tmp_path, "4:9")
    _, (lines, _) = run_ranks(_run, config.parallel.mesh, 2, config)
    assert lines[0].startswith("pipeline trace of iteration 4: ")
    assert (tmp_path / "pipeline_trace_4-9.json").exists()


def _is_inside(event: dict[str, Any], outer: dict[str, Any]) -> bool:
    start, end = outer["ts"], outer["ts"] + outer["dur"]
    slack = 1e-3  # microseconds: the sum of two rounded ones
    return start - slack <= event["ts"] and event["ts"] + event["dur"] <= end + slack


def _names(events: list[dict[str, Any]], category: str) -> set[str]:
    return {event["name"] for event in events if event["cat"] == category}


def _actions(events: list[dict[str, Any]]) -> Counter[tuple[str, int, int]]:
    return Counter(
        (event["cat"], event["args"]["microbatch"], event["args"]["chunk"])
        for event in events
        if "args" in event
    )


def _scheduled(layout: str, rank: int) -> Counter[tuple[str, int, int]]:
    parallel = LAYOUTS[layout]
    pp = parallel.pipeline_model_parallel_size
    schedule = SCHEDULES[parallel.schedule]
    stages = schedule.stage_map(pp, parallel.num_virtual_stages_per_pipeline_rank)
    actions = schedule.train(rank if pp > 1 else 0, stages, MICROBATCHES)
    return Counter((action.kind.value, action.microbatch, action.chunk) for action in actions)
