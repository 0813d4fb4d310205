"""Tensors that ranks exchange have the same elements as those that are cut from the full tensors."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megalite.checkpoint import relayout
from megalite.checkpoint.relayout import bytes_to_hold, exchange, hold
from megalite.config import ParallelConfig
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.parameter_spec import ParameterShard, ParameterSpec
from megalite.tensor_parallel.placement import Cut
from megalite.utils.errors import UserError
from tests.live_ranks import run_ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8)
LAYOUTS = ({"tp": 4}, {"tp": 2, "dp": 2}, {"pp": 2, "tp": 2}, {"dp": 4}, {"pp": 4})
NUM_TENSORS = 12


def parallel(tp: int = 1, pp: int = 1, dp: int = 1) -> ParallelConfig:
    return ParallelConfig(tp, pp, dp, distributed_backend="gloo")


def full_tensor(number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 200, shape, generator=generator).to(dtype)


def cut_tensors(topology: Topology, seed: int, *, is_empty: bool) -> dict[str, Tensor | ParameterShard]:
    """Random boxes of random tensors, whole or in parts of random lengths, with padding that depends on tp.

    Args:
        seed: seed of the parts; the tensors are always the same.
    """
    shapes, cuts = random.Random(7), random.Random(seed)
    tensors: dict[str, Tensor | ParameterShard] = {}
    for number in range(NUM_TENSORS):
        dtype = DTYPES[number % len(DTYPES)]
        used = (shapes.randint(1, 9), *(4 * shapes.randint(1, 3) for _ in range(shapes.randint(0, 2))))
        dim = shapes.randrange(len(used))
        rows = -(-used[0] // topology.tp.size) * topology.tp.size
        num_padding = rows - used[0] if dim == 0 else 0
        spec = ParameterSpec((used[0] + num_padding, *used[1:]), Cut("tp", dim), num_padding=num_padding)
        box = spec.box(topology)
        full = torch.cat([full_tensor(number, used, dtype), torch.ones(num_padding, *used[1:]).to(dtype)])
        mine = box.of(full).flatten()
        bounds = [
            0,
            *sorted(cuts.randint(0, mine.numel()) for _ in range(topology.dp.size - 1)),
            mine.numel(),
        ]
        start, end = bounds[topology.dp.rank : topology.dp.rank + 2]
        if is_replicated := cuts.random() < 0.5:
            start, end = 0, mine.numel()
        if number % topology.pp.size != topology.pp.rank and number > 1:  # the first two are on all stages
            continue
        elements = mine[start:end].clone()
        if is_empty:
            elements.zero_()
        tensors[f"tensor {number}"] = ParameterShard(elements, start, box.shape, spec, is_replicated)
    return tensors | {"count": torch.tensor(0 if is_empty else 5)}


def elements(tensor: Tensor | ParameterShard) -> Tensor:
    return tensor.tensor if isinstance(tensor, ParameterShard) else tensor


def exchange_all(topology: Topology, seed: int) -> list[int]:
    """Move between layouts; return the bytes sent."""
    sent, layouts = [], random.Random(seed)
    for number in range(4):
        held = hold(cut_tensors(topology, number, is_empty=False), topology)
        topology.change_layout(parallel(**layouts.choice(LAYOUTS)).mesh)
        expected = cut_tensors(topology, number + 1, is_empty=False)
        tensors = cut_tensors(topology, number + 1, is_empty=True)
        with mock.patch.object(relayout, "MESSAGE_BYTES", 24):
            sent.append(exchange(held, tensors, topology))
        assert not held
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            used = slice(None)
            if isinstance(tensor, ParameterShard):  # padding that nobody held is still zero
                box = tensor.spec.box(topology)
                used = slice(0, max(0, box.num_before(tensor.spec.used_shape[0]) - tensor.start))
            assert torch.equal(elements(tensor).view(-1)[used], elements(expected[name]).view(-1)[used]), name
    return sent


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 30))])
def test_random_cuts_in_small_messages(seed: int) -> None:
    first, *others = run_ranks(exchange_all, parallel(tp=2, dp=2).mesh, 4, seed)
    assert all(each == first for each in others)
    assert max(first) > 1000


def same_layout(topology: Topology) -> tuple[int, int]:
    """Move nowhere; return the bytes sent by all ranks, and those that this one held."""
    tensors = cut_tensors(topology, 1, is_empty=False)
    expected = {name: elements(each).clone() for name, each in tensors.items()}
    held, needed = hold(tensors, topology), bytes_to_hold(tensors, topology)
    held_bytes = sum(piece.num_bytes for _, piece in held)
    assert needed == held_bytes + 2 * relayout.MESSAGE_BYTES
    for each in tensors.values():
        elements(each).zero_()
    sent = exchange(held, tensors, topology)
    assert all(torch.equal(elements(tensors[name]), each) for name, each in expected.items())
    return sent, held_bytes


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2}], ids=str)
def test_ranks_hold_one_copy_and_take_what_they_hold_from_themselves(layout: dict[str, int]) -> None:
    """Both have the 8 bytes of the count, of which the first holds a copy; with dp they share more."""
    (sent, held), (_, other) = run_ranks(same_layout, parallel(**layout).mesh, 2)
    (_, whole), *_ = run_ranks(same_layout, parallel().mesh, 1)
    if "tp" in layout:
        assert sent == 8
        assert held + other >= whole  # padding
    else:
        assert 8 < sent < whole / 2
        assert held + other == whole
    assert max(held, other) < 0.75 * whole


def refused(topology: Topology, fault: str) -> str:
    tensors = cut_tensors(topology, 1, is_empty=False)
    held = hold(tensors, topology)
    wanted: dict[str, Any] = dict(cut_tensors(topology, 1, is_empty=True))
    if fault == "dropped":
        held = [each for each in held if each[0] != "tensor 3"]
    elif fault == "dropped on a rank" and topology.rank == 0:
        held = [each for each in held if each[0] != "tensor 4"]
    elif fault == "dtype":
        wanted["count"] = wanted["count"].float()
    elif fault == "not needed":
        del wanted["count"]
    before = {name: elements(each).clone() for name, each in wanted.items()}
    try:
        exchange(held, wanted, topology)
    except UserError as error:
        assert all(torch.equal(elements(wanted[name]), each) for name, each in before.items())
        return str(error)
    raise AssertionError("nothing is refused")


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("dropped", "elements of tensor 3 are in no file"),
        ("dropped on a rank", "elements of tensor 4 are in no file"),
        ("dtype", "count is int64, here float32"),
        ("not needed", "no rank needs count of the old one"),
    ],
)
def test_what_does_not_arrive_exactly_once_is_refused(fault: str, text: str) -> None:
    first, *others = run_ranks(refused, parallel(tp=2).mesh, 2, fault)
    assert text in first
    assert all(each == first for each in others)
