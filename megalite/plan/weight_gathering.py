"""Choose how long ZeRO stage 3 keeps gathered weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from megalite.config import Config
from megalite.distributed.collectives import all_reduce
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.model.stage import StageProvider
from megalite.optim.weight_gathering import WeightGathering
from megalite.plan.advice import planned_run_on
from megalite.plan.out_of_memory import device_of, with_shard_degree
from megalite.plan.planned_run import PlannedRun
from megalite.plan.rank_memory import TIGHT_SHARE, choose_gathering, rank_memories
from megalite.utils.errors import UserError

_GB = 1e9
_FLAG = "--fsdp-reshard-after-forward"


def choose_weight_gathering(
    config: Config, topology: Topology, provider: StageProvider | None = None
) -> WeightGathering:
    """Resolve `fsdp_reshard_after_forward` for this run; a collective with ZeRO stage 3 in a pipeline.

    Weights are kept only if the planned memory of every stage fits on every rank's device.

    Args:
        provider: builds the stages of the program's own model.
    """
    parallel = config.parallel
    if parallel.zero_stage_among(topology.replicas.shard.size) < 3:
        return WeightGathering(False, "weights are not sharded")
    if parallel.fsdp_reshard_after_forward != "default":
        return WeightGathering.configured(parallel)
    if parallel.pp == 1:
        return WeightGathering(False, f"there is no pipeline; pass {_FLAG} never to keep them")
    if topology.device.type == "meta":
        return WeightGathering(False, f"a dry run has no GPU to measure; pass {_FLAG} never to keep them")
    run = _planned_run(config, topology, provider)
    try:
        kept = rank_memories(replace(run, full_weights_fit=True))
    except UserError as error:  # on every rank
        return WeightGathering(False, f"{error}; pass {_FLAG} never to keep them")
    fits = torch.tensor(float(choose_gathering(run).gathers_once), device=topology.device)
    all_fit = all_reduce(fits, topology.world, of="the choice of gathered weights") == topology.world_size
    keeps_weights = bool(topology.to_host(all_fit))
    needed, available = max(memory.total for memory in kept) / _GB, run.cluster.gpu.memory_bytes / _GB
    relation = f"{'fits in' if keeps_weights else 'is more than'} {TIGHT_SHARE:.0%} of {available:.2f} GB"
    if not keeps_weights and needed <= TIGHT_SHARE * available:
        relation = "does not fit another rank's memory"
    return WeightGathering(
        keeps_weights, f"a stage with its full weights needs {needed:.2f} GB, which {relation}"
    )


def _planned_run(config: Config, topology: Topology, provider: StageProvider | None) -> PlannedRun:
    """Return the plan of this run on this rank's device; CPU ranks share the machine's memory."""
    device = device_of(topology.device)
    if topology.device.type == "cpu":
        num_local = max(Launch.from_environment().local_world_size, 1)
        device = replace(device, memory_bytes=device.memory_bytes / num_local)
    return planned_run_on(with_shard_degree(config, topology), topology.world_size, device, provider)
