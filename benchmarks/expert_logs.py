#!/usr/bin/env python
"""Measure what the log of experts adds to an iteration that counts their tokens, as a share of the iteration.

python benchmarks/expert_logs.py

One rank with one thread trains a small model. Counts of the routers, their sum over the ranks and the figures
of each layer are billed for their processor time, and put in relation to the rest of the same iteration: the
difference of two iterations would be lost in the noise of a machine that has neighbours. A line is a number
of experts: the median and the range of the iterations' shares. By default, one of 100 iterations counts.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megalite.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.model.experts import Router
from megalite.train.callbacks.metrics_logging import begin_counts, end_counts, loads_of_layers
from megalite.train.trainer import Trainer, start_trainer
from megalite.utils.hardware import process_settings
from megalite.utils.log import log

SHAPES = ((8, 2, 512), (64, 8, 128), (128, 8, 128))
"""Experts, experts of a token, width of an expert."""


def config_of(experts: int, topk: int, width: int) -> Config:
    """Return a run of a small model with these experts."""
    model: ModelConfig = replace(
        PRESETS["llama-tiny"],
        hidden_size=256,
        num_layers=4,
        vocab_size=512,
        seq_length=512,
        num_experts=experts,
        moe_router_topk=topk,
        moe_ffn_hidden_size=width,
    )
    training = TrainingConfig(micro_batch_size=2, global_batch_size=4, train_iters=10**6, eval_iters=0)
    return Config(model=model, data=DataConfig(mock_data=True), training=training)


class Bill:
    """Adds up the processor time of calls, in `seconds`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, billed."""

        def billed(*args: Any) -> Any:
            start = time.thread_time()
            result = function(*args)
            self.seconds += time.thread_time() - start
            return result

        return billed


def share_of_iteration(trainer: Trainer, bill: Bill) -> float:
    """Return the billed processor time of an iteration, relative to the rest of it."""
    bill.seconds, start = 0.0, time.thread_time()
    bill.of(begin_counts)(trainer)
    trainer.step()
    bill.of(lambda: loads_of_layers(end_counts(trainer), trainer))()
    return bill.seconds / (time.thread_time() - start - bill.seconds)


def shares_of(config: Config, topology: Topology, rounds: int) -> list[float]:
    """Return the shares of iterations after the first one, in order of size."""
    bill = Bill()
    with start_trainer(config, topology) as trainer:
        for chunk in trainer.chunks:
            for router in chunk.modules():
                if isinstance(router, Router):
                    router._count = bill.of(router._count)  # type: ignore[method-assign]
        return sorted([share_of_iteration(trainer, bill) for _ in range(rounds + 1)][1:])


def main() -> None:
    """Print a line for each shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    log.setLevel(logging.ERROR)
    with Topology.start(ParallelConfig().mesh, Launch.from_environment()) as topology:
        process_settings.limit_threads(1, 1)
        for experts, topk, width in SHAPES:
            shares = shares_of(config_of(experts, topk, width), topology, args.rounds)
            print(
                f"{experts} experts, {topk} of a token: {statistics.median(shares):.2%} "
                f"({shares[0]:.2%} to {shares[-1]:.2%})",
                flush=True,
            )


if __name__ == "__main__":
    main()
