"""Test how the gradients of biases and norms get into their bucket's buffer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.config import ParallelConfig
from megalite.distributed.topology import Topology
from megalite.kernels import add_weight_gradient_
from megalite.optim import gradient_buckets
from megalite.optim.flat_buffers import Bucket, make_buckets
from megalite.optim.gradient_buckets import GRADIENT_BUFFERS, GradientBuffer, GradReducer
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter

SHAPES = ((5,), (64,), (2, 9))
NUM_MICROBATCHES = 3
Make = Callable[..., nn.Parameter]


class Launches(TorchDispatchMode):
    """Counts the operators that write to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ("copy_", "add_", "_foreach_copy_", "_foreach_add_"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def biases_of(make_parameter: Make, dtype: torch.dtype) -> list[nn.Parameter]:
    return [make_parameter(*shape, dtype=dtype, decay=False) for shape in SHAPES]


def reducer_of(biases: list[nn.Parameter], topology: Topology, stage: int = 0) -> GradReducer:
    named = [(f"bias.{number}", bias) for number, bias in enumerate(biases)]
    (bucket,) = make_buckets(named, partial(Bucket, replicas=topology.dp), 10**6)
    reducer = GradReducer([[GRADIENT_BUFFERS[stage](bucket, None)]], overlap=True)
    reducer.begin(NUM_MICROBATCHES)
    return reducer


def gradient(bias: nn.Parameter, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(bias.shape, generator=generator).to(bias.dtype)


def backward(biases: Sequence[nn.Parameter], seed: int) -> None:
    torch.stack([(bias * gradient(bias, seed)).sum() for bias in biases]).sum().backward()


def parts(buffer: GradientBuffer) -> list[Tensor]:
    """Return the parameters' parts of the buffer, the first parameter first."""
    return [buffer.bucket.view(buffer.full, entry) for entry in buffer.bucket.entries[::-1]]


def sums_of(biases: Sequence[nn.Parameter], seeds: Sequence[int]) -> list[Tensor]:
    """Return the sums of gradients, added one by one in the buffer's dtype."""
    dtype = gradient_buckets.main_dtype(biases[0].dtype)
    sums = []
    for bias in biases:
        total = gradient(bias, seeds[0]).to(dtype)
        for seed in seeds[1:]:
            total += gradient(bias, seed)
        sums.append(total)
    return sums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_microbatch_takes_one_call(
    dtype: torch.dtype, stage: int, make_parameter: Make, topology: Topology
) -> None:
    biases = biases_of(make_parameter, dtype)
    reducer = reducer_of(biases, topology, stage)
    (buffer,) = reducer.buffers
    for part in parts(buffer):
        part.fill_(torch.nan)  # of the previous iteration
    widening = {"_foreach_copy_": 1} if dtype == torch.bfloat16 else {}
    for number in range(NUM_MICROBATCHES):
        with Launches() as launches:
            backward(biases, seed=number)
        assert launches.counts == ({"_foreach_add_": 1, **widening} if number else {"_foreach_copy_": 1})
        assert all(bias.grad is None for bias in biases)
        for part, expected in zip(parts(buffer), sums_of(biases, range(number + 1)), strict=True):
            assert torch.equal(part, expected)


def test_a_parameter_has_two_gradients_before_another_has_one(
    make_parameter: Make, topology: Topology
) -> None:
    biases = biases_of(make_parameter, torch.bfloat16)
    reducer = reducer_of(biases, topology)
    backward(biases[:2], seed=0)
    backward(biases[:2], seed=1)
    backward(biases[1:], seed=2)
    reducer.finish()
    seeds = [0, 1], [0, 1, 2], [2]
    for bias, part, each in zip(biases, parts(reducer.buffers[0]), seeds, strict=True):
        assert torch.equal(part, *sums_of([bias], each))


def test_unused_parameters_do_not_keep_others_out(make_parameter: Make, topology: Topology) -> None:
    biases = biases_of(make_parameter, torch.bfloat16)
    reducer = reducer_of(biases, topology)
    (buffer,) = reducer.buffers
    for _ in range(2):  # iterations
        reducer.begin(NUM_MICROBATCHES)
        parts(buffer)[2].fill_(torch.nan)
        backward(biases[:2], seed=3)
        reducer.finish()
        for part, expected in zip(parts(buffer), sums_of(biases[:2], [3]), strict=False):
            assert torch.equal(part, expected)
        assert not parts(buffer)[2].any()


def test_a_claimed_part_has_the_gradients_so_far(make_parameter: Make, topology: Topology) -> None:
    """Test it with a parameter whose gradient autograd accumulates first, and a GEMM adds to later."""
    biases = biases_of(make_parameter, torch.bfloat16)
    reducer = reducer_of(biases, topology)
    backward(biases[:1], seed=0)
    part, is_stale = reducer.main_grads()[biases[0]].claim()
    assert not is_stale
    assert torch.equal(part, *sums_of(biases[:1], [0]))


def test_a_graph_overwrites_a_part_and_then_adds_to_it(make_parameter: Make, topology: Topology) -> None:
    """As the graphs of torch.compile do, which have no other way to learn which of the two to do."""
    weights = [make_parameter(*shape, dtype=torch.float32) for shape in ((3, 2), (4, 2), (5, 2))]
    named = [(f"weight.{number}", weight) for number, weight in enumerate(weights)]
    (bucket,) = make_buckets(named, partial(Bucket, replicas=topology.dp), 10**6)
    reducer = GradReducer([[GradientBuffer(bucket, None)]], overlap=True, graphs_add=True)
    (buffer,), main_grads = reducer.buffers, reducer.main_grads()
    grad, x = torch.randn(7, 4), torch.randn(7, 2)
    for _ in range(2):  # iterations
        buffer.full.fill_(torch.nan)
        with Launches() as launches:
            reducer.begin(NUM_MICROBATCHES)
        assert not launches.counts
        for number, weight in enumerate(weights[:2]):
            fixed = main_grads[weight].fixed_buffer
            assert fixed is not None
            for _ in range(1 + number):
                add_weight_gradient_(fixed[0], grad[:, : weight.shape[0]], x, is_written=fixed[1])
        assert not main_grads[weights[0]].claim()[1]  # an eager layer would add
        reducer.finish()
        first, second, unreached = parts(buffer)
        torch.testing.assert_close(first, grad[:, :3].t() @ x)
        torch.testing.assert_close(second, 2 * grad.t() @ x)
        assert not unreached.any()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_reduction_starts_with_the_last_gradient(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that it starts inside backward, and that its message has all gradients."""
    messages: list[Tensor] = []
    for name in ("start_all_reduce", "flat_reduce_scatter"):
        start = getattr(gradient_buckets, name)

        def recorded(*args: Any, start: Any = start) -> Any:
            messages.append(args[-2].clone())
            return start(*args)

        monkeypatch.setattr(gradient_buckets, name, recorded)
    with Topology.fake(ParallelConfig(data_parallel_size=2).mesh, 2, 0, device="cpu") as topology:
        context = LayerContext(topology, torch.bfloat16)
        biases = [new_parameter(ParameterSpec(shape, decay=False), context) for shape in SHAPES]
        reducer = reducer_of(biases, topology, stage)
        (bucket,) = (each.bucket for each in reducer.buffers)
        for number in range(NUM_MICROBATCHES):
            backward(biases[1:], seed=number)
            assert len(messages) == (number if stage == 2 else 0)
            backward(biases[:1], seed=number)
    seeds = [NUM_MICROBATCHES - 1] if stage == 2 else list(range(NUM_MICROBATCHES))
    found = [bucket.view(messages[-1], entry) for entry in bucket.entries[::-1]]
    assert len(messages) == (NUM_MICROBATCHES if stage == 2 else 1)
    for part, expected in zip(found, sums_of(biases, seeds), strict=True):
        assert torch.equal(part, expected)
