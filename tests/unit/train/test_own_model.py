"""A model of torch's own modules: initial weights that no layout changes, and fp32 main weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megalite import GPT, Microbatch, Providers, SequentialStage, UserError
from megalite.config import Config, DataConfig, RecomputeConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.topology import Topology
from megalite.model.bert_stage import BERT
from megalite.model.recompute import apply_recompute
from megalite.tensor_parallel.parameter_spec import LayerContext, spec_of
from megalite.train.own_model import check_stage
from megalite.train.trainer import start_trainer

MODEL = replace(PRESETS["gpt-tiny"], vocab_size=50, seq_length=16)


class Residual(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.orthogonal_(self.linear.weight)  # a model's own choice of initial weights
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, x: Tensor, microbatch: Microbatch) -> Tensor:
        return x + self.scale * torch.tanh(self.linear(x))


class ResidualModel(SequentialStage):
    def build_layer(self, number: int) -> nn.Module:
        return Residual(self.config.hidden_size)


def _stage(topology: Topology, layers: range, seed: int = 1) -> ResidualModel:
    return ResidualModel(
        MODEL, LayerContext(topology, torch.float32, seed=seed), layers, is_first=layers[0] == 0
    )


def test_initial_weights_are_the_modules_own_and_the_same_on_any_stage(one_rank: Topology) -> None:
    state = torch.get_rng_state()
    whole, part = _stage(one_rank, range(4)), _stage(one_rank, range(2, 4))
    for name, weight in part.named_parameters():
        torch.testing.assert_close(weight, whole.get_parameter(name), rtol=0, atol=0)
    weights = [layer.linear.weight for layer in whole.layers.values()]
    torch.testing.assert_close(weights[0] @ weights[0].t(), torch.eye(MODEL.hidden_size))
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], _stage(one_rank, range(4), seed=2).layers["0"].linear.weight)
    torch.testing.assert_close(torch.get_rng_state(), state)


def test_weight_decay_applies_to_matrices(one_rank: Topology) -> None:
    layer = _stage(one_rank, range(1)).layers["0"]
    assert spec_of(layer.linear.weight).decay
    assert not spec_of(layer.linear.bias).decay


class ScaledNorm(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((hidden_size,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class OwnHead(GPT):
    def build_head(self) -> nn.Module:
        return ScaledNorm(self.config.hidden_size)


def test_a_head_of_its_own_replaces_the_final_norm(one_rank: Topology) -> None:
    stage = OwnHead(MODEL, LayerContext(one_rank, torch.float32), range(1))
    hidden = torch.randn(3, 2, MODEL.hidden_size)
    expected = nn.functional.linear(2.0 * hidden, stage.get_parameter("embedding.word.weight"))
    torch.testing.assert_close(stage.logits(hidden), expected)
    units = [parameter for _, parameters in stage.units() for parameter in parameters]
    assert {*units} == {*stage.parameters()}


def test_chunks_of_a_head_that_computes_all_logits_are_refused(one_rank: Topology) -> None:
    chunks = RecomputeConfig(cross_entropy_chunks=4)
    apply_recompute(OwnHead(MODEL, LayerContext(one_rank, torch.float32), range(1)), chunks)
    with pytest.raises(UserError, match=r"--cross-entropy-chunks 4 .*head of a ResidualModel computes all"):
        apply_recompute(_stage(one_rank, range(1)), chunks)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_main_weights_begin_unrounded(zero_stage: int, one_rank: Topology) -> None:
    config = Config(
        model=replace(MODEL, params_dtype="bf16"),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(train_iters=2, global_batch_size=2),
    )
    config = replace(config, parallel=replace(config.parallel, zero_stage=zero_stage))
    providers = Providers(model=ResidualModel)
    with start_trainer(config, one_rank, providers=providers) as trainer:
        (stage,) = trainer.chunks
        name = "layers.2.linear.weight"
        main = trainer.optimizer.state()[f"{name}.main"].tensor
        full = _stage(one_rank, range(4), config.training.seed).get_parameter(name)
        assert main.dtype == torch.float32
        torch.testing.assert_close(main.view_as(full), full.detach(), rtol=0, atol=0)
        torch.testing.assert_close(stage.get_parameter(name), full.bfloat16(), rtol=0, atol=0)
        assert spec_of(stage.get_parameter(name)).initial is None  # freed
        trainer.step()


class OwnLosses(GPT):
    def losses(self, output: Tensor, microbatch: Microbatch) -> Tensor:
        return self.masked_sum(self.losses_of(output, microbatch.labels.t()), microbatch)


def test_a_z_loss_is_refused_if_the_model_would_ignore_it(one_rank: Topology) -> None:
    context = LayerContext(one_rank, torch.float32)
    config = replace(MODEL, z_loss_coeff=0.1)
    for model in (GPT, ResidualModel, BERT):
        check_stage(model(config, context, range(1)), model)
    with pytest.raises(UserError, match=r"--z-loss-coeff 0\.1 with OwnLosses, whose own losses does"):
        check_stage(OwnLosses(config, context, range(1)), OwnLosses)
    check_stage(OwnLosses(MODEL, context, range(1)), OwnLosses)


def test_multi_token_prediction_is_refused_if_the_model_would_ignore_it(one_rank: Topology) -> None:
    context = LayerContext(one_rank, torch.float32)
    config = replace(MODEL, position_embedding_type="none", mtp_num_layers=1)
    check_stage(GPT(config, context, range(1)), GPT)
    for model in (ResidualModel, OwnLosses):
        with pytest.raises(UserError, match=f"--mtp-num-layers 1 with {model.__name__}, whose losses"):
            check_stage(model(config, context, range(1)), model)
