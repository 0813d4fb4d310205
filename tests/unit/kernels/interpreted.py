"""Runs tests of operators on Triton's interpreter: `python -m tests.unit.kernels.interpreted FILE…`.

A program of its own, as Triton decides when it is imported whether its kernels are compiled or interpreted,
and as the CPU's own kernels must not be loaded. The blocks of attention are small, so that short sequences
have several.
"""

import os
import sys
import types
from collections.abc import Sequence

import pytest
import torch


def main(arguments: Sequence[str]) -> int:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)  # threads would cost these small tensors more than they save
    pose = types.ModuleType("megalite.kernels._C")
    pose.capability = lambda: "Triton's interpreter"  # type: ignore[attr-defined]
    sys.modules[pose.__name__] = pose
    from megalite.kernels import moments, softmax, token_rows
    from megalite.kernels.dropout import launch as launch_dropout
    from megalite.kernels.dropout import launch_backward as launch_sum_backward
    from megalite.kernels.dropout import launch_sum
    from megalite.kernels.flash_attention import (
        SIZES,
        BlockSizes,
        KernelSizes,
        launch,
        launch_backward,
        with_sinks,
    )
    from megalite.kernels.recurrence import SIZES as RECURRENCE_SIZES
    from megalite.kernels.recurrence import RecurrenceSizes
    from megalite.kernels.recurrence import launch as launch_recurrence
    from megalite.kernels.recurrence import launch_backward as launch_recurrence_backward

    small = KernelSizes(BlockSizes(16, 32, 4, 1), BlockSizes(32, 16, 4, 1), BlockSizes(32, 16, 4, 1))
    split = small._replace(value_gradients=BlockSizes(16, 32, 4, 1))
    sizes = {64: small, 128: small, 256: split}
    SIZES.update({(itemsize, head_dim): sizes[head_dim] for itemsize in (2, 4) for head_dim in sizes})
    RECURRENCE_SIZES.update(dict.fromkeys(RECURRENCE_SIZES, RecurrenceSizes(16, 16, 32, 32, 4, 4, 1)))
    library = torch.library.Library("megalite", "IMPL")
    for name, function in {
        "bias_dropout_add": launch_sum,
        "bias_dropout_add_backward": launch_sum_backward,
        "causal_softmax_": softmax.launch,
        "causal_softmax_backward_": softmax.launch_backward,
        "copy_to_rows": token_rows.launch_copy,
        "dropout": launch_dropout,
        "flash_attention": with_sinks(launch),
        "flash_attention_backward": launch_backward,
        "recurrence": launch_recurrence,
        "recurrence_backward": launch_recurrence_backward,
        "round_moments_": moments.launch,
        "sum_rows": token_rows.launch_sum,
    }.items():
        library.impl(name, function, "CPU")
    return pytest.main(["-q", "-x", "-p", "no:cacheprovider", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
