"""The Triton kernels as their launchers have them compiled, for GPUs that are absent."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.machine_code import RESERVED_SHARED, TARGETS, read
from benchmarks.triton_kernels import (
    ALL,
    compile_attention,
    compile_recurrence,
    only_compiled,
    run_dropout,
    run_dropout_backward,
    run_moments,
    run_softmax,
    run_token_rows,
    sizes_for,
)
from megalite.kernels.flash_attention import LARGE_MEMORY, has_triton, launch, launch_backward
from megalite.kernels.recurrence import launch as launch_recurrence
from megalite.kernels.recurrence import launch_backward as launch_recurrence_backward

pytestmark = pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
SMALL_MEMORY = 99 << 10
"""bytes of a program on GPUs of compute capability 8.6, 8.9 and 12.0"""
RECURRENCES = [(128, 128, True), (256, 256, True), (128, 64, False)]
"""key size, value size, and whether the delta rule writes"""
BERT = "dropout, documents, both sides"
DTYPES = [torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow)]  # few train in the latter


@pytest.mark.parametrize("options", [f"{ALL}, caps", BERT, f"{ALL}, slice", f"{ALL}, keys", "keys"])
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
    found = compile_attention(head_dim, torch.float16, options, 90, **shape)
    assert list(found) == ["forward", "key_gradients", "query_gradients"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("sizes", "capability"), [(80, 80), (80, 86), (80, 120), (90, 90), (100, 100)])
def test_gpus_have_enough_memory(sizes: int, capability: int, head_dim: int, dtype: torch.dtype) -> None:
    with sizes_for(sizes):
        found = compile_attention(head_dim, dtype, ALL, capability)
    shared = max(each.metadata.shared for each in found.values())
    assert shared <= (SMALL_MEMORY if sizes == 80 else LARGE_MEMORY)
    assert max(getattr(each.metadata, "tmem_size", 0) or 0 for each in found.values()) <= 512


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("key_dim", "value_dim", "is_delta"), RECURRENCES)
@pytest.mark.parametrize("capability", [80, 90])
def test_recurrences_fit_into_shared_memory(
    capability: int, key_dim: int, value_dim: int, is_delta: bool, dtype: torch.dtype
) -> None:
    found = compile_recurrence(key_dim, value_dim, dtype, capability, is_delta=is_delta)
    assert len(found) == (6 if is_delta else 5)
    memory = TARGETS[capability].shared - RESERVED_SHARED
    assert max(each.metadata.shared for each in found.values()) <= memory


@pytest.mark.slow
@pytest.mark.parametrize("key_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("is_delta", [True, False])
def test_no_kernel_reads_a_register_without_a_value(is_delta: bool, key_dim: int) -> None:
    """ptxas of CUDA 12.8 wrote such code."""
    for name, each in compile_recurrence(key_dim, 32, torch.bfloat16, 90, is_delta=is_delta).items():
        (kernel,) = read(each.asm["cubin"])
        assert kernel.code.products
        assert kernel.code.without_value == [], name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("run", [run_dropout, run_dropout_backward, run_moments, run_softmax])
def test_one_kernel_without_spills_serves_all_keys(run: Callable[..., None], dtype: torch.dtype) -> None:
    found = []
    for key, base in ((-7, 0), (1, 16), (2**63 - 1, 2**34), (16, 8)):
        with only_compiled(90) as kernels:
            run(dtype, key, base)
        found.append(kernels)
    assert all(each == found[0] for each in found)
    assert not any(read(kernel.asm["cubin"])[0].stack for _, kernel in found[0])


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_tokens_are_in_registers(dtype: torch.dtype, drops: bool) -> None:
    with only_compiled(90) as kernels:
        run_token_rows(dtype, drops=drops)
    assert [name for name, _ in kernels] == ["copy_kernel", "sum_kernel"]
    assert not any(read(kernel.asm["cubin"])[0].stack for _, kernel in kernels)


def test_each_launch_says_whether_products_and_sums_are_fused() -> None:
    """Triton 3.9 prints a warning for each kernel that does not, as the default is to change."""
    from triton.runtime.jit import JITFunction

    launches: dict[str, dict[str, Any]] = {}

    def record(self: Any, *_: Any, **options: Any) -> None:
        launches[self.fn.__qualname__] = options

    with mock.patch.object(JITFunction, "run", record):
        q, grad = (torch.empty(1, 2, 16, 16) for _ in range(2))
        rest = None, None, None, None, None, 0.25, 0.0, 0
        launch_backward(grad, q, q, q, *launch(q, q, q, *rest), *rest)
        arguments = q, q, q.unsqueeze(2), torch.empty(1, 2, 1, 16), torch.empty(1, 2, 1, 16), None, None, True
        launch_recurrence(*arguments)
        launch_recurrence_backward(grad.unsqueeze(2), None, *arguments)
        run_dropout(torch.bfloat16)
        run_softmax(torch.bfloat16)
        run_token_rows(torch.bfloat16)
    assert {"forward_kernel", "delta_kernel", "dropout_kernel", "softmax_kernel", "states_kernel"} < set(
        launches
    )
    assert [name for name, options in launches.items() if "enable_fp_fusion" not in options] == []
