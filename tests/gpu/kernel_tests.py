"""Runs the tests of the CPU's kernels on the GPU's: each call goes to the GPU and its results come back.

A program, as the CPU's own kernels must not be loaded: `python -m tests.gpu.kernel_tests FILE...`. With the
option --at-run-time the GPU's are not loaded either: it runs what is compiled at run time.
"""

import sys
import types
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

LIBRARY = "megalite.kernels._C"
CUDA_LIBRARY = "megalite.kernels._CUDA"
AT_RUN_TIME = "--at-run-time"


def elsewhere(
    op: torch._ops.OpOverload, there: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., object]:
    """The operator on copies of its tensors, of which those that it writes to are copied back."""

    def call(*arguments: object) -> object:
        moved = tree_map_only(torch.Tensor, there, arguments)
        result = op(*moved)
        for declared, given, copy in zip(op._schema.arguments, arguments, moved, strict=False):
            if declared.alias_info is not None and declared.alias_info.is_write:
                for tensor, written in zip(tree_leaves(given), tree_leaves(copy), strict=True):
                    tensor.copy_(written)
        return tree_map_only(torch.Tensor, torch.Tensor.cpu, result)

    return call


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    """The tensor in a copy of its whole memory: with the same strides, and the same alignment."""
    whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return whole.cuda().as_strided(x.size(), x.stride(), x.storage_offset())


def main(arguments: Sequence[str]) -> int:
    pose = types.ModuleType(LIBRARY)
    pose.capability = lambda: "CUDA"  # type: ignore[attr-defined]
    sys.modules[LIBRARY] = pose
    if AT_RUN_TIME in arguments:
        sys.modules[CUDA_LIBRARY] = None  # type: ignore[assignment]  # as if it were not built
        torch._dynamo.config.recompile_limit = 1000  # the tests have many shapes
    import megalite.kernels

    library = torch.library.Library("megalite", "IMPL")
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        namespace, _, op = name.partition("::")
        if namespace == "megalite":
            library.impl(op, elsewhere(getattr(torch.ops.megalite, op).default, on_gpu), "CPU")
    print(megalite.kernels.describe("cuda"))
    options = [each for each in arguments if each != AT_RUN_TIME]
    if AT_RUN_TIME in arguments:  # it tests what the operators are compiled by
        options += ["--deselect", "tests/unit/kernels/test_dropout.py::test_describe_names_every_operator"]
    return pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *options])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
