"""What the data-parallel ranks sum, and when they start to."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megalite.config import ParallelConfig
from megalite.distributed.local_ranks import RankError
from megalite.distributed.topology import Topology
from megalite.optim import gradient_buckets
from megalite.optim.flat_buffers import Bucket, make_buckets
from megalite.optim.gradient_buckets import GRADIENT_BUFFERS, MAX_IN_FLIGHT, GradReducer
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from tests.live_ranks import run_ranks

NUM_LAYERS = 4
WIDTH = 6
NUM_MICROBATCHES = 3
BUCKET_SIZES = (1, WIDTH * WIDTH + 1, 10**9)
WAYS = [(0, True), (0, False), (1, True), (1, False), (2, True), (2, False)]
"""ZeRO stage, and whether gradients are reduced under backward."""


def parallel(dp: int, shard: int | None = None) -> ParallelConfig:
    return ParallelConfig(
        data_parallel_size=dp, data_parallel_shard_degree=shard, zero_stage=1, distributed_backend="gloo"
    )


class Chain(nn.Module):
    """Linear layers of whole numbers: their gradients' sums are exact, in whatever order they are added.

    Args:
        watch: called with a layer's number as backward reaches its output.
    """

    def __init__(self, topology, watch=None) -> None:
        super().__init__()
        self.watch = watch
        context = LayerContext(topology, torch.float64)
        spec = ParameterSpec((WIDTH, WIDTH))
        self.layers = nn.ParameterList([new_parameter(spec, context) for _ in range(NUM_LAYERS)])
        self.unused = new_parameter(spec, context)
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


def reducer_of(net, topology, bucket_size: int, stage: int = 0, overlap: bool = True) -> GradReducer:
    buckets = make_buckets(net.named_parameters(), partial(Bucket, replicas=topology.dp), bucket_size)
    return GradReducer([[GRADIENT_BUFFERS[stage](bucket, None) for bucket in buckets]], overlap)


def gathered(reducer: GradReducer) -> dict[str, torch.Tensor]:
    """Each parameter's complete gradient."""
    return {
        entry.name: each.bucket.view(each.all_gather(), entry).clone()
        for each in reducer.buffers
        for entry in each.bucket.entries
    }


def poison(reducer: GradReducer) -> None:
    """Replace the gradients of the last iteration, which nothing may read, with NaN."""
    torch.use_deterministic_algorithms(True)  # new memory is NaN too, such as each buffer of stage 2
    for each in reducer.buffers:
        if each.reduces_each_microbatch:
            each.shard_sum.fill_(torch.nan)
        else:
            for entry in each.bucket.entries:
                each.bucket.view(each.full, entry).fill_(torch.nan)


def reduce(net, topology, num_microbatches: int, *way) -> dict[str, torch.Tensor]:
    """Runs the microbatches of this rank, each from a seed of its own."""
    reducer = reducer_of(net, topology, *way)
    reducer.begin(num_microbatches)
    poison(reducer)
    for number in range(num_microbatches):
        net.backward(100 * topology.dp.rank + number)
    reducer.finish()
    return gathered(reducer)


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
            for way in WAYS:
                net = Chain(topology)
                sums = reduce(net, topology, num_microbatches, bucket_size, *way)
                for (name, _), gradient in zip(net.named_parameters(), expected, strict=True):
                    assert torch.equal(sums[name], gradient), (num_microbatches, bucket_size, way, name)
                assert not sums["unused"].any()
                assert all(sums[f"layers.{number}"].any() for number in range(NUM_LAYERS))


@pytest.mark.parametrize(("dp", "shard"), [(2, None), (4, 2)])
def test_sums_are_those_of_plain_all_reduces(dp, shard):
    run_ranks(compare_sums, parallel(dp, shard).mesh, dp)


def record_course_of_groups(topology, stage: int) -> list[str]:
    """An iteration of one microbatch in order, where the shards of two groups are replicated."""
    events: list[str] = []
    net = Chain(topology, watch=lambda number: events.append(f"backward {number}"))
    del net.unused
    reducer = reducer_of(net, topology, 1, stage, True)
    started = {"reduce-scatter": 0, "all-reduce": 0}

    def recorded(name: str, function):
        def call(*args):
            started[name] += 1
            events.append(f"{name} {NUM_LAYERS - started[name]}")
            return function(*args)

        return call

    reducer.begin(1)
    with pytest.MonkeyPatch.context() as patch:
        for function, name in (("flat_reduce_scatter", "reduce-scatter"), ("start_all_reduce", "all-reduce")):
            patch.setattr(gradient_buckets, function, recorded(name, getattr(gradient_buckets, function)))
        net.backward(0)
        events.append("end")
        reducer.finish()
    return events


@pytest.mark.parametrize("stage", [1, 2])
def test_groups_reduce_a_bucket_between_them_once_the_next_bucket_is_full(stage):
    expected = ["backward 3", "reduce-scatter 3"]
    for number in (2, 1, 0):
        expected += [f"backward {number}", f"reduce-scatter {number}", f"all-reduce {number + 1}"]
    expected += ["end", "all-reduce 0"]
    for events in run_ranks(record_course_of_groups, parallel(4, 2).mesh, 4, stage):
        assert events == expected


def record_course(topology, overlap: bool) -> list[str]:
    """An iteration in order: backward reaches a layer, a layer's bucket starts, backward ends."""
    events: list[str] = []
    net = Chain(topology, watch=lambda number: events.append(f"backward {number}"))
    del net.unused
    reducer = reducer_of(net, topology, 1, 0, overlap)
    names = {each.full.data_ptr(): each.bucket.entries[0].name[-1] for each in reducer.buffers}
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
    for events in run_ranks(record_course, parallel(2).mesh, 2, True):
        assert events == expected


def test_without_overlap_they_start_once_backward_has_ended():
    backward = [f"backward {number}" for number in reversed(range(NUM_LAYERS))]
    expected = [*backward, "end"] * NUM_MICROBATCHES
    expected += [f"reduce {number}" for number in reversed(range(NUM_LAYERS))]
    for events in run_ranks(record_course, parallel(2).mesh, 2, False):
        assert events == expected


def buffers_between_microbatches(topology) -> list[tuple[int, int]]:
    """How many whole buffers there are after each microbatch at stage 2, and most messages in flight."""
    net = Chain(topology)
    del net.unused
    reducer = reducer_of(net, topology, 1, 2)
    reducer.begin(NUM_MICROBATCHES)
    seen = []
    for number in range(NUM_MICROBATCHES):
        net.backward(number)
        assert all(parameter.grad is None for parameter in net.parameters())
        seen.append((sum(each.buffer is not None for each in reducer.buffers), len(reducer._in_flight)))
    reducer.finish()
    return seen


def test_at_stage_2_no_whole_gradient_outlives_its_microbatch():
    expected = [(0, MAX_IN_FLIGHT)] * NUM_MICROBATCHES
    assert run_ranks(buffers_between_microbatches, parallel(2).mesh, 2) == [expected] * 2


class Branches(nn.Module):
    """Two weights of one shape, whose gradients come in another order on every other rank."""

    def __init__(self, topology, skip_on_rank: int | None) -> None:
        super().__init__()
        context = LayerContext(topology, torch.float64)
        self.a = new_parameter(ParameterSpec((WIDTH,)), context)
        self.b = new_parameter(ParameterSpec((WIDTH,)), context)
        self.rank = topology.dp.rank
        self.skip = skip_on_rank == topology.dp.rank

    def backward(self) -> None:
        used = {"a": 1.0, "b": 10.0}
        if self.skip:
            del used["b"]
        order = sorted(used, reverse=self.rank % 2 == 1)
        sum((self.get_parameter(name) * used[name] * (self.rank + 1)).sum() for name in order).backward()


def reduce_branches(topology, skip_on_rank: int | None, stage: int) -> tuple[list[str], list[float]]:
    net = Branches(topology, skip_on_rank)
    reducer = reducer_of(net, topology, 1, stage)
    order: list[str] = []
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    reducer.begin(2)
    net.backward()
    net.backward()
    reducer.finish()
    return order, [sums[0].item() for _, sums in sorted(gathered(reducer).items())]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_whose_gradients_come_in_other_orders_sum_the_right_ones(stage):
    first, second = run_ranks(reduce_branches, parallel(2).mesh, 2, None, stage)
    assert first[0] != second[0]
    assert first[1] == second[1] == [6.0, 60.0]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_parameter_without_gradient_on_one_rank(stage):
    for _, sums in run_ranks(reduce_branches, parallel(2).mesh, 2, 1, stage):
        assert sums == [6.0, 20.0]


def reduce_twice(topology) -> list[bool]:
    """Two iterations of one reducer at each stage."""
    same = []
    for stage in (0, 1, 2):
        net = Chain(topology)
        reducer = reducer_of(net, topology, 1, stage)
        sums = []
        for _ in range(2):
            reducer.begin(1)
            net.backward(topology.dp.rank)
            reducer.finish()
            sums.append(torch.cat([tensor.flatten() for tensor in gathered(reducer).values()]))
        same += [torch.equal(*sums), bool(sums[0].any())]
    return same


def test_starts_anew_with_each_iteration():
    assert run_ranks(reduce_twice, parallel(2).mesh, 2) == [[True] * 6] * 2


def backward_once_too_often(topology) -> None:
    net = Branches(topology, None)
    reducer = reducer_of(net, topology, 1)
    reducer.begin(1)
    net.backward()
    net.backward()


def test_a_gradient_that_comes_too_late_is_no_silent_error():
    with pytest.raises(RankError, match=r"more backward passes than passed to begin\(\)"):
        run_ranks(backward_once_too_often, parallel(2).mesh, 2)


def test_what_follows_a_reduction_has_all_microbatches() -> None:
    """One bucket is reduced once per microbatch; the tied weight's reduction starts while it is in flight."""
    with Topology.fake(ParallelConfig(data_parallel_size=2).mesh, 2, 0, device="cpu") as topology:
        net = Chain(topology)
        *others, tied = (
            GRADIENT_BUFFERS[stage](bucket, None)
            for stage, pairs in ((2, [*net.named_parameters()][:-1]), (1, [("unused", net.unused)]))
            for bucket in make_buckets(pairs, partial(Bucket, replicas=topology.dp), 10**9)
        )
        complete = {}
        reducer = GradReducer(
            [others],
            overlap=True,
            tied_buffer=tied,
            on_complete=lambda buffer: complete.update({buffer: buffer.owned_grad.clone()}),
        )
        reducer.begin(NUM_MICROBATCHES)
        for number in range(NUM_MICROBATCHES):
            net.backward(number)
        reducer.finish()
        assert len(others) == 1 and complete.keys() == {*others, tied}
        assert all(gradient.equal(buffer.owned_grad) for buffer, gradient in complete.items())
