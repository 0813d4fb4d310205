"""The Triton kernels as their launchers have them compiled, for GPUs that are absent."""

from collections.abc import Callable
from importlib.metadata import version
from unittest import mock

import pytest
import torch

from benchmarks.triton_kernels import HOPPER, NAMES, compile_attention, only_compiled, resources
from megalite.kernels import CausalSoftmax, Drop
from megalite.kernels.dropout import launch_kernel
from megalite.kernels.flash_attention import LARGE_MEMORY, SIZES, SMALL_SIZES, has_triton
from megalite.kernels.softmax import launch, launch_backward

pytestmark = pytest.mark.skipif(
    not has_triton() or [int(part) for part in version("triton").split(".")[:2]] < [3, 7],
    reason="Triton is not installed, or older, which needs more registers: pip install triton==3.7.1",
)
SMALL_MEMORY = 99 << 10
"""bytes of a program on GPUs of compute capability 8.6, 8.9 and 12.0"""
MAX_SPILLED = 64
"""bytes of a thread: 16 of its 255 registers"""
ALL = "dropout, documents, alibi"
BERT = "dropout, documents, both sides"


@pytest.mark.parametrize(
    "options",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in ("", "dropout")), ALL, BERT],  # these need most
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hopper_keeps_sums_in_registers(head_dim: int, options: str) -> None:
    found = compile_attention(head_dim, torch.bfloat16, options)
    for name, sizes, each in zip(NAMES, SIZES[2, head_dim], found, strict=True):
        assert each.spilled <= MAX_SPILLED, name
        assert each.shared <= LARGE_MEMORY, name
        assert each.programs(sizes.warps) >= 1, name


@pytest.mark.parametrize("options", [ALL, BERT])
@pytest.mark.parametrize(
    ("seq_length", "num_heads", "num_groups", "head_dim"),
    [
        (1, 1, 1, 16),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((37, 4, 1, 96), (44, 6, 2, 80))),
    ],
)
def test_odd_shapes_compile(
    seq_length: int, num_heads: int, num_groups: int, head_dim: int, options: str
) -> None:
    """Triton compiles an integer of 1 as a constant."""
    shape = {"seq_length": seq_length, "num_heads": num_heads, "num_groups": num_groups}
    assert len(compile_attention(head_dim, torch.float16, options, **shape)) == len(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("capability", [80, 86, 120])
def test_other_gpus_have_enough_shared_memory(capability: int, head_dim: int, dtype: torch.dtype) -> None:
    with mock.patch.dict(SIZES, SMALL_SIZES):
        found = compile_attention(head_dim, dtype, ALL, capability)
    assert max(each.shared for each in found) <= SMALL_MEMORY


def _run_dropout(dtype: torch.dtype, key: int, base: int) -> None:
    x = torch.empty(512, 2, 2048, dtype=dtype)
    launch_kernel(x, x[0, 0], x, torch.arange(2), 0.1, key, base, 2048)


def _run_dropout_backward(dtype: torch.dtype, key: int, base: int) -> None:
    grad = torch.empty(512, 2, 2048, dtype=dtype)
    launch_kernel(grad, None, None, torch.arange(2), 0.1, key, base, 2048, has_sums=True)


def _run_softmax(dtype: torch.dtype, key: int, base: int) -> None:
    drop = Drop(0.1, key % 2**64, torch.arange(2), base)
    softmax = CausalSoftmax(
        2048, 0.1, torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2048).long(), drop=drop
    )
    scores = torch.empty(2, 4, 128, 2048, dtype=dtype)
    log_sums = launch(scores, *softmax.arguments(1920))
    launch_backward(scores, scores, log_sums, *softmax.arguments(1920))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("run", [_run_dropout, _run_dropout_backward, _run_softmax])
def test_one_kernel_without_spills_serves_all_keys(run: Callable[..., None], dtype: torch.dtype) -> None:
    found = []
    with only_compiled(HOPPER) as kernels:
        for key, base in ((-7, 0), (1, 16), (2**63 - 1, 2**34), (16, 8)):
            run(dtype, key, base)
            found.append(dict(kernels))
    assert all(each == found[0] for each in found)
    assert not any(resources(each).spilled for each in found[0].values())
