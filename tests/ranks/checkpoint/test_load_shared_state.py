"""A checkpoint is bound to no number of replicas and to no way of sharing the optimizer's state out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from megalite.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)
from megalite.config.presets import PRESETS
from megalite.tensor_parallel.parameter_spec import ParameterShard
from megalite.train.trainer import Trainer, start_trainer
from tests.live_ranks import run_ranks

NUM_ITERATIONS = 3
Way = tuple[int, ...]
"""Data-parallel size, ZeRO stage, and the ranks that it shards over if these are not all."""


def config_of(folder: Path, way: Way, dtype: str) -> Config:
    dp, stage, *degree = way
    model = dataclasses.replace(PRESETS["gpt-tiny"], num_layers=2, vocab_size=100, seq_length=16)
    return Config(
        model=dataclasses.replace(model, params_dtype=dtype),
        parallel=ParallelConfig(
            data_parallel_size=dp,
            zero_stage=stage,
            data_parallel_shard_degree=degree[0] if degree else None,
            ddp_bucket_size=20000,
            overlap_param_gather=stage > 0,
        ),
        optimizer=OptimizerConfig(initial_loss_scale=2.0**20, hysteresis=1, lr=1e-2),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(
            micro_batch_size=2, global_batch_size=8, train_iters=2 * NUM_ITERATIONS, eval_iters=0
        ),
        checkpoint=CheckpointConfig(save=str(folder), load=str(folder)),
    )


def trainer_of(topology, config: Config) -> Trainer:
    return start_trainer(config, topology)


def whole_tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, put together from the ranks' parts."""
    whole = {}
    for name, tensor in trainer.tensors().items():
        if isinstance(tensor, ParameterShard):
            full = torch.zeros(tensor.shape, dtype=tensor.tensor.dtype)
            full.view(-1)[tensor.start : tensor.start + tensor.tensor.numel()] = tensor.tensor
            if not tensor.is_replicated:
                torch.distributed.all_reduce(full, group=trainer.topology.dp.shard.group)
            tensor = full
        whole[name] = tensor.clone()
    return whole


def save(topology, config: Config) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Saves half-way; gives what it saved, and the losses of the undisturbed rest."""
    trainer = trainer_of(topology, config)
    for _ in range(NUM_ITERATIONS):
        trainer.step()
    trainer.save()
    saved = whole_tensors(trainer)
    return saved, [trainer.step().loss for _ in range(NUM_ITERATIONS)]


def load(topology, config: Config) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same of a run that resumes."""
    trainer = trainer_of(topology, config)
    assert trainer.load()
    assert trainer.progress.iteration == NUM_ITERATIONS
    return whole_tensors(trainer), [trainer.step().loss for _ in range(NUM_ITERATIONS)]


@pytest.mark.parametrize(
    ("saved_as", "loaded_as", "dtype"),
    [
        *(
            pytest.param(*ways, dtype, marks=[] if dtype == "bf16" else pytest.mark.slow)
            for dtype in ("fp32", "bf16", "fp16")
            for ways in (((2, 1), (1, 0)), ((1, 0), (2, 2)), ((2, 2), (4, 1)), ((2, 0), (2, 1)))
        ),
        ((4, 1, 2), (2, 2), "bf16"),
        ((2, 1), (4, 2, 2), "fp32"),
        ((4, 2, 2), (4, 2, 2), "bf16"),
        ((4, 3, 2), (4, 3, 2), "bf16"),
        ((4, 3, 2), (4, 1, 2), "fp32"),
        ((4, 1), (4, 3, 2), "fp32"),
    ],
)
def test_any_way_resumes_any_other(tmp_path: Path, saved_as: Way, loaded_as: Way, dtype: str) -> None:
    first, second = (config_of(tmp_path, way, dtype) for way in (saved_as, loaded_as))
    saved, losses = run_ranks(save, first.parallel.mesh, saved_as[0], first)[0]
    loaded, resumed = run_ranks(load, second.parallel.mesh, loaded_as[0], second)[0]
    assert saved.keys() == loaded.keys()
    assert any(name.endswith(".main") for name in saved) is (dtype != "fp32")
    assert ("optimizer.loss_scaler.scale" in saved) is (dtype == "fp16")
    for name, tensor in saved.items():
        assert tensor.dtype == loaded[name].dtype
        assert torch.equal(tensor, loaded[name]), name
    if saved_as == loaded_as or (saved_as[0] == loaded_as[0] == 2):
        assert resumed == losses
    assert resumed == pytest.approx(losses, rel={"fp32": 1e-5, "bf16": 2e-3, "fp16": 1e-3}[dtype])


def test_a_rounded_weight_is_its_main_weight_rounded(tmp_path: Path) -> None:
    config = config_of(tmp_path, (2, 1), "bf16")
    saved, _ = run_ranks(save, config.parallel.mesh, 2, config)[0]
    names = [name.removeprefix("model.") for name in saved if name.startswith("model.")]
    for name in names:
        main = saved[f"optimizer.{name}.main"]
        assert main.dtype == torch.float32
        assert torch.equal(saved[f"model.{name}"], main.bfloat16())


def initial(topology, config: Config) -> dict[str, torch.Tensor]:
    return whole_tensors(trainer_of(topology, config))


def test_initial_main_weights_are_drawn_in_fp32(tmp_path: Path) -> None:
    config, fp32 = config_of(tmp_path, (2, 1), "bf16"), config_of(tmp_path, (1, 0), "fp32")
    rounded = run_ranks(initial, config.parallel.mesh, 2, config)[0]
    (exact,) = run_ranks(initial, fp32.parallel.mesh, 1, fp32)
    names = [name.removeprefix("model.") for name in exact if name.startswith("model.")]
    assert names
    for name in names:
        assert torch.equal(rounded[f"optimizer.{name}.main"], exact[f"model.{name}"])
        assert torch.equal(rounded[f"model.{name}"], exact[f"model.{name}"].bfloat16())
