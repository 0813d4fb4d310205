"""What the data-parallel ranks sum, and when they start to."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megalite.config import ParallelConfig
from megalite.local_ranks import RankError, run_ranks
from megalite.optim.flat import FlatGroup
from megalite.optim.reducer import GradReducer
from megalite.parallel.shard import ParameterSpec, Placement, new_parameter

NUM_LAYERS = 4
WIDTH = 6
NUM_MICROBATCHES = 3
BUCKET_SIZES = (1, WIDTH * WIDTH + 1, 3 * WIDTH * WIDTH, 10**9)


def parallel(dp: int) -> ParallelConfig:
    return ParallelConfig(data_parallel_size=dp, distributed_backend="gloo")


class Chain(nn.Module):
    """Linear layers of whole numbers: their gradients' sums are exact, in whatever order they are added.

    Args:
        watch: called with a layer's number as backward reaches its output.
    """

    def __init__(self, topology, watch=None) -> None:
        super().__init__()
        self.watch = watch
        place = Placement(topology.tp, torch.float64, topology.device)
        spec = ParameterSpec((WIDTH, WIDTH))
        self.layers = nn.ParameterList([new_parameter(spec, place) for _ in range(NUM_LAYERS)])
        self.unused = new_parameter(spec, place)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randint(-2, 3, spec.full_shape, generator=generator))

    def forward(self, x):
        for number, weight in enumerate(self.layers):
            x = F.linear(x, weight)
            if self.watch is not None:
                x.register_hook(lambda _, number=number: self.watch(number))
        return x.sum()

    def backward(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self(torch.randint(-2, 3, (5, WIDTH), generator=generator).double()).backward()


def reduce(net, topology, bucket_size: int, num_microbatches: int) -> GradReducer:
    """Runs the microbatches of this rank, each from a seed of its own."""
    group = FlatGroup(list(net.named_parameters()))
    reducer = GradReducer([group], topology.dp, bucket_size)
    reducer.begin(num_microbatches)
    for number in range(num_microbatches):
        net.backward(100 * topology.dp.rank + number)
    reducer.finish()
    return reducer


def plain_sum(topology, num_microbatches: int) -> list[torch.Tensor]:
    """The same by autograd on a plain copy, and one all-reduce for each parameter."""
    net = Chain(topology)
    for number in range(num_microbatches):
        net.backward(100 * topology.dp.rank + number)
    gradients = [
        torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in net.parameters()
    ]
    for gradient in gradients:
        dist.all_reduce(gradient)
    return gradients


def compare_sums(topology) -> None:
    for num_microbatches in (1, NUM_MICROBATCHES):
        expected = plain_sum(topology, num_microbatches)
        for bucket_size in BUCKET_SIZES:
            net = Chain(topology)
            reduce(net, topology, bucket_size, num_microbatches)
            for weight, gradient in zip(net.parameters(), expected, strict=True):
                assert torch.equal(weight.grad, gradient), (num_microbatches, bucket_size)
            assert not net.unused.grad.any()
            assert all(weight.grad.any() for weight in net.layers)


@pytest.mark.parametrize("dp", [2, 4])
def test_sums_are_those_of_plain_all_reduces(dp):
    run_ranks(compare_sums, parallel(dp), dp, timeout=60.0)


def bucket_sizes(topology) -> list[list[int]]:
    net = Chain(topology)
    group = FlatGroup(list(net.named_parameters()))
    reducers = [GradReducer([group], topology.dp, size) for size in BUCKET_SIZES]
    return [[bucket.grad.numel() for bucket in reducer.buckets] for reducer in reducers]


def test_buckets_are_full_from_their_size_on():
    one = WIDTH * WIDTH
    expected = [[one] * 5, [2 * one, 2 * one, one], [3 * one, 2 * one], [5 * one]]
    assert run_ranks(bucket_sizes, parallel(2), 2)[0] == expected
    assert run_ranks(bucket_sizes, parallel(1), 1) == [[[]] * 4]  # one rank has nothing to sum


def record_course(topology) -> list[str]:
    """An iteration in order: backward reaches a layer, a layer's bucket starts, backward ends."""
    events: list[str] = []
    net = Chain(topology, watch=lambda number: events.append(f"backward {number}"))
    del net.unused
    group = FlatGroup(list(net.named_parameters()))
    names = {group.view(group.grad, slot).data_ptr(): slot.name[-1] for slot in group.slots}
    reducer = GradReducer([group], topology.dp, 1)
    all_reduce = dist.all_reduce

    def recorded(tensor, **options):
        assert options["async_op"]
        events.append(f"reduce {names[tensor.data_ptr()]}")
        return all_reduce(tensor, **options)

    dist.all_reduce = recorded
    try:
        reducer.begin(NUM_MICROBATCHES)
        for number in range(NUM_MICROBATCHES):
            net.backward(number)
            events.append("end")
        reducer.finish()
    finally:
        dist.all_reduce = all_reduce
    return events


def test_all_reduces_start_under_the_last_backward_alone():
    backward = [f"backward {number}" for number in reversed(range(NUM_LAYERS))]
    last = [f"{what} {number}" for number in reversed(range(NUM_LAYERS)) for what in ("backward", "reduce")]
    expected = [*backward, "end"] * (NUM_MICROBATCHES - 1) + [*last, "end"]
    for events in run_ranks(record_course, parallel(2), 2):
        assert events == expected


class Branches(nn.Module):
    """Two weights of one shape, whose gradients come in another order on every other rank."""

    def __init__(self, topology, skip_on_rank: int | None) -> None:
        super().__init__()
        place = Placement(topology.tp, torch.float64, topology.device)
        self.a = new_parameter(ParameterSpec((WIDTH,)), place)
        self.b = new_parameter(ParameterSpec((WIDTH,)), place)
        self.rank = topology.dp.rank
        self.skip = skip_on_rank == topology.dp.rank

    def backward(self) -> None:
        used = {"a": 1.0, "b": 10.0}
        if self.skip:
            del used["b"]
        order = sorted(used, reverse=self.rank % 2 == 1)
        sum((self.get_parameter(name) * used[name] * (self.rank + 1)).sum() for name in order).backward()


def reduce_branches(topology, skip_on_rank: int | None) -> tuple[list[str], list[float]]:
    net = Branches(topology, skip_on_rank)
    reducer = GradReducer([FlatGroup(list(net.named_parameters()))], topology.dp, 1)
    order: list[str] = []
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    reducer.begin(2)
    net.backward()
    net.backward()
    reducer.finish()
    return order, [net.a.grad[0].item(), net.b.grad[0].item()]


def test_ranks_whose_gradients_come_in_other_orders_sum_the_right_ones():
    first, second = run_ranks(reduce_branches, parallel(2), 2, None, timeout=30.0)
    assert first[0] != second[0]
    assert first[1] == second[1] == [6.0, 60.0]


def test_a_parameter_without_gradient_on_one_rank():
    for _, sums in run_ranks(reduce_branches, parallel(2), 2, 1, timeout=30.0):
        assert sums == [6.0, 20.0]


def reduce_twice(topology) -> list[bool]:
    """Two iterations of one reducer; the gradients of the first are zeroed before the second."""
    net = Chain(topology)
    group = FlatGroup(list(net.named_parameters()))
    reducer = GradReducer([group], topology.dp, 1)
    sums = []
    for _ in range(2):
        group.grad.zero_()
        reducer.begin(1)
        net.backward(topology.dp.rank)
        reducer.finish()
        sums.append(group.grad.clone())
    return [torch.equal(*sums), bool(sums[0].any())]


def test_starts_anew_with_each_iteration():
    assert run_ranks(reduce_twice, parallel(2), 2) == [[True, True]] * 2


def backward_once_too_often(topology) -> None:
    net = Branches(topology, None)
    reducer = GradReducer([FlatGroup(list(net.named_parameters()))], topology.dp, 1)
    reducer.begin(1)
    net.backward()
    net.backward()


def test_a_gradient_that_comes_too_late_is_no_silent_error():
    with pytest.raises(RankError, match=r"more backward passes than begin\(\) was told"):
        run_ranks(backward_once_too_often, parallel(2), 2, timeout=30.0)
