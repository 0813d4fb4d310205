"""Advise a rank that ran out of memory: its planned memory, and the flags that would save most memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megalite.config import Config
from megalite.config.config import layers_per_stage
from megalite.config.fields import fields_by_flag, with_fields
from megalite.config.rules.parallel_rules import replicas, sample_ranks
from megalite.plan.communication import Cluster
from megalite.plan.layout_fields import MIN_SLICE, routing_line, with_even_stages
from megalite.plan.planned_run import PlannedRun, run_problems
from megalite.plan.rank_memory import TIGHT_SHARE, RankMemory, choose_gathering, rank_memories
from megalite.utils.errors import UserError
from megalite.utils.hardware.gpus import GPUS

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
    parallel, recompute, size = config.parallel, config.recompute, config.training.micro_batch_size
    num_replicas = replicas(config, world_size) or 1
    if parallel.tp > 1 and not parallel.sequence_parallel:
        yield _change(config, "sequence", "--sequence-parallel", "at no cost", sequence_parallel=True)
    if num_replicas > 1 and parallel.zero_stage == 0:
        yield _change(config, "zero", "--use-distributed-optimizer", "at no cost", zero_stage=1)
    if recompute.recompute_granularity is None:
        cost, flags = "at the cost of a little more computation", "--recompute-granularity selective"
        yield _change(config, "recompute", flags, cost, recompute_granularity="selective")
    if config.training.fp8_format is not None and config.training.fp8_weight_cache:
        cost = "at the cost of rounding the weights to 8 bits for each microbatch"
        yield _change(config, "fp8", "--no-fp8-weight-cache", cost, fp8_weight_cache=False)
    if size > 1 and not config.depends_on_micro_batch:
        cost, flags = "at the cost of smaller GEMMs", f"--micro-batch-size {size // 2}"
        yield _change(config, "micro-batch", flags, cost, micro_batch_size=size // 2)
    if num_replicas > 1 and parallel.zero_stage < 2:
        cost = "at the cost of a reduction for each microbatch"
        yield _change(config, "zero", "--zero-stage 2", cost, zero_stage=2)
    if parallel.zero_stage > 0 and (
        parallel.mesh.shards_within_node
        or num_replicas > parallel.shard_degree_among(num_replicas, parallel.tp * num_replicas)
    ):
        has_number = parallel.num_distributed_optimizer_instances is not None
        flags = (
            "--num-distributed-optimizer-instances 1"
            if has_number
            else f"--data-parallel-shard-degree {num_replicas}"
        )
        cost = "at the cost of more communication between nodes"
        whole = {"data_parallel_shard_degree": None, "num_distributed_optimizer_instances": None}
        yield _change(config, "groups", flags, cost, **whole)
    if num_replicas > 1 and parallel.zero_stage < 3:
        cost = "at the cost of gathering weights and reducing gradients for each microbatch"
        yield _change(config, "zero", "--zero-stage 3", cost, zero_stage=3)
    if num_replicas > 1 and parallel.zero_stage == 3 and parallel.fsdp_reshard_after_forward != "always":
        cost, flags = "at the cost of gathering weights for each microbatch", "--fsdp-reshard-after-forward"
        yield _change(config, "gathering", f"{flags} always", cost, fsdp_reshard_after_forward="always")
    if recompute.recompute_granularity != "full":
        cost, flags = "at the cost of a third more computation", "--recompute-granularity full"
        yield _change(config, "recompute", flags, cost, recompute_granularity="full")
    most = max(layers_per_stage(config))
    if recompute.recompute_granularity == "full" and recompute.cpu_offload_activations < most:
        cost = "at the cost of host memory, and of copies that may be slower than the computation"
        flags = f"--cpu-offload-activations {most}"
        yield _change(config, "activations", flags, cost, cpu_offload_activations=most)
    yield _twice(config, "--tp", "at the cost of more communication", world_size)
    yield _twice(config, "--pp", "at the cost of a larger bubble", world_size)


def _change(config: Config, kind: str, flags: str, cost: str, **values: Any) -> Change:
    return Change(kind, flags, cost, with_fields(config, **values))


def _offloads(config: Config, is_host: bool) -> Iterator[Change]:
    """Yield changes that move the optimizer state out of the device's memory."""
    if config.optimizer.offloads_optimizer or config.optimizer.optimizer == "muon":
        return
    if not is_host:
        cost, flags = "at the cost of updates on the host", "--optimizer-cpu-offload"
        yield _change(config, "optimizer", flags, cost, optimizer_cpu_offload=True)
    elif not config.checkpoint.async_save:
        flags = "--optimizer-nvme-offload DIR"
        cost = "at the cost of reading and writing the state in each update"
        yield _change(config, "optimizer", flags, cost, optimizer_nvme_offload="DIR")


def divided_further(config: Config, world_size: int) -> Iterator[Change]:
    """Yield changes that divide samples or experts among more ranks; a model of your own may not allow it."""
    parallel = config.parallel
    if config.model.has_experts:
        ep = 2 * parallel.ep
        sizes, flags = {"expert_model_parallel_size": ep}, f"--ep {ep}"
        if parallel.tp > 1 and not parallel.has_expert_axes:
            sizes["expert_tensor_parallel_size"] = 1  # whole experts
            flags += " --etp 1"
        yield _change(config, "experts", flags, "at the cost of sending tokens to their experts", **sizes)
    if config.model.seq_length >= 2 * parallel.mesh.num_position_slices * MIN_SLICE:
        yield _twice(config, "--cp", "at the cost of more communication", world_size)


def _twice(config: Config, flag: str, cost: str, world_size: int) -> Change:
    """Return the change that doubles an axis: half as many replicas, or twice the world size."""
    field = fields_by_flag()[flag].name
    size = 2 * getattr(config.parallel, field)
    is_even = (sample_ranks(config, world_size) or 1) % 2 == 0
    changed = with_even_stages(with_fields(config, data_parallel_size=None, **{field: size}))
    if not is_even:
        cost, world_size = f"{cost} and twice the ranks", 2 * world_size
    return Change(flag, f"{flag} {size}", cost, changed, world_size)
