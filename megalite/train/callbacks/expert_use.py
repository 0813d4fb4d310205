"""Log how the routers of layers with experts divide the tokens of a global batch.

Shapes: L layers of the model and of multi-token prediction, e experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megalite.config import Config, ModelConfig
from megalite.distributed.collectives import all_reduce
from megalite.model.experts import Router
from megalite.model.routing_record import RoutingStatistics
from megalite.optim.expert_balance import sum_over_tokens
from megalite.train.loop import Callback, TrainingLoop, is_due
from megalite.train.telemetry.metrics import ExpertUse, LayerLoads
from megalite.train.telemetry.writers import Writers
from megalite.train.train_step import StepResult
from megalite.train.trainer import Trainer

_LAYERS, _MTP = "layers", "mtp"


class ExpertLogging(Callback):
    """Log of the loads of all experts every --log-experts-interval iterations.

    Routers count in these iterations only. Put it before callbacks that run a microbatch again.
    """

    def __init__(self, writers: Writers) -> None:
        self.writers = writers
        self._counted: dict[int, RoutingStatistics] = {}  # by row

    def before_step(self, loop: TrainingLoop) -> None:
        if is_due(loop.next_iteration, logged_interval(loop.trainer.config)):
            begin_counts(loop.trainer)

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        if is_due(loop.iteration, logged_interval(loop.trainer.config)):
            self._counted = end_counts(loop.trainer)

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        trainer = loop.trainer
        if is_due(loop.iteration, logged_interval(trainer.config)) and not result.plan.is_excluded:
            layers = loads_of_layers(self._counted, trainer)
            if layers:  # a model of your own may route otherwise
                samples = trainer.progress.consumed_samples
                self.writers.expert_use(ExpertUse(loop.iteration, samples, layers))


def logged_interval(config: Config) -> int | None:
    """Return --log-experts-interval; None if nothing is written."""
    logging, has_file = config.logging, config.logging.metrics_path(config.checkpoint.save) is not None
    if not config.model.has_experts or not (has_file or logging.has_dashboards):
        return None
    return logging.log_experts_interval or None


def begin_counts(trainer: Trainer) -> None:
    """Let the routers count the tokens of the next iteration."""
    for router in _routers(trainer).values():
        router.statistics = RoutingStatistics(router.num_experts, trainer.topology.device)


def end_counts(trainer: Trainer) -> dict[int, RoutingStatistics]:
    """Let the routers count no more, and return what they counted on this rank by row."""
    found = {}
    for row, router in _routers(trainer).items():
        assert router.statistics is not None
        found[row], router.statistics = router.statistics, None
    return found


def loads_of_layers(counted: Mapping[int, RoutingStatistics], trainer: Trainer) -> Mapping[str, LayerLoads]:
    """Return the loads of the global batch in each layer by its name; a collective."""
    model, topology = trainer.config.model, trainer.topology
    assert model.num_experts is not None
    # [L, e + 2] counts, dropped choices and sums of entropies. fp64 holds whole numbers up to 2^53 exactly.
    shape = (_num_rows(model), model.num_experts + 2)
    totals = torch.zeros(shape, dtype=torch.float64, device=topology.device)
    for row, statistics in counted.items():
        others = torch.stack((statistics.num_dropped.double(), statistics.entropy))
        totals[row] = torch.cat((statistics.num_tokens.double(), others))
    for router in list(_routers(trainer).values())[:1]:
        sum_over_tokens(totals, router.weight, topology)
    all_reduce(totals, topology.pp, of="tokens of each expert")
    found = {}
    for row, (*counts, dropped, entropy) in enumerate(topology.to_host(totals).tolist()):
        if num_choices := sum(counts):
            num_tokens = num_choices / model.moe_router_topk
            tokens = tuple(map(int, counts))
            found[_name(row, model)] = LayerLoads(tokens, entropy / num_tokens, int(dropped))
    return found


def _routers(trainer: Trainer) -> dict[int, Router]:
    """Return the routers of this rank by their rows: the layers, then those of multi-token prediction."""
    found = {}
    for chunk in trainer.chunks:
        for name, module in chunk.named_modules():
            path = name.split(".")
            if isinstance(module, Router) and path[0] in (_LAYERS, _MTP):
                first_row = trainer.config.model.num_layers if path[0] == _MTP else 0
                found[first_row + int(path[1])] = module
    return found


def _num_rows(model: ModelConfig) -> int:
    return model.num_layers + model.mtp_num_layers


def _name(row: int, model: ModelConfig) -> str:
    return f"{_LAYERS}.{row}" if row < model.num_layers else f"{_MTP}.{row - model.num_layers}"
