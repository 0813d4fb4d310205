"""Products in 8 bits over tensor-parallel ranks: slices are rounded as the whole is, by one scale."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config import Config, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megalite.distributed.topology import Topology
from megalite.observe.verify.layouts import Layout
from megalite.tensor_parallel import fp8
from megalite.tensor_parallel.fp8 import Fp8Settings, in_fp8
from megalite.tensor_parallel.gemm import WeightGradientStore, run_stored
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.parameter_spec import LayerContext, gather_full, spec_of
from megalite.train import model_chunks
from megalite.train.trainer import start_trainer
from tests.live_ranks import run_ranks

S, B, WIDTH, OUT = 8, 2, 64, 96
KINDS = {"column": ColumnParallelLinear, "row": RowParallelLinear}
FORMS = list(itertools.product((False, True), (False, True)))
"""Whether sequence parallel, whether the weight gradient is stored for later."""


def _full(name: str, *shape: int) -> Tensor:
    """The same on every rank; its last numbers in each dim are largest, so that slices differ in scale."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
    for dim, size in enumerate(shape):
        steps = torch.linspace(0.1, 5.0, size).view(
            [-1 if other == dim else 1 for other in range(len(shape))]
        )
        numbers = numbers * steps
    return numbers.bfloat16()


def _layer(topology: Topology, kind: str, sequence_parallel: bool, stored: bool) -> dict[str, Tensor]:
    tp = topology.tp
    store = WeightGradientStore()
    context = LayerContext(
        topology,
        torch.bfloat16,
        sequence_parallel=sequence_parallel,
        weight_gradient_store=store if stored else None,
        fp8=Fp8Settings("hybrid"),
    )
    layer = KINDS[kind](WIDTH, (OUT,) if kind == "column" else OUT, context, bias=False, std=1.0)  # type: ignore[arg-type]
    spec = spec_of(layer.weight)
    layer.weight.data.copy_(spec.box(topology).of(_full("weight", *spec.full_shape)))
    whole_dim = 0 if sequence_parallel else None
    x_dim, y_dim = (whole_dim, 2) if kind == "column" else (2, whole_dim)

    def mine(tensor: Tensor, dim: int | None) -> Tensor:
        return tensor if dim is None else tensor.chunk(tp.size, dim)[tp.rank].contiguous()

    def whole(tensor: Tensor, dim: int | None) -> Tensor:
        if dim is None or tp.size == 1:
            return tensor.detach()
        slices = [torch.empty_like(tensor) for _ in range(tp.size)]
        dist.all_gather(slices, tensor.detach().contiguous(), group=tp.group)
        return torch.cat(slices, dim)

    x = mine(_full("xx", S, B, WIDTH), x_dim).requires_grad_()
    with store.collect() as gradients:
        y = layer(x)
        y.backward(mine(_full("ddd", S, B, OUT), y_dim))
    run_stored(gradients)
    assert x.grad is not None and layer.weight.grad is not None
    gradient = gather_full(layer.weight.grad, spec, topology)
    return {"y": whole(y, y_dim), "dx": whole(x.grad, x_dim), "dw": gradient}


def _on_ranks(topology: Topology) -> dict[Any, dict[str, Tensor]]:
    return {(kind, form): _layer(topology, kind, *form) for kind in KINDS for form in FORMS}


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[Any]]:
    return {
        tp: run_ranks(_on_ranks, ParallelConfig(tensor_model_parallel_size=tp).mesh, tp) for tp in (1, 2, 4)
    }


def _train(topology: Topology, config: Config) -> tuple[list[float], dict[str, Tensor], int]:
    """Return losses and norms of two iterations, the new weights, and how often a matrix was rounded."""
    num_rounded = 0

    def counted(*args: Any) -> Any:
        nonlocal num_rounded
        num_rounded += 1
        return in_fp8(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_chunks, "check_device", lambda *_: None)  # torch._scaled_mm runs on a CPU
        patch.setattr(fp8, "in_fp8", counted)
        with start_trainer(config, topology) as trainer:
            results = [trainer.step() for _ in range(2)]
    trainer.optimizer.finish_weights()
    weights = {name: trainer.optimizer.weight(name).clone() for name in trainer.optimizer.weights()}
    return [figure for each in results for figure in (each.loss, each.grad_norm)], weights, num_rounded


@pytest.mark.parametrize("name", ["tp2+sp+full", "dp2+zero1+gather", "pp2zb", "dp2+zero3"])
def test_training_with_kept_copies_has_the_same_bits(name: str) -> None:
    """Count, without copies, each layer's 4 GEMMs of 2 microbatches of 2 iterations in 2 passes or more."""
    layout = Layout.parse(name)
    results = {}
    for is_cached in (True, False):
        config = Config(
            model=ModelConfig(
                num_layers=2,
                hidden_size=32,  # a CPU multiplies numbers in fp8 one by one
                num_attention_heads=4,
                seq_length=16,
                vocab_size=90,
                params_dtype="bf16",
            ),
            optimizer=OptimizerConfig(lr=1e-2),
            data=DataConfig(mock_data=True),
            training=TrainingConfig(
                train_iters=9, micro_batch_size=1, fp8_format="hybrid", fp8_weight_cache=is_cached
            ),
        )
        config = layout.apply(config, 2 * layout.size("dp"))
        results[is_cached] = run_ranks(_train, config.parallel.mesh, layout.world_size, config)
    gemms = 2 * 4 * 2 // layout.size("pp")
    passes = 2.75 if "full" in name else 2  # a recomputed MLP stops before its last GEMM
    for (figures, weights, num), (others, expected, num_plain) in zip(*results.values(), strict=True):
        assert figures == others
        assert all(torch.equal(weight, expected[key]) for key, weight in weights.items())
        assert num_plain == 2 * gemms * passes * 2
        assert num == (num_plain if "zero3" in name else gemms * (2 * passes + 2))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_cut_as_whole(kind: str, form: tuple[bool, bool], tp: int, worlds: dict[int, list[Any]]) -> None:
    """What no sum over ranks makes is bitwise the same; the sums themselves are in bf16."""
    reference = worlds[1][0][kind, (False, False)]
    exact = {"column": ("y", "dw"), "row": ("dx", "dw")}[kind]
    for rank in worlds[tp]:
        for name, tensor in rank[kind, form].items():
            if name in exact:
                assert torch.equal(tensor, reference[name]), name
            else:
                error = (tensor.double() - reference[name].double()).norm()
                assert error < 4e-3 * tp * reference[name].double().norm(), name
