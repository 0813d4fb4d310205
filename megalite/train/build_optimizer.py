"""Build the optimizer for a rank's model chunks."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.config import Config, ModelConfig
from megalite.distributed.topology import Topology
from megalite.model.attention import Attention
from megalite.model.experts import Router
from megalite.model.stage import DTYPES, Stage
from megalite.optim.expert_balance import ExpertBalance
from megalite.optim.optimizer import Optimizer
from megalite.optim.post_step_hook import PostStepHook
from megalite.optim.qk_clip import MeasuredHeads, QKClip
from megalite.optim.sharded_weights import ChunkModules
from megalite.tensor_parallel.parameter_spec import forget_initial_values
from megalite.tensor_parallel.vocab_parallel import TiedWeight
from megalite.train.model_chunks import named_parameters


def build_optimizer(
    chunks: Sequence[Stage],
    config: Config,
    topology: Topology,
    *,
    fuses_weight_gradients: bool = False,
    keeps_weights: bool = False,
) -> Optimizer:
    """Build the optimizer of the chunks' weights. The fp32 main weights start unrounded.

    Args:
        fuses_weight_gradients: the chunks' linear layers add weight gradients to `weight.main_grad`.
        keeps_weights: with ZeRO stage 3, gather each weight once an iteration.
    """
    optimizer = Optimizer(
        named_parameters(chunks),
        _tied_weight(chunks, topology),
        config.optimizer,
        config.parallel,
        topology,
        DTYPES[config.model.params_dtype],
        [unit for chunk in chunks for unit in chunk.units()],
        fuses_weight_gradients,
        # A graph that recomputes a part of itself cannot add to a buffer that other microbatches change:
        # PyTorch compares the buffer's version with the version in forward.
        graphs_add=config.training.compile and not config.recompute.modules,
        chunks=[ChunkModules(chunk, list(chunk.layers.values()), list(chunk.units())) for chunk in chunks],
        keeps_weights=keeps_weights,
    )
    optimizer.post_step_hooks = _post_step_hooks(config.model, topology, chunks, optimizer)
    optimizer.initialize_main(config.training.seed)
    for _, parameter in named_parameters(chunks):
        forget_initial_values(parameter)
    return optimizer


def _post_step_hooks(
    model: ModelConfig, topology: Topology, chunks: Sequence[Stage], optimizer: Optimizer
) -> list[PostStepHook]:
    """Return the changes that follow an update of the chunks."""
    found: list[PostStepHook] = []
    if model.qk_clip:
        found.append(QKClip(model, topology, _measured_heads(chunks), optimizer.updated))
    modules = [module for chunk in chunks for module in chunk.modules()]
    routers = [module for module in modules if isinstance(module, Router) and module.is_adjusted]
    if routers:
        found.append(ExpertBalance(topology, routers, model.moe_router_bias_update_rate))
    return found


def _measured_heads(chunks: Sequence[Stage]) -> list[MeasuredHeads]:
    """Return the attention layers of the chunks whose scores are measured."""
    return [
        MeasuredHeads(module.qkv.weight, module.qkv.bias, module.core.largest)
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, Attention) and module.core.largest is not None
    ]


def _tied_weight(chunks: Sequence[Stage], topology: Topology) -> TiedWeight | None:
    """Return the word embedding if two pipeline stages use it, on one rank or as copies on two ranks."""
    weight = next((chunk.tied_weight for chunk in chunks if chunk.tied_weight is not None), None)
    if weight is None or topology.pp.size == 1:
        return None
    has_both = any(chunk.is_first for chunk in chunks) and any(chunk.is_last for chunk in chunks)
    num_gradients = sum(chunk.num_tied_gradients for chunk in chunks)
    return TiedWeight(weight, has_other_copy=not has_both, num_gradients=num_gradients)
