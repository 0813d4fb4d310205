"""Ranks that hang on purpose, each with its own standard error, and what became of them."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

from megalite.config import CheckpointConfig, Config, DataConfig, ParallelConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.local_ranks import forked_with_torch
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.train.callbacks import watchdog
from megalite.train.trainer import Trainer, start_trainer
from tests.programs import free_port

NUM_RANKS = 4
CONFIG = Config(
    model=replace(PRESETS["gpt-tiny"], num_layers=2, vocab_size=256, seq_length=16),
    data=DataConfig(mock_data=True),
    training=TrainingConfig(global_batch_size=4, train_iters=100, eval_iters=2, hang_timeout=1.0),
)
Fault = Callable[[Trainer], None]


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        statuses: exit status by rank; None where the rank did not exit by itself.
        errors: what each rank wrote to standard error.
        folder: of the run's checkpoints.
    """

    statuses: list[int | None]
    errors: list[str]
    folder: Path

    @property
    def reports(self) -> list[str]:
        """Every rank's report of a hang."""
        return [text for text in self.errors if "error: hang" in text]


def run_with_fault(fault: Fault, at_fault: int, parallel: ParallelConfig, folder: Path) -> Outcome:
    """Trains on four ranks, one of which meets a fault after its first iteration.

    Args:
        fault: a function of this module; called instead of the second iteration, which follows.
        at_fault: the rank.
    """
    context = forked_with_torch()
    port = free_port()
    config = replace(
        CONFIG,
        parallel=dataclasses.replace(parallel, distributed_backend="gloo", num_threads=1),
        checkpoint=CheckpointConfig(save=str(folder)),
    )
    ranks = [
        context.Process(target=_rank_main, args=(rank, port, config, fault, at_fault))
        for rank in range(NUM_RANKS)
    ]
    for process in ranks:
        process.start()
    try:
        stopped = fault is stop_process
        for rank, process in enumerate(ranks):
            if not (stopped and rank == at_fault):
                process.join(600)
        statuses = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    errors = [(folder / f"stderr_{rank}").read_text() for rank in range(NUM_RANKS)]
    return Outcome(statuses, errors, folder)


def sleep_in_data(trainer: Trainer) -> None:
    """Make every further read of a sample wait forever."""
    prefetcher = trainer.load_batch._prefetcher
    assert prefetcher is not None
    prefetcher._reads.clear()
    prefetcher._read = lambda *_: threading.Event().wait()  # type: ignore[assignment, return-value]


def skip_collectives(trainer: Trainer) -> None:
    """Enter a collective that the other ranks enter later, or never."""
    with trainer.topology.world.wait("barrier"):
        dist.barrier()


def stop_process(trainer: Trainer) -> None:
    """Stop the process, as a debugger does, or a machine that swaps, once the rank has posted a status."""
    trainer.topology.store.wait([f"megalite/watchdog/{trainer.topology.rank}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def _rank_main(rank: int, port: int, config: Config, fault: Fault, at_fault: int) -> None:
    folder = config.checkpoint.save
    assert folder is not None
    descriptor = os.open(Path(folder) / f"stderr_{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 2)
    # A busy machine may keep a thread from a core for some polls.
    watchdog._SILENT_POLLS = 40 if fault is stop_process else 400
    # Rank 0 serves the store.
    watchdog._PATIENCE_SECONDS = 1.0 if fault is stop_process and at_fault == 0 else 120.0
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with Topology.start(config.parallel.mesh, Launch(rank, NUM_RANKS, rank, NUM_RANKS)) as topology:
        trainer = start_trainer(config, topology)
        with watchdog.HangWatchdog().running(SimpleNamespace(trainer=trainer)):  # type: ignore[arg-type]
            trainer.step()
            if rank == at_fault:
                fault(trainer)
            for _ in range(3):
                trainer.step()
