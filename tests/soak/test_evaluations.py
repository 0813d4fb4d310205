"""What a run holds of its process stays constant over many evaluations; ``pytest -s`` prints a table."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from megalite.config import Config, DataConfig, LoggingConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.data.batch_loader import NUM_AHEAD
from megalite.data.indexed_dataset import IndexedWriter
from megalite.distributed.topology import Topology
from megalite.train.callbacks import default_callbacks
from megalite.train.loop import train
from megalite.train.stopping import RequeueNote, StopConditions, StopSignals
from megalite.train.telemetry.metrics import ValidationMetrics
from megalite.train.telemetry.timers import Timers
from megalite.train.telemetry.writers import Writers
from megalite.train.trainer import start_trainer

SEQ_LENGTH = 64
WARM_UP = 10
"""Evaluations before the first measurement: allocators and caches fill during them."""
MAX_MAPPINGS = 8
"""Mappings that the allocator may add; a thread that stays adds two for each evaluation."""
MAX_MEMORY_MB = 32.0


class Held(NamedTuple):
    """What this process holds; memory is the resident set in MiB."""

    threads: int
    files: int
    mappings: int
    memory_mb: float

    @staticmethod
    def now() -> Held:
        status = Path("/proc/self/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return Held(
            int(fields["Threads"]),
            len(os.listdir("/proc/self/fd")),
            len(Path("/proc/self/maps").read_text().splitlines()),
            int(fields["VmRSS"].split()[0]) / 1024,
        )


@dataclass
class MeasuringWriters:
    """The run's writers, with a measurement after each evaluation."""

    writers: Writers
    held: list[Held]

    def __getattr__(self, name: str) -> object:
        return getattr(self.writers, name)

    def validation(self, metrics: ValidationMetrics) -> None:
        self.writers.validation(metrics)
        self.held.append(Held.now())


def _corpus(folder: Path) -> str:
    prefix = str(folder / "corpus")
    tokens = np.random.default_rng(0).integers(0, 64, 64 * 256)
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add_documents(tokens, np.full(64, 256, np.int32))
    return prefix


def _train(topology: Topology, folder: Path, num_evaluations: int) -> list[Held]:
    config = Config(
        model=replace(PRESETS["gpt-tiny"], vocab_size=64, seq_length=SEQ_LENGTH, num_layers=1),
        data=DataConfig(data_path=(_corpus(folder),), split="80,20,0"),
        logging=LoggingConfig(
            log_interval=1, metrics_file=str(folder / "m.jsonl"), tensorboard_dir=str(folder / "board")
        ),
        training=TrainingConfig(
            global_batch_size=2,
            micro_batch_size=2,
            train_iters=num_evaluations,
            eval_interval=1,
            eval_iters=1,
        ),
    )
    timers, held = Timers(), list[Held]()
    stop = StopConditions(config.training, topology, StopSignals(RequeueNote(None)))
    with (
        Writers(config.logging, topology, "") as writers,
        start_trainer(config, topology, timers) as trainer,
    ):
        assert train(trainer, stop, default_callbacks(MeasuringWriters(writers, held), config)) == 0  # type: ignore[arg-type]
    return held


@pytest.mark.parametrize("num_evaluations", [25, pytest.param(500, marks=pytest.mark.slow)])
def test_evaluations_leave_nothing_behind(num_evaluations: int, tmp_path: Path, one_rank: Topology) -> None:
    held = _train(one_rank, tmp_path, num_evaluations)
    assert len(held) == num_evaluations
    print(f"\n{'evaluations':>12}{'threads':>9}{'files':>7}{'mappings':>10}{'memory MiB':>12}")
    for number in sorted({1, WARM_UP, *range(0, num_evaluations + 1, num_evaluations // 5)} - {0}):
        threads, files, mappings, memory = held[number - 1]
        print(f"{number:>12}{threads:>9}{files:>7}{mappings:>10}{memory:>12.1f}")
    first, last = held[WARM_UP - 1], held[-1]
    assert {each.files for each in held[WARM_UP:]} == {first.files}
    # An evaluation reads ahead in up to so many threads, and the kernel may count one that has just ended.
    assert max(each.threads for each in held[WARM_UP:]) <= first.threads + NUM_AHEAD
    assert last.mappings - first.mappings <= MAX_MAPPINGS
    assert last.memory_mb - first.memory_mb <= MAX_MEMORY_MB
    deadline = time.monotonic() + 300.0
    while (after := Held.now()).threads >= first.threads and time.monotonic() < deadline:
        time.sleep(0.01)  # for the kernel to stop counting threads that have ended
    assert after.threads <= first.threads - 1  # the reader of training data has ended
    assert after.files < first.files  # and the metrics file is closed
