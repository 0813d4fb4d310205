"""How the gradients of a run's weights come into the sums of them."""

from __future__ import annotations

from typing import NamedTuple

from megalite.config import Config
from megalite.kernels.weight_gradient import has_widening_product
from megalite.model.stage import DTYPES
from megalite.optim.gradients import main_dtype
from megalite.topology import Topology


class Fusion(NamedTuple):
    """Whether the products that make weights' gradients add to the sums themselves.

    Attributes:
        told: that, and why, in words for the log.
    """

    is_on: bool
    told: str


def fusion_of(config: Config, topology: Topology) -> Fusion:
    """The best that a run's config and device allow.

    A product that is not one with its addition gains nothing, and is left to autograd, which adds up the
    gradients of a weight with two uses before they come to the sum.
    """
    dtype = DTYPES[config.model.params_dtype]
    factors, total = (str(each).removeprefix("torch.") for each in (dtype, main_dtype(dtype)))
    if not config.parallel.gradient_accumulation_fusion:
        return Fusion(False, "added by autograd (--no-gradient-accumulation-fusion)")
    if config.parallel.zero_stage_among(topology.dp.size) == 3:
        return Fusion(False, "added by autograd (--zero-stage 3 shares them out at once)")
    if dtype != main_dtype(dtype) and not has_widening_product(dtype, main_dtype(dtype), topology.device):
        return Fusion(
            False, f"added by autograd (no product of {factors} adds to {total} on {topology.device.type})"
        )
    if config.training.compile and topology.tp.size == 1:
        return Fusion(True, "added by the logits' product itself, of --compile's layers by autograd")
    return Fusion(True, "added by the products themselves")
