"""Shares a module's weights out among data-parallel ranks, by torch's fully_shard (Zhao et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megalite.optim.gradients import main_dtype
from megalite.optim.rows import Rows
from megalite.parallel.rng import fill_initial
from megalite.parallel.shard import spec_of
from megalite.topology import Topology


def share_out(
    module: nn.Module,
    blocks: Iterable[nn.Module],
    seed: int,
    topology: Topology,
    dtype: torch.dtype,
    message_dtype: torch.dtype | None,
) -> list[Rows]:
    """Gives the module its initial weights, of which this rank keeps its rows.

    From then on a block's weights are whole from its forward's start to its end, and in backward again. The
    blocks are drawn and cut one after the other: a rank never holds more whole weights than one of them.

    Args:
        module: its parameters have no memory yet (device meta), and are replaced.
        blocks: parts of it that are gathered one at a time; all that is in none of them is gathered as one,
            and stays whole from forward to backward.
        seed: keys the initial weights.
        dtype: that the module computes in; main weights and gradients are finer.
        message_dtype: gradients are rounded to it for their way between ranks, and summed in it; None sends
            them as they add up.
    """
    main = main_dtype(dtype)
    policy = MixedPrecisionPolicy(dtype, message_dtype or main, cast_forward_inputs=False)
    named = dict(module.named_parameters())
    names = {parameter: name for name, parameter in named.items()}
    for unit in (*blocks, module):
        for owner in unit.modules():
            for key, parameter in list(owner.named_parameters(recurse=False)):
                if name := names.get(parameter):
                    weight = torch.empty(parameter.shape, dtype=main, device=topology.device)
                    fill_initial(weight, name, spec_of(parameter), seed, topology)
                    setattr(owner, key, nn.Parameter(_by_rows(weight, key)))
        fully_shard(unit, mesh=topology.mesh["dp"], mp_policy=policy)
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)  # a mean's parts are summed
        unit.set_force_sum_reduction_for_comms(True)  # plainly: gloo has no factors
    return [_rows(name, parameter, named[name], topology) for name, parameter in module.named_parameters()]


def _by_rows(weight: Tensor, key: str) -> Tensor:
    """A linear layer's parameters as its product takes them: ``[..., in] -> [out, in]``, ``[...] -> [out]``.

    The first dim is what torch cuts, and SwiGLU's ``[2, ffn, h]`` would make two ranks' shares of it.
    """
    if key == "bias":
        return weight.flatten()
    return weight.flatten(0, -2) if weight.dim() > 1 else weight


def _rows(name: str, parameter: nn.Parameter, original: nn.Parameter, topology: Topology) -> Rows:
    parameter.spec = spec_of(original)  # type: ignore[attr-defined]
    return Rows(name, parameter, tuple(original.shape), topology.dp)
