"""Plan one run: its memory, time and costs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from megalite.config.model.model_config import CONVENTION, flops_per_token_by_convention
from megalite.distributed.axes import EXPERTS
from megalite.plan.iteration_time import (
    IterationTime,
    least_layer_seconds,
    least_seconds,
    time_iteration,
)
from megalite.plan.layer_time import WorkSeconds
from megalite.plan.optimizer_update import largest_offloaded_state, offload_seconds
from megalite.plan.planned_run import PlannedRun
from megalite.plan.rank_memory import (
    TIGHT_SHARE,
    RankMemory,
    activation_parts,
    choose_gathering,
    host_activations,
    largest_memory,
    rank_memories,
)
from megalite.plan.uncertainty import Interval, interval, kind_of_run
from megalite.plan.units import whole_model

_GB = 1e9
_DAY = 86400.0
_JSON_KINDS = {"gemms": "products", "memory_bound": "passes"}
"""Kinds of `WorkSeconds` that have another name in --json, with that name."""


@dataclass(frozen=True)
class Costs:
    """Inputs to the costs of a run, besides its plan; each is None if it is unknown.

    Attributes:
        train_tokens: tokens of the whole run.
        watts: power of one GPU, with its part of the node's power.
        price: price of a GPU per hour.
    """

    train_tokens: float | None = None
    watts: float | None = None
    price: float | None = None


class RunPlan:
    """Plan of a run. Each number is computed when it is first requested."""

    def __init__(self, run: PlannedRun) -> None:
        self.run = choose_gathering(run)

    @cached_property
    def parameters(self) -> int:
        """Return the number of parameters of the whole model, with the vocabulary's padding."""
        return self.run.units.num_parameters

    @cached_property
    def memories(self) -> list[RankMemory]:
        """Return the memory of each pipeline rank."""
        return rank_memories(self.run)

    @cached_property
    def largest_memory(self) -> RankMemory:
        """Return the memory of the largest rank."""
        return largest_memory(self.run)

    @cached_property
    def memory_bytes(self) -> float:
        """Return the bytes of the largest rank."""
        return self.largest_memory.total

    @cached_property
    def host_bytes(self) -> float:
        """Return the host memory of the rank that offloads most activations."""
        return max(host_activations(self.run))

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.run.cluster.gpu.memory_bytes

    @property
    def is_tight(self) -> bool:
        """Return whether the run fits, but leaves less free memory than a plan's typical error."""
        return self.fits and self.memory_bytes > TIGHT_SHARE * self.run.cluster.gpu.memory_bytes

    @cached_property
    def time(self) -> IterationTime:
        """Return the time of one optimizer step."""
        return time_iteration(self.run)

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """Return the 80% intervals of the `time` of an iteration in seconds, and of the `memory` in bytes."""
        kind, planned = (
            kind_of_run(self.run, self.time),
            {"time": self.time.seconds, "memory": self.memory_bytes},
        )
        return {quantity: interval(quantity, value, kind) for quantity, value in planned.items()}

    @cached_property
    def least_layer_seconds(self) -> float:
        """Return a lower bound of `least_seconds` that takes less time to compute."""
        return least_layer_seconds(self.run)

    @cached_property
    def least_seconds(self) -> float:
        """Return a lower bound of the seconds of one optimizer step."""
        return least_seconds(self.run)

    @property
    def tokens(self) -> int:
        """Return the tokens of an iteration."""
        return self.run.global_batch * self.run.config.model.seq_length

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.time.seconds

    def tflops(self, flops_of_token: float) -> float:
        """Return the TFLOP/s per GPU, for this many operations per token."""
        return flops_of_token * self.tokens_per_second / self.run.cluster.world_size / 1e12

    @property
    def tflops_per_gpu(self) -> float:
        """Return the TFLOP/s per GPU, by `CONVENTION`."""
        return self.tflops(self.flops_by_convention["causal"])

    @cached_property
    def flops_by_convention(self) -> dict[str, float]:
        """Return the FLOPs per token by each convention; of the program's own model, only `CONVENTION`."""
        run = self.run
        if run.provider is None:
            return flops_per_token_by_convention(run.config.model, run.tp)
        model = run.config.model
        return {"causal": 3 * whole_model(model, run.tp, run.provider).forward_flops / model.seq_length}

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilization: the share of the data sheet's rate."""
        return self.tflops_per_gpu / self.run.cluster.gpu.tflops


def train_tokens(plan: RunPlan, costs: Costs) -> float | None:
    """Return the tokens of the whole run, from --train-tokens, --train-samples or --train-iters."""
    training, length = plan.run.config.training, plan.run.config.model.seq_length
    if costs.train_tokens is not None:
        return costs.train_tokens
    if training.train_samples is None and training.train_iters is None:
        return None
    return float(plan.run.config.num_samples(plan.run.dp) * length)


def as_object(plan: RunPlan, costs: Costs) -> dict[str, Any]:
    """Return the object that --json prints."""
    by_convention = {name: plan.tflops(flops) for name, flops in plan.flops_by_convention.items()}
    return {
        "parameters": plan.parameters,
        "layout": {"tp": plan.run.tp, "pp": plan.run.pp, "dp": plan.run.dp, "cp": plan.run.cp},
        **_experts_object(plan.run),
        "iteration_time_s": plan.time.seconds,
        "iteration_time_s_interval": plan.intervals["time"][:2],
        "tokens_per_second": plan.tokens_per_second,
        "tflops_per_gpu": plan.tflops_per_gpu,
        "tflops_convention": CONVENTION,
        "tflops_per_gpu_by_convention": by_convention,
        "mfu": plan.mfu,
        "memory_gb": plan.memory_bytes / _GB,
        "memory_gb_interval": [size / _GB for size in plan.intervals["memory"][:2]],
        "memory_gb_by_stage": [memory.total / _GB for memory in plan.memories],
        "memory_gb_by_stage_and_kind": [
            {kind: size / _GB for kind, size in memory._asdict().items()} for memory in plan.memories
        ],
        "activation_gb_by_stage_and_part": [
            {part: size / _GB for part, size in activation_parts(plan.run, rank, memory.activations).items()}
            for rank, memory in enumerate(plan.memories)
        ],
        "host_memory_gb_by_stage": [size / _GB for size in host_activations(plan.run)],
        "memory_gb_available": plan.run.cluster.gpu.memory_bytes / _GB,
        "bubble_fraction": plan.time.bubble_fraction,
        "seconds_by_kind": {**_by_kind(plan.time.work), "bubble": plan.time.waiting},
        "median_stage_seconds_by_kind": _by_kind(plan.time.median_work),
        "fits": plan.fits,
        "tight": plan.is_tight,
        **_offload_object(plan),
        **run_costs(plan, costs),
    }


def _experts_object(run: PlannedRun) -> dict[str, Any]:
    parallel = run.config.parallel
    if not parallel.has_expert_axes:
        return {}
    sizes = {"ep": parallel.ep, "etp": parallel.etp, "edp": run.replicas[EXPERTS.name].size}
    return {"experts": {**sizes, "moe_imbalance": parallel.planned_imbalance}}


def _by_kind(work: WorkSeconds) -> dict[str, float]:
    return {_JSON_KINDS.get(kind, kind): seconds for kind, seconds in work._asdict().items()}


def _offload_object(plan: RunPlan) -> dict[str, Any]:
    state = largest_offloaded_state(plan.run)
    if state is None:
        return {}
    seconds = offload_seconds(plan.run, state)
    sizes = {f"{kind}_gb": size / _GB for kind, size in asdict(state).items() if kind != "elements"}
    return {"offload": {**sizes, "seconds": asdict(seconds)}}


def run_costs(plan: RunPlan, costs: Costs) -> dict[str, float]:
    """Return the days and GPU hours of the whole run, and its energy and price if they are known."""
    tokens = train_tokens(plan, costs)
    if tokens is None:
        return {}
    seconds = tokens / plan.tokens_per_second
    gpu_hours = seconds * plan.run.cluster.world_size / 3600
    found = {"train_tokens": tokens, "days": seconds / _DAY, "gpu_hours": gpu_hours}
    if costs.watts is not None:
        found["energy_mwh"] = gpu_hours * costs.watts / 1e6
    if costs.price is not None:
        found["price"] = gpu_hours * costs.price
    return found


def large(number: float) -> str:
    """Return a count in trillions, billions or millions, or in full below a million."""
    for unit, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{plain(number / unit)} {name}"
    return f"{number:,.0f}"


def plain(number: float, digits: int = 4) -> str:
    """Return a number with at least `digits` significant digits and no exponent."""
    if number == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(number)))
    text = f"{number:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def duration(days: float, digits: int = 4) -> str:
    """Return a length of time in the largest unit that it contains at least once."""
    units = {"day": 1.0, "hour": 24.0, "minute": 1440.0, "second": 86400.0}
    name = next((name for name, unit in units.items() if days * unit >= 1), "second")
    text = plain(days * units[name], digits)
    return f"{text} {name}{'' if text == '1' else 's'}"
