"""Products in 8 bits and compiled layers on a real GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megalite.config import ModelConfig, ParallelConfig, TrainingConfig
from megalite.data.microbatch import Microbatch
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.model.compiled import check_compiler, compile_layers
from megalite.tensor_parallel.fp8 import (
    DTYPES,
    E4M3,
    E5M2,
    Fp8,
    Fp8Settings,
    TensorwiseGemm,
    amax,
    check_device,
    in_fp8,
)
from megalite.tensor_parallel.gemm import MainGrad
from megalite.utils.errors import UserError
from tests.stages import build_stage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=128,
    num_attention_heads=2,
    seq_length=64,
    vocab_size=128,
    params_dtype="bf16",
    attention_dropout=0.0,
)
LLAMA = ModelConfig(
    **{
        **vars(MODEL),
        "position_embedding_type": "rope",
        "activation": "swiglu",
        "normalization": "RMSNorm",
        "add_bias_linear": False,
    }
)


@pytest.fixture
def one_gpu() -> Iterator[Topology]:
    with Topology.start(ParallelConfig().mesh, Launch(0, 1, 0, 1)) as topology:
        yield topology


def _meant(x: Fp8) -> Tensor:
    return x.numbers.double() * x.scale.double()


def _skip_without_fp8(topology: Topology) -> None:
    try:
        check_device(topology.device, TrainingConfig(fp8_format="hybrid"))
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3"])
def test_products_are_those_of_what_8_bits_mean(fp8_format: str, one_gpu: Topology) -> None:
    """Of 15 rows: of those no multiple of 16 is asked."""
    _skip_without_fp8(one_gpu)
    gemm, device = TensorwiseGemm(Fp8Settings(fp8_format), one_gpu.tp), one_gpu.device
    x, grad, weight = (
        torch.randn(*shape, device=device).bfloat16() for shape in ((5, 3, 64), (5, 3, 48), (48, 64))
    )
    _, gradient_dtype = DTYPES[fp8_format]
    in_8_bits, of_weight = _meant(in_fp8(x.flatten(0, 1), E4M3, amax(x))), in_fp8(weight, E4M3, amax(weight))
    grads = _meant(in_fp8(grad.flatten(0, 1), gradient_dtype, amax(grad)))
    y = gemm.forward(x, weight, None).flatten(0, 1).double()
    torch.testing.assert_close(y, in_8_bits @ _meant(of_weight).t(), rtol=2.0**-7, atol=0.05)
    x_grad = gemm.input_gradient(grad, weight, gemm.scales(grad, weight)).flatten(0, 1).double()
    torch.testing.assert_close(x_grad, grads @ _meant(of_weight), rtol=2.0**-7, atol=0.01)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_one_pass_rounds_as_the_cpu_does(dtype: torch.dtype, one_gpu: Topology) -> None:
    _skip_without_fp8(one_gpu)
    x = 300.0 * torch.randn(96, 160).bfloat16()
    for there in (x.to(one_gpu.device), x.t().to(one_gpu.device)):
        here = there.cpu()
        assert torch.equal(amax(there).cpu(), amax(here))
        on_gpu, expected = in_fp8(there, dtype, amax(there)), in_fp8(here, dtype, amax(here))
        assert torch.equal(on_gpu.numbers.cpu().view(torch.uint8), expected.numbers.view(torch.uint8))


def _main_grad(buffer: torch.Tensor) -> MainGrad:
    return MainGrad(lambda: (buffer.detach(), False), lambda: None, buffer)


@pytest.mark.parametrize("fp8_format", [None, "hybrid"])
@pytest.mark.parametrize(("base", "dropout"), [(MODEL, 0.0), (MODEL, 0.1), (LLAMA, 0.0)])
def test_compiled_layers_give_the_same(
    base: ModelConfig, dropout: float, fp8_format: str | None, one_gpu: Topology
) -> None:
    """Add the weight gradients of two microbatches to fp32 buffers.

    A gradient in 8 bits has 2 bits of mantissa: one that rounds to the other side differs by up to 1/8.
    """
    if fp8_format is not None:
        _skip_without_fp8(one_gpu)
    check_compiler(one_gpu.device)
    model = ModelConfig(**{**vars(base), "hidden_dropout": dropout})
    ids = torch.arange(130, device=one_gpu.device).view(2, 65) % 128
    numbers = torch.arange(2, device=one_gpu.device)
    losses, norms = [], []
    for compiled in (False, True):
        fp8 = None if fp8_format is None else Fp8Settings(fp8_format)
        stage = build_stage(model, one_gpu, range(2), seed=1, fp8=fp8, fuses_weight_gradients=True)
        buffers = [torch.zeros_like(p, dtype=torch.float32) for p in stage.layers.parameters() if p.dim() > 1]
        matrices = (p for p in stage.layers.parameters() if p.dim() > 1)
        for parameter, buffer in zip(matrices, buffers, strict=True):
            parameter.main_grad = _main_grad(buffer)  # type: ignore[attr-defined]
        if compiled:
            compile_layers(stage)
        for _ in range(2):
            loss = stage(Microbatch(ids[:, :-1], ids[:, 1:], numbers), None)
            loss.backward()
        losses.append(loss.item())
        grads = [p.grad.float() for p in stage.parameters() if p.grad is not None]
        norms.append([grad.norm().item() for grad in (*grads, *buffers)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert norms[1] == pytest.approx(norms[0], rel=0.05 if fp8_format is None else 1 / 8)
