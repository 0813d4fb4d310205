"""Copies of an offloaded update: gradients go down while backward runs, weights come up under the forward."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from megalite.config import Config, DataConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.kernels import adamw_
from megalite.optim import offload as offload_module
from megalite.train.trainer import start_trainer
from tests.live_ranks import run_ranks
from tests.ranks.checkpoint.test_load_layouts import world_size

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "ZeRO 0": {"data_parallel_size": 2},
    "ZeRO 1": {"data_parallel_size": 2, "zero_stage": 1, "overlap_param_gather": True},
    "ZeRO 2": {"data_parallel_size": 2, "zero_stage": 2, "overlap_param_gather": True},
    "ZeRO 3": {"data_parallel_size": 2, "zero_stage": 3},
    "ZeRO 3 in groups": {"data_parallel_size": 4, "zero_stage": 3, "data_parallel_shard_degree": 2},
    "sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}


def copies_of(topology, config: Config):
    """Return how many gradients were copied when backward ended, of how many, and what each update waited."""
    with start_trainer(config, topology) as trainer:
        optimizer = trainer.optimizer
        offload = optimizer.offload
        assert offload is not None and offload.gradients is not None
        finish_gradients, num_copied = optimizer.finish_gradients, []
        began, waited, num_calls = threading.Event(), [], 0

        def count_and_finish(scale=None):
            num_copied.append(len(offload.gradients.copied))
            return finish_gradients(scale)

        def update_after_forward_began(*tensors, **settings):
            nonlocal num_calls
            num_calls += 1
            if num_calls % len(offload.storage.ranges) == 0:  # the last range of an update
                waited.append(began.wait(300))
            return adamw_(*tensors, **settings)

        optimizer.finish_gradients = count_and_finish
        offload_module.adamw_ = update_after_forward_began
        try:
            trainer.step()
            first, _ = next(trainer.chunks[0].units())
            first.register_forward_pre_hook(lambda *_: began.set())
            trainer.step()
            optimizer.finish_weights()
        finally:
            offload_module.adamw_ = adamw_
        num_summed_later = sum(not optimizer._is_complete(state) for state in optimizer.adamw.states)
        return num_copied, offload.count - num_summed_later, waited


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            layout, id=name, marks=[pytest.mark.slow] if name in ("ZeRO 2", "ZeRO 3 in groups") else []
        )
        for name, layout in LAYOUTS.items()
    ],
)
def test_copies_overlap_backward_and_the_next_forward(layout: dict[str, Any]) -> None:
    parallel = ParallelConfig(**layout, ddp_bucket_size=2000, overlap_grad_reduce=True)
    config = Config(
        model=replace(PRESETS["gpt-tiny"], vocab_size=101, seq_length=16, params_dtype="bf16"),
        parallel=parallel,
        optimizer=OptimizerConfig(lr=1e-2, optimizer_cpu_offload=True),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(micro_batch_size=1, global_batch_size=4, train_iters=2, eval_iters=0),
    )
    for num_copied, count, waited in run_ranks(copies_of, parallel.mesh, world_size(parallel), config):
        assert count >= 8
        # The last bucket is still being reduced. With ZeRO 3 it has up to three states, of different kinds.
        num_last = 3 if parallel.zero_stage == 3 else 1
        assert all(count - num_last <= number <= count for number in num_copied), num_copied
        assert waited == [True, True]  # the last range was not updated when forward began
