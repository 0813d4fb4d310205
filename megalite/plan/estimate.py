"""Everything that a plan says of one job."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from megalite.plan.flops import CONVENTION, flops_per_token, flops_per_token_by_convention
from megalite.plan.iteration import IterationTime, time_iteration
from megalite.plan.job import Job
from megalite.plan.memory import Memory, rank_memories
from megalite.plan.parameters import total_parameters

_GB = 1e9
TIGHT_SHARE = 0.94
"""Share of a GPU's memory above which a plan that fits may still run out of memory.

Plans of published runs are typically off by 4 to 8%."""
_DAY = 86400.0


@dataclass(frozen=True)
class Costs:
    """What a run may be told of beside its layout.

    Attributes:
        train_tokens: of the whole run.
        watts: of one GPU with its part of the node.
        price: of a GPU for an hour.
    """

    train_tokens: float | None = None
    watts: float | None = None
    price: float | None = None


class Plan:
    """A job's memory at once, its time when it is asked for."""

    def __init__(self, job: Job) -> None:
        self.job = job

    @cached_property
    def parameters(self) -> int:
        """Of the whole model, with its vocabulary's padding."""
        return total_parameters(self.job.config.model, self.job.tp)

    @cached_property
    def memories(self) -> list[Memory]:
        """By pipeline rank."""
        return rank_memories(self.job)

    @property
    def memory_bytes(self) -> float:
        """Of the rank that needs most."""
        return max(memory.total for memory in self.memories)

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.job.cluster.gpu.memory_bytes

    @property
    def is_tight(self) -> bool:
        """Whether it fits with less memory to spare than a plan is usually off by."""
        return self.fits and self.memory_bytes > TIGHT_SHARE * self.job.cluster.gpu.memory_bytes

    @cached_property
    def time(self) -> IterationTime:
        """Of one optimizer step."""
        return time_iteration(self.job)

    @property
    def tokens(self) -> int:
        """Of an iteration."""
        return self.job.global_batch * self.job.config.model.seq_length

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.time.seconds

    def tflops(self, flops_of_token: float) -> float:
        """A GPU's, where a token takes so many operations."""
        return flops_of_token * self.tokens_per_second / self.job.cluster.world_size / 1e12

    @property
    def tflops_per_gpu(self) -> float:
        """By `CONVENTION`."""
        return self.tflops(flops_per_token(self.job.config.model, self.job.tp))

    @property
    def mfu(self) -> float:
        """Share of the data sheet's rate."""
        return self.tflops_per_gpu / self.job.cluster.gpu.tflops


def train_tokens(plan: Plan, costs: Costs) -> float | None:
    """Of the whole run, as --train-tokens says, or --train-samples, or --train-iters."""
    training, length = plan.job.config.training, plan.job.config.model.seq_length
    if costs.train_tokens is not None:
        return costs.train_tokens
    if training.train_samples is None and training.train_iters is None:
        return None
    return float(plan.job.config.num_samples(plan.job.dp) * length)


def as_object(plan: Plan, costs: Costs) -> dict[str, Any]:
    """What --json prints."""
    model, tp = plan.job.config.model, plan.job.tp
    by_convention = flops_per_token_by_convention(model, tp)
    return {
        "parameters": plan.parameters,
        "iteration_time_s": plan.time.seconds,
        "tokens_per_second": plan.tokens_per_second,
        "tflops_per_gpu": plan.tflops_per_gpu,
        "tflops_convention": CONVENTION,
        "tflops_per_gpu_by_convention": {name: plan.tflops(flops) for name, flops in by_convention.items()},
        "mfu": plan.mfu,
        "memory_gb": plan.memory_bytes / _GB,
        "memory_gb_by_stage": [memory.total / _GB for memory in plan.memories],
        "memory_gb_by_stage_and_kind": [
            {kind: size / _GB for kind, size in asdict(memory).items()} for memory in plan.memories
        ],
        "memory_gb_available": plan.job.cluster.gpu.memory_bytes / _GB,
        "bubble_fraction": plan.time.bubble_fraction,
        "seconds_by_kind": {**asdict(plan.time.work), "bubble": plan.time.waiting},
        "fits": plan.fits,
        "tight": plan.is_tight,
        **run_costs(plan, costs),
    }


def run_costs(plan: Plan, costs: Costs) -> dict[str, float]:
    """Days of the whole run, and its energy and price where they can be told."""
    tokens = train_tokens(plan, costs)
    if tokens is None:
        return {}
    seconds = tokens / plan.tokens_per_second
    gpu_hours = seconds * plan.job.cluster.world_size / 3600
    found = {"train_tokens": tokens, "days": seconds / _DAY, "gpu_hours": gpu_hours}
    if costs.watts is not None:
        found["energy_mwh"] = gpu_hours * costs.watts / 1e6
    if costs.price is not None:
        found["price"] = gpu_hours * costs.price
    return found
