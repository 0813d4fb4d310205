"""The Triton kernels as their launchers have them compiled, for GPUs that are absent."""

from collections.abc import Callable
from importlib.metadata import version
from unittest import mock

import pytest
import torch

from benchmarks.triton_kernels import HOPPER, NAMES, compile_attention, only_compiled, resources
from megalite.kernels import CausalSoftmax, Drop
from megalite.kernels.dropout import launch_kernel
from megalite.kernels.flash_attention import (
    LARGE_MEMORY,
    SIZES,
    SMALL_SIZES,
    BlockSizes,
    KernelSizes,
    has_triton,
)
from megalite.kernels.softmax import launch, launch_backward

pytestmark = pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
SMALL_MEMORY = 99 << 10
"""bytes of a program on GPUs of compute capability 8.6, 8.9 and 12.0"""
TRITON = ".".join(version("triton").split(".")[:2]) if has_triton() else ""
SPILLED: dict[str, dict[tuple[int, str], tuple[int, int]]] = {
    "3.6": {
        (64, "key_gradients"): (48, 0),
        (128, "key_gradients"): (136, 0),
        (256, "key_gradients"): (376, 21),
        (256, "query_gradients"): (8, 0),
    },
    "3.7": {(128, "key_gradients"): (152, 0), (256, "key_gradients"): (320, 25)},
    "3.8": {
        (128, "key_gradients"): (152, 1),
        (256, "forward"): (8, 0),
        (256, "key_gradients"): (344, 20),
        (256, "query_gradients"): (32, 0),
    },
    "3.9": {
        (128, "forward"): (8, 0),
        (128, "key_gradients"): (352, 28),
        (128, "query_gradients"): (120, 2),
        (256, "forward"): (96, 10),
        (256, "key_gradients"): (848, 91),
        (256, "query_gradients"): (168, 12),
    },
}
"""Bytes that a thread spills, and moves of spilled registers in the inner loop: the most of all options.

By Triton's version, head size and kernel; kernels that are not here spill nothing. Newer versions may
spill as much as the last one.
"""
DOUBLED = {(256, "key_gradients")}
"""Kernels whose sums, 256 floats of each key twice, need all registers of 8 warps for 64 keys."""
ALL = "dropout, documents, alibi"
BERT = "dropout, documents, both sides"
FAST = {(128, ""), (128, "dropout")}


def _check(head_dim: int, options: str) -> None:
    """Check the machine code of the kernels for Hopper."""
    found = compile_attention(head_dim, torch.bfloat16, options)
    limits = SPILLED.get(TRITON, SPILLED["3.9"])
    for name, sizes, each in zip(NAMES, SIZES[2, head_dim], found, strict=True):
        most = 2.0 if (head_dim, name) in DOUBLED else 1.125  # forward: and one for each row of a block
        assert 1.0 <= each.exponentials_per_score(sizes) <= most, name
        assert all(product.startswith("HGMMA.64x") for product in each.products), name  # not mma.sync
        spilled, moves = limits.get((head_dim, name), (0, 0))
        assert (each.spilled <= spilled, each.moves <= moves) == (True, True), (name, each)
        assert each.shared <= LARGE_MEMORY, name
        assert each.programs(sizes.warps) >= 1, name


@pytest.mark.parametrize(
    ("head_dim", "options"),
    [
        pytest.param(head_dim, options, marks=() if (head_dim, options) in FAST else pytest.mark.slow)
        for head_dim in (64, 128, 256)
        for options in ("", "dropout", "alibi", "documents", ALL, BERT)
    ],
)
def test_hopper_computes_each_score_once(head_dim: int, options: str) -> None:
    _check(head_dim, options)


@pytest.mark.parametrize(
    "sizes", [BlockSizes(32, 64, 8, 3), BlockSizes(32, 32, 8, 2)], ids=["scores twice", "mma.sync"]
)
def test_blocks_too_small_for_their_warps_are_found(sizes: BlockSizes) -> None:
    small = KernelSizes(SIZES[2, 128].forward, sizes, SIZES[2, 128].query_gradients)
    with mock.patch.dict(SIZES, {(2, 128): small}), pytest.raises(AssertionError, match="key_gradients"):
        _check(128, "")


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
