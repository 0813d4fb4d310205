"""Each fault of a run of two ranks is named by the term of the time that it makes longer, and no other is."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megalite.checkpoint.saver import Saver
from megalite.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LoggingConfig,
    ParallelConfig,
    TrainingConfig,
)
from megalite.config.presets import PRESETS
from megalite.distributed.axis import Observer, Wait
from megalite.distributed.topology import Topology
from megalite.observe.report.run_history import read_history
from megalite.observe.unit_record import KERNEL_KINDS
from megalite.train.callbacks import default_callbacks
from megalite.train.loop import train
from megalite.train.stopping import RequeueNote, StopConditions, StopSignals
from megalite.train.telemetry.time_recorder import OperatorTimer
from megalite.train.telemetry.time_terms import TimeSample, compare
from megalite.train.telemetry.writers import Writers
from megalite.train.trainer import Trainer, start_trainer
from megalite.utils.log import log
from megalite.utils.torch_private import EagerMode
from tests.live_ranks import run_ranks

LAYOUTS = {
    "dp": ParallelConfig(data_parallel_size=2, distributed_backend="gloo"),
    "tp": ParallelConfig(tensor_model_parallel_size=2, distributed_backend="gloo"),
    "pp": ParallelConfig(pipeline_model_parallel_size=2, distributed_backend="gloo"),
}
CONFIG = Config(
    model=replace(PRESETS["gpt-tiny"], num_layers=2, vocab_size=64, seq_length=16),
    data=DataConfig(mock_data=True),
    training=TrainingConfig(micro_batch_size=2, global_batch_size=4, train_iters=4, eval_iters=0),
)
SCALES = (0.5, 2.0, 8.0)
"""Factors of the seconds below, tried in turn until the fault is many times what a busy machine takes."""
SECONDS = 0.4
"""Extra seconds of a wait for data, a save, an evaluation and so on: many times an iteration."""
RANK_SECONDS = {"tp": 2.4, "dp": 1.0, "pp": 1.0}
"""Extra seconds of a slow rank's forward. Two busy cores take long for the many waits along tp."""
LINK_SECONDS = {"tp": 0.02, "dp": 0.2, "pp": 0.1}
"""Extra seconds of each of an iteration's waits along an axis."""
Fault = Callable[[Trainer, float], AbstractContextManager[Any] | None]
"""Makes a fault of this scale in a trainer, or returns a context in which all of the process has it."""


def _sleeper(scale: float) -> Callable[..., None]:
    return lambda *_: time.sleep(SECONDS * scale)


@dataclass
class SlowWait(Observer):
    """Makes each wait along an axis longer, on every rank, as a slow link does."""

    axis: str
    seconds: float

    def begins(self, what: Any) -> None:
        """Do nothing: the message is on its way."""

    def ends(self, what: Any) -> None:
        if isinstance(what, Wait) and what.axis.startswith(self.axis):
            time.sleep(self.seconds)


def _axis(trainer: Trainer) -> str:
    return next(name for name, axis in trainer.topology.axes.items() if axis.size > 1)


def _slow_rank(trainer: Trainer, scale: float) -> None:
    seconds = RANK_SECONDS[_axis(trainer)] * scale
    if trainer.topology.rank == 1:
        trainer.chunks[0].register_forward_pre_hook(lambda *_: time.sleep(seconds))


def _slow_link(trainer: Trainer, scale: float) -> None:
    axis = _axis(trainer)
    trainer.topology.observers.insert(0, SlowWait(axis, LINK_SECONDS[axis] * scale))


def _starved_loader(trainer: Trainer, scale: float) -> None:
    if trainer.topology.rank == 1:
        loader = trainer.load_batch
        assert loader._prefetcher is not None
        sleep, take = _sleeper(scale), loader._prefetcher.take
        loader._prefetcher.take = lambda *what: (sleep(), take(*what))[1]  # type: ignore[method-assign]


class SlowOperators(EagerMode):
    """Makes the run's operators of these names take longer, from the third iteration on."""

    def __init__(self, trainer: Trainer, seconds: float, *names: str) -> None:
        super().__init__()
        self._trainer, self._seconds, self._names = trainer, seconds, names

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._trainer.progress.iteration >= 2 and func.overloadpacket.__name__ in self._names:
            time.sleep(self._seconds)
        return func(*args, **(kwargs or {}))


def _slow_gemms(trainer: Trainer, scale: float) -> SlowOperators:
    return SlowOperators(trainer, 0.02 * scale, "mm", "addmm", "add_weight_gradient_")


def _slow_attention(trainer: Trainer, scale: float) -> SlowOperators:
    fused = "_scaled_dot_product_flash_attention_for_cpu"
    return SlowOperators(trainer, 0.05 * scale, fused, f"{fused}_backward")


def _slow_unfused_attention(trainer: Trainer, scale: float) -> SlowOperators:
    return SlowOperators(trainer, 0.03 * scale, "causal_softmax_", "bmm")


def _slow_norms(trainer: Trainer, scale: float) -> SlowOperators:
    return SlowOperators(trainer, 0.03 * scale, "native_layer_norm", "native_layer_norm_backward")


def _slow_python(trainer: Trainer, scale: float) -> None:
    sleep = _sleeper(scale)
    trainer.chunks[0].register_forward_pre_hook(
        lambda *_: sleep() if trainer.progress.iteration >= 2 else None
    )


def _long_stages(trainer: Trainer, scale: float) -> None:
    trainer.chunks[0].register_forward_pre_hook(_sleeper(scale))


def _before(owner: type, method: str, action: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Return a context in which the action precedes each call of a method."""
    original = getattr(owner, method)
    call = lambda *args, **named: (action(), original(*args, **named))[1]  # noqa: E731
    return mock.patch.object(owner, method, call)


def _slow_disk(_: Trainer, scale: float) -> AbstractContextManager[Any]:
    return _before(Saver, "save", _sleeper(scale))


def _slow_evaluation(trainer: Trainer, scale: float) -> None:
    sleep = _sleeper(scale)
    trainer.chunks[0].register_forward_pre_hook(lambda chunk, _: None if chunk.training else sleep())


def _garbage(trainer: Trainer, scale: float) -> None:
    def collect(*_: Any) -> None:
        end = time.perf_counter() + SECONDS * scale
        while time.perf_counter() < end:
            gc.collect()

    trainer.chunks[0].register_forward_pre_hook(collect)


def _slow_log(_: Trainer, scale: float) -> AbstractContextManager[Any]:
    return _before(Writers, "iteration", _sleeper(scale))


def _nothing(_: Trainer, scale: float) -> None:
    """Make no fault."""


def _run(topology: Topology, config: Config, fault: Fault, scale: float = 1.0) -> list[str]:
    """Train with the fault, and return the log lines."""
    lines: list[str] = []
    log.setLevel("INFO")
    log.addFilter(lambda record: lines.append(record.getMessage()) or True)  # type: ignore[func-returns-value]
    signals = StopSignals(RequeueNote(None))
    with (
        start_trainer(config, topology) as trainer,
        Writers(config.logging, topology, "", config.checkpoint.save) as writers,
        fault(trainer, scale) or nullcontext(),
    ):
        train(trainer, StopConditions(config.training, topology, signals), default_callbacks(writers, config))
    return lines


@pytest.mark.parametrize(
    ("fault", "layout", "term", "evidence"),
    [
        (_slow_rank, "dp", "straggler", "rank 1 ("),
        pytest.param(_slow_rank, "tp", "straggler", "rank 1 (", marks=pytest.mark.slow),
        pytest.param(_slow_rank, "pp", "stage imbalance", "the stage of rank 1 (", marks=pytest.mark.slow),
        (_long_stages, "pp", "bubble", "rank "),
        (_slow_gemms, "dp", "GEMMs", "it takes "),
        pytest.param(_slow_attention, "dp", "attention", "it takes ", marks=pytest.mark.slow),
        pytest.param(_slow_unfused_attention, "dp", "attention", "it takes ", marks=pytest.mark.slow),
        pytest.param(_slow_norms, "dp", "memory-bound kernels", "it takes ", marks=pytest.mark.slow),
        pytest.param(_slow_python, "dp", "kernel launches", "it takes ", marks=pytest.mark.slow),
        (_slow_link, "dp", "dp wait", "even rank "),
        pytest.param(_slow_link, "tp", "tp wait", "even rank ", marks=pytest.mark.slow),
        pytest.param(_slow_link, "pp", "pp wait", "even rank ", marks=pytest.mark.slow),
        (_starved_loader, "dp", "data", "rank 1 ("),
        (_slow_disk, "dp", "saving", "it takes "),
        (_slow_evaluation, "dp", "evaluation", "it takes "),
        pytest.param(_slow_log, "dp", "logging", "it takes ", marks=pytest.mark.slow),
        pytest.param(_garbage, "dp", "garbage collection", "it takes ", marks=pytest.mark.slow),
    ],
    ids=lambda value: value.__name__ if callable(value) else value if len(value) == 2 else None,
)
def test_a_fault_is_named(fault: Fault, layout: str, term: str, evidence: str, tmp_path: Path) -> None:
    """A machine that stops a rank for a while is a fault too, and is named: then a longer fault is tried."""
    for scale in SCALES:
        try:
            _check(fault, layout, scale, term, evidence, tmp_path / str(scale))
            return
        except AssertionError:
            if scale == SCALES[-1]:
                raise


def _check(fault: Fault, layout: str, scale: float, term: str, evidence: str, folder: Path) -> None:
    config = replace(
        CONFIG,
        parallel=LAYOUTS[layout],
        logging=LoggingConfig(log_interval=1, log_time_breakdown=True),
        model=replace(CONFIG.model, attention_dropout=0.1 * (fault is _slow_unfused_attention)),
        checkpoint=CheckpointConfig(save=str(folder), save_interval=1 if fault is _slow_disk else None),
        training=replace(CONFIG.training, eval_interval=1, eval_iters=1 if fault is _slow_evaluation else 0),
    )
    _, lines = run_ranks(_run, config.parallel.mesh, 2, config, fault, scale)
    (line,) = (line for line in lines if line.startswith("time breakdown: "))
    assert line.startswith(f"time breakdown: {term} cost ")
    assert f" of an iteration: {evidence}" in line
    samples = read_history(folder / "metrics.jsonl").samples
    assert [sample.iteration for sample in samples] == [2, 3, 4]
    assert _always_named(samples) == {term}


def _always_named(samples: Sequence[TimeSample]) -> set[str]:
    """Return the terms that each slow sample names: another program on the machine is no constant fault."""
    expected = {term.name: term.expected for term in compare(samples).terms}
    slow = samples[1:]  # some faults begin later
    return set.intersection(
        *({term.name for term in compare([each], expected).slow_terms()} for each in slow)
    )


def test_kernels_are_measured_in_the_iteration_before_a_sample(tmp_path: Path) -> None:
    logging = LoggingConfig(
        log_interval=3, log_time_breakdown=True, metrics_file=str(tmp_path / "metrics.jsonl")
    )
    training = replace(CONFIG.training, train_iters=6)
    config = replace(CONFIG, parallel=LAYOUTS["dp"], logging=logging, training=training)
    run_ranks(_run_with_timers, config.parallel.mesh, 2, config)
    (sample,) = read_history(tmp_path / "metrics.jsonl").samples
    assert sample.iteration == 6
    assert min(sample.seconds[kind] for kind in KERNEL_KINDS) > 0.0


def _run_with_timers(topology: Topology, config: Config) -> None:
    """Train, and check which iterations have a timer of kernels."""
    measured = []

    def note(trainer: Trainer, _: float) -> AbstractContextManager[Any]:
        return _before(OperatorTimer, "__enter__", lambda: measured.append(trainer.progress.iteration + 1))

    _run(topology, config, note)
    assert measured == [2, 5]


def test_without_the_flag_nothing_is_recorded(tmp_path: Path) -> None:
    logging = LoggingConfig(log_interval=1, metrics_file=str(tmp_path / "metrics.jsonl"))
    config = replace(CONFIG, parallel=LAYOUTS["dp"], logging=logging)
    _, lines = run_ranks(_run, config.parallel.mesh, 2, config, _nothing)
    assert not any("time breakdown" in line for line in lines)
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert not any("time_breakdown" in record for record in records)
