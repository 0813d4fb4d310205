"""Checksums of the bits of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

_WORDS_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Words that are hashed together, by the type of the device: a CPU's cache holds them."""


def _signed(number: int) -> int:
    """Return the int64 that has the same bits as an unsigned number."""
    return number - (1 << 64) if number >= 1 << 63 else number


_STEP, _FIRST, _SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Constants of splitmix64 (Steele et al. 2014)."""


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return the checksum of a tensor's bits, an int64 scalar on its device.

    It is the sum of a hash of each 64-bit word and its position, modulo 2**64. For one position the hash is a
    permutation, so a change within one word always changes the sum. Swapped words change it too, but for a
    chance of about 2**-30 at most. Two tensors are compared with ``==`` of this number: NaNs are equal if
    their bits are, and 0 differs from -0.
    """
    words = _words(tensor)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    size = _WORDS_AT_ONCE.get(words.device.type, 1 << 24)
    for start in range(0, len(words), size):
        part = words[start : start + size]
        hashed = torch.arange(start, start + len(part), device=words.device).mul_(_STEP).bitwise_xor_(part)
        hashed.mul_(_FIRST)
        hashed ^= (hashed >> 32) & 0xFFFFFFFF  # a logical shift
        hashed.mul_(_SECOND)
        hashed ^= (hashed >> 29) & 0x7FFFFFFFF
        total += hashed.sum()
    return total


def _words(tensor: Tensor) -> Tensor:
    """Return the bits as int64 ``[n]``, with zeros at the end if they do not fill the last word."""
    as_bytes = tensor.detach().reshape(-1).view(torch.uint8)
    if (rest := -len(as_bytes) % 8) or as_bytes.data_ptr() % 8 or as_bytes.storage_offset() % 8:
        as_bytes = F.pad(as_bytes, (0, rest)) if rest else as_bytes.clone()
    return as_bytes.view(torch.int64)


def checksum_of(checksums: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return one checksum of several in order, an int64 scalar on `device`."""
    moved = [each.to(device) for each in checksums]
    return checksum(torch.stack(moved)) if moved else torch.zeros((), dtype=torch.int64, device=device)


def id_of(text: str) -> int:
    """Return an int64 that identifies a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
