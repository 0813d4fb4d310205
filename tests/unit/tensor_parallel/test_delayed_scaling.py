"""Scales from earlier iterations, against Transformer Engine's definition and against ml_dtypes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from megalite.config import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.delayed_scaling import DelayedGemm, ScaleHistory
from megalite.tensor_parallel.fp8 import Fp8Settings
from megalite.train.trainer import start_trainer

TOPS = np.array([448.0, 448.0, 57344.0])


def _gemm_in_run(topology: Topology, **options: object) -> tuple[DelayedGemm, ScaleHistory]:
    gemm = DelayedGemm(Fp8Settings("hybrid", "delayed", emulates=True, **options))  # type: ignore[arg-type]
    return gemm, ScaleHistory(topology, {nn.Linear(1, 1): gemm}, uses_newest=False)


@pytest.mark.parametrize(("uses_newest", "length"), [(False, 1), (False, 3), (True, 1), (True, 3)])
def test_scales_are_those_of_transformer_engine(uses_newest: bool, length: int, one_rank: Topology) -> None:
    """Its history begins with the iteration in progress; it is read, rolled, and its first row is cleared."""
    gemm = DelayedGemm(Fp8Settings("hybrid", "delayed", history_length=length))
    history = ScaleHistory(one_rank, {nn.Linear(1, 1): gemm}, uses_newest=uses_newest)
    theirs, scale = np.zeros((length, 3)), np.ones(3)
    rows = [[3, 0, 1], [9, 2, 1], [0, 4, 1], [0, 5, math.inf], [0, 1, 2], [0, 1, 2], [1, 0, 3], [2, 0, 0]]
    for row in rows:
        history.begin()
        history.measured[0].copy_(torch.tensor(row))
        history.step(torch.tensor(True))
        theirs[0] = row
        amax = theirs[0].copy() if uses_newest else theirs.max(0)
        theirs = np.roll(theirs, -1, 0)
        theirs[0] = 0.0
        is_usable = (amax > 0) & np.isfinite(amax)
        scale = np.where(is_usable, TOPS / np.where(is_usable, amax, 1.0), scale)
        np.testing.assert_allclose(TOPS / gemm.history[0].numpy(), scale, rtol=1e-6)
    before = gemm.history.clone()
    history.begin()
    history.measured.fill_(7.0)
    history.step(torch.tensor(False))  # weights that were not updated have no new scales either
    assert torch.equal(gemm.history, before)


def test_operands_are_rounded_with_the_scales_of_the_history(one_rank: Topology) -> None:
    """In forward and in backward, with a margin, and with numbers beyond the range."""
    gemm, history = _gemm_in_run(one_rank, margin=1)
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(*shape, generator=generator) for shape in ((6, 1, 8), (4, 8), (6, 1, 4)))
    wide, wide_grad = x @ weight.t(), grad @ weight
    assert torch.equal(gemm.forward(x, weight, None), wide)  # without a history
    assert torch.equal(gemm.input_gradient(grad, weight, None), wide_grad)
    history.step(torch.tensor(True))
    history.begin()

    def rounded(tensor: torch.Tensor, largest: float, kind: type, top: float) -> torch.Tensor:
        scale = np.float32(2 * largest / top)
        codes = np.clip(tensor.numpy() * (np.float32(1) / scale), -top, top).astype(kind)
        return torch.from_numpy(codes.astype(np.float32) * scale)

    e4m3, e5m2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    largest = [float(each.abs().max()) for each in (x, weight, grad)]
    x[0] *= 5.0
    weights = rounded(weight, largest[1], e4m3, 448.0)
    expected = rounded(x, largest[0], e4m3, 448.0) @ weights.t()
    torch.testing.assert_close(gemm.forward(x, weight, None), expected)
    expected = rounded(grad, largest[2], e5m2, 57344.0) @ weights
    torch.testing.assert_close(gemm.input_gradient(grad, weight, None), expected)
    assert [float(each) for each in gemm.measured] == [float(x.abs().max()), *largest[1:]]
    x[0, 0, 0] = math.inf
    assert gemm.forward(x, weight, None).isnan().all()


def _config(folder: Path) -> Config:
    return Config(
        model=ModelConfig(num_layers=1, hidden_size=32, num_attention_heads=2, seq_length=16, vocab_size=64),
        optimizer=OptimizerConfig(lr=1e-2),
        data=DataConfig(mock_data=True),
        checkpoint=CheckpointConfig(load=str(folder), save=str(folder)),
        training=TrainingConfig(
            train_iters=3, fp8_format="e4m3", fp8_recipe="delayed", emulate=True, fp8_amax_history_len=2
        ),
    )


def test_a_run_resumes_with_its_history(tmp_path: Path, one_rank: Topology) -> None:
    """With another length the history begins anew, after --allow-settings-change."""
    config = _config(tmp_path)
    with start_trainer(config, one_rank) as trainer:
        for _ in range(2):
            trainer.step()
        trainer.save()
        expected = trainer.step().loss
    with start_trainer(config, one_rank) as trainer:
        trainer.load()
        assert trainer.step().loss == expected
    longer = replace(config.training, fp8_amax_history_len=3)
    changed = replace(config.checkpoint, allow_settings_change=True)
    with start_trainer(replace(config, training=longer, checkpoint=changed), one_rank) as trainer:
        trainer.load()
        histories = [each for name, each in trainer.chunks[0].named_buffers() if "amax" in name]
        assert len(histories) == 4 and all(each.shape == (4, 3) and not each.any() for each in histories)
        assert trainer.step().loss != expected
