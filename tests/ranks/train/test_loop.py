"""When the training loop lets Python collect garbage, on ranks whose collector visits little else."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import dropwhile
from typing import Any

from torch import Tensor

from megalite.config import Config, DataConfig, ParallelConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.local_ranks import run_ranks
from megalite.distributed.topology import Topology
from megalite.pipeline.executor import ScheduleRun
from megalite.train.callbacks import default_callbacks
from megalite.train.loop import Callback, TrainingLoop, train
from megalite.train.stopping import RequeueNote, StopConditions, StopSignals
from megalite.train.telemetry.writers import Writers
from megalite.train.trainer import start_trainer

Collection = tuple[int, bool]
"""The iteration of a collection, and whether Python collects by itself."""


class Garbage(Callback):
    """Makes garbage in each iteration, more than starts a collection, and records each collection."""

    def __init__(self, error: Exception | None = None) -> None:
        self.collections: list[Collection] = []
        self._error = error

    @contextmanager
    def running(self, loop: TrainingLoop) -> Iterator[None]:
        self._loop = loop
        gc.callbacks.append(self._record)
        try:
            yield
        finally:
            gc.callbacks.remove(self._record)

    def _record(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.collections.append((self._loop.iteration, gc.isenabled()))

    def before_step(self, loop: TrainingLoop) -> None:
        for _ in range(10_000):
            cycle: list[object] = []
            cycle.append(cycle)
        if self._error is not None:
            raise self._error


def _config(**training: int) -> Config:
    return Config(
        model=replace(PRESETS["gpt-tiny"], num_layers=1, vocab_size=64, seq_length=16),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(
            **{"global_batch_size": 2, "micro_batch_size": 1, "train_iters": 2, "eval_iters": 1, **training}
        ),
    )


def _train(topology: Topology, callbacks: list[Callback], **training: int) -> None:
    config = _config(**training)
    stop_conditions = StopConditions(config.training, topology, StopSignals(RequeueNote(None)))
    with Writers(config.logging, topology, "") as writers, start_trainer(config, topology) as trainer:
        train(trainer, stop_conditions, [*callbacks, *default_callbacks(writers, config)], None)


def _on_a_rank(function: Any, *args: object) -> Any:
    return run_ranks(function, ParallelConfig().mesh, 1, *args)[0]


CASES: list[tuple[dict[str, int], list[int]]] = [
    ({"manual_gc_interval": 3}, [0, 1, 3, 4, 4, 6, 7, 7]),  # around the evaluations at 4 and 7
    ({"manual_gc_interval": 3, "manual_gc_eval": False}, [0, 1, 3, 6]),
    ({"manual_gc_interval": 0, "manual_gc_eval": False}, [0, 1]),
    ({"eval_iters": 0}, [0, 1]),
]
"""Fields of a run, and the iterations in which the loop collects."""


def _collections(topology: Topology, *runs: dict[str, int]) -> list[tuple[list[Collection], bool]]:
    """Return the collections of each run, and whether the collector is afterwards as in a fresh process."""
    gc.unfreeze()  # run_ranks has frozen the imports
    found = []
    for fields in runs:
        garbage = Garbage()
        _train(topology, [garbage], **{"train_iters": 7, "eval_interval": 4, **fields})
        found.append((garbage.collections, gc.isenabled() and gc.get_freeze_count() == 0))
    return found


def test_garbage_is_collected_between_iterations() -> None:
    runs = _on_a_rank(_collections, *(fields for fields, _ in CASES))
    for (fields, expected), (found, is_restored) in zip(CASES, runs, strict=True):
        collections = list(dropwhile(lambda each: each[1], found))  # from the loop's first one on
        assert [iteration for iteration, is_enabled in collections if not is_enabled] == expected, fields
        assert {iteration for iteration, is_enabled in collections if is_enabled} <= {7}, fields  # at the end
        assert is_restored, fields


def test_python_collects_collections_without_manual_gc() -> None:
    ((found, _),) = _on_a_rank(_collections, {"train_iters": 3, "manual_gc": False})
    assert {0, 1, 2} <= {iteration for iteration, is_enabled in found if is_enabled}


def _is_restored_after_an_error(topology: Topology) -> bool:
    gc.unfreeze()
    with suppress(ZeroDivisionError):
        _train(topology, [Garbage(ZeroDivisionError())])
        return False
    return gc.isenabled() and gc.get_freeze_count() == 0


def test_the_collector_is_restored_after_an_error() -> None:
    assert _on_a_rank(_is_restored_after_an_error)


def _counts_around_a_run(topology: Topology) -> tuple[int, int, bool]:
    gc.disable()
    gc.freeze()
    before = gc.get_freeze_count()
    _train(topology, [])
    return before, gc.get_freeze_count(), gc.isenabled()


def test_a_collector_that_the_program_has_set_up_stays_so() -> None:
    before, after, is_enabled = _on_a_rank(_counts_around_a_run)
    assert not is_enabled and 0 < after <= before


def _left_to_the_collector(topology: Topology) -> list[str]:
    """Return the types of tensors and schedules in the garbage of a step."""
    with start_trainer(_config(train_iters=5, eval_iters=0), topology) as trainer:
        for _ in range(2):
            trainer.step()
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        trainer.step()
        gc.collect()
        gc.set_debug(0)
        return [type(each).__name__ for each in gc.garbage if isinstance(each, Tensor | ScheduleRun)]


def test_a_step_leaves_no_tensor_to_the_collector() -> None:
    """A microbatch in a cycle of references would stay in memory until the next collection."""
    assert _on_a_rank(_left_to_the_collector) == []
