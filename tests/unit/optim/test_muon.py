"""Muon against torch's: the same updates of the separate matrices of a model without fused weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megalite.config import OptimizerConfig, ParallelConfig
from megalite.distributed.topology import Topology
from megalite.optim.flat_buffers import parameter_kind
from megalite.optim.muon import COEFFICIENTS, orthogonalize
from megalite.optim.optimizer import Optimizer
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter

QKV_ROWS = (4, 2, 2)
"""Two key/value heads of 2 features, each with two heads of queries."""
SPECS = {
    "word": ParameterSpec((12, 6), is_vocabulary=True),
    "positions": ParameterSpec((5, 6), maps_features=False),
    "qkv": ParameterSpec((16, 6), fused_rows=QKV_ROWS),
    "up": ParameterSpec((2, 10, 6)),
    "down": ParameterSpec((6, 10)),
    "bias": ParameterSpec((6,), decay=False),
}
CONFIG = OptimizerConfig(
    optimizer="muon", muon_coefficient_type="simple", muon_nesterov=True, weight_decay=0.1, clip_grad=0.0
)
TORCH_SCALES = {"original": ("shape_scaling", 1.0), "match_rms_adamw": ("spectral", 0.2)}
RATE = 0.02


def values_of(name: str, iteration: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * iteration + sum(map(ord, name)))
    return torch.randn(SPECS[name].full_shape, generator=generator, dtype=torch.float64)


def matrices_in(name: str, full: Tensor) -> list[Tensor]:
    """The matrices of an unfused model."""
    if name == "up":
        return list(full)
    if name != "qkv":
        return [full]
    groups = full.unflatten(0, (-1, sum(QKV_ROWS)))
    return [each.flatten(0, 1) for each in groups.split(QKV_ROWS, dim=1)]


def build(topology: Topology, config: OptimizerConfig, dtype: torch.dtype) -> tuple[dict, Optimizer]:
    context = LayerContext(topology, dtype)
    parameters = {name: new_parameter(spec, context) for name, spec in SPECS.items()}
    for name, parameter in parameters.items():
        parameter.data.copy_(values_of(name, 0))
    parallel = ParallelConfig(ddp_bucket_size=100)
    return parameters, Optimizer(parameters.items(), None, config, parallel, topology, dtype)


def train(topology: Topology, config: OptimizerConfig, dtype: torch.dtype, num_steps: int = 4) -> dict:
    parameters, optimizer = build(topology, config, dtype)
    for iteration in range(num_steps):
        step(parameters, optimizer, lambda name, number=1 + iteration: values_of(name, number))
    return parameters


def step(parameters: dict, optimizer: Optimizer, gradient: Callable[[str], Tensor]) -> None:
    optimizer.begin(1)
    for name, parameter in parameters.items():
        (parameter * gradient(name).to(parameter.dtype)).sum().backward()
    optimizer.step(RATE, CONFIG.weight_decay, optimizer.finish_gradients())


def train_with_torch(adjust: str, nesterov: bool, dtype: torch.dtype, num_steps: int = 4) -> dict:
    """The weights by torch.optim.Muon for each matrix, and torch.optim.AdamW for the rest."""
    matrices = {name: matrices_in(name, values_of(name, 0)) for name in SPECS}
    weights = {
        name: [nn.Parameter(each.to(dtype).contiguous()) for each in found]
        for name, found in matrices.items()
    }
    hidden = [each for name in ("qkv", "up", "down") for each in weights[name]]
    muon = torch.optim.Muon(
        hidden, lr=RATE, weight_decay=CONFIG.weight_decay, nesterov=nesterov, adjust_lr_fn=adjust
    )
    adamw = torch.optim.AdamW(
        [
            {"params": [*weights["word"], *weights["positions"]], "weight_decay": CONFIG.weight_decay},
            {"params": weights["bias"], "weight_decay": 0.0},
        ],
        lr=RATE,
        betas=(CONFIG.adam_beta1, CONFIG.adam_beta2),
    )
    for iteration in range(num_steps):
        for name, found in weights.items():
            gradients = matrices_in(name, values_of(name, 1 + iteration))
            for weight, gradient in zip(found, gradients, strict=True):
                weight.grad = gradient.to(dtype).contiguous()
        muon.step()
        adamw.step()
    return weights


def assert_equal(parameters: dict, expected: dict, tolerance: float) -> None:
    for name, parameter in parameters.items():
        for found, weight in zip(matrices_in(name, parameter.detach()), expected[name], strict=True):
            torch.testing.assert_close(found, weight.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", TORCH_SCALES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_the_weights_are_those_of_torch(topology, monkeypatch, adjust, nesterov, dtype, tolerance):
    """torch always iterates in bf16. Here it keeps the dtype, so that the rest can be compared."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    mode, factor = TORCH_SCALES[adjust]
    config = dataclasses.replace(
        CONFIG, muon_scale_mode=mode, muon_extra_scale_factor=factor, muon_nesterov=nesterov
    )
    expected = train_with_torch(adjust, nesterov, dtype)
    assert_equal(train(topology, config, dtype), expected, tolerance)


def test_weights_in_bf16_iterate_as_torch_does():
    matrix = values_of("down", 1)
    theirs = torch.optim._muon._zeropower_via_newtonschulz(matrix.float(), COEFFICIENTS["simple"][0], 5, 1e-7)
    assert orthogonalize(matrix.bfloat16(), "simple", 5).equal(theirs)


@pytest.mark.parametrize("kind", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (16, 16)])
def test_singular_values_come_close_to_one(kind, shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalize(matrix, kind, 8))
    largest_error = 1e-6 if kind == "polar_express" else 0.5
    assert (values - 1).abs().max() < largest_error


def test_mup_does_not_scale_the_update_again(topology):
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    for weight, ratio in zip(weights, (1.0, 4.0), strict=True):
        weight.spec = ParameterSpec((8, 8), width_ratio=ratio)
    assert parameter_kind(weights[1], CONFIG) == parameter_kind(weights[0], CONFIG)
    adam = dataclasses.replace(CONFIG, optimizer="adam")
    assert parameter_kind(weights[1], adam) == parameter_kind(weights[0], adam)._replace(width_ratio=4.0)


def test_a_fused_weight_as_one_matrix(topology):
    """The update has the singular values of one matrix, not of three."""
    config = dataclasses.replace(
        CONFIG, muon_split_qkv=False, muon_coefficient_type="polar_express", muon_num_ns_steps=12
    )
    parameters = train(
        topology, dataclasses.replace(config, muon_scale_mode="unit_rms_norm"), torch.float64, 1
    )
    update = (1 - RATE * CONFIG.weight_decay) * values_of("qkv", 0) - parameters["qkv"].detach()
    expected = torch.full((6,), RATE * (16 / 6) ** 0.5, dtype=torch.float64)
    torch.testing.assert_close(torch.linalg.svdvals(update), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_gradient_changes_nothing(topology, dtype):
    parameters, optimizer = build(topology, CONFIG, dtype)
    step(parameters, optimizer, lambda name: values_of(name, 1))
    tensors = [*parameters.values(), *(t for state in optimizer.states for _, t in state.tensors())]
    before = [tensor.detach().clone() for tensor in tensors]
    step(parameters, optimizer, lambda name: torch.full(SPECS[name].full_shape, torch.nan))
    assert all(now.equal(then) for now, then in zip(tensors, before, strict=True))
    step(parameters, optimizer, lambda name: values_of(name, 2))
    assert not any(now.equal(then) for now, then in zip(tensors, before, strict=True))


def test_matrices_have_one_moment(topology):
    _, optimizer = build(topology, CONFIG, torch.float32)
    kinds = {entry.name: list(state.moments) for state in optimizer.states for entry in state.entries}
    matrices = [name for name, moments in kinds.items() if moments == ["momentum_buffer"]]
    assert sorted(matrices) == ["down", "qkv", "up"]
    assert all(kinds[name] == ["exp_avg", "exp_avg_sq"] for name in ("word", "positions", "bias"))
