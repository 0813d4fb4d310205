"""Blocks of slices of the queries with gathered keys.

tests/ranks/attention/test_ring.py compares their attention with that of one rank, on ranks.
"""

from __future__ import annotations

import torch

from megalite.attention.choice import build_core
from megalite.attention.core import StageCore
from megalite.attention.kernels import Block, SdpaKernel
from megalite.attention.ring import GatheredKeys
from megalite.distributed.topology import Topology
from megalite.kernels import CausalSoftmax, Drop, VisibleKeys
from tests.unit.model.test_attention import config_of, expected, inputs, joined, of_slices, slices_of

S, NUM_RANKS = 36, 3
OPEN = VisibleKeys(), Drop(0.0, 0, torch.arange(2))


def core_of(one_rank: Topology, rank: int) -> StageCore:
    context = slices_of(one_rank, torch.float64, "cpu", "all_gather", NUM_RANKS, rank)
    return build_core(config_of(num_query_groups=2), context, "flash")


def test_a_slice_has_blocks_with_the_keys_before_it_and_with_its_own(one_rank: Topology) -> None:
    core = core_of(one_rank, 0)
    kernel = core.cores["all_gather"].kernel
    assert isinstance(kernel, SdpaKernel)
    gathered = GatheredKeys((range(6), range(30, 36)), CausalSoftmax(S, 1.0), kernel)
    ((step, _),) = gathered.arriving(torch.empty(2, 2, S, 64), torch.empty(2, 2, S, 64))
    assert list(gathered.calls(step)) == [
        ((0,), slice(0, 6), slice(0, 6), Block(range(6), range(6))),  # there is no key before the first slice
        ((1,), slice(6, 12), slice(30, 36), Block(range(30, 36), range(30, 36))),
        ((1,), slice(6, 12), slice(0, 30), Block(range(30, 36), range(30))),
    ]


def test_slices_together_have_the_attention_of_the_formula(one_rank: Topology) -> None:
    config = config_of(num_query_groups=2)
    parts = inputs(config, S, torch.float64)
    ranks = [of_slices(core_of(one_rank, rank), parts, *OPEN) for rank in range(NUM_RANKS)]
    for found, whole in zip(joined(ranks), expected(config, parts, None), strict=True):
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
