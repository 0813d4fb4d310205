"""Choose how weight gradients are accumulated over microbatches."""

from __future__ import annotations

from typing import NamedTuple

from megalite.config import Config
from megalite.distributed.topology import Topology
from megalite.kernels.weight_gradient import has_widening_gemm
from megalite.model.stage import DTYPES
from megalite.optim.gradient_buckets import main_dtype


class Fusion(NamedTuple):
    """Fusion of weight-gradient GEMMs with the accumulation of their results.

    Attributes:
        is_on: the GEMMs add to `weight.main_grad` themselves.
        description: how gradients are accumulated, and why, for the log.
    """

    is_on: bool
    description: str


def weight_gradient_fusion(config: Config, topology: Topology) -> Fusion:
    """Return the fastest choice that the run's config and device allow.

    Fusion is not faster if the device has no GEMM that adds to the wider dtype of `main_grad`. Then autograd
    accumulates; it first sums the gradients of a weight that is used twice.
    """
    dtype = DTYPES[config.model.params_dtype]
    if not config.parallel.gradient_accumulation_fusion:
        return Fusion(False, "accumulated by autograd (--no-gradient-accumulation-fusion)")
    zero_stage = config.parallel.zero_stage_among(topology.replicas.shard.size)
    if dtype != main_dtype(dtype) and not has_widening_gemm(dtype, main_dtype(dtype), topology.device):
        inputs, total = (str(each).removeprefix("torch.") for each in (dtype, main_dtype(dtype)))
        return Fusion(
            False,
            f"accumulated by autograd ({topology.device.type} has no GEMM of {inputs} that adds to {total})",
        )
    if config.training.compile and topology.tp.size == 1 and (zero_stage > 1 or config.recompute.modules):
        reason = f"--zero-stage {zero_stage}, whose buffers do not stay in place"
        if config.recompute.modules:
            reason = "--recompute-granularity selective"
        return Fusion(
            True,
            f"accumulated by the GEMM of the logits, and by autograd in the layers (--compile with {reason})",
        )
    return Fusion(True, "accumulated by the weight-gradient GEMMs (fused)")
