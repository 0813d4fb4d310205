#!/usr/bin/env python
"""Measure the cost of --audit-interval 100.

python benchmarks/audit.py [--rounds 5]

Two replicas on two ranks of this machine. Each round runs an iteration without an audit and one with an
audit, and compares their CPU time, which other processes disturb less than the time on the clock.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import time

import torch

from megalite.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainingConfig
from megalite.distributed.local_ranks import run_ranks
from megalite.distributed.topology import Topology
from megalite.train.callbacks.audit import MicrobatchComparison
from megalite.train.replicas import ReplicaComparison
from megalite.train.trainer import start_trainer
from megalite.utils.log import log

INTERVAL = 100
ZERO_STAGES = (0, 1)
NUM_MICROBATCHES = (2, 8)


def measure(topology: Topology, config: Config, rounds: int) -> tuple[float, float]:
    """Return medians of CPU time in iterations: of an audit, and of its comparison of the replicas."""
    log.setLevel(logging.ERROR)
    audits, comparisons = [], []
    with start_trainer(config, topology) as trainer:
        replicas, microbatch = ReplicaComparison(trainer), MicrobatchComparison(trainer)
        trainer.train_step.before_update.append(microbatch.find)  # does nothing without `start`
        for _ in range(rounds + 1):
            times = [time.process_time()]
            trainer.step()
            times.append(time.process_time())
            microbatch.start()
            trainer.step()
            times.append(time.process_time())
            replicas.find()
            times.append(time.process_time())
            plain, audited, comparison = (end - start for start, end in itertools.pairwise(times))
            audits.append((audited + comparison - plain) / plain)
            comparisons.append(comparison / plain)
    return statistics.median(audits[1:]), statistics.median(comparisons[1:])  # the first round warms up


def config_of(zero_stage: int, num_microbatches: int) -> Config:
    """Return two replicas of a model with 14 million parameters."""
    return Config(
        model=ModelConfig(
            num_layers=4, hidden_size=384, num_attention_heads=6, seq_length=512, vocab_size=16384
        ),
        parallel=ParallelConfig(data_parallel_size=2, zero_stage=zero_stage),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(global_batch_size=2 * num_microbatches, train_iters=10**6, eval_iters=0),
    )


def main() -> None:
    """Print a row for each ZeRO stage and number of microbatches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    flags = parser.parse_args()
    print(f"torch {torch.__version__}, {vars(flags)}; CPU time of rank 0, at --audit-interval {INTERVAL}")
    print(
        "| ZeRO | microbatches of a replica | one audit, in iterations | of it, comparing replicas | cost |"
    )
    print("|---|---|---|---|---|")
    for zero_stage in ZERO_STAGES:
        for num_microbatches in NUM_MICROBATCHES:
            config = config_of(zero_stage, num_microbatches)
            (audit, comparison), _ = run_ranks(
                measure, config.parallel.mesh, 2, config, flags.rounds, timeout=3600
            )
            cost = f"{audit:.2f} | {comparison:.2f} | {audit / INTERVAL:.2%}"
            print(f"| {zero_stage} | {num_microbatches} | {cost} |", flush=True)


if __name__ == "__main__":
    main()
