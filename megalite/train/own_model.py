"""Check the arguments, the stage and the results of a program's own model provider."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.distributed.topology import Topology
from megalite.errors import UserError, check_call, few, kind_of
from megalite.log import log
from megalite.model.stage import Stage, StageProvider


def name_of(provider: StageProvider) -> str:
    """Return the name of a class or function, for messages."""
    return getattr(provider, "__qualname__", None) or type(provider).__name__


def is_own(provider: StageProvider | None) -> bool:
    """Return whether a model is the program's own; None means the model of the config."""
    return provider is not None and not str(getattr(provider, "__module__", "")).startswith("megalite.")


def check_model_provider(provider: StageProvider) -> None:
    """Check that a model provider can be called like `StageProvider`.

    Raises:
        UserError: it cannot.
    """
    name = name_of(provider)
    if not callable(provider) or (isinstance(provider, type) and not issubclass(provider, Stage)):
        raise UserError(
            f"the model provider is {kind_of(provider)}: pass a subclass of GPT or SequentialStage, or a "
            "function with the same arguments"
        )
    if missing := sorted(getattr(provider, "__abstractmethods__", ())):
        raise UserError(f"{name} lacks {', '.join(missing)}: define each in the class")
    check_call(provider, name, "config", "context", "layers", keywords=("is_first", "is_last"))


def check_stage(stage: Any, provider: StageProvider) -> None:
    """Check a stage that a model provider has built.

    Raises:
        UserError: it is not a stage, or has frozen parameters.
    """
    if not isinstance(stage, Stage):
        raise UserError(f"{name_of(provider)} returns {kind_of(stage)}: return the Stage that it builds")
    if frozen := [name for name, weight in stage.named_parameters() if not weight.requires_grad]:
        raise UserError(
            f"{few(frozen)} of {type(stage).__name__}: requires_grad is False, and every parameter is "
            "trained: use register_buffer for constants"
        )


def check_first_iteration(unreached: list[str], loss: float, topology: Topology) -> None:
    """Check a model of your own after its first whole iteration; a collective.

    Args:
        unreached: parameters that backward has not reached on this rank; a warning names them.
        loss: loss of the iteration, on this rank.

    Raises:
        UserError: the loss differs between tensor-parallel ranks; on every rank.
    """
    everywhere: list[tuple[list[str], float]] = [([], 0.0) for _ in range(topology.world_size)]
    dist.all_gather_object(everywhere, (unreached, loss))
    names = sorted({name for each, _ in everywhere for name in each})
    if names and topology.rank == 0:
        log.warning(
            "no gradient reached %s in the first iteration: is it used in forward? Weight decay alone "
            "changes it",
            few(names),
        )
    losses = [each for _, each in everywhere]
    if max(losses) - min(losses) > 1e-6 * abs(max(losses)):  # never true for NaN
        raise UserError(
            f"the loss differs between the ranks of --tp {topology.tp.size}, from {min(losses):.6f} to "
            f"{max(losses):.6f}: if it sums over a cut dim, such as the columns of the logits, pass the sum "
            "to reduce_from_tensor_parallel"
        )


class OutputCheck:
    """Checks the output of a stage of your own model, as a forward hook of the stage."""

    def __init__(self, config: ModelConfig, hidden_shape: tuple[int, ...], stage: Stage) -> None:
        self._num_losses = len(config.loss_names)
        self._hidden_shape = hidden_shape
        self._dtype = stage.context.dtype
        self._is_last = stage.is_last
        # Other ranks may have a stage without the mistake. Rank 0, which reports for all, has the first one.
        self._on_one_rank = not stage.is_first

    def __call__(self, stage: nn.Module, _: Any, output: Any) -> None:
        if (fault := self._fault(output)) is not None:
            error = UserError(f"{type(stage).__name__} returns {fault}")
            error.on_one_rank = self._on_one_rank
            raise error

    def _fault(self, output: Any) -> str | None:
        """Return what is wrong with an output and how to fix it, or None."""
        if not isinstance(output, Tensor):
            wanted = "the sum of the losses, a scalar" if self._is_last else "hidden states, a tensor"
            return f"{kind_of(output)} from forward: return {wanted}"
        shape = list(output.shape)
        if not self._is_last:
            if tuple(shape) == self._hidden_shape and output.dtype == self._dtype:
                return None
            return (
                f"hidden states of shape {shape} in {output.dtype}: the next stage receives [s, b, h] = "
                f"{list(self._hidden_shape)} in {self._dtype}"
            )
        if shape not in ([self._num_losses], [] if self._num_losses == 1 else [self._num_losses]):
            return (
                f"a loss of shape {shape}: return the sum of the losses of the microbatch's tokens, a "
                "scalar, such as self.masked_sum(losses, microbatch)"
            )
        if torch.is_grad_enabled() and not output.requires_grad:
            return "a loss without a gradient: compute it from the output without detach() and .item()"
        return None
