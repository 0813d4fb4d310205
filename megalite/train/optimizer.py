"""The optimizer of a rank's chunks of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from megalite.config import Config
from megalite.model.stage import DTYPES, GPTStage
from megalite.observer import Observer
from megalite.optim.gather import Unit
from megalite.optim.loss_scaler import LossScaler
from megalite.optim.optimizer import Optimizer
from megalite.optim.part import Part
from megalite.parallel.tied import TiedWeight
from megalite.topology import Topology
from megalite.train.chunks import named_parameters


class RunOptimizer(Protocol):
    """What a run asks of its optimizer, whatever the ranks share out; `Optimizer` tells what it all is."""

    scaler: LossScaler
    observers: list[Observer[str]]

    def begin(self, num_microbatches: int) -> None: ...

    def finish_gradients(self, scale: Tensor | None = None) -> Tensor: ...

    def step(
        self, learning_rate: float, weight_decay: float, grad_norm: Tensor, is_allowed: Tensor | None = None
    ) -> None: ...

    def finish_weights(self) -> None: ...

    def params_norm(self) -> float: ...

    def num_zeros(self) -> int: ...

    def gradient_squares(self) -> Mapping[str, Tensor]: ...

    def bad_gradients(self) -> list[str]: ...

    def weight(self, name: str) -> Tensor: ...

    def gradient(self, name: str) -> Tensor: ...

    def weights(self) -> Mapping[str, Part]: ...

    def state(self) -> Mapping[str, Tensor | Part]: ...


def build_optimizer(
    chunks: Sequence[GPTStage], config: Config, topology: Topology, *, fuses_weight_gradients: bool = False
) -> RunOptimizer:
    """Takes over the chunks' weights; main weights in fp32 start as the model's before rounding.

    Args:
        fuses_weight_gradients: the chunks' linear layers add weight gradients to `weight.main_grad`.
    """
    build = OPTIMIZERS[config.parallel.zero_stage_among(topology.dp.size)]
    return build(chunks, config, topology, fuses_weight_gradients)


def _with_whole_weights(
    chunks: Sequence[GPTStage], config: Config, topology: Topology, fuses_weight_gradients: bool
) -> RunOptimizer:
    optimizer = Optimizer(
        named_parameters(chunks),
        _tied_weight(chunks, topology),
        config.optimizer,
        config.parallel,
        topology,
        DTYPES[config.model.params_dtype],
        [Unit(module, uses) for chunk in chunks for module, uses in chunk.units()],
        fuses_weight_gradients,
    )
    optimizer.initialize_main(config.training.seed)
    return optimizer


def _with_shared_weights(
    chunks: Sequence[GPTStage], config: Config, topology: Topology, _: bool
) -> RunOptimizer:
    from megalite.optim.fully_sharded import FullyShardedOptimizer  # torch takes seconds to import DTensor

    (model,) = chunks  # there is no pipeline
    return FullyShardedOptimizer(
        model,
        model.layers.values(),
        config.optimizer,
        config.parallel,
        topology,
        DTYPES[config.model.params_dtype],
        config.training.seed,
    )


OPTIMIZERS: dict[int, Callable[[Sequence[GPTStage], Config, Topology, bool], RunOptimizer]] = {
    0: _with_whole_weights,
    1: _with_whole_weights,
    2: _with_whole_weights,
    3: _with_shared_weights,
}
"""By ZeRO stage."""


def _tied_weight(chunks: Sequence[GPTStage], topology: Topology) -> TiedWeight | None:
    """The word table, where two stages of a pipeline use it: from one rank, or from two with a copy each."""
    weight = next((chunk.tied_weight for chunk in chunks if chunk.tied_weight is not None), None)
    if weight is None or topology.pp.size == 1:
        return None
    has_both = any(chunk.is_first for chunk in chunks) and any(chunk.is_last for chunk in chunks)
    return TiedWeight(weight, is_copied=not has_both)
