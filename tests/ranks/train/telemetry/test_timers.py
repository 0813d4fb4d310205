"""Test the table of all ranks' timers, and that it costs nothing if no timers are requested."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalite.config import Config, DataConfig, LoggingConfig, ParallelConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.axis import Observer, Wait, observing
from megalite.distributed.topology import Topology
from megalite.train.callbacks import default_callbacks
from megalite.train.loop import train
from megalite.train.stopping import RequeueNote, StopConditions, StopSignals
from megalite.train.telemetry.timers import Timers, WallClock
from megalite.train.telemetry.writers import Writers
from megalite.train.tracing import Recorder
from megalite.train.trainer import start_trainer
from megalite.utils.log import log
from tests.live_ranks import run_ranks

CONFIG = Config(
    model=replace(PRESETS["gpt-tiny"], num_layers=2, vocab_size=64, seq_length=16),
    parallel=ParallelConfig(pipeline_model_parallel_size=2, distributed_backend="gloo"),
    data=DataConfig(mock_data=True),
    training=TrainingConfig(global_batch_size=4, micro_batch_size=2, train_iters=2, eval_iters=1),
)


def _run(topology: Topology, logging: LoggingConfig) -> tuple[list[str], int]:
    """Return the log lines, and how often objects were gathered over all ranks during training."""
    lines: list[str] = []
    num_gathered = 0
    gather = dist.all_gather_object

    def counting(*args: object, **options: object) -> None:
        nonlocal num_gathered
        num_gathered += 1
        gather(*args, **options)

    log.setLevel("INFO")
    log.addFilter(lambda record: lines.append(record.getMessage()) or True)  # type: ignore[func-returns-value]
    config = replace(CONFIG, logging=logging)
    signals = StopSignals(RequeueNote(None))
    timers = Timers(topology.device, logging.timers_level, topology.observers)
    with start_trainer(config, topology, timers) as trainer:
        trainer.verify_data = lambda: None  # it gathers errors at the end
        with Writers(config.logging, topology, "") as writers:
            dist.all_gather_object = counting
            train(
                trainer,
                StopConditions(config.training, topology, signals),
                default_callbacks(writers, config),
            )
            dist.all_gather_object = gather
        return lines, num_gathered


def _table(lines: list[str]) -> dict[str, str]:
    """Return the rows of the first table, by timer."""
    text = next(line for line in lines if line.startswith("(min, max) time across ranks (ms):"))
    return {row.split(" .")[0].strip(): row.split(": ", 1)[1] for row in text.splitlines()[1:]}


def test_both_ranks_are_in_the_table() -> None:
    logging = LoggingConfig(log_interval=2, timing_log_level=2)
    _, (lines, num_gathered) = run_ranks(_run, CONFIG.parallel.mesh, 2, logging)
    table = _table(lines)
    of_both = {"forward-backward", "forward-compute", "backward-compute", "optimizer", "interval-time"}
    for name in of_both:
        assert re.fullmatch(r"\([\d.]+, [\d.]+\) slowest: rank [01]", table[name])
    of_one = {"forward-recv", "backward-send", "forward-send", "backward-recv"}
    assert all(re.fullmatch(r"\([\d.]+, [\d.]+\)", table[name]) for name in of_one)
    assert sum(line.startswith("(min, max)") for line in lines) == 1
    assert num_gathered == 1  # once a log line


@pytest.mark.parametrize("level", [None, 0])
def test_without_timers_nothing_is_gathered_or_logged(level: int | None) -> None:
    logging = LoggingConfig(log_interval=1, timing_log_level=level)
    ranks = run_ranks(_run, CONFIG.parallel.mesh, 2, logging)
    assert [num_gathered for _, num_gathered in ranks] == [0, 0]
    assert not [line for lines, _ in ranks for line in lines if "across ranks" in line]


def test_timers_for_tensorboard_alone_are_not_in_the_log(tmp_path: Path) -> None:
    logging = LoggingConfig(
        log_interval=1, log_timers_to_tensorboard=True, tensorboard_dir=str(tmp_path / "board")
    )
    _, (lines, _) = run_ranks(_run, CONFIG.parallel.mesh, 2, logging)
    assert not [line for line in lines if "across ranks" in line]
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert [event.step for event in events.Scalars("forward-backward-time")] == [1, 2]


class _WaitsForReplicas(Observer):
    """Collect the axes and kinds of waits for other replicas."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()

    def begins(self, what: object) -> None:
        if isinstance(what, Wait) and what.axis.startswith("dp"):
            self.seen.add((what.axis, what.what))

    def ends(self, what: object) -> None:
        pass


def _step_in_groups(topology: Topology, config: Config) -> tuple[set[str], set[tuple[str, str]], set[str]]:
    """Return the timers of a step, its waits for other replicas, and their categories in a trace."""
    timers = Timers(level=1, observers=topology.observers)
    waits, recorder = _WaitsForReplicas(), Recorder(WallClock(), WallClock())
    with start_trainer(config, topology, timers) as trainer:
        with observing(topology.observers, waits, recorder):
            trainer.step()
        categories = {span.category for span in recorder.spans()}
        return set(timers.take()), waits.seen, {each for each in categories if each.startswith("dp")}


def test_waits_within_and_between_groups_count_as_those_of_all_replicas() -> None:
    parallel = replace(
        CONFIG.parallel,
        pipeline_model_parallel_size=1,
        data_parallel_size=4,
        data_parallel_shard_degree=2,
        zero_stage=1,
    )
    training = replace(CONFIG.training, micro_batch_size=1)
    config = replace(CONFIG, parallel=parallel, training=training)
    for timers, waits, categories in run_ranks(_step_in_groups, parallel.mesh, 4, config):
        assert waits == {
            ("dp_shard", "reduce-scatter"),
            ("dp_replicate", "all-reduce"),
            ("dp_shard", "all-gather"),
            ("dp", "all-reduce"),  # the loss
        }
        assert categories == {"dp wait"}
        assert {"all-grads-sync", "params-all-gather"} <= timers
