"""Activation recomputation: drop activations after forward and recompute them in backward.

(Chen et al. 2016; Korthikanti et al. 2022, section 5.)

`apply_recompute` wraps methods of a built stage's modules, which they declare as wrap points.

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

A recomputed function runs under hooks that replace each tensor it saves for backward by a number. When
backward unpacks the first number, the function runs again, and the hooks collect all its saved tensors.
Gradients of parameters, their hooks and the weight-gradient store therefore work as without recomputation.
The gradients have the same bits: dropout is counter-based, so there is no generator state to restore, and
tokens go to the experts that forward selected (`kept_choices`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megalite.batch.loss_terms import add_terms
from megalite.config import RecomputeConfig
from megalite.distributed.axis import Axis
from megalite.distributed.collectives import start_all_gather
from megalite.kernels import ResidualSum
from megalite.model.latent_attention import LatentAttention
from megalite.model.layer import TransformerLayer
from megalite.model.layer_state import LayerState
from megalite.model.mlp import MLP
from megalite.model.multi_token_prediction import MultiTokenModule
from megalite.model.routing_record import KeptChoices
from megalite.model.stage import Stage
from megalite.utils.errors import UserError
from megalite.utils.torch_private import storage_number
from megalite.utils.wrapping import wrap

Keep = Callable[[Tensor], Callable[[], Tensor]]
"""Function that keeps a tensor for backward, and returns a function that returns the tensor."""


def apply_recompute(stage: Stage, config: RecomputeConfig) -> None:
    """Let backward recompute parts of a built stage; call it before `compile_layers`.

    Raises:
        UserError: a model of your own does not have these parts.
    """
    for layer in stage.all_layers():
        if isinstance(layer, TransformerLayer):
            _recompute_parts(layer, config)
        elif config.modules or config.mlp_chunks > 1:
            option = "--recompute-granularity selective" if config.modules else "--mlp-chunks"
            raise UserError(
                f"{option} recomputes parts of a transformer layer, and this model's layers are "
                f"{type(layer).__name__}: pass --recompute-granularity full"
            )
    if config.recompute_granularity == "full":
        _recompute_groups(stage, config)
    if config.cross_entropy_chunks > 1 and stage.is_last:
        _compute_losses_in_chunks(stage, config.cross_entropy_chunks)


def _recompute_parts(layer: TransformerLayer, config: RecomputeConfig) -> None:
    if layer.spec.mixer is not None:
        _recompute_mixer(layer, config)
    if layer.spec.has_mlp:
        _recompute_mlp(layer, config)


def _recompute_mixer(layer: TransformerLayer, config: RecomputeConfig) -> None:
    mixer = layer.mixer
    assert isinstance(mixer, nn.Module)
    if "mla_up_proj" in config.modules and isinstance(mixer, LatentAttention):
        _recompute_from_latents(mixer)
    elif "core_attn" in config.modules:
        wrap(mixer, mixer.core_method, _recompute_core)
    if "layernorm" in config.modules:
        recompute_output(layer.attention_norm, "forward", mixer, mixer.input_method)


def _recompute_mlp(layer: TransformerLayer, config: RecomputeConfig) -> None:
    mlp = layer.mlp
    if config.mlp_chunks > 1:
        assert isinstance(mlp, MLP), "the configuration rejects experts in chunks"
        _compute_mlp_in_chunks(mlp, config.mlp_chunks)
    if "mlp" in config.modules:
        if layer.experts is not None:
            wrap(layer.experts, "transform", _recompute_experts)
        recompute_output(layer.mlp_norm, "forward", mlp, "transform", recompute_consumer=True)
        return
    if "layernorm" in config.modules:
        first = "project_up" if isinstance(mlp, MLP) and config.mlp_chunks == 1 else "transform"
        recompute_output(layer.mlp_norm, "forward", mlp, first)
    if "mlp_act" in config.modules and isinstance(mlp, MLP):
        mlp.up.fuses_gelu = False  # only the activation's input is kept, not its output
        recompute_output(mlp, "activate", mlp, "project_down")


def _compute_mlp_in_chunks(mlp: MLP, num_chunks: int) -> None:
    for linear in (mlp.up, mlp.down):
        # Weight gradients stored for later would hold the wide activations of all chunks.
        linear.context = replace(linear.context, store=None)

    def in_chunks(transform: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        chunks = x.tensor_split(min(num_chunks, x.shape[0]))  # of the sequence, or of the rank's slice
        return torch.cat([recompute(transform, chunk) for chunk in chunks])

    wrap(mlp, "transform", lambda transform: partial(in_chunks, transform))


def _recompute_experts(transform: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *others: recompute(_with_last(transform, others), x)


def _recompute_from_latents(mixer: LatentAttention) -> None:
    """Let attention start from the latents, so that these are kept instead of queries, keys and values."""
    projections: list[Callable[..., tuple[Tensor, ...]]] = []

    def pass_on(project: Callable[..., Any]) -> Callable[..., Any]:
        projections.append(project)
        return lambda *latents: latents

    wrap(mixer, "from_latents", pass_on)
    (project,) = projections

    def from_latents(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attend_projected(of_queries: Tensor, shared: Tensor, latent: Tensor, *others: Any) -> Tensor:
            return attend(*project(of_queries, shared, latent), *others)

        return _recompute_core(attend_projected)

    wrap(mixer, mixer.core_method, from_latents)


def _recompute_core(core: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def recompute_core(*arguments: Any) -> Tensor:
        kept = [
            number
            for number, each in enumerate(arguments)
            if isinstance(each, Tensor) and each.is_floating_point()
        ]

        # The closure must not hold the kept tensors: their storages may be offloaded or released.
        others = [None if number in kept else each for number, each in enumerate(arguments)]
        result: Tensor = recompute(
            partial(_core_with, core, others, kept), *(arguments[number] for number in kept)
        )
        return result

    return recompute_core


def _core_with(
    core: Callable[..., Tensor], others: Sequence[Any], kept: Sequence[int], *tensors: Tensor
) -> Tensor:
    """Call a mixer's core with the kept tensors at their places among its other arguments."""
    arguments = [*others]
    for number, each in zip(kept, tensors, strict=True):
        arguments[number] = each
    return core(*arguments)


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


class _Keep(torch.autograd.Function):
    """Saves a tensor for backward like any operator; the result holds it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        raise AssertionError("it has no gradient")


def keep_whole(x: Tensor) -> Callable[[], Tensor]:
    """Keep the tensor.

    Autograd saves it, so the hooks around this call apply, such as hooks that offload activations.
    """
    if not torch.is_grad_enabled():
        return x.detach
    anchor = x.new_empty(0, requires_grad=True)  # makes autograd save x.detach(); x would be its own leaf
    kept = _Keep.apply(x.detach(), anchor)  # before torch 2.13 the node alone does not keep saved tensors
    return lambda: kept.grad_fn.saved_tensors[0]


def keep_slice(tp: Axis) -> Keep:
    """Keep this rank's slice of a tensor that is replicated over tp, and all-gather the slices in backward.

    The first dim, the sequence, is cut. Its size must be divisible by the axis' size.
    """
    if tp.size == 1:
        return keep_whole

    def keep(x: Tensor) -> Callable[[], Tensor]:
        own_slice = keep_whole(x.detach().chunk(tp.size)[tp.rank].clone())
        return lambda: start_all_gather(own_slice(), tp).wait()

    return keep


def recompute(function: Callable[..., Any], *inputs: Tensor, keep: Keep = keep_whole) -> Any:
    """Return ``function(*inputs)``, and only keep the inputs for backward.

    Args:
        function: function to recompute. Other tensors that it uses must be parameters, or need no gradient.
        keep: how the first input is kept; the others are kept whole.
    """
    if torch.compiler.is_compiling():
        return _traced(function, *inputs)
    return _Region(function, inputs, keep).run(*inputs)


def _traced(function: Callable[..., Any], *inputs: Tensor) -> Any:
    """Mark a call whose results a graph of torch.compile recomputes in backward."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def recompute_output(
    producer: nn.Module,
    produces: str,
    consumer: nn.Module,
    consumes: str,
    *,
    recompute_consumer: bool = False,
) -> None:
    """Wrap a method of each module so that the tensor passed between them is not kept.

    Use it for cheap functions with large outputs (norms and activations) whose consumer saves its input.
    Backward runs the producer once more, for the consumer's gradients and for its own. If the producer has
    several outputs, the first is the consumer's input. Further arguments of the consumer need no gradient.

    Args:
        produces: name of the producer's method, which takes one tensor; declared, like the consumer's.
        consumes: name of the consumer's method, which takes the producer's output.
        recompute_consumer: also recompute the consumer, from the recomputed output.
    """
    current: list[_Region] = []  # the producer's region, from its call to the consumer's call

    def produce_dropped(produce: Callable[..., Any], x: Tensor | ResidualSum) -> Any:
        if isinstance(x, ResidualSum):
            x = x.compute()  # the region keeps the sum, not its operands
        if torch.compiler.is_compiling():
            return _traced(produce, x)
        current[:] = [_Region(produce, (x,), keep_whole)]
        return current[0].run(x)

    def consume_dropped(consume: Callable[..., Any], y: Tensor, *others: Any) -> Any:
        consume = _with_last(consume, others)
        if torch.compiler.is_compiling():
            # torch.compile keeps a tensor that passes from one marked call to the next, but not its view.
            return _traced(consume, y.view_as(y)) if recompute_consumer else consume(y)
        if not current:  # the producer ran in a graph, and the consumer is called between graphs
            return recompute(consume, y) if recompute_consumer else consume(y)
        dropped = _DroppedOutput(current.pop(), y)
        if recompute_consumer:
            return recompute(consume, y, keep=lambda y: partial(dropped.unpack, dropped.pack(y)))
        with saved_tensors_hooks(dropped.pack, dropped.unpack):
            return consume(y)

    wrap(producer, produces, lambda produce: partial(produce_dropped, produce))
    wrap(consumer, consumes, lambda consume: partial(consume_dropped, consume))


def _with_last(function: Callable[..., Any], arguments: Sequence[Any]) -> Callable[..., Any]:
    """Return the function of one tensor that also passes these arguments."""
    return (lambda x: function(x, *arguments)) if arguments else function


class _AllCollected(Exception):
    """Raised to stop the second run of a function: it has saved everything that backward needs."""


class _Region:
    """Runs a function without saving tensors, and runs it again when backward needs the first of them."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Tensor, ...], keep: Keep) -> None:
        self.function = function
        keeps = chain((keep,), repeat(keep_whole))
        self.inputs = [(keep(x), x.requires_grad) for keep, x in zip(keeps, inputs, strict=False)]
        self.num_saved = 0
        self.collected: list[Tensor | None] = []
        self.second_output: Tensor | None = None
        self.choices = KeptChoices()

    def run(self, *inputs: Tensor) -> Any:
        with self.choices.first_run(), saved_tensors_hooks(self._pack, self._unpack):
            return self.function(*inputs)

    def output(self) -> Tensor:
        """Return the function's first output from a second run."""
        if self.second_output is None:
            self._run_again(to_the_end=True)
            assert self.second_output is not None
        return self.second_output

    def _pack(self, tensor: Tensor) -> int | Tensor:
        if _is_input(tensor):
            return tensor
        self.num_saved += 1
        return self.num_saved - 1

    def _unpack(self, packed: int | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if not self.collected:
            self._run_again(to_the_end=False)
        tensor, self.collected[packed] = self.collected[packed], None
        assert tensor is not None, "a second backward through a recomputed region"
        return tensor

    def _run_again(self, to_the_end: bool) -> None:
        """Run the function again, `to_the_end` or until its last saved tensor."""

        def collect(tensor: Tensor) -> None:
            if _is_input(tensor):
                return
            self.collected.append(tensor.detach())
            if len(self.collected) == self.num_saved and not to_the_end:
                raise _AllCollected

        inputs = [kept().detach().requires_grad_(requires_grad) for kept, requires_grad in self.inputs]
        hooks = saved_tensors_hooks(collect, _never)
        with torch.enable_grad(), self.choices.second_run(), hooks, suppress(_AllCollected):
            self.second_output = _first(self.function(*inputs)).detach()
        assert len(self.collected) == self.num_saved, "the second run saved other tensors than the first"


class _DroppedOutput:
    """Replaces a region's output among its consumer's saved tensors, identified by size and strides."""

    def __init__(self, region: _Region, y: Tensor) -> None:
        self.region = region
        self.storage = storage_number(y.untyped_storage())

    def pack(self, tensor: Tensor) -> Any:
        if storage_number(tensor.untyped_storage()) != self.storage:
            return tensor.detach()
        return tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        return self.region.output().as_strided(*packed)


def _first(outputs: Tensor | tuple[Any, ...]) -> Any:
    return outputs if isinstance(outputs, Tensor) else outputs[0]


def _is_input(tensor: Tensor) -> bool:
    """Return whether a saved tensor is the microbatch's own: sample numbers, which dropout saves.

    They are kept, so the second run need not collect them and ends before a layer's last collective.
    """
    return tensor.dtype == torch.int64


def _never(_: None) -> Tensor:
    raise AssertionError("the second run has no backward of its own")
