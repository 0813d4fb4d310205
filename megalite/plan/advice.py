"""What takes a rank's memory, and which flags would take the most off it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from megalite.config import Config
from megalite.plan.check import job_problems
from megalite.plan.cluster import Cluster
from megalite.plan.gpu import GPUS
from megalite.plan.job import Job
from megalite.plan.layout import with_even_stages, with_layout
from megalite.plan.memory import Memory, rank_memories
from megalite.plan.program import own_program

_GB = 1e9
NUM_REMEDIES = 3
"""That are told, the most effective ones."""
MIN_SHARE = 0.01
"""Of the memory, below which a remedy is none."""


@dataclass(frozen=True)
class Device:
    """What a rank runs on.

    Attributes:
        memory_bytes: that a process can have of it.
        residual_bytes: of a process that no tensor holds.
    """

    memory_bytes: float
    residual_bytes: float


class Change(NamedTuple):
    """Flags that a run may be given.

    Attributes:
        kind: of several changes of one kind the most effective is told.
        flags: as a command line has them.
        price: what they cost, in words.
        config: with them.
        world_size: of the run with them, where they share its layers out anew; None where they do not.
    """

    kind: str
    flags: str
    price: str
    config: Config
    world_size: int | None = None


class Remedy(NamedTuple):
    """A change, and the bytes that it takes off a rank."""

    change: Change
    saved: float


@dataclass(frozen=True)
class Advice:
    """What is told of a rank that has run out of memory.

    Attributes:
        memory: of the rank, as planned.
        remedies: the most effective first.
    """

    memory: Memory
    remedies: list[Remedy]

    def lines(self) -> Iterator[str]:
        """In words."""
        parts = sorted(asdict(self.memory).items(), key=lambda part: -part[1])
        told = ", ".join(f"{name} {size / _GB:.2f}" for name, size in parts if size >= 0.005 * _GB)
        yield f"the plan's estimate for this rank is {self.memory.total / _GB:.2f} GB: {told}"
        for change, saved in self.remedies:
            yield f"{change.flags} would take {saved / _GB:.2f} GB less, {change.price}"
        if not self.remedies:
            yield "no flag would take less: what is left is more ranks, a smaller model or shorter samples"


def advise(config: Config, world_size: int, pp_rank: int, device: Device) -> Advice:
    """Plans a pipeline rank of a run as it is, and with each change that training would accept."""
    now = _job(config, world_size, device)
    memory = rank_memories(now)[pp_rank]
    best: dict[str, Remedy] = {}
    for change in changes(config, world_size):
        job = _job(change.config, change.world_size or world_size, device)
        if job_problems(change.config, job.cluster):
            continue
        totals = [each.total for each in rank_memories(job)]
        saved = memory.total - (totals[pp_rank] if change.world_size is None else max(totals))
        if saved > max(MIN_SHARE * memory.total, best[change.kind].saved if change.kind in best else 0.0):
            best[change.kind] = Remedy(change, saved)
    return Advice(memory, sorted(best.values(), key=lambda remedy: -remedy.saved)[:NUM_REMEDIES])


def _job(config: Config, world_size: int, device: Device) -> Job:
    """The run on that device: its speed and its links make no difference to memory."""
    gpu = replace(
        GPUS["a100-80"],
        memory_gib=device.memory_bytes / 2**30,
        residual_gb=device.residual_bytes / _GB,
    )
    cluster = Cluster(gpu, world_size, gpu.gpus_per_node, gpu.node_gbps, gpu.network_gbps)
    return Job(config, cluster, own_program(config.model))


def changes(config: Config, world_size: int) -> Iterator[Change]:
    """All that could be tried; some may be no config that training accepts."""
    parallel, recompute = config.parallel, config.recompute
    dp = world_size // (parallel.tp * parallel.pp)
    size = config.training.micro_batch_size
    if size > 1:
        smaller = with_layout(config, micro_batch_size=size // 2)
        yield Change("micro-batch", f"--micro-batch-size {size // 2}", "for smaller products", smaller)
    if recompute.recompute_granularity != "full":
        full = with_layout(config, recompute_granularity="full")
        yield Change("recompute", "--recompute-granularity full", "for a third more computation", full)
    if recompute.recompute_granularity is None:
        selective = with_layout(config, recompute_granularity="selective")
        yield Change(
            "recompute", "--recompute-granularity selective", "for little more computation", selective
        )
    if dp > 1 and parallel.zero_stage == 0:
        sharded = with_layout(config, zero_stage=1)
        yield Change("zero", "--use-distributed-optimizer", "at no price", sharded)
    if dp > 1 and parallel.zero_stage < 2:
        gradients = with_layout(config, zero_stage=2)
        yield Change("zero", "--zero-stage 2", "for a reduction each microbatch", gradients)
    if parallel.tp > 1 and not parallel.sequence_parallel:
        cut = with_layout(config, sequence_parallel=True)
        yield Change("sequence", "--sequence-parallel", "at no price", cut)
    for axis, price in (("tensor", "for more communication"), ("pipeline", "for a larger bubble")):
        yield _twice(config, axis, price, world_size)


def _twice(config: Config, axis: str, price: str, world_size: int) -> Change:
    """Twice the ranks on an axis, out of the replicas' where they are even in number."""
    name, flag = f"{axis}_model_parallel_size", {"tensor": "--tp", "pipeline": "--pp"}[axis]
    size = 2 * getattr(config.parallel, name)
    is_even = world_size // (config.parallel.tp * config.parallel.pp) % 2 == 0
    parallel = replace(config.parallel, data_parallel_size=None)
    changed = with_even_stages(with_layout(replace(config, parallel=parallel), **{name: size}))
    words = price if is_even else f"{price} and twice the ranks"
    return Change(axis, f"{flag} {size}", words, changed, world_size if is_even else 2 * world_size)
