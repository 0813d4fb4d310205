"""The whole model's figures are those of one rank, however its parameters are cut, copied and shared out."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch

from megalite.config import Config, DataConfig, ParallelConfig, TrainingConfig
from megalite.local_ranks import run_ranks
from megalite.presets import PRESETS
from megalite.topology import Topology
from megalite.train.layer_norms import layer_grad_norms
from megalite.train.prepare import build_data
from megalite.train.telemetry.timers import Timers
from megalite.train.trainer import Trainer

CONFIG = Config(
    # Positions that no sample has get no gradient. Keys' biases, which a softmax takes no notice of, are left
    # out: the gradient of one is zero or not by the rounding of its sums.
    model=replace(
        PRESETS["gpt-tiny"],
        vocab_size=256,
        seq_length=32,
        max_position_embeddings=48,
        add_bias_linear=False,
        params_dtype="fp64",
    ),
    data=DataConfig(mock_data=True),
    training=TrainingConfig(global_batch_size=4, train_iters=4, eval_iters=0),
)
LAYOUTS = {
    "tp2": ParallelConfig(2),
    "pp2, a tied table on both": ParallelConfig(1, 2),
    "dp2": ParallelConfig(1, 1, 2),
    "dp2, shared out": ParallelConfig(1, 1, 2, zero_stage=2),
}


FIGURE_LAYOUTS = {**LAYOUTS, "dp2, fully sharded": ParallelConfig(1, 1, 2, zero_stage=3)}


def _layer_norms(topology: Topology, config: Config) -> tuple[dict[str, float], dict[str, float], float]:
    """After two updates, which clip; those that are counted on full tensors by hand; and the whole norm."""
    timers = Timers()
    trainer = Trainer(config, topology, build_data(config, topology, timers), timers)
    for _ in range(2):
        result = trainer.step()
    told = dict(layer_grad_norms(trainer.optimizer, config.model.num_layers, result.grad_norm, topology))
    if topology.world_size > 1:
        return told, {}, result.grad_norm
    squares: dict[str, float] = {}
    for name, _ in trainer.chunks[0].named_parameters():
        layer = ".".join(name.split(".")[:2]) if name.startswith("layers") else name.split(".")[0]
        part = layer if layer.startswith(("layers", "embedding")) else "head"
        gradient = trainer.optimizer.gradient(name)
        squares[part] = squares.get(part, 0.0) + gradient.square().sum().item()
    whole = sum(squares.values())
    norms = {part: result.grad_norm * math.sqrt(square / whole) for part, square in squares.items()}
    return told, norms, result.grad_norm


@functools.cache
def _norms_of_one_rank() -> tuple[dict[str, float], dict[str, float], float]:
    (found,) = run_ranks(_layer_norms, ParallelConfig(distributed_backend="gloo"), 1, CONFIG)
    return found


def test_norms_of_layers_are_as_counted_by_hand() -> None:
    told, by_hand, whole = _norms_of_one_rank()
    assert told == pytest.approx(by_hand, rel=1e-12)
    assert list(told) == ["embedding", *(f"layers.{layer}" for layer in range(4)), "head"]
    assert math.hypot(*told.values()) == pytest.approx(whole, rel=1e-12)
    assert min(told.values()) > 0


@pytest.mark.parametrize("layout", FIGURE_LAYOUTS)
def test_any_layout_has_the_same_norms_of_layers(layout: str) -> None:
    config = replace(CONFIG, parallel=replace(FIGURE_LAYOUTS[layout], distributed_backend="gloo"))
    expected, _, _ = _norms_of_one_rank()
    for told, _, _ in run_ranks(_layer_norms, config.parallel, 2, config):
        assert told == pytest.approx(expected, rel=1e-11)


def _figures(topology: Topology, config: Config) -> tuple[float, int, float, int]:
    """As the optimizer tells them after two iterations, and as they are counted on full tensors by hand."""
    timers = Timers()
    trainer = Trainer(config, topology, build_data(config, topology, timers), timers)
    for _ in range(2):
        trainer.step()
    norm, zeros = trainer.optimizer.params_norm(), trainer.optimizer.num_zeros()
    if topology.world_size > 1:
        return norm, zeros, norm, zeros
    weights = dict(trainer.chunks[0].named_parameters())
    flat = torch.cat([weight.detach().flatten() for weight in weights.values()])
    gradients = [trainer.optimizer.gradient(name) for name in weights]
    return norm, zeros, flat.norm().item(), sum(int((gradient == 0).sum()) for gradient in gradients)


@functools.cache
def _one_rank() -> tuple[float, int, float, int]:
    (found,) = run_ranks(_figures, ParallelConfig(distributed_backend="gloo"), 1, CONFIG)
    return found


def test_one_rank_counts_as_one_does_by_hand() -> None:
    norm, zeros, norm_by_hand, zeros_by_hand = _one_rank()
    assert norm == pytest.approx(norm_by_hand, rel=1e-13)
    assert zeros == zeros_by_hand >= 16 * CONFIG.model.hidden_size


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_counts_the_same(layout: str) -> None:
    config = replace(CONFIG, parallel=replace(LAYOUTS[layout], distributed_backend="gloo"))
    norm, zeros, *_ = _one_rank()
    for rank_norm, rank_zeros, *_ in run_ranks(_figures, config.parallel, 2, config):
        assert rank_norm == pytest.approx(norm, rel=1e-12)
        assert rank_zeros == zeros
