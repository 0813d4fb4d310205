"""Advise a rank that ran out of memory: its planned memory, and the flags that would save most memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megalite.config import Config
from megalite.config.rules.parallel_rules import replicas, sample_ranks
from megalite.config.stage_layers import layers_per_stage
from megalite.hardware.gpus import GPUS
from megalite.plan.communication import Cluster
from megalite.plan.layout_fields import MIN_SLICE, routing_line, with_even_stages, with_layout
from megalite.plan.planned_run import PlannedRun, run_problems
from megalite.plan.rank_memory import TIGHT_SHARE, RankMemory, choose_gathering, rank_memories
from megalite.utils.errors import UserError

_GB = 1e9
NUM_REMEDIES = 3
"""Remedies to report."""
MIN_SHARE = 0.01
"""Smallest share of the memory that a remedy must save."""


@dataclass(frozen=True)
class Device:
    """Device of a rank.

    Attributes:
        memory_bytes: memory that a process can use.
        residual_bytes: memory of a process that is not in tensors.
        is_host: whether its memory is the host's.
    """

    memory_bytes: float
    residual_bytes: float
    is_host: bool = False


class Change(NamedTuple):
    """Flags that may save memory.

    Attributes:
        kind: only one change of each kind is reported: the cheapest that suffices, or the most effective.
        flags: the flags as on a command line.
        cost: the cost of the flags, as text.
        config: the config with the flags.
        world_size: number of ranks with the flags, if they change the layout; otherwise None.
    """

    kind: str
    flags: str
    cost: str
    config: Config
    world_size: int | None = None


class Remedy(NamedTuple):
    """Change and its effect.

    Attributes:
        saved: bytes that it saves on the rank.
        suffices: whether the rank's plan does not fit, but fits with the change.
    """

    change: Change
    saved: float
    suffices: bool = False


@dataclass(frozen=True)
class Advice:
    """Advice to a rank that ran out of memory.

    Attributes:
        memory: planned memory of the rank.
        remedies: the changes that suffice, cheapest first; then the changes that save most.
        routing: which use of the experts is assumed; None if it does not matter.
    """

    memory: RankMemory
    remedies: list[Remedy]
    routing: str | None = None

    def lines(self) -> Iterator[str]:
        """Yield the advice as lines of text."""
        parts = sorted(self.memory._asdict().items(), key=lambda part: -part[1])
        kinds = ", ".join(f"{name} {size / _GB:.2f}" for name, size in parts if size >= 0.005 * _GB)
        yield f"the planned memory of this rank is {self.memory.total / _GB:.2f} GB: {kinds}"
        if self.routing:
            yield f"the plan assumes {self.routing}; with more, it needs more memory"
        for change, saved, _ in self.remedies:
            yield f"{change.flags} would save {saved / _GB:.2f} GB, {change.cost}"
        if not self.remedies:
            yield "no flag would save memory: use more ranks, a smaller model or shorter samples"


def advise(
    config: Config, world_size: int, pp_rank: int, device: Device, provider: Callable[..., Any] | None = None
) -> Advice:
    """Plan the memory of a pipeline rank now, and with each change that training would accept.

    Args:
        provider: builds the stages of the program's own model.

    Raises:
        UserError: the program's own model cannot be planned.
    """
    memory = _memories(planned_run_on(config, world_size, device, provider))[pp_rank]
    available = TIGHT_SHARE * device.memory_bytes
    best: dict[str, Remedy] = {}
    divisions = divided_further(config, world_size) if provider is None else ()
    for change in (*changes(config, world_size), *divisions, *_offloads(config, device.is_host)):
        run = planned_run_on(change.config, change.world_size or world_size, device, provider)
        if run_problems(change.config, run.cluster):
            continue
        try:
            totals = [each.total for each in _memories(run)]
        except UserError:
            continue  # the program's own model does not support the change
        saved = memory.total - (totals[pp_rank] if change.world_size is None else max(totals))
        known = best.get(change.kind, Remedy(change, MIN_SHARE * memory.total))
        if saved > known.saved and not known.suffices:
            best.pop(change.kind, None)  # move it behind cheaper changes
            best[change.kind] = Remedy(change, saved, max(totals) <= available < memory.total)
    enough = [remedy for remedy in best.values() if remedy.suffices]
    others = sorted((each for each in best.values() if not each.suffices), key=lambda each: -each.saved)
    return Advice(memory, [*enough, *others][:NUM_REMEDIES], routing_line(config))


def planned_run_on(
    config: Config, world_size: int, device: Device, provider: Callable[..., Any] | None = None
) -> PlannedRun:
    """Return the plan of a run on ranks with this memory. The speed of GPU and links does not matter for it.

    Args:
        config: the config, with its shard degree as a number, since the plan does not know the nodes.
        provider: builds the stages of the program's own model.
    """
    gpu = replace(
        GPUS["a100-80"],
        memory_gib=device.memory_bytes / 2**30,
        residual_gb=device.residual_bytes / _GB,
    )
    cluster = Cluster(gpu, world_size, gpu.gpus_per_node, gpu.node_gbps, gpu.network_gbps)
    return PlannedRun(config, cluster, provider=provider)


def advise_largest(config: Config, world_size: int, device: Device) -> Advice | None:
    """Advise the pipeline rank that needs most memory; return None if its plan fits on the device."""
    totals = [memory.total for memory in _memories(planned_run_on(config, world_size, device, None))]
    largest = max(totals)
    return (
        advise(config, world_size, totals.index(largest), device) if largest > device.memory_bytes else None
    )


def _memories(run: PlannedRun) -> list[RankMemory]:
    """Return the memory of each pipeline rank, keeping gathered weights as a run on this device would."""
    return rank_memories(choose_gathering(run))


def changes(config: Config, world_size: int) -> Iterator[Change]:
    """Yield the changes to try, cheapest first. Training may reject some of them."""
    parallel = config.parallel
    num_replicas = replicas(config, world_size) or 1
    size = config.training.micro_batch_size
    if parallel.tp > 1 and not parallel.sequence_parallel:
        sharded = with_layout(config, sequence_parallel=True)
        yield Change("sequence", "--sequence-parallel", "at no cost", sharded)
    if num_replicas > 1 and parallel.zero_stage == 0:
        yield _zero(config, "--use-distributed-optimizer", 1, "at no cost")
    if config.recompute.recompute_granularity is None:
        selective = with_layout(config, recompute_granularity="selective")
        cost = "at the cost of a little more computation"
        yield Change("recompute", "--recompute-granularity selective", cost, selective)
    if config.training.fp8_format is not None and config.training.fp8_weight_cache:
        uncached = replace(config, training=replace(config.training, fp8_weight_cache=False))
        cost = "at the cost of rounding the weights to 8 bits for each microbatch"
        yield Change("fp8", "--no-fp8-weight-cache", cost, uncached)
    if size > 1 and not config.model.depends_on_micro_batch:
        smaller = with_layout(config, micro_batch_size=size // 2)
        yield Change(
            "micro-batch", f"--micro-batch-size {size // 2}", "at the cost of smaller GEMMs", smaller
        )
    if num_replicas > 1 and parallel.zero_stage < 2:
        yield _zero(config, "--zero-stage 2", 2, "at the cost of a reduction for each microbatch")
    if parallel.zero_stage > 0 and (
        parallel.shards_within_node
        or num_replicas > parallel.shard_degree_among(num_replicas, parallel.tp * num_replicas)
    ):
        whole = replace(parallel, data_parallel_shard_degree=None, num_distributed_optimizer_instances=None)
        cost = "at the cost of more communication between nodes"
        has_number = parallel.num_distributed_optimizer_instances is not None
        flags = (
            "--num-distributed-optimizer-instances 1"
            if has_number
            else f"--data-parallel-shard-degree {num_replicas}"
        )
        yield Change("groups", flags, cost, replace(config, parallel=whole))
    if num_replicas > 1 and parallel.zero_stage < 3:
        cost = "at the cost of gathering weights and reducing gradients for each microbatch"
        yield _zero(config, "--zero-stage 3", 3, cost)
    if num_replicas > 1 and parallel.zero_stage == 3 and parallel.fsdp_reshard_after_forward != "always":
        freed = replace(config, parallel=replace(parallel, fsdp_reshard_after_forward="always"))
        cost = "at the cost of gathering weights for each microbatch"
        yield Change("gathering", "--fsdp-reshard-after-forward always", cost, freed)
    if config.recompute.recompute_granularity != "full":
        full = with_layout(config, recompute_granularity="full")
        cost = "at the cost of a third more computation"
        yield Change("recompute", "--recompute-granularity full", cost, full)
    most = max(layers_per_stage(config))
    if config.recompute.recompute_granularity == "full" and config.recompute.cpu_offload_activations < most:
        offloaded = with_layout(config, cpu_offload_activations=most)
        cost = "at the cost of host memory, and of copies that may be slower than the computation"
        yield Change("activations", f"--cpu-offload-activations {most}", cost, offloaded)
    yield _twice(config, "tensor", "--tp", "at the cost of more communication", world_size)
    yield _twice(config, "pipeline", "--pp", "at the cost of a larger bubble", world_size)


def _zero(config: Config, flags: str, stage: int, cost: str) -> Change:
    return Change("zero", flags, cost, with_layout(config, zero_stage=stage))


def _offloads(config: Config, is_host: bool) -> Iterator[Change]:
    """Yield changes that move the optimizer state out of the device's memory."""
    if config.optimizer.offloads_optimizer or config.optimizer.optimizer == "muon":
        return
    if not is_host:
        on_host = with_layout(config, optimizer_cpu_offload=True)
        yield Change("optimizer", "--optimizer-cpu-offload", "at the cost of updates on the host", on_host)
    elif not config.checkpoint.async_save:
        on_disk = with_layout(config, optimizer_nvme_offload="DIR")
        cost = "at the cost of reading and writing the state in each update"
        yield Change("optimizer", "--optimizer-nvme-offload DIR", cost, on_disk)


def divided_further(config: Config, world_size: int) -> Iterator[Change]:
    """Yield changes that divide samples or experts among more ranks; a model of your own may not allow it."""
    model, parallel = config.model, config.parallel
    if model.has_experts:
        ep = 2 * parallel.ep
        sizes, flags = {"expert_model_parallel_size": ep}, f"--ep {ep}"
        if parallel.tp > 1 and not parallel.has_expert_axes:
            sizes["expert_tensor_parallel_size"] = 1  # whole experts
            flags += " --etp 1"
        cost = "at the cost of sending tokens to their experts"
        yield Change("experts", flags, cost, with_layout(config, **sizes))
    if model.seq_length >= 2 * parallel.cp * MIN_SLICE:
        yield _twice(config, "context", "--cp", "at the cost of more communication", world_size)


def _twice(config: Config, axis: str, flag: str, cost: str, world_size: int) -> Change:
    """Return the change that doubles an axis: half as many replicas, or twice the world size."""
    name = "context_parallel_size" if axis == "context" else f"{axis}_model_parallel_size"
    size = 2 * getattr(config.parallel, name)
    is_even = (sample_ranks(config, world_size) or 1) % 2 == 0
    parallel = replace(config.parallel, data_parallel_size=None)
    changed = with_even_stages(with_layout(replace(config, parallel=parallel), **{name: size}))
    if not is_even:
        cost, world_size = f"{cost} and twice the ranks", 2 * world_size
    return Change(axis, f"{flag} {size}", cost, changed, world_size)
