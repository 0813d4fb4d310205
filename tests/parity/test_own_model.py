"""Models, datasets and losses of a user's own: those of examples/, in any layout."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from megalite import (
    ColumnParallelLinear,
    FieldSamples,
    LayerContext,
    Microbatch,
    ModelConfig,
    ParameterSpec,
    Providers,
    RowParallelLinear,
    SequentialStage,
    Topology,
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    new_parameter,
)
from megalite.config import Config, DataConfig, OptimizerConfig, RecomputeConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.local_ranks import LocalRanks
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.layouts import Layout
from megalite.observe.verify.record_run import RunRecord
from megalite.observe.verify.record_run import record_run as record_on
from megalite.utils.errors import UserError
from tests.parity.models import config_in

NUM_ITERATIONS, GLOBAL_BATCH_SIZE = 2, 8
FULL = RecomputeConfig(recompute_granularity="full")
MODELS = {
    "own_model": "ConvolutionModel",
    "own_loss": "FocalGPT",
    "own_scan": "ScanModel",
    "own_vocabulary_loss": "VocabularyLossGPT",
}
EXAMPLES = Path(__file__).parents[2] / "examples"


RANKS = LocalRanks()
"""Ranks that can import the examples."""
record_run = partial(record_on, ranks=RANKS)


@pytest.fixture(scope="module", autouse=True)
def _examples_can_be_imported() -> Iterator[None]:
    """Let ranks import what is pickled by name."""
    with pytest.MonkeyPatch.context() as patch, RANKS:
        patch.syspath_prepend(str(EXAMPLES))
        yield


def _example(name: str) -> ModuleType:
    """Import a file of examples/."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _providers(name: str) -> Providers:
    example = _example(name)
    if name in MODELS:
        return Providers(model=getattr(example, MODELS[name]))
    return Providers(datasets=example.datasets, samples=FieldSamples(example.FIELDS))


class ScaledLayer(nn.Module):
    """Compute x + down(scale * silu(up(x))) with a whole parameter, which the cut channels use."""

    def __init__(self, hidden_size: int, context: LayerContext) -> None:
        super().__init__()
        self.context = context
        self.up = ColumnParallelLinear(hidden_size, 4 * hidden_size, context)
        self.down = RowParallelLinear(4 * hidden_size, hidden_size, context)
        self.scale = new_parameter(ParameterSpec((1,), mean=1.0), context)

    def forward(self, x: Tensor, microbatch: Microbatch) -> Tensor:
        tp, sp = self.context.tp, self.context.sequence_parallel
        scale = self.scale if sp else copy_to_tensor_parallel(self.scale, tp)
        return x + self.down(scale * functional.silu(self.up(x)))


class ScaledModel(SequentialStage):
    """Predict the next token with the layers above."""

    def build_layer(self, number: int) -> nn.Module:
        return ScaledLayer(self.config.hidden_size, self.context)


class MeanModel(ScaledModel):
    """Return the mean of a microbatch's losses, a mistake."""

    def losses(self, output: Tensor, microbatch: Microbatch) -> Tensor:
        return super().losses(output, microbatch) / microbatch.labels.numel()


class PositionAttention(nn.Module):
    """Compute x + projection(attention(norm(x))), as docs/python_api.md shows it for --cp."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        h, self.context = config.hidden_size, context
        self.head_size = h // config.num_attention_heads
        self.norm = nn.LayerNorm(h)
        self.qkv = ColumnParallelLinear(h, (3, h), context)
        self.projection = RowParallelLinear(h, h, context)

    def positions(self, x: Tensor, microbatch: Microbatch) -> Tensor:
        positions = self.context.positions_of(x, microbatch.samples)  # int64 [s/cp, b]
        return positions

    def forward(self, x: Tensor, microbatch: Microbatch) -> Tensor:
        positions = self.positions(x, microbatch)
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, -1, self.head_size))
        q, k, v = heads.unbind(2)  # [s/cp, b, n/tp, d]
        k, v, of_keys = (gather_from_sequence_parallel(y, self.context.cp) for y in (k, v, positions))
        is_seen = of_keys.t()[:, None, :] <= positions.t()[:, :, None]  # [b, s/cp, s], for causal attention
        q, k, v = (y.permute(1, 2, 0, 3) for y in (q, k, v))  # [b, n/tp, s, d]
        y = functional.scaled_dot_product_attention(q, k, v, is_seen[:, None])
        return x + self.projection(y.permute(2, 0, 1, 3).flatten(2))


class ContiguousAttention(PositionAttention):
    """Assumes that rank r holds the r-th part of each sample, a mistake."""

    def positions(self, x: Tensor, microbatch: Microbatch) -> Tensor:
        first = self.context.cp.rank * len(x)
        return torch.arange(first, first + len(x))[:, None].expand(-1, x.shape[1])


class AttentionModel(SequentialStage):
    """Predict the next token with the layers above."""

    layer: type[PositionAttention] = PositionAttention

    def build_layer(self, number: int) -> nn.Module:
        return self.layer(self.config, self.context)


class ContiguousModel(AttentionModel):
    layer = ContiguousAttention


def _differences(model: type[SequentialStage], name: str) -> list[str]:
    """Return how a run of one iteration in a layout differs from the one on one rank."""
    layout, providers = Layout.parse(name), Providers(model)
    run = record_run(config_in(name, _config()), 1, layout.world_size, providers)
    return compare(run, record_run(_config(), 1, 1, providers)).excesses(TOLERANCES["fp64"])


def test_a_whole_parameter_of_cut_channels() -> None:
    assert _differences(ScaledModel, "tp2") == _differences(ScaledModel, "tp2+sp") == []


def test_a_model_that_says_that_it_mixes_tokens_is_not_cut() -> None:
    with pytest.raises(UserError, match=r"ConvolutionModel mixes the tokens of a rank alone .* remove --cp"):
        _differences(_example("own_model").ConvolutionModel, "cp2")


@pytest.mark.parametrize("layout", ["cp2", "tp2cp2", "cp4+a2a"])
def test_attention_of_a_user_over_context_parallel_ranks(layout: str) -> None:
    assert _differences(AttentionModel, layout) == []


def test_positions_of_context_parallel_ranks_are_not_contiguous() -> None:
    assert "lm_loss of iteration 1 differs by" in _differences(ContiguousModel, "cp2")[0]


def test_another_micro_batch_size_finds_a_mean_in_place_of_a_sum() -> None:
    assert "lm_loss of iteration 1 differs by" in _differences(MeanModel, "mbs1")[0]


def _config() -> Config:
    return Config(
        model=replace(PRESETS["gpt-tiny"], vocab_size=200, params_dtype="fp64", seq_length=32),
        optimizer=OptimizerConfig(lr=3e-3, lr_decay_style="constant"),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(
            micro_batch_size=2, global_batch_size=GLOBAL_BATCH_SIZE, train_iters=NUM_ITERATIONS, eval_iters=2
        ),
    )


@cache
def _reference(name: str) -> RunRecord:
    return record_run(config_in("mbs8", _config()), NUM_ITERATIONS, 1, _providers(name))


@pytest.mark.parametrize(
    ("name", "layout", "recompute"),
    [
        ("own_model", "tp2pp2dp2+sp+zero1", FULL),
        ("own_model", "pp2zbv+gather", RecomputeConfig()),
        ("own_model", "tp2dp2+zero3", RecomputeConfig()),
        ("own_dataset", "tp2pp4", RecomputeConfig()),
        ("own_loss", "tp2pp2+sp", RecomputeConfig()),
        ("own_scan", "tp2", RecomputeConfig()),
        ("own_scan", "tp2dp2+sp", FULL),
        ("own_vocabulary_loss", "tp2pp2", RecomputeConfig()),
        ("own_vocabulary_loss", "tp4+sp", RecomputeConfig()),
    ],
)
def test_same_run(name: str, layout: str, recompute: RecomputeConfig) -> None:
    config = config_in(layout, replace(_config(), recompute=recompute))
    run = record_run(config, NUM_ITERATIONS, Layout.parse(layout).world_size, _providers(name))
    assert not compare(run, _reference(name)).excesses(TOLERANCES["fp64"])


def test_the_loss_over_the_vocabulary_is_torchs(one_rank: Topology) -> None:
    config = _config()
    example = _example("own_vocabulary_loss")
    context = LayerContext(one_rank, torch.float64)
    stage = example.VocabularyLossGPT(config.model, context, range(1))
    tokens = torch.randint(200, (2, 33), generator=torch.Generator().manual_seed(1))
    microbatch = Microbatch.of(tokens, torch.arange(2))
    hidden = stage.final_norm(stage.hidden_states(microbatch, None))
    logits = stage.logits_of(hidden)[..., :200].flatten(0, 1)
    smoothed = functional.cross_entropy(
        logits, microbatch.labels.t().flatten(), label_smoothing=example.SMOOTHING, reduction="sum"
    )
    expected = smoothed + example.Z_LOSS * logits.logsumexp(-1).square().sum()
    torch.testing.assert_close(stage(microbatch, None), expected, rtol=1e-12, atol=0)


def test_parts_that_an_own_layer_does_not_have_are_refused() -> None:
    parts = RecomputeConfig(recompute_granularity="selective", recompute_modules=("mlp",))
    with pytest.raises(UserError, match=r"this model's layers are ConvolutionLayer: pass .* full"):
        record_run(replace(_config(), recompute=parts), 1, 1, _providers("own_model"))
