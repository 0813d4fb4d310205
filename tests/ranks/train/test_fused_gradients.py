"""Weight gradients that the products add to their sums themselves: the same training as by autograd."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from megalite.local_ranks import run_ranks
from megalite.parallel import linear
from megalite.topology import Topology
from megalite.train import weight_gradients
from megalite.train.prepare import build_data
from megalite.train.telemetry.timers import Timers
from megalite.train.trainer import Trainer
from megalite.verify.layout import Layout

NUM_LAYERS, NUM_MICROBATCHES, NUM_ITERATIONS = 4, 3, 2
CONFIG = Config(
    model=ModelConfig(
        num_layers=NUM_LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        seq_length=16,
        vocab_size=90,
        hidden_dropout=0.1,
        params_dtype="fp64",
    ),
    optimizer=OptimizerConfig(lr=1e-3, clip_grad=0.5),
    data=DataConfig(mock_data=True),
    training=TrainingConfig(train_iters=100, micro_batch_size=1, eval_iters=0),
)
LAYOUTS = ("tp1", "tp2+sp+full", "dp2+zero1+gather", "dp2+zero2", "pp2zb", "pp2v2")


def with_fusion(config: Config, fused: bool) -> Config:
    return replace(config, parallel=replace(config.parallel, gradient_accumulation_fusion=fused))


def train(topology: Topology, config: Config) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses and norms, new weights, and how many products have added to a sum themselves."""
    num_added = 0
    add = linear.add_weight_gradient_

    def counted(*tensors: Tensor) -> None:
        nonlocal num_added
        num_added += 1
        add(*tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "add_weight_gradient_", counted)
        patch.setattr(weight_gradients, "has_widening_product", lambda *_: True)
        trainer = Trainer(config, topology, build_data(config, topology, Timers()), Timers())
        results = [trainer.step() for _ in range(NUM_ITERATIONS)]
    figures = [figure for result in results for figure in (result.loss, result.grad_norm)]
    trainer.optimizer.finish_weights()
    names = trainer.optimizer.weights()
    return figures, {name: trainer.optimizer.weight(name).clone() for name in names}, num_added


def both(name: str, config: Config) -> tuple[list, list]:
    """What each rank gives with fusion, and without."""
    layout = Layout.parse(name)
    config = layout.apply(config, NUM_MICROBATCHES * layout.dp)
    fused, plain = (
        run_ranks(train, config.parallel, layout.world_size, with_fusion(config, is_fused))
        for is_fused in (True, False)
    )
    assert all(num_added == 0 for *_, num_added in plain)
    return fused, plain


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_training_as_by_autograd(name: str) -> None:
    fused, plain = both(name, CONFIG)
    per_layer = 4 * NUM_LAYERS // Layout.parse(name).pp
    for rank, ((figures, weights, num_added), (expected, others, _)) in enumerate(
        zip(fused, plain, strict=True)
    ):
        makes_logits = Layout.parse(name).pp == 1 or rank == 1
        assert num_added == (per_layer + makes_logits) * NUM_MICROBATCHES * NUM_ITERATIONS
        assert figures == pytest.approx(expected, rel=1e-12)
        for key, weight in weights.items():
            torch.testing.assert_close(weight, others[key], rtol=1e-9, atol=1e-12, msg=key)


@pytest.mark.parametrize("name", ["tp1", "dp2+zero1"])
def test_16_bit_products_add_to_sums_of_32(name: str) -> None:
    """As on a GPU, here by the op's reference; but for the tied table nothing is rounded another time."""
    model = replace(CONFIG.model, params_dtype="bf16", untie_embeddings_and_output_weights=True)
    fused, plain = both(name, replace(CONFIG, model=model))
    for (figures, weights, num_added), (expected, others, _) in zip(fused, plain, strict=True):
        assert num_added > 0
        assert figures == expected
        assert all(torch.equal(weight, others[key]) for key, weight in weights.items())


def test_ranks_that_share_out_weights_leave_it_to_autograd() -> None:
    fused, plain = both("dp2+zero3", CONFIG)
    for (figures, _, num_added), (expected, *_) in zip(fused, plain, strict=True):
        assert num_added == 0
        assert figures == expected
