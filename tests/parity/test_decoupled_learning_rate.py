"""The embedding's and the output layer's own learning rate: torch's AdamW on one rank, and any layout."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from megalite.config import Config, DataConfig, OptimizerConfig, TrainingConfig
from megalite.config.parameter_schedules import LearningRate
from megalite.config.presets import PRESETS
from megalite.distributed.topology import Topology
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.record_run import RunRecord
from megalite.train.model_chunks import named_parameters
from megalite.train.trainer import start_trainer
from tests.live_ranks import run_ranks
from tests.parity.models import run_alone, run_in

NUM_ITERATIONS = 3
OPTIMIZER = OptimizerConfig(
    lr=3e-3,
    min_lr=3e-4,
    decoupled_lr=1e-2,
    decoupled_min_lr=2e-3,
    lr_decay_style="cosine",
    lr_warmup_iters=2,
    weight_decay=0.1,
)


def config_of(model: str, optimizer: OptimizerConfig = OPTIMIZER) -> Config:
    return Config(
        model=replace(
            PRESETS[model],
            vocab_size=256,
            seq_length=32,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype="fp64",
        ),
        optimizer=optimizer,
        data=DataConfig(mock_data=True),
        training=TrainingConfig(
            micro_batch_size=2, global_batch_size=8, train_iters=NUM_ITERATIONS, eval_iters=0
        ),
    )


@functools.cache
def reference(model: str) -> RunRecord:
    return run_alone(config_of(model), NUM_ITERATIONS)


def compare_with_torch(topology: Topology, config: Config) -> None:
    """Update copies of the weights by torch's AdamW with the trainer's gradients, and compare each time."""
    rates = {
        own: LearningRate(replace(config.optimizer, **fields), NUM_ITERATIONS)
        for own, fields in ((False, {}), (True, {"lr": 1e-2, "min_lr": 2e-3}))
    }
    with start_trainer(config, topology) as trainer:
        copies = {name: nn.Parameter(w.detach().clone()) for name, w in named_parameters(trainer.chunks)}
        own_names = {name for name in copies if name in ("embedding.word.weight", "output.weight")}
        assert len(own_names) == 1 + config.model.untie_embeddings_and_output_weights
        groups = [
            {"params": [weight], "weight_decay": 0.1 if weight.dim() > 1 else 0.0, "own": name in own_names}
            for name, weight in copies.items()
        ]
        adamw = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8, foreach=False)
        for iteration in range(1, NUM_ITERATIONS + 1):
            trainer.train_step.compute_gradients(trainer.train_step.plan_iteration(trainer.progress))
            for name, weight in copies.items():
                weight.grad = trainer.optimizer.gradient(name).clone()
            torch.nn.utils.clip_grad_norm_(copies.values(), config.optimizer.clip_grad)
            for group in adamw.param_groups:
                group["lr"] = rates[group["own"]](iteration)
            adamw.step()
            trainer.step()
            for name, weight in copies.items():
                torch.testing.assert_close(trainer.optimizer.weight(name), weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("model", ["gpt-tiny", "llama-tiny"])
def test_as_torch_with_groups_of_parameters(model: str) -> None:
    config = config_of(model)
    run_ranks(compare_with_torch, config.parallel.mesh, 1, config)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("gpt-tiny", "pp2"),  # a copy of the tied weight on two ranks
        ("llama-tiny", "tp2pp2dp2+sp+zero1+gather"),
        pytest.param("gpt-tiny", "tp2pp2dp2", marks=pytest.mark.slow),
        pytest.param("llama-tiny", "dp2+zero2", marks=pytest.mark.slow),
        ("llama-tiny", "dp2+zero3"),
    ],
)
def test_same_run(model: str, name: str) -> None:
    run = run_in(name, config_of(model), NUM_ITERATIONS)
    assert not compare(run, reference(model)).excesses(TOLERANCES["fp64"])


def test_the_rate_makes_a_difference() -> None:
    """What is compared does depend on the rate: it could tell a difference."""
    other = config_of("gpt-tiny", replace(OPTIMIZER, decoupled_lr=None, decoupled_min_lr=None))
    comparison = compare(run_alone(other, NUM_ITERATIONS), reference("gpt-tiny"))
    assert comparison.excesses(TOLERANCES["fp64"])
