"""Products in 8 bits against the products of what the 8 bits stand for, and against 16 bits.

``torch._scaled_mm`` runs on a CPU as well, which a run does not take: it would be slower than bf16 there.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from megalite.config import ModelConfig, TrainingConfig
from megalite.data.microbatch import Microbatch
from megalite.distributed.topology import Topology
from megalite.kernels.library import at_run_time, compile_problem
from megalite.model.compiled import compile_layers
from megalite.tensor_parallel import fp8
from megalite.tensor_parallel.fp8 import (
    E4M3,
    E5M2,
    Fp8,
    Fp8Settings,
    Fp8Weights,
    TensorwiseGemm,
    amax,
    check_device,
    in_fp8,
    scaled_gemm,
)
from megalite.tensor_parallel.gemm import WIDE
from megalite.tensor_parallel.linear import (
    ColumnParallelLinear,
    LinearContext,
    RowParallelLinear,
    column_linear,
)
from megalite.tensor_parallel.parameter_spec import LayerContext
from megalite.utils.errors import UserError
from tests.stages import build_stage

BF16 = torch.bfloat16
FORMATS = {"hybrid": E5M2, "e4m3": E4M3}
STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}
"""Half the distance of neighbours, as a part of the number."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Products this small gain nothing by threads, and lose much where others want the cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def _normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(BF16)


def _meant(x: Fp8) -> Tensor:
    return x.numbers.double() * x.scale.double()


def _context(topology: Topology, **options: object) -> LayerContext:
    return LayerContext(topology, BF16, **options)  # type: ignore[arg-type]


def _input_gradient(gemm: TensorwiseGemm, grad: Tensor, weight: Tensor) -> Tensor:
    return gemm.input_gradient(grad, weight, gemm.scales(grad, weight))


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_rounding_is_to_the_nearest_of_any_scale(dtype: torch.dtype, scale: float) -> None:
    x = _normal(64, 48, seed=0, scale=scale)
    rounded = in_fp8(x, dtype, amax(x))
    error = (_meant(rounded) - x.double()).abs()
    smallest = torch.finfo(dtype).smallest_normal * rounded.scale.double()
    assert (error <= STEP[dtype] * x.double().abs().clamp_min(smallest) * (1 + 1e-6)).all()
    assert rounded.numbers.double().abs().max() == torch.finfo(dtype).max


@pytest.mark.parametrize(("dtype", "is_transposed"), [(E4M3, False), (E5M2, True)])
def test_one_compiled_pass_gives_the_same_bits(dtype: torch.dtype, is_transposed: bool) -> None:
    """As on a GPU; numbers beyond the largest, and those that are not finite, among them."""
    x = _normal(64, 48, seed=0, scale=300.0)
    x[3, 5:8] = torch.tensor([math.inf, -math.inf, math.nan])
    x = x.t() if is_transposed else x
    if problem := compile_problem("cpu"):
        pytest.skip(problem)
    compiled = at_run_time(inspect.unwrap(fp8.round_tensor), device_type="cpu")
    for factor in (0.73, 2.0**-30, 2.0**20):
        eager, one_pass = (
            function(x, torch.tensor(factor), dtype) for function in (fp8.round_tensor, compiled)
        )
        assert torch.equal(eager.view(torch.uint8), one_pass.view(torch.uint8))
        assert one_pass.is_contiguous()


@pytest.mark.parametrize("fused", [False, True], ids=["graph", "product"])
@pytest.mark.parametrize("emulates", [False, True], ids=["scaled_mm", "emulated"])
@pytest.mark.parametrize("fp8_format", FORMATS)
def test_products_are_those_of_what_8_bits_mean(
    fp8_format: str, emulates: bool, fused: bool, one_rank: Topology
) -> None:
    """In the forward and backward for torch.compile, and in those of the linear layer."""
    context = LinearContext.of(
        _context(one_rank, fuses_weight_gradients=fused, fp8=Fp8Settings(fp8_format, emulates=emulates))
    )
    x = _normal(5, 3, 64, seed=1).requires_grad_()
    weight = nn.Parameter(_normal(2, 24, 64, seed=2))  # two dims of output features
    bias = nn.Parameter(_normal(2, 24, seed=3))
    grad = _normal(5, 3, 48, seed=4, scale=1e-3)
    y = column_linear(x, weight, bias, context)
    y.backward(grad)
    rows, flat, grads = x.detach().flatten(0, 1), weight.detach().flatten(0, 1), grad.flatten(0, 1)
    in_8_bits = [_meant(in_fp8(part, E4M3, amax(part))) for part in (rows, flat)]
    grad_in_8_bits = _meant(in_fp8(grads, FORMATS[fp8_format], amax(grads)))
    expected = in_8_bits[0] @ in_8_bits[1].t() + bias.detach().double().flatten()
    close = {"rtol": 2.0**-8, "atol": 1e-4}  # half a unit in the last place of bf16, and sums in fp32
    torch.testing.assert_close(y.detach().flatten(0, 1).double(), expected, **close)
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    expected = grad_in_8_bits @ in_8_bits[1]
    torch.testing.assert_close(x.grad.flatten(0, 1).double(), expected, rtol=2.0**-8, atol=1e-7)
    assert torch.equal(weight.grad.flatten(0, 1), grads.t() @ rows)  # in 16 bits
    assert torch.equal(bias.grad.flatten(), grads.sum(0))
    sixteen = nn.functional.linear(x.detach(), flat, bias.detach().flatten())
    assert 0.01 < _distance(y.detach(), sixteen) < 0.06


def test_factors_that_are_not_contiguous(one_rank: Topology) -> None:
    gemm = TensorwiseGemm(Fp8Settings("hybrid"), one_rank.tp)
    x, weight = _normal(32, 6, 4, seed=1).permute(2, 1, 0), _normal(32, 48, seed=2).t()
    grad = _normal(48, 6, 4, seed=3).permute(2, 1, 0)
    assert torch.equal(gemm.forward(x, weight, None), gemm.forward(x.contiguous(), weight.contiguous(), None))
    assert torch.equal(
        _input_gradient(gemm, grad, weight),
        _input_gradient(gemm, grad.contiguous(), weight.contiguous()),
    )


def test_zeros_stay_zeros(one_rank: Topology) -> None:
    zeros, weight = torch.zeros(4, 2, 32, dtype=BF16), _normal(16, 32, seed=0)
    gemm = TensorwiseGemm(Fp8Settings("hybrid"), one_rank.tp)
    assert not gemm.forward(zeros, weight, None).any()
    assert not gemm.forward(zeros, torch.zeros_like(weight), None).any()
    assert not _input_gradient(gemm, torch.zeros(4, 2, 16, dtype=BF16), weight).any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("fp8_format", FORMATS)
def test_what_is_not_finite_is_not_hidden(bad: float, fp8_format: str, one_rank: Topology) -> None:
    """The run's guard must see it: a saturated infinity would train on."""
    gemm = TensorwiseGemm(Fp8Settings(fp8_format), one_rank.tp)
    x, grad, weight = (_normal(*shape, seed=0) for shape in ((3, 2, 32), (3, 2, 16), (16, 32)))
    for tensor in (x, grad):
        tensor[1, 1, 5] = bad
    assert not gemm.forward(x, weight, None)[1, 1].isfinite().any()
    assert not _input_gradient(gemm, grad, weight)[1, 1].isfinite().any()


MODEL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=32,
    vocab_size=64,
    params_dtype="bf16",
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


def _curve(topology: Topology, fp8_format: str | None, num_steps: int = 16) -> list[float]:
    """Mean losses of training to count: each token is the one before plus 1.

    PyTorch's e4m3 GEMMs take up to 30 ns a multiplication on a CPU, so there are few tokens.
    """
    stage = build_stage(
        MODEL, topology, range(2), seed=1, fp8=None if fp8_format is None else Fp8Settings(fp8_format)
    )
    optimizer = torch.optim.AdamW(stage.parameters(), lr=6e-3)
    losses = []
    for step in range(num_steps):
        first = torch.randint(0, 64, (2, 1), generator=torch.Generator().manual_seed(step))
        ids = (first + torch.arange(17)) % 64
        optimizer.zero_grad()
        loss = stage(Microbatch(ids[:, :-1], ids[:, 1:], torch.arange(2)), None) / (2 * 16)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("fp8_format", ["hybrid", pytest.param("e4m3", marks=pytest.mark.slow)])
def test_the_curve_is_that_of_16_bits(fp8_format: str, one_rank: Topology) -> None:
    eight, sixteen = _curve(one_rank, fp8_format), _curve(one_rank, None)
    assert sixteen[-1] < 0.9 * sixteen[0]
    assert eight != sixteen
    errors = [abs(one / other - 1.0) for one, other in zip(eight, sixteen, strict=True)]
    assert sum(errors) / len(errors) < 0.01
    assert max(errors) < 0.05  # a step's rounding, and so its loss, depends on the CPU


def test_the_layers_linears_alone_are_in_8_bits(one_rank: Topology) -> None:
    stage = build_stage(MODEL, one_rank, range(1), seed=1, fp8=Fp8Settings("hybrid"))
    linears = [each for each in stage.modules() if isinstance(each, ColumnParallelLinear | RowParallelLinear)]
    assert len(linears) == 4
    for layer in linears:
        x = _normal(4, 1, layer.weight.shape[-1], seed=0)
        in_8_bits = [
            in_fp8(part, E4M3, amax(part)) for part in (x.flatten(0, 1), layer.weight.flatten(0, -2))
        ]
        y = layer(x).detach().flatten(0, 1)
        expected = scaled_gemm(*in_8_bits, None, BF16, is_fast=True)
        bias = 0.0 if layer.skip_bias_add else layer.bias.detach().flatten()
        torch.testing.assert_close(y, expected + bias, rtol=2.0**-7, atol=1e-4)
        assert not torch.equal(y, nn.functional.linear(x, layer.weight.flatten(0, -2)).flatten(0, 1) + bias)
    wide = build_stage(
        MODEL, one_rank, range(2), seed=1, fp8=Fp8Settings("hybrid", wide_layers=frozenset({0}))
    )
    is_wide = [
        layer.mlp.up.context.gemm is layer.attention.qkv.context.gemm is WIDE
        for layer in wide.layers.values()
    ]
    assert is_wide == [True, False]
    hidden = _normal(4, 1, 32, seed=0)
    plain = nn.functional.linear(stage.final_norm(hidden), stage.output_weight)
    assert torch.equal(stage.logits(hidden), plain)


def test_a_compiled_layer_multiplies_in_8_bits_too(one_rank: Topology) -> None:
    counters.clear()
    torch.compiler.reset()
    stages = [build_stage(MODEL, one_rank, range(2), seed=1, fp8=Fp8Settings("hybrid")) for _ in range(2)]
    compile_layers(stages[1], "aot_eager")
    ids = torch.arange(66).view(2, 33) % 64
    for stage in stages:
        stage(Microbatch(ids[:, :-1], ids[:, 1:], torch.arange(2)), None).backward()
    for (name, parameter), compiled in zip(stages[0].named_parameters(), stages[1].parameters(), strict=True):
        assert parameter.grad is not None and compiled.grad is not None
        assert _distance(compiled.grad, parameter.grad) < 0.05, name
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


class Rounded(list[tuple[int, ...]]):
    """Holds the shapes of the matrices that are rounded in the block."""

    def __enter__(self) -> Rounded:
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(fp8, "in_fp8", self._round)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def _round(self, x: Tensor, dtype: torch.dtype, largest: Tensor) -> Fp8:
        self.append(tuple(x.shape))
        return in_fp8(x, dtype, largest)


OUT, IN, ROWS = 48, 32, 16


def _layer_of(
    topology: Topology, kind: str, weights: Fp8Weights | None
) -> ColumnParallelLinear | RowParallelLinear:
    context = _context(topology, fp8=Fp8Settings("hybrid", weights=weights or Fp8Weights()))
    layer = (ColumnParallelLinear if kind == "column" else RowParallelLinear)(IN, OUT, context, bias=False)
    layer.weight.data.copy_(_normal(OUT, IN, seed=1))
    return layer


def _pass(layer: nn.Module, seed: int) -> list[Tensor]:
    """Run forward and backward of a microbatch; return the output and the gradient of the input."""
    x = _normal(ROWS, 1, IN, seed=seed).requires_grad_()
    y = layer(x)
    y.backward(_normal(ROWS, 1, OUT, seed=seed + 100))
    assert x.grad is not None
    return [y.detach(), x.grad]


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("fuses", [False, True])
def test_a_weight_is_rounded_once_an_iteration_in_both_orders(
    kind: str, fuses: bool, one_rank: Topology
) -> None:
    weights = Fp8Weights()
    plain, cached = (_layer_of(one_rank, kind, each) for each in (None, weights))
    cached.context = replace(cached.context, fuses_weight_gradient=fuses)  # another autograd function
    for _ in range(2):  # iterations
        with Rounded() as rounded, weights.iteration(keeps_copies=True):
            results = [_pass(cached, seed) for seed in range(3)]
        assert rounded.count((OUT, IN)) == rounded.count((IN, OUT)) == 1
        expected = [_pass(plain, seed) for seed in range(3)]
        for one, other in zip(results, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        for layer in (plain, cached):
            layer.weight.data.mul_(1.7)  # the update


def test_without_copies_a_weight_is_measured_once_an_iteration(
    one_rank: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, measured = Fp8Weights(), []
    layer = _layer_of(one_rank, "column", weights)
    expected = _pass(layer, 0)
    monkeypatch.setattr(fp8, "amax", lambda x: measured.append(x.shape) or amax(x))
    with Rounded() as rounded, weights.iteration(keeps_copies=False):
        results = [_pass(layer, 0) for _ in range(2)]
    assert measured.count((OUT, IN)) == 1
    assert rounded.count((OUT, IN)) == rounded.count((IN, OUT)) == 2
    assert all(torch.equal(a, b) for pair in results for a, b in zip(pair, expected, strict=True))


def test_outside_of_an_iteration_a_weight_may_change_at_any_time(one_rank: Topology) -> None:
    """Test it as an evaluation or a checkpoint's weights need it: after an iteration, nothing is known."""
    weights = Fp8Weights()
    plain, cached = (_layer_of(one_rank, "row", each) for each in (None, weights))
    with weights.iteration(keeps_copies=True):
        _pass(cached, 0)
    for factor in (3.0, -0.1):
        for layer in (plain, cached):
            layer.weight.data.mul_(factor)
        with torch.no_grad():
            assert torch.equal(cached(_normal(ROWS, 1, IN, seed=7)), plain(_normal(ROWS, 1, IN, seed=7)))


def test_weights_of_equal_shape_are_told_apart(one_rank: Topology) -> None:
    """Test it with two layers in one flat tensor, as in a bucket."""
    weights = Fp8Weights()
    flat = torch.stack([_normal(OUT, IN, seed=1), _normal(OUT, IN, seed=2)])
    layers = [_layer_of(one_rank, "column", weights) for _ in range(2)]
    for layer, part in zip(layers, flat, strict=True):
        layer.weight.data = part
    expected = [_pass(layer, 0) for layer in layers]
    with weights.iteration(keeps_copies=True):
        results = [_pass(layer, 0) for layer in layers]
    assert not torch.equal(results[0][0], results[1][0])
    for one, other in zip(results, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_device_without_8_bits_is_refused() -> None:
    with pytest.raises(UserError, match=r"compute capability 8.9 or later.*this run is on cpu"):
        check_device(torch.device("cpu"), TrainingConfig(fp8_format="hybrid"))
