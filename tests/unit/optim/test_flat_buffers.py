"""Parameters live in flat tensors, aligned and padded to whole shards."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from megalite.optim.flat_buffers import ALIGNMENT, Bucket, make_buckets, usual_bucket_size

SHAPES = {"first": (2, 3), "second": (5,), "third": (8, 10)}


@pytest.fixture
def named(make_parameter):
    return [(name, make_parameter(*shape)) for name, shape in SHAPES.items()]


def places(bucket: Bucket) -> list[tuple[str, int, int]]:
    return [(entry.name, entry.start, entry.end) for entry in bucket.entries]


def test_the_last_parameter_comes_first_and_each_starts_aligned(named, topology):
    (bucket,) = make_buckets(named, partial(Bucket, replicas=topology.dp), 10**6)
    assert places(bucket) == [("third", 0, 80), ("second", 128, 133), ("first", 192, 198)]
    assert bucket.size == bucket.weight.numel() == 256
    assert bucket.shard == slice(0, 256)


@pytest.mark.parametrize(("dp", "size"), [(1, 256), (2, 256), (3, 384), (4, 256), (8, 512)])
def test_shards_are_aligned_and_make_up_the_bucket(named, topology, dp, size):
    axes = [dataclasses.replace(topology.dp, size=dp, rank=rank) for rank in range(dp)]
    buckets = [make_buckets(named, partial(Bucket, replicas=axis), 10**6)[0] for axis in axes]
    assert {bucket.size for bucket in buckets} == {size}
    bounds = [0, *(bucket.shard.stop for bucket in buckets)]
    assert [bucket.shard.start for bucket in buckets] == bounds[:-1]
    assert bounds[-1] == size
    assert all(bound % ALIGNMENT == 0 for bound in bounds)


def test_weights_keep_their_values_and_become_views(named, topology):
    before = {name: parameter.detach().clone() for name, parameter in named}
    (bucket,) = make_buckets(named, partial(Bucket, replicas=topology.dp), 10**6)
    for name, parameter in named:
        assert torch.equal(parameter, before[name])
    assert bucket.weight.count_nonzero() == 91
    with torch.no_grad():
        bucket.weight.copy_(torch.arange(256.0))
    for entry in bucket.entries:
        assert torch.equal(entry.parameter.flatten(), torch.arange(float(entry.start), entry.end).double())
        assert torch.equal(bucket.view(bucket.weight.detach(), entry), entry.parameter)


def test_buckets_are_full_from_their_size_on_and_in_the_order_of_backward(make_parameter, topology):
    """Weights and biases go apart; a bucket stands where backward comes to the last of its parameters."""
    named = [
        (f"{kind}.{layer}", make_parameter(4, decay=kind == "weight"))
        for layer in range(3)
        for kind in ("bias", "weight")
    ]
    buckets = make_buckets(named, partial(Bucket, replicas=topology.dp), 8)
    assert [[entry.name for entry in bucket.entries] for bucket in buckets] == [
        ["weight.2", "weight.1"],
        ["bias.2", "bias.1"],
        ["weight.0"],
        ["bias.0"],
    ]
    assert [[section.kind.decay for section in bucket.sections] for bucket in buckets] == [
        [True],
        [False],
        [True],
        [False],
    ]
    assert len(make_buckets(named, partial(Bucket, replicas=topology.dp), 1)) == 6


def test_the_usual_bucket_leaves_most_gradients_to_go_under_backward() -> None:
    sizes = [usual_bucket_size(num_elements) for num_elements in (10**5, 30 * 10**6, 10**9)]
    assert sizes == [10**6, 5 * 10**6, 40 * 10**6]
