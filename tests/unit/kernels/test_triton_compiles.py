"""The Triton kernels of flash attention as their launchers have them compiled, for GPUs that are absent."""

from unittest import mock

import pytest
import torch

from benchmarks.triton_kernels import NAMES, compile_attention
from megalite.kernels.flash_attention import LARGE_MEMORY, SIZES, SMALL_SIZES, has_triton

pytestmark = pytest.mark.skipif(not has_triton(), reason="Triton is not installed: pip install triton==3.7.1")
SMALL_MEMORY = 99 << 10
"""bytes of a program on GPUs of compute capability 8.6, 8.9 and 12.0"""
MAX_SPILLED = 64
"""bytes of a thread: 16 of its 255 registers"""
ALL = "dropout, documents, alibi"
BERT = "dropout, documents, both sides"


@pytest.mark.parametrize("options", ["", "dropout", ALL, BERT])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hopper_keeps_sums_in_registers(head_dim: int, options: str) -> None:
    found = compile_attention(head_dim, torch.bfloat16, options)
    for name, sizes, each in zip(NAMES, SIZES[2, head_dim], found, strict=True):
        assert each.spilled <= MAX_SPILLED, name
        assert each.shared <= LARGE_MEMORY, name
        assert each.programs(sizes.warps) >= 1, name


@pytest.mark.parametrize(
    ("seq_length", "num_heads", "num_groups", "head_dim"), [(1, 1, 1, 16), (37, 4, 1, 96), (44, 6, 2, 80)]
)
def test_odd_shapes_compile(seq_length: int, num_heads: int, num_groups: int, head_dim: int) -> None:
    """Triton compiles an integer of 1 as a constant."""
    shape = {"seq_length": seq_length, "num_heads": num_heads, "num_groups": num_groups}
    for options in (ALL, BERT):
        assert len(compile_attention(head_dim, torch.float16, options, **shape)) == len(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("capability", [80, 86, 120])
def test_other_gpus_have_enough_shared_memory(capability: int, head_dim: int, dtype: torch.dtype) -> None:
    with mock.patch.dict(SIZES, SMALL_SIZES):
        found = compile_attention(head_dim, dtype, ALL, capability)
    assert max(each.shared for each in found) <= SMALL_MEMORY
