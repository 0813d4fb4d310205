"""Activation recomputation: drop activations after forward and recompute them in backward.

(Korthikanti et al. 2022, section 5.)

    granularity    module       recomputed                          kept for backward instead
    full                        a group of whole layers             the group's input, and keys and values
                                                                    of earlier layers that it attends to
                                a module of later tokens            its two inputs
    selective      core_attn    what is between a mixer's linear    queries, keys, values and gates, or
                                layers: rotary embedding and        the features of a recurrent layer's
                                attention, or the recurrence        heads
    selective      mla_up_proj  core_attn, and before it the        latents of queries and of keys and
                                projections from latents            values, and the shared part of keys
    selective      mlp          the MLP and its norm                the norm's input
    selective      mlp_act      the activation                      its input
    selective      layernorm    the norms of the blocks' inputs     their inputs
    --mlp-chunks                the MLP, one chunk of the sequence  its input
                                after another

A layer's modules declare the selective part themselves, in `recompute_parts`; see `recompute_region`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config import RecomputeConfig
from megalite.data.microbatch import LayerState, add_terms
from megalite.model.multi_token_prediction import MultiTokenModule
from megalite.model.recompute_region import Keep, keep_slice, keep_whole, recompute
from megalite.model.stage import Stage
from megalite.utils.errors import UserError
from megalite.utils.wrapping import wrap


def apply_recompute(stage: Stage, config: RecomputeConfig) -> None:
    """Let backward recompute parts of a built stage; call it before `compile_layers`.

    Raises:
        UserError: a model of your own does not have these parts.
    """
    if config.modules or config.mlp_chunks > 1:
        for layer in stage.all_layers():
            _recompute_parts(layer, config)
    if config.recompute_granularity == "full":
        _recompute_groups(stage, config)
    if config.cross_entropy_chunks > 1 and stage.is_last:
        _compute_losses_in_chunks(stage, config.cross_entropy_chunks)


def _recompute_parts(layer: nn.Module, config: RecomputeConfig) -> None:
    declared = getattr(layer, "recompute_parts", None)
    if declared is None:
        option = "--recompute-granularity selective" if config.modules else "--mlp-chunks"
        raise UserError(
            f"{option} recomputes parts of a transformer layer, and this model's layers are "
            f"{type(layer).__name__}: pass --recompute-granularity full"
        )
    declared(config)


def _recompute_groups(stage: Stage, config: RecomputeConfig) -> None:
    groups = config.groups(len(stage.layers))
    is_sliced = config.distribute_saved_activations and not stage.context.sequence_parallel
    keep = keep_slice(stage.context.tp) if is_sliced else keep_whole
    recomputed = {group for group, is_recomputed in groups if is_recomputed}
    for module in stage.modules():
        if isinstance(module, MultiTokenModule):
            wrap(module, "forward", partial(_recompute_module, keep))

    def recompute_group(run_group: Callable[..., Any]) -> Callable[..., Any]:
        def run_recomputed(
            group: range, layers: Sequence[nn.Module], state: LayerState, *inputs: Any
        ) -> LayerState:
            if group not in recomputed:
                return run_group(group, layers, state, *inputs)
            x, keys, terms = state.hidden, state.keys, state.terms
            # The closure must not hold the kept tensors: their storages may be offloaded or released.
            others, sources = state._replace(hidden=x.new_empty(0), keys={}, terms={}), [*keys]

            def run_again(x: Tensor, *tensors: Tensor) -> LayerState:
                pairs = zip(tensors[::2], tensors[1::2], strict=True)
                own = others._replace(hidden=x, keys=dict(zip(sources, pairs, strict=True)))
                return run_group(group, layers, own, *inputs)

            after: LayerState = recompute(run_again, x, *chain(*keys.values()), keep=keep)
            return after._replace(terms=add_terms(terms, after.terms))

        return run_recomputed

    stage.layer_groups = [group for group, _ in groups]
    wrap(stage, "run_group", recompute_group)


def _recompute_module(keep: Keep, forward: Callable[..., Any]) -> Callable[..., Any]:
    def recompute_module(embedded: Tensor, hidden: Tensor, *inputs: Any) -> Any:
        return recompute(lambda *each: forward(*each, *inputs), embedded, hidden, keep=keep)

    return recompute_module


def _compute_losses_in_chunks(stage: Stage, num_chunks: int) -> None:
    output = stage.output_layer
    if output is None:
        raise UserError(
            f"--cross-entropy-chunks {num_chunks} computes the logits in parts, and the head of a "
            f"{type(stage).__name__} computes all of them: remove it"
        )
    # Autograd sums the output weight's gradient over the chunks, in the weight's dtype. The gradient is
    # neither added to main_grad nor stored for later.
    output.context = replace(output.context, store=None, fuses_weight_gradient=False)
    num_slices = stage.context.tp.size if stage.context.sequence_parallel else 1
    wrap(
        stage,
        "losses_of",
        lambda losses_of: partial(losses_in_chunks, losses_of, num_chunks=num_chunks, num_slices=num_slices),
    )


def losses_in_chunks(
    losses_of: Callable[[Tensor, Tensor], Tensor],
    normed: Tensor,
    targets: Tensor,
    num_chunks: int,
    num_slices: int = 1,
) -> Tensor:
    """Compute the losses of all tokens; only one chunk's logits exist at a time, even in backward.

    Args:
        losses_of: maps hidden states ``[n, b, h]`` and targets ``[num_slices n, b]`` to losses, in the shape
            of the targets.
        normed: ``[s / num_slices, b, h]``, hidden states after the final norm.
        targets: ``[s, b]`` token ids.
        num_chunks: number of chunks of the first dim of `normed`; at most its size.
        num_slices: number of ranks that hold slices of the sequence, which `losses_of` gathers.

    Returns:
        Loss of each token, ``[s, b]``.
    """

    def chunk_losses(normed: Tensor, targets: Tensor) -> Tensor:
        losses = recompute(lambda x: losses_of(x, targets.flatten(0, 1)), normed)
        return losses.unflatten(0, (num_slices, -1))

    num_chunks = min(num_chunks, normed.shape[0])
    by_slice = targets.unflatten(0, (num_slices, -1))  # [r, s/r, b], r = num_slices
    chunks = zip(normed.tensor_split(num_chunks), by_slice.tensor_split(num_chunks, dim=1), strict=True)
    return torch.cat([chunk_losses(x, y) for x, y in chunks], dim=1).flatten(0, 1)
