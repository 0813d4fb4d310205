"""Rules of the numbers' types, and of what data-parallel ranks share out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megalite.config.problem import Problem

if TYPE_CHECKING:
    from megalite.config.config import Config


def loss_scale(config: Config, world_size: int | None) -> Iterator[Problem]:
    """A dynamic loss scale starts above its minimum."""
    optimizer = config.optimizer
    if optimizer.min_loss_scale > optimizer.initial_loss_scale:
        yield Problem(
            ("min_loss_scale", "initial_loss_scale"),
            f"--min-loss-scale {optimizer.min_loss_scale} is above --initial-loss-scale "
            f"{optimizer.initial_loss_scale}: change one",
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
