"""Test that the norms and counts of the whole model are those of one rank, in any layout."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from megalite.config import Config, DataConfig, ParallelConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.parameter_spec import ParameterShard, spec_of
from megalite.train.callbacks.layer_norms import layer_grad_norms
from megalite.train.callbacks.optimizer_norms import optimizer_norms
from megalite.train.trainer import start_trainer
from tests.live_ranks import run_ranks

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
    "dp2, fully sharded": ParallelConfig(1, 1, 2, zero_stage=3),
    "pp2 dp2, fully sharded": ParallelConfig(1, 2, 2, zero_stage=3),
    "tp4": ParallelConfig(4),
    "tp2 pp2": ParallelConfig(2, 2),
    **{f"tp2 dp2, ZeRO {stage}": ParallelConfig(2, 1, 2, zero_stage=stage) for stage in (1, 2, 3)},
}
UNTIED_LAYOUTS = ("tp4", "tp2 pp2", "tp2 dp2, ZeRO 1", "tp2 dp2, ZeRO 3")


class Figures(NamedTuple):
    """Figures of a whole model's weights, gradient and moments."""

    norm: float
    zeros: int
    optimizer_norms: Mapping[str, float]
    grad_norm: float
    layer_norms: Mapping[str, float]


def _figures(topology: Topology, config: Config) -> tuple[Figures, Figures]:
    """Return figures after two updates that clip, from the optimizer and computed from full tensors."""
    trainer = start_trainer(config, topology)
    for _ in range(2):
        grad_norm = trainer.step().grad_norm
    optimizer = trainer.optimizer
    figures = Figures(
        optimizer.params_norm(),
        optimizer.num_zeros(),
        optimizer_norms(optimizer),
        grad_norm,
        dict(layer_grad_norms(optimizer, config.model.num_layers, grad_norm, topology)),
    )
    if topology.world_size > 1:
        return figures, figures
    full: dict[str, list[torch.Tensor]] = {"weight": [], "gradient": [], "momentum": [], "variance": []}
    squares: dict[str, float] = {}
    state = optimizer.state()
    for name, weight in trainer.chunks[0].named_parameters():
        used = slice(spec_of(weight).used_shape[0])
        full["weight"].append(weight.detach()[used].flatten())
        gradient = optimizer.gradient(name)
        full["gradient"].append(gradient[used].flatten())
        layer = ".".join(name.split(".")[:2]) if name.startswith("layers") else name.split(".")[0]
        part = layer if layer.startswith(("layers", "embedding")) else "head"
        squares[part] = squares.get(part, 0.0) + gradient.square().sum().item()
        for moment, of_adam in (("momentum", "exp_avg"), ("variance", "exp_avg_sq")):
            shard = state[f"{name}.{of_adam}"]
            assert isinstance(shard, ParameterShard)
            full[moment].append(shard.tensor.view(weight.shape)[used].flatten())
    whole = {kind: torch.cat(parts) for kind, parts in full.items()}
    zeros = int((whole.pop("gradient") == 0).sum())
    whole["variance_sqrt"] = whole["variance"].sqrt()
    norms = {
        f"{kind}_{of_norm}": tensor.norm(p).item()
        for kind, tensor in whole.items()
        for of_norm, p in (("l2", 2), ("l1", 1), ("abs_max", math.inf))
    }
    clipped = grad_norm / math.sqrt(sum(squares.values()))
    layer_norms = {part: clipped * math.sqrt(square) for part, square in squares.items()}
    return figures, Figures(norms["weight_l2"], zeros, norms, grad_norm, layer_norms)


def _config(is_tied: bool, parallel: ParallelConfig) -> Config:
    model = replace(CONFIG.model, untie_embeddings_and_output_weights=not is_tied)
    return replace(CONFIG, model=model, parallel=replace(parallel, distributed_backend="gloo"))


@functools.cache
def _one_rank(is_tied: bool) -> tuple[Figures, Figures]:
    config = _config(is_tied, ParallelConfig())
    (found,) = run_ranks(_figures, config.parallel.mesh, 1, config)
    return found


@pytest.mark.parametrize("is_tied", [True, False])
def test_one_rank_counts_as_one_does_by_hand(is_tied: bool) -> None:
    figures, by_hand = _one_rank(is_tied)
    assert figures.norm == pytest.approx(by_hand.norm, rel=1e-13)
    assert figures.zeros == by_hand.zeros >= 16 * CONFIG.model.hidden_size
    assert figures.optimizer_norms == pytest.approx(by_hand.optimizer_norms, rel=1e-13)
    assert figures.layer_norms == pytest.approx(by_hand.layer_norms, rel=1e-12)
    assert list(figures.layer_norms) == ["embedding", *(f"layers.{layer}" for layer in range(4)), "head"]
    assert math.hypot(*figures.layer_norms.values()) == pytest.approx(figures.grad_norm, rel=1e-12)
    assert min(figures.layer_norms.values()) > 0


@pytest.mark.parametrize(
    ("layout", "is_tied"),
    [*((layout, True) for layout in LAYOUTS), *((layout, False) for layout in UNTIED_LAYOUTS)],
)
def test_any_layout_counts_the_same(layout: str, is_tied: bool) -> None:
    parallel = LAYOUTS[layout]
    config = _config(is_tied, parallel)
    dp = parallel.data_parallel_size or 1
    num_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * dp
    expected, _ = _one_rank(is_tied)
    for figures, _ in run_ranks(_figures, config.parallel.mesh, num_ranks, config):
        assert figures.norm == pytest.approx(expected.norm, rel=1e-12)
        assert figures.zeros == expected.zeros
        assert figures.optimizer_norms == pytest.approx(expected.optimizer_norms, rel=1e-10)
        assert figures.layer_norms == pytest.approx(expected.layer_norms, rel=1e-11)
