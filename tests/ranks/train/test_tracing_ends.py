"""A trace of iterations of which a run has only some, or none; test_loop_observers.py has whole traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megalite.config import Config, DataConfig, LoggingConfig, ParallelConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.topology import Topology
from megalite.train.loop import TrainingLoop
from megalite.train.stopping import RequeueNote, StopConditions, StopSignals
from megalite.train.tracing import PipelineTracing
from megalite.train.trainer import start_trainer
from megalite.utils.log import log
from tests.live_ranks import run_ranks


def _run(topology: Topology, config: Config) -> list[str]:
    """Train two iterations, and return the log lines."""
    lines: list[str] = []
    log.setLevel("INFO")
    log.addFilter(lambda record: lines.append(record.getMessage()) or True)  # type: ignore[func-returns-value]
    stop_conditions = StopConditions(config.training, topology, StopSignals(RequeueNote(None)))
    with start_trainer(config, topology) as trainer:
        TrainingLoop(trainer, stop_conditions, [PipelineTracing()]).run()
    return lines


def _lines(folder: Path, iterations: str) -> tuple[list[str], list[str]]:
    """Return the log lines of both ranks."""
    config = Config(
        model=replace(PRESETS["gpt-tiny"], vocab_size=64, seq_length=16, num_layers=2),
        parallel=ParallelConfig(pipeline_model_parallel_size=2),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(global_batch_size=2, train_iters=2, eval_iters=0),
        logging=LoggingConfig(trace_pipeline=iterations, tensorboard_dir=str(folder)),
    )
    first, last = run_ranks(_run, config.parallel.mesh, 2, config)
    return first, last


def test_a_run_that_ends_before_says_so(tmp_path: Path) -> None:
    lines, _ = _lines(tmp_path, "7:8")
    assert lines == ["--trace-pipeline 7:8: no trace, as the run had no such iteration"]
    assert not list(tmp_path.iterdir())


def test_a_run_that_ends_within_the_range_writes_its_iterations(tmp_path: Path) -> None:
    _, lines = _lines(tmp_path, "1:9")
    assert lines[0].startswith("pipeline trace of iterations 1-2: ")
    assert (tmp_path / "pipeline_trace_1-9.json").exists()
