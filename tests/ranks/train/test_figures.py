"""Test that the norms and counts of the whole model are those of one rank, in any layout."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch

from megalite.config import Config, DataConfig, ParallelConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.local_ranks import run_ranks
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.parameter_spec import spec_of
from megalite.train.callbacks.layer_norms import layer_grad_norms
from megalite.train.trainer import start_trainer

CONFIG = Config(
    # Positions that no sample has get no gradient. There are no biases: those of keys do not change a
    # softmax, so that it depends on rounding whether their gradient is zero.
    # The vocabulary is padded to 259 rows, to 266 with tp=2 and to 280 with tp=4.
    model=replace(
        PRESETS["gpt-tiny"],
        vocab_size=257,
        make_vocab_size_divisible_by=7,
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


FIGURE_LAYOUTS = {
    **LAYOUTS,
    "dp2, fully sharded": ParallelConfig(1, 1, 2, zero_stage=3),
    "pp2 dp2, fully sharded": ParallelConfig(1, 2, 2, zero_stage=3),
}
PADDED_LAYOUTS = {
    **FIGURE_LAYOUTS,
    "tp4": ParallelConfig(4),
    "tp2 pp2": ParallelConfig(2, 2),
    **{f"tp2 dp2, ZeRO {stage}": ParallelConfig(2, 1, 2, zero_stage=stage) for stage in (1, 2, 3)},
}
UNTIED_LAYOUTS = ("tp4", "tp2 pp2", "tp2 dp2, ZeRO 1", "tp2 dp2, ZeRO 3")


def _layer_norms(topology: Topology, config: Config) -> tuple[dict[str, float], dict[str, float], float]:
    """Return the norms after two updates that clip, the same from full tensors, and the whole norm."""
    trainer = start_trainer(config, topology)
    for _ in range(2):
        result = trainer.step()
    norms_of_layers = dict(
        layer_grad_norms(trainer.optimizer, config.model.num_layers, result.grad_norm, topology)
    )
    if topology.world_size > 1:
        return norms_of_layers, {}, result.grad_norm
    squares: dict[str, float] = {}
    for name, _ in trainer.chunks[0].named_parameters():
        layer = ".".join(name.split(".")[:2]) if name.startswith("layers") else name.split(".")[0]
        part = layer if layer.startswith(("layers", "embedding")) else "head"
        gradient = trainer.optimizer.gradient(name)
        squares[part] = squares.get(part, 0.0) + gradient.square().sum().item()
    whole = sum(squares.values())
    norms = {part: result.grad_norm * math.sqrt(square / whole) for part, square in squares.items()}
    return norms_of_layers, norms, result.grad_norm


@functools.cache
def _norms_of_one_rank() -> tuple[dict[str, float], dict[str, float], float]:
    (found,) = run_ranks(_layer_norms, ParallelConfig(distributed_backend="gloo"), 1, CONFIG)
    return found


def test_norms_of_layers_are_as_counted_by_hand() -> None:
    norms_of_layers, by_hand, whole = _norms_of_one_rank()
    assert norms_of_layers == pytest.approx(by_hand, rel=1e-12)
    assert list(norms_of_layers) == ["embedding", *(f"layers.{layer}" for layer in range(4)), "head"]
    assert math.hypot(*norms_of_layers.values()) == pytest.approx(whole, rel=1e-12)
    assert min(norms_of_layers.values()) > 0


@pytest.mark.parametrize("layout", FIGURE_LAYOUTS)
def test_any_layout_has_the_same_norms_of_layers(layout: str) -> None:
    config = replace(CONFIG, parallel=replace(FIGURE_LAYOUTS[layout], distributed_backend="gloo"))
    expected, _, _ = _norms_of_one_rank()
    num_ranks = config.parallel.tp * config.parallel.pp * (config.parallel.data_parallel_size or 1)
    for norms_of_layers, _, _ in run_ranks(_layer_norms, config.parallel, num_ranks, config):
        assert norms_of_layers == pytest.approx(expected, rel=1e-11)


def _figures(topology: Topology, config: Config) -> tuple[float, int, float, int]:
    """Return norm and zeros after two iterations, from the optimizer and computed from full tensors."""
    trainer = start_trainer(config, topology)
    for _ in range(2):
        trainer.step()
    norm, zeros = trainer.optimizer.params_norm(), trainer.optimizer.num_zeros()
    if topology.world_size > 1:
        return norm, zeros, norm, zeros
    weights, gradients = [], []
    for name, weight in trainer.chunks[0].named_parameters():
        used = slice(spec_of(weight).used_shape[0])
        weights.append(weight.detach()[used].flatten())
        gradients.append(trainer.optimizer.gradient(name)[used])
    num_zeros = sum(int((gradient == 0).sum()) for gradient in gradients)
    return norm, zeros, torch.cat(weights).norm().item(), num_zeros


def _config(is_tied: bool, parallel: ParallelConfig) -> Config:
    model = replace(CONFIG.model, untie_embeddings_and_output_weights=not is_tied)
    return replace(CONFIG, model=model, parallel=replace(parallel, distributed_backend="gloo"))


@functools.cache
def _one_rank(is_tied: bool) -> tuple[float, int, float, int]:
    config = _config(is_tied, ParallelConfig())
    (found,) = run_ranks(_figures, config.parallel, 1, config)
    return found


@pytest.mark.parametrize("is_tied", [True, False])
def test_one_rank_counts_as_one_does_by_hand(is_tied: bool) -> None:
    norm, zeros, norm_by_hand, zeros_by_hand = _one_rank(is_tied)
    assert norm == pytest.approx(norm_by_hand, rel=1e-13)
    assert zeros == zeros_by_hand >= 16 * CONFIG.model.hidden_size


@pytest.mark.parametrize(
    ("layout", "is_tied"),
    [*((layout, True) for layout in PADDED_LAYOUTS), *((layout, False) for layout in UNTIED_LAYOUTS)],
)
def test_any_layout_counts_the_same(layout: str, is_tied: bool) -> None:
    parallel = PADDED_LAYOUTS[layout]
    config = _config(is_tied, parallel)
    dp = parallel.data_parallel_size or 1
    num_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * dp
    norm, zeros, *_ = _one_rank(is_tied)
    for rank_norm, rank_zeros, *_ in run_ranks(_figures, config.parallel, num_ranks, config):
        assert rank_norm == pytest.approx(norm, rel=1e-12)
        assert rank_zeros == zeros
