"""The generator: published vectors, independent quantiles, and the same header in plain C++."""

import hashlib
import math
import shutil
import statistics
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from megalite.kernels import site_key
from megalite.kernels.philox import philox, random_words, signed64, standard_normal

HEADER = Path(__file__).parents[3] / "csrc" / "philox.h"

# kat_vectors of the Random123 distribution, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter: str, key: str, expected: str) -> None:
    low, high = words(key)
    result = philox([torch.tensor(word) for word in words(counter)], high << 32 | low)
    assert [int(word) for word in result] == words(expected)


def test_element_and_sample_fill_the_counter() -> None:
    counter = [torch.tensor(word) for word in (0xFFFFFFFE, 0x1FFFFFFF, 0x9ABCDEF0, 0x7FFFFFFF)]
    element, sample = 4 * (0x1FFFFFFF << 32 | 0xFFFFFFFE), 0x7FFFFFFF << 32 | 0x9ABCDEF0
    result = random_words(torch.tensor(element), 4, torch.tensor(sample), 5)
    assert result.tolist() == [int(word) for word in philox(counter, 5)]


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4 * (2**32 - 2) + 1])
def test_a_span_is_its_elements_one_by_one(first: int) -> None:
    sample = torch.tensor([7, 2**40])
    span = random_words(torch.tensor(first), 23, sample, 5)
    single = [random_words(torch.tensor(first + i), 1, sample, 5) for i in range(23)]
    assert torch.equal(span, torch.cat(single, dim=-1))
    assert span.shape == (2, 23)


def grid() -> torch.Tensor:
    """Words from both ends, around each border of a region, and between."""
    borders = [round(p * 2**32) for p in (0.075, 0.5, 0.925)]
    near = [b + d for b in (0, *borders, 2**32 - 1) for d in range(-3, 4) if 0 <= b + d < 2**32]
    return torch.tensor(near + list(range(0, 2**32, 2**32 // 4001)))


def test_normal_quantiles_agree_with_others() -> None:
    value = standard_normal(grid())
    p = (grid().double() + 0.5) / 2**32
    python = torch.tensor([statistics.NormalDist().inv_cdf(x) for x in p.tolist()], dtype=torch.float64)
    torch.testing.assert_close(value, python, rtol=2e-15, atol=0)
    torch.testing.assert_close(value, torch.special.ndtri(p), rtol=1e-12, atol=1e-15)


def test_normal_quantiles_are_antisymmetric() -> None:
    assert torch.equal(standard_normal(grid()), -standard_normal(2**32 - 1 - grid()))


def test_site_keys_follow_seed_and_name() -> None:
    digest = hashlib.blake2b(b"1234/decoder.layers.0.weight", digest_size=8).digest()
    assert site_key(1234, "decoder.layers.0.weight") == struct.unpack("<Q", digest)[0]
    keys = {site_key(seed, name) for seed in range(10) for name in ("a", "b", "0/a")}
    assert len(keys) == 30


@pytest.mark.parametrize("value", [-1, 2**64])
def test_a_key_has_64_bits(value: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        signed64(value)


PROGRAM = r"""
#include "HEADER"
#include <cstdio>
int main() {
  uint32_t words[4 * 23];
  megalite::random_words(words, (uint64_t{1} << 32) - 7, 23, (uint64_t{3} << 32) + 5, 0x9E3779B97F4A7C15u);
  for (uint32_t word : words) std::printf("%u %a\n", word, megalite::standard_normal(word));
  uint32_t word;
  while (std::scanf("%u", &word) == 1) std::printf("%u %a\n", word, megalite::standard_normal(word));
}
"""


@pytest.mark.parametrize("flags", [["-O0"], ["-O3", "-march=native"]], ids=" ".join)
def test_the_header_gives_the_same_bits(tmp_path: Path, flags: list[str]) -> None:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, program = tmp_path / "main.cpp", tmp_path / "main"
    source.write_text(PROGRAM.replace("HEADER", str(HEADER)))
    subprocess.run(
        [compiler, "-std=c++17", "-ffp-contract=off", *flags, str(source), "-o", str(program)], check=True
    )
    extra = grid().tolist()
    output = subprocess.run(
        [program], input="\n".join(map(str, extra)), capture_output=True, text=True, check=True
    ).stdout
    numbers, normals = zip(*(line.split() for line in output.splitlines()), strict=True)
    first = 4 * ((1 << 32) - 7)
    expected = random_words(torch.tensor(first), 92, torch.tensor((3 << 32) + 5), 0x9E3779B97F4A7C15)
    assert list(map(int, numbers)) == expected.tolist() + extra
    assert [float.fromhex(z) for z in normals] == standard_normal(
        torch.tensor(list(map(int, numbers)))
    ).tolist()
    assert not any(math.isnan(float.fromhex(z)) for z in normals)
