"""Megatron-core with an injected error, for ``megalite judge PATH-OF-THIS-FILE --set error=NAME``.

Each error replaces one function of the package for the ranks that build this program. On one rank it changes
nothing, as errors of parallel code do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from functools import wraps
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import optimizer_param_scheduler, parallel_state, tensor_parallel
from megatron.core.distributed import distributed_data_parallel, param_and_grad_buffer
from megatron.core.optimizer import distrib_optimizer, optimizer
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
from megatron.core.transformer import mlp
from megatron.core.transformer.moe import moe_utils, router

from megalite.observe.judge.adapters import megatron_core

finalize_model_grads = sys.modules["megatron.core.distributed.finalize_model_grads"]  # not its function

from_megalite = megatron_core.from_megalite

Replace = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes a wrong function from the right one."""


class Error(NamedTuple):
    """Error of one function.

    Attributes:
        owner, name: the module or class, and the function's name in it.
        layout: a layout in which it shows.
        flags: the model that has it; by default a small Llama.
        options: values of --set that it needs.
        num_iterations: iterations of a run, or of a run and its resume, in which it shows.
    """

    owner: Any
    name: str
    replace: Replace
    layout: str
    flags: tuple[str, ...] = ()
    options: Mapping[str, str] = MappingProxyType({})
    num_iterations: int = 2


EXPERTS = ("--num-experts", "4", "--moe-router-topk", "2")
BIASES = ("--preset", "gpt-tiny")


def nothing(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: None


def same(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: x


@contextmanager
def _no_messages() -> Any:
    """Let all-reduces of this block do nothing."""
    with patch.object(dist, "all_reduce", lambda *args, **kwargs: None):
        yield


def without_messages(right: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(right)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        with _no_messages():
            return right(*args, **kwargs)

    return wrong


def without_backward_sum(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(ctx: Any, *args: Any) -> Any:
        output = right(ctx, *args)
        ctx.allreduce_dgrad = False
        return output

    return staticmethod(wrong)  # type: ignore[return-value]


def unscaled(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(group: Any, *args: Any, **kwargs: Any) -> Any:
        for bucket in group.buckets:
            bucket.gradient_scaling_factor = 1.0
        return right(group, *args, **kwargs)

    return wrong


def scaled_by_expert_replicas(right: Callable[..., Any]) -> Callable[..., Any]:
    """Divide gradients of experts by their replicas, of which each has the tokens of several ranks."""

    def wrong(group: Any, *args: Any, **kwargs: Any) -> Any:
        for bucket in group.buckets:
            if not getattr(next(iter(bucket.params)), "allreduce", True):
                bucket.gradient_scaling_factor = 1.0 / group.data_parallel_group.size()
        return right(group, *args, **kwargs)

    return wrong


def predicted_on_each_rank(right: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the logit of a token that is not in this rank's vocabulary."""

    def wrong(logits: Any, target: Any, most: Any, start: int, end: int) -> Any:
        mask, masked, _, sums, exp = right(logits, target, most, start, end)
        return (
            mask,
            masked,
            exp.view(-1, exp.shape[-1])[torch.arange(masked.numel()), masked].log().view_as(target),
            sums,
            exp,
        )

    return staticmethod(wrong)  # type: ignore[return-value]


def target_on_each_rank(right: Callable[..., Any]) -> Callable[..., Any]:
    return staticmethod(lambda softmax, mask: right(softmax, torch.zeros_like(mask)))  # type: ignore[return-value]


def unmasked_embedding(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(module: Any, tokens: Any) -> Any:
        own = (tokens - module.vocab_start_index).clamp(0, len(module.weight) - 1)
        output = torch.nn.functional.embedding(own, module.weight)
        if module.reduce_scatter_embeddings:
            output = output.transpose(0, 1).contiguous()
            return layers.reduce_scatter_to_sequence_parallel_region(output, group=module.tp_group)
        return layers.reduce_from_tensor_model_parallel_region(output, group=module.tp_group)

    return wrong


def bias_on_each_rank(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(module: Any, x: Any) -> Any:
        output, bias = right(module, x)
        return output, None if bias is None else bias * module.tp_group.size()

    return wrong


def loss_scale_times_replicas(right: Callable[..., Any]) -> Callable[..., Any]:
    return staticmethod(  # type: ignore[return-value]
        lambda scale: right(scale * parallel_state.get_data_parallel_world_size())
    )


def unmarked_router(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(module: Any, *args: Any, **kwargs: Any) -> None:
        right(module, *args, **kwargs)
        module.weight.sequence_parallel = False

    return wrong


def group_of_model(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: parallel_state.get_model_parallel_group()


def times_replicas(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda chunk, factor: right(chunk, factor * parallel_state.get_data_parallel_world_size())


def first_optimizer(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda chain: chain.chained_optimizers[0].get_grad_norm()


_GROUP = param_and_grad_buffer._ParamAndGradBucketGroup
_LINEAR = layers.LinearWithGradAccumulationAndAsyncCommunication
ERRORS = {
    "row without sum": Error(layers, "reduce_from_tensor_model_parallel_region", same, "tp2"),
    "column without backward sum": Error(_LINEAR, "forward", without_backward_sum, "tp2"),
    "norms without sum": Error(
        finalize_model_grads, "_allreduce_non_tensor_model_parallel_grads", nothing, "tp2+sp"
    ),
    "tied embedding without sum": Error(
        finalize_model_grads, "_allreduce_word_embedding_grads", nothing, "pp2", BIASES
    ),
    "norm counts replicas": Error(
        tensor_parallel, "param_is_not_tensor_parallel_duplicate", lambda right: lambda *a, **k: True, "tp2"
    ),
    "norm of one rank": Error(optimizer, "get_grad_norm_fp32", without_messages, "pp2"),
    "gradients not averaged": Error(_GROUP, "start_grad_sync", unscaled, "dp2"),
    "gradients not reduced": Error(_GROUP, "start_grad_sync", without_messages, "dp2"),
    "weights not gathered": Error(_GROUP, "start_param_sync", nothing, "dp2+zero1"),
    "predicted on each rank": Error(
        VocabParallelCrossEntropy, "calculate_predicted_logits", predicted_on_each_rank, "tp2"
    ),
    "target on each rank": Error(
        VocabParallelCrossEntropy, "prepare_gradient_calculation_operands", target_on_each_rank, "tp2"
    ),
    "unmasked embedding": Error(layers.VocabParallelEmbedding, "forward", unmasked_embedding, "tp2"),
    "bias on each rank": Error(layers.RowParallelLinear, "forward", bias_on_each_rank, "tp2", BIASES),
    "experts by their replicas": Error(
        _GROUP, "start_grad_sync", scaled_by_expert_replicas, "dp2ep2", EXPERTS
    ),
    "aux loss times replicas": Error(
        moe_utils.MoEAuxLossAutoScaler,
        "set_loss_scale",
        loss_scale_times_replicas,
        "dp2",
        (*EXPERTS, "--moe-aux-loss-coeff", "0.1"),
    ),
    "router without sum": Error(router.TopKRouter, "__init__", unmarked_router, "tp2+sp", EXPERTS),
    "expert bias of own tokens": Error(
        finalize_model_grads,
        "get_updated_expert_bias",
        without_messages,
        "dp2",
        (*EXPERTS, "--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
    ),
    "norm of a shard": Error(
        distrib_optimizer.DistributedOptimizer, "get_grad_stats_parallel_group", group_of_model, "dp2+zero1"
    ),
    "norm without experts": Error(
        optimizer.ChainedOptimizer, "get_grad_norm", first_optimizer, "dp2ep2", EXPERTS
    ),
    "divided by the tokens of a replica": Error(
        distributed_data_parallel.DistributedDataParallel,
        "scale_gradients",
        times_replicas,
        "dp2",
        options={"calculate_per_token_loss": "true"},
    ),
    "SwiGLU saved as one matrix": Error(mlp, "apply_swiglu_sharded_factory", same, "tp2"),
    "schedule not resumed": Error(
        optimizer_param_scheduler.OptimizerParamScheduler,
        "load_state_dict",
        nothing,
        "dp2",
        ("--lr-warmup-iters", "3"),
        num_iterations=4,  # the optimizer's state has the rate of the first one after a resume
    ),
}


def build(layout: Any, config: Any, options: Mapping[str, str]) -> Any:
    """Return the adapter's program with the error in the package."""
    error = ERRORS[options["error"]]
    right = getattr(error.owner, error.name)
    setattr(error.owner, error.name, error.replace(right))
    rest = {name: value for name, value in options.items() if name != "error"}
    program = megatron_core.build(layout, config, rest)
    close = program.close

    def mended() -> None:
        close()
        setattr(error.owner, error.name, right)

    program.close = mended
    return program
