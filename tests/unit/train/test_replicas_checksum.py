"""Checksums see each bit and each position, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.train import replicas
from megalite.train.replicas import checksum, checksum_of, id_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)


def _sum(tensor: Tensor) -> int:
    return int(checksum(tensor).item())


@pytest.mark.parametrize("bit", range(64))
@pytest.mark.parametrize("word", [0, 4])
def test_a_flip_of_any_bit_is_seen(bit: int, word: int) -> None:
    words = torch.arange(5) * 0x123456789ABCDEF
    flipped = words.clone()
    flipped[word] ^= -(1 << 63) if bit == 63 else 1 << bit
    assert _sum(words.view(torch.float32)) != _sum(flipped.view(torch.float32))


@pytest.mark.parametrize("first", [1.0, 0.0])
def test_swaps_are_seen(first: float) -> None:
    """Swapped words that differ only in their highest bit are the hardest to see."""
    values = torch.tensor([first, 0.5], dtype=torch.float64).repeat(20)
    values[7] = -first
    sums = set()
    for other in range(0, 40, 2):
        swapped = values.clone()
        swapped[7], swapped[other] = values[other], values[7]
        sums.add(_sum(swapped))
    assert len(sums) == 20


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 8, 33])
def test_memory_does_not_matter(dtype: torch.dtype, size: int) -> None:
    values = torch.arange(size + 1).to(dtype)
    shifted = values[1:]  # at an address that is no multiple of 8
    assert _sum(shifted) == _sum(shifted.clone())
    assert _sum(torch.stack([values, values]).t()) == _sum(torch.stack([values, values]).t().contiguous())


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000)
    whole = _sum(values)
    monkeypatch.setitem(replicas._WORDS_AT_ONCE, "cpu", 7)
    assert _sum(values) == whole


def test_bits_are_compared() -> None:
    nan, zero = torch.full((3,), torch.nan), torch.zeros(3)
    assert _sum(nan) == _sum(nan.clone())
    assert _sum(zero) != _sum(-zero)
    assert _sum(torch.zeros(())) == _sum(torch.zeros(()))


def test_several_checksums_are_one_in_order() -> None:
    device = torch.device("cpu")
    one, two = checksum(torch.ones(3)), checksum(torch.zeros(3))
    assert checksum_of([one, two], device) != checksum_of([two, one], device)
    assert checksum_of([], device) == 0
    assert id_of("a") == id_of("a") != id_of("b")
