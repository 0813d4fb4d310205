"""Rules of the numbers' types, and of what data-parallel ranks share out."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.flags import flag_of
from megalite.config.optimizer import MAX_LOSS_SCALE
from megalite.config.problem import Problem


def loss_scale(config: Config, world_size: int | None) -> Iterator[Problem]:
    """A dynamic loss scale starts above its minimum, and no scale is above the largest."""
    optimizer = config.optimizer
    if optimizer.min_loss_scale > optimizer.initial_loss_scale:
        yield Problem(
            ("min_loss_scale", "initial_loss_scale"),
            f"--min-loss-scale {optimizer.min_loss_scale} is above --initial-loss-scale "
            f"{optimizer.initial_loss_scale}: change one",
        )
    for name in ("loss_scale", "initial_loss_scale"):
        scale = getattr(optimizer, name)
        if scale is not None and scale > MAX_LOSS_SCALE:
            yield Problem(
                (name,),
                f"{flag_of(name)} {scale:g} is above 2**64, the maximum: give a smaller one",
            )


def gradient_messages(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Gradients are rounded for their way only to what holds them."""
    weights, messages = config.model.params_dtype, config.parallel.grad_communication_dtype
    fields = ("params_dtype", "grad_communication_dtype")
    if messages is not None and weights == "fp64":
        yield Problem(
            fields,
            f"--grad-communication-dtype {messages} with --params-dtype fp64, which is there to verify "
            "layouts: leave one out",
        )
    elif messages == "fp16" and weights != "fp16":
        yield Problem(
            fields,
            f"--grad-communication-dtype fp16 with --params-dtype {weights}: only with fp16 weights "
            "does a loss scale keep gradients within fp16's range, give bf16 instead",
        )


def zero_stage(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Weights that are gathered anew for each microbatch have no place in a pipeline."""
    parallel = config.parallel
    if parallel.zero_stage == 3 and parallel.pp > 1:
        yield Problem(
            ("zero_stage", "pipeline_model_parallel_size"),
            f"--zero-stage 3 with --pp {parallel.pp}: each stage would gather its weights for each one of "
            "many microbatches, give --zero-stage 2, or more of --tp instead of --pp",
        )


def fp8(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Products in 8 bits are of matrices whose sides are multiples of 16, in a model of bf16."""
    model, tp, given = config.model, config.parallel.tp, config.training.fp8_format
    if given is None:
        return
    if model.params_dtype != "bf16":
        yield Problem(
            ("fp8_format", "params_dtype"),
            f"--fp8-format {given} with --params-dtype {model.params_dtype}: what is not multiplied in 8 "
            "bits is in bf16, give --bf16",
        )
    heads = model.num_attention_heads * model.head_dim
    sides = (
        (("hidden_size",), f"--hidden-size {model.hidden_size}", model.hidden_size, 1),
        (
            ("num_attention_heads", "num_query_groups", "kv_channels"),
            f"the {heads + 2 * model.num_kv_heads * model.head_dim} features of queries, keys and values "
            "(--num-attention-heads, --num-query-groups, --kv-channels)",
            heads + 2 * model.num_kv_heads * model.head_dim,
            tp,
        ),
        (
            ("num_attention_heads", "kv_channels"),
            f"the {heads} features of all heads (--num-attention-heads, --kv-channels)",
            heads,
            tp,
        ),
        (("ffn_hidden_size",), f"--ffn-hidden-size {model.ffn_size}", model.ffn_size, tp),
    )
    for fields, what, size, ranks in sides:
        if size % (16 * ranks):
            over = f" over --tp {ranks}" if ranks > 1 else ""
            yield Problem(
                ("fp8_format", "tensor_model_parallel_size", *fields),
                f"--fp8-format {given} with {what}{over}: a rank's share must be a multiple of 16",
            )
