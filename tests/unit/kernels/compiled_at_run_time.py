"""Runs tests of operators on what torch.compile makes of their references, on a CPU.

It is what a GPU without the compiled library runs. A program of its own, as the CPU's own kernels must not be
loaded: `python -m tests.unit.kernels.compiled_at_run_time FILE…`
"""

import sys
import types
from collections.abc import Sequence

import pytest
import torch


def main(arguments: Sequence[str]) -> int:
    pose = types.ModuleType("megalite.kernels._C")
    pose.capability = lambda: "torch.compile"  # type: ignore[attr-defined]
    sys.modules[pose.__name__] = pose
    from megalite.kernels import activations, cross_entropy, norm, rotary
    from megalite.kernels.library import at_run_time

    torch._dynamo.config.recompile_limit = 1000  # the tests have many shapes
    library = torch.library.Library("megalite", "IMPL")
    for name, reference, compiled in (
        ("bias_gelu", activations.gelu_reference, None),
        ("bias_gelu_backward", activations.gelu_backward_reference, None),
        ("bias_swiglu", activations.swiglu_reference, None),
        ("bias_swiglu_backward", activations.swiglu_backward_reference, None),
        ("cross_entropy_gradient_", cross_entropy.gradient_reference, cross_entropy._replace_by_gradient),
        ("cross_entropy_statistics", cross_entropy.statistics_reference, cross_entropy._statistics),
        ("layer_norm", norm.layer_reference, None),
        ("layer_norm_backward", norm.layer_backward_reference, None),
        ("rms_norm", norm.rms_reference, None),
        ("rms_norm_backward", norm.rms_backward_reference, None),
        ("rotate", rotary.reference, None),
    ):
        library.impl(name, at_run_time(reference, compiled=compiled, device_type="cpu"), "CPU")
    status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *arguments])
    print(torch._dynamo.utils.counters["stats"]["unique_graphs"], "graphs were compiled")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
