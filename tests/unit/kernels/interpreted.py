"""Runs tests of flash attention on Triton's interpreter: `python -m tests.unit.kernels.interpreted FILE…`.

A program of its own, as Triton decides when it is imported whether its kernels are compiled or interpreted.
The blocks are small, so that short sequences have several.
"""

import os
import sys
from collections.abc import Sequence

import pytest
import torch


def main(arguments: Sequence[str]) -> int:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)  # threads would cost these small tensors more than they save
    from megalite.kernels.flash_attention import SIZES, BlockSizes, KernelSizes, launch, launch_backward

    small = KernelSizes(BlockSizes(16, 32, 4, 1), BlockSizes(32, 16, 4, 1), BlockSizes(32, 16, 4, 1))
    SIZES.update({(itemsize, head_dim): small for itemsize in (2, 4) for head_dim in (64, 128, 256)})
    library = torch.library.Library("megalite", "IMPL")
    library.impl("flash_attention", launch, "CPU")
    library.impl("flash_attention_backward", launch_backward, "CPU")
    return pytest.main(["-q", "-x", "-p", "no:cacheprovider", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
