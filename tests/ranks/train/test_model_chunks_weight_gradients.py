"""Test that fused accumulation of weight gradients trains as autograd's does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from megalite.distributed.topology import Topology
from megalite.observe.verify.layouts import Layout
from megalite.optim.gradient_buckets import GradientBuffer
from megalite.tensor_parallel import linear
from megalite.train import model_chunks
from megalite.train.trainer import start_trainer
from tests.live_ranks import run_ranks

NUM_MICROBATCHES, NUM_ITERATIONS = 2, 2
CONFIG = Config(
    model=ModelConfig(
        num_layers=2,
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
    """Return losses and norms, new weights, and the number of GEMMs that accumulated their result.

    An iteration starts with NaN in place of the last one's gradients, which it must overwrite.
    """
    num_added = 0
    begin = GradientBuffer.begin

    def counted(add: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
        def call(*tensors: Tensor, overwrite: bool) -> Tensor | None:
            nonlocal num_added
            num_added += 1
            return add(*tensors, overwrite=overwrite)

        return call

    def begin_with_nan(buffer: GradientBuffer) -> None:
        begin(buffer)
        for entry in buffer.bucket.entries if buffer.buffer is not None else ():
            buffer.bucket.view(buffer.buffer, entry).fill_(torch.nan)

    torch.use_deterministic_algorithms(True)  # fills new memory with NaN, such as the buffers of ZeRO stage 2
    with pytest.MonkeyPatch.context() as patch:
        for name in ("add_weight_gradient_", "add_weight_and_bias_gradient_"):
            patch.setattr(linear, name, counted(getattr(linear, name)))
        patch.setattr(GradientBuffer, "begin", begin_with_nan)
        patch.setattr(model_chunks, "has_widening_gemm", lambda *_: True)
        with start_trainer(config, topology) as trainer:
            results = [trainer.step() for _ in range(NUM_ITERATIONS)]
    figures = [figure for result in results for figure in (result.loss, result.grad_norm)]
    trainer.optimizer.finish_weights()
    names = trainer.optimizer.weights()
    return figures, {name: trainer.optimizer.weight(name).clone() for name in names}, num_added


def _num_layers(layout: Layout) -> int:
    return 2 * (layout.v or 1)


def both(name: str, config: Config) -> tuple[list, list]:
    """Return the result of each rank, with fusion and without."""
    layout = Layout.parse(name)
    config = replace(config, model=replace(config.model, num_layers=_num_layers(layout)))
    config = layout.apply(config, NUM_MICROBATCHES * layout.size("dp"))
    fused, plain = (
        run_ranks(train, config.parallel.mesh, layout.world_size, with_fusion(config, is_fused))
        for is_fused in (True, False)
    )
    assert all(num_added == 0 for *_, num_added in plain)
    return fused, plain


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_training_as_by_autograd(name: str) -> None:
    fused, plain = both(name, CONFIG)
    layout = Layout.parse(name)
    per_stage = 4 * _num_layers(layout) // layout.size("pp")
    for rank, ((figures, weights, num_added), (expected, others, _)) in enumerate(
        zip(fused, plain, strict=True)
    ):
        makes_logits = layout.size("pp") == 1 or rank == 1
        assert num_added == (per_stage + makes_logits) * NUM_MICROBATCHES * NUM_ITERATIONS
        assert figures == pytest.approx(expected, rel=1e-12)
        for key, weight in weights.items():
            torch.testing.assert_close(weight, others[key], rtol=1e-9, atol=1e-12, msg=key)


@pytest.mark.parametrize("name", ["tp1", "dp2+zero1"])
def test_16_bit_gemms_add_to_fp32_sums(name: str) -> None:
    """Test it with the op's reference. The embedding is untied: a tied one is rounded once more."""
    model = replace(CONFIG.model, params_dtype="bf16", untie_embeddings_and_output_weights=True)
    fused, plain = both(name, replace(CONFIG, model=model))
    for (figures, weights, num_added), (expected, others, _) in zip(fused, plain, strict=True):
        assert num_added > 0
        assert figures == expected
        assert all(torch.equal(weight, others[key]) for key, weight in weights.items())
