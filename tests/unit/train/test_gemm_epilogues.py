"""Test the choice of GEMM epilogues on a CPU, where their references run, with times that are passed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from megalite.config import Config, DataConfig, ModelConfig, OptimizerConfig, RecomputeConfig, TrainingConfig
from megalite.config.validate import unused_options
from megalite.distributed.topology import Topology
from megalite.model.stage import Stage
from megalite.tensor_parallel import linear
from megalite.tensor_parallel.gemm import MainGrad
from megalite.tensor_parallel.linear import ColumnParallelLinear
from megalite.tensor_parallel.parameter_spec import LayerContext
from megalite.train import gemm_epilogues
from megalite.train.gemm_epilogues import MARGIN, choose_gemm_epilogues
from megalite.train.model_chunks import ChunkResources, build_chunks

CONFIG = Config(
    model=ModelConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        seq_length=8,
        vocab_size=32,
        params_dtype="bf16",
    ),
    optimizer=OptimizerConfig(lr=1e-3),
    data=DataConfig(mock_data=True),
    training=TrainingConfig(train_iters=1, micro_batch_size=3, eval_iters=0),
)


@pytest.fixture(autouse=True)
def gemms_with_epilogues(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("has_linear_gelu", "has_bias_gradient_gemm"):
        monkeypatch.setattr(gemm_epilogues, name, lambda *_: True)


def timer(gelu: Sequence[float], bias_gradient: Sequence[float]) -> Callable[..., Sequence[float]]:
    """Return a timer that runs the functions and returns these times."""

    def time(functions: Sequence[Callable[[], object]]) -> Sequence[float]:
        for function in functions:
            function()
        return gelu if len(functions) == 4 else bias_gradient

    return time


def chunks_of(config: Config, topology: Topology) -> list[Stage]:
    return build_chunks(config, topology, ChunkResources(fuses_weight_gradients=True))


def forms(chunks: Sequence[Stage]) -> set[tuple[bool, bool]]:
    """Return whether GELU and qkv's bias gradient are in GEMMs, for all layers."""
    layers = [layer for chunk in chunks for layer in chunk.layers.values()]
    return {(layer.mlp.up.fuses_gelu, layer.attention.qkv.context.fuses_bias_gradient) for layer in layers}


@pytest.mark.parametrize(
    ("gelu", "bias_gradient", "expected", "texts"),
    [
        (
            (3e-3, 4e-3, 4e-3, 5e-3),
            (2e-3, 1e-3),
            (True, False),
            [
                "GELU of 24 x 16 -> 64: in GEMMs (7.000 ms in GEMMs, 9.000 ms in separate kernels)",
                "bias gradient of 24 x 16 -> 48: in separate kernels (2.000 ms in GEMMs, 1.000 ms in",
            ],
        ),
        (
            (9e-3, 1e-3, 4e-3, 5e-3),
            (1e-3, 2e-3),
            (False, True),
            ["GELU of 24 x 16 -> 64: in separate kernels (10.000 ms in GEMMs, 9.000 ms in separate kernels)"],
        ),
        ((1 + 0.9 * MARGIN, 0, 1, 0), (1 + 1.1 * MARGIN, 1), (True, False), []),  # noise does not decide
    ],
)
def test_the_faster_form_is_chosen_and_logged(
    gelu: Sequence[float],
    bias_gradient: Sequence[float],
    expected: tuple[bool, bool],
    texts: Sequence[str],
    one_rank: Topology,
) -> None:
    chunks = chunks_of(CONFIG, one_rank)
    state = torch.get_rng_state()
    line = choose_gemm_epilogues(chunks, CONFIG, one_rank, timer(gelu, bias_gradient))
    assert forms(chunks) == {expected}
    assert all(text in line for text in texts)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("training", "expected", "line"),
    [
        ({"gemm_epilogues": "on"}, (True, True), ""),
        (
            {"deterministic": True},
            (False, False),
            "GELU and bias gradients in separate kernels (--deterministic)",
        ),
        (
            {"gemm_epilogues": "off", "deterministic": True},
            (False, False),
            "GELU and bias gradients in separate kernels (--gemm-epilogues off)",
        ),
    ],
)
def test_nothing_is_timed_if_the_choice_is_fixed(
    training: dict[str, Any], expected: tuple[bool, bool], line: str, one_rank: Topology
) -> None:
    config, never = replace(CONFIG, training=replace(CONFIG.training, **training)), Mock()
    chunks = chunks_of(config, one_rank)
    assert choose_gemm_epilogues(chunks, config, one_rank, never) == line
    assert forms(chunks) == {expected}
    assert not never.called


def test_a_shape_without_such_a_gemm_has_separate_kernels(
    one_rank: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a device that lacks the GEMM, nor one that has no algorithm for this shape."""
    warning = Mock()
    monkeypatch.setattr(gemm_epilogues.log, "warning", warning)
    monkeypatch.setattr(gemm_epilogues, "has_linear_gelu", lambda *_: False)
    chunks = chunks_of(CONFIG, one_rank)
    line = choose_gemm_epilogues(
        chunks, CONFIG, one_rank, Mock(side_effect=RuntimeError("no algorithm\nat all"))
    )
    assert forms(chunks) == {(False, False)}
    assert "GELU of 24 x 16 -> 64: in separate kernels (a rank does not have the GEMMs)" in line
    ((_, shape, reason), _) = warning.call_args
    assert (str(shape), reason) == ("bias gradient of 24 x 16 -> 48", "no algorithm")


def test_layers_that_do_not_use_the_gemms_are_not_timed(one_rank: Topology) -> None:
    recompute = RecomputeConfig(recompute_granularity="selective", recompute_modules=("mlp_act",))
    config = replace(CONFIG, recompute=recompute)
    line = choose_gemm_epilogues(chunks_of(config, one_rank), config, one_rank, timer((), (1e-3, 2e-3)))
    assert "GELU" not in line
    compiled = replace(CONFIG, training=replace(CONFIG.training, compile=True))
    assert choose_gemm_epilogues(chunks_of(CONFIG, one_rank), compiled, one_rank, Mock()) == ""


@pytest.mark.parametrize("fuses", [True, False])
def test_a_layer_sums_its_bias_gradient_in_the_chosen_form(
    fuses: bool, one_rank: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Mock(wraps=linear.add_weight_and_bias_gradient_)
    monkeypatch.setattr(linear, "add_weight_and_bias_gradient_", add)
    layer = ColumnParallelLinear(8, 16, LayerContext(one_rank, torch.float64, fuses_weight_gradients=True))
    layer.context = replace(layer.context, fuses_bias_gradient=fuses)
    total = torch.zeros(16, 8, dtype=torch.float64)
    layer.weight.main_grad = MainGrad(lambda: (total, False), lambda: None, None)  # type: ignore[attr-defined]
    x, grad = torch.randn(3, 2, 8, dtype=torch.float64), torch.randn(3, 2, 16, dtype=torch.float64)
    layer(x).backward(grad)
    assert layer.bias is not None and layer.bias.grad is not None
    torch.testing.assert_close(layer.bias.grad, grad.sum((0, 1)))
    torch.testing.assert_close(total, grad.flatten(0, 1).t() @ x.flatten(0, 1))
    assert add.called is fuses


@pytest.mark.parametrize(
    ("model", "has_effect"),
    [
        ({}, True),
        ({"activation": "relu"}, True),
        ({"params_dtype": "fp32"}, False),
        ({"activation": "swiglu", "add_bias_linear": False}, False),
    ],
)
def test_the_flag_is_reported_where_it_has_no_effect(model: dict[str, Any], has_effect: bool) -> None:
    config = replace(
        CONFIG,
        model=replace(CONFIG.model, **model),
        training=replace(CONFIG.training, gemm_epilogues="off"),
    )
    assert any("--gemm-epilogues off has no effect" in line for line in unused_options(config)) != has_effect
