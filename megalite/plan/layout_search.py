"""Search all layouts of a model on a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import gcd
from typing import Any

from megalite.config import Config
from megalite.config.stage_layers import layers_per_stage
from megalite.errors import UserError
from megalite.pipeline.schedules import SCHEDULES
from megalite.plan.estimate import RunPlan
from megalite.plan.exchange_time import CP_SECONDS
from megalite.plan.iteration_time import least_seconds
from megalite.plan.layout_configs import LayoutCheck, LayoutConfigs
from megalite.plan.layout_fields import MIN_SLICE, changed_fields, with_layout
from megalite.plan.offloaded_state import NODE_MEMORY_GB
from megalite.plan.plan_request import Request
from megalite.plan.planned_run import Cluster, PlannedRun
from megalite.plan.rank_memory import node_host_bytes

MAX_MICRO_BATCH = 16
MAX_CHUNKS = 8
NUM_NEAREST = 3
"""Layouts to report if none fits."""
SIMILAR = 1.03
"""Ratio of times within which plans cannot tell layouts apart."""
PIPELINE_FIELDS = {
    "pipeline_schedule",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_layers",
}
"""Fields that determine the pipeline, if any of them is set."""
CHEAP_MODULES = ("layernorm", "mlp_act")
"""Modules that are cheap to recompute. Core attention is too, if its scores are saved."""
EXPERT_MODULES = ("layernorm", "mlp")
"""Modules of a model with experts, whose activations take most of its memory."""
MAX_EXPERT_NODES = 8
"""Most nodes among which a search divides the experts of a layer."""


@dataclass
class SearchResult:
    """Holds the result of a search.

    Attributes:
        fitting: plans that fit in memory.
        rejected: number of layouts that training would reject, by kind of problem, with its first message.
        too_large: number of layouts that do not fit, by the kind of memory that takes most.
        closest: of the plans that do not fit, the one that needs the least memory for each tp and pp.
    """

    fitting: list[RunPlan] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    too_large: Counter[str] = field(default_factory=Counter)
    closest: dict[tuple[int, int], RunPlan] = field(default_factory=dict)

    def nearest(self, count: int) -> list[RunPlan]:
        """Return the `count` plans of different tp and pp that need the least memory, smallest first."""
        return sorted(self.closest.values(), key=lambda plan: plan.memory_bytes)[:count]


Watch = Callable[[str], None]
"""A function that shows the progress of a search; it is called with a text after each layout."""


def watch_nothing(text: str) -> None:
    """Show nothing."""


def search_with_offload(request: Request, watch: Watch = watch_nothing) -> SearchResult:
    """Plan every layout with the optimizer state in host memory, if a usual node has enough memory."""
    config = with_layout(request.config, optimizer_cpu_offload=True)
    found = search(replace(request, config=config), watch=watch)
    found.fitting = [plan for plan in found.fitting if _fits_host(plan)]
    return found


def search(request: Request, cluster: Cluster | None = None, watch: Watch = watch_nothing) -> SearchResult:
    """Plan every layout; `fitting` is not sorted.

    If no layout fits, plan layouts that offload all activations to the host.
    """
    cluster = cluster or request.cluster
    found = _search(request, cluster, watch, offloads=False)
    if found.fitting or "cpu_offload_activations" in request.fixed_fields:
        return found
    offloaded = _search(request, cluster, watch, offloads=True)
    offloaded.fitting = [plan for plan in offloaded.fitting if _fits_host(plan)]
    return offloaded if offloaded.fitting else found


def _fits_host(plan: RunPlan) -> bool:
    """Return whether a usual node has enough host memory for everything its ranks offload."""
    return node_host_bytes(plan.run) <= NODE_MEMORY_GB * 1e9


def _search(request: Request, cluster: Cluster, watch: Watch, *, offloads: bool) -> SearchResult:
    """Plan every layout, each with all activations in host memory if `offloads`."""
    found, reasons = SearchResult(), dict[tuple[str, ...], str]()
    check = LayoutCheck(cluster.world_size)
    for number, config in enumerate(_configs(request, cluster), 1):
        watch(f"{number:,} layouts of {cluster.world_size:,} GPUs planned, {len(found.fitting):,} fit")
        problem = check.first_problem(config)
        if problem is not None:
            found.rejected[reasons.setdefault(problem.fields, problem.text)] += 1
            continue
        if offloads:
            config = with_layout(config, cpu_offload_activations=max(layers_per_stage(config)))
        try:
            plan = RunPlan(request.planned_run(config, cluster))
            fits = plan.fits
        except UserError as error:  # the program's own model does not support the layout
            found.rejected[str(error)] += 1
            continue
        if fits:
            found.fitting.append(plan)
            continue
        found.too_large[largest_kind(plan)] += 1
        smallest = found.closest.setdefault((plan.run.tp, plan.run.pp), plan)
        if plan.memory_bytes < smallest.memory_bytes:
            found.closest[plan.run.tp, plan.run.pp] = plan
    return found


def largest_kind(plan: RunPlan) -> str:
    """Return the kind of memory that takes most on the largest rank."""
    memory = max(plan.memories, key=lambda each: each.total)
    kind, _ = max(memory._asdict().items(), key=lambda each: each[1])
    return kind


def fastest(plans: list[RunPlan], count: int, watch: Watch = watch_nothing) -> list[RunPlan]:
    """Return the `count` fastest plans. A lower bound without the bubble limits how many are simulated."""
    best: list[RunPlan] = []
    bounds = ((least_seconds(p.run), i, p) for i, p in enumerate(plans))
    for number, (bound, _, plan) in enumerate(sorted(bounds), 1):
        watch(f"{number:,} of at most {len(plans):,} schedules simulated")
        if len(best) == count and bound >= best[-1].time.seconds:
            break
        best = sorted([*best, plan], key=lambda each: each.time.seconds)[:count]
    return best


def simplest(plans: list[RunPlan], ratio: float = SIMILAR) -> RunPlan:
    """Return the layout for --layout auto: the one with the fewest options of those that are almost fastest.

    Plans that may run out of memory count only if there is no other.

    Args:
        ratio: maximum time, relative to the fastest plan.
    """
    plans = [plan for plan in plans if not plan.is_tight] or plans
    (best,) = fastest(plans, 1)
    longest = ratio * best.time.seconds
    by_options = sorted(
        plans,
        key=lambda plan: (len(changed_fields(plan.run.config)), plan.run.zero_stage, plan.memory_bytes),
    )
    return next(
        plan for plan in by_options if least_seconds(plan.run) <= longest and plan.time.seconds <= longest
    )


def _configs(request: Request, cluster: Cluster) -> Iterator[Config]:
    """Yield every layout whose sizes divide the cluster, with all options that have an effect in it."""
    base = request.config
    if base.training.global_batch_size is None:
        raise UserError(
            "--search needs --global-batch-size: layouts are compared by the time of an optimizer step"
        )
    configs = LayoutConfigs(base)
    for sizes in _axis_sizes(request, cluster):
        run = request.planned_run(with_layout(base, **sizes), cluster)
        for values in _choices(request, run):
            yield configs.config({**sizes, **values})


def _axis_sizes(request: Request, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Yield the sizes of all axes but dp, which has the other ranks."""
    base, num_ranks = request.config, cluster.world_size
    for tp, cp in product(_divisors(cluster.gpus_per_node), _context_sizes(request)):
        for pp in _divisors(num_ranks):
            if num_ranks % (tp * cp * pp) or pp > base.model.num_layers:
                continue
            sizes = {
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
                "context_parallel_size": cp,
            }
            fixed = request.fixed_fields.intersection(sizes)
            if all(getattr(base.parallel, name) == sizes[name] for name in fixed):
                for expert_sizes in _expert_sizes(request, cluster, num_ranks // pp):
                    yield sizes | expert_sizes


def _context_sizes(request: Request) -> list[int]:
    """Return the context-parallel sizes to try: powers of two whose ranks have enough tokens of a sample."""
    model, given = request.config.model, request.config.parallel.cp
    if "context_parallel_size" in request.fixed_fields or request.provider is not None:
        return [given]
    most = max(1, model.seq_length // MIN_SLICE)
    return [2**power for power in range(most.bit_length())]


def _expert_sizes(request: Request, cluster: Cluster, num_ranks: int) -> Iterator[dict[str, Any]]:
    """Yield the sizes of the axes of experts to try, for a stage of `num_ranks` ranks.

    These are the default, and whole experts divided among half a node up to `MAX_EXPERT_NODES`.
    """
    model, axes = request.config.model, {"expert_model_parallel_size", "expert_tensor_parallel_size"}
    if not model.has_experts or request.provider is not None or axes & request.fixed_fields:
        yield {}
        return
    assert model.num_experts is not None
    yield {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}
    ep = max(2, cluster.gpus_per_node // 2)
    while ep <= MAX_EXPERT_NODES * cluster.gpus_per_node:
        if model.num_experts % ep == 0 and num_ranks % ep == 0:
            yield {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1}
        ep *= 2


def _choices(request: Request, run: PlannedRun) -> Iterator[dict[str, Any]]:
    """Yield the values of the other fields for the sizes of `run`; fixed fields keep their values."""
    base, fixed = request.config, request.fixed_fields
    needs_slices = run.config.parallel.has_expert_axes
    ways: dict[str, list[Any]] = {
        # With several samples in a microbatch, smaller microbatches need the same memory without cp.
        "micro_batch_size": _micro_batches(base, run.dp) if run.cp == 1 else [1],
        "zero_stage": [0] if run.num_sharing == 1 else [0, 1, 2, 3],
        "sequence_parallel": [needs_slices, True][needs_slices:] if run.tp > 1 else [False],
        "cp_comm_type": list(CP_SECONDS) if run.cp > 1 else [base.parallel.cp_comm_type],
    }
    free = {name: values for name, values in ways.items() if name not in fixed}
    pipelines: list[dict[str, Any]] = [{}]
    if not fixed & PIPELINE_FIELDS:
        pipelines = _pipelines(base, run.pp, has_messages=needs_slices)
    recomputes: list[dict[str, Any]] = [{}]
    if not fixed & {"recompute_granularity", "recompute_modules"}:
        recomputes = _recomputes(request.planned_run())
    degree = _degree_within_node(request, run)
    for pipeline, recompute, values in product(pipelines, recomputes, product(*free.values())):
        choice = {**pipeline, **recompute, **dict(zip(free, values, strict=True))}
        if choice.get("cp_comm_type", base.parallel.cp_comm_type) == "a2a+p2p":
            choice |= _levels(request, run)
        yield choice
        if degree is not None and choice.get("zero_stage", base.parallel.zero_stage) > 0:
            yield {**choice, "data_parallel_shard_degree": degree}


def _degree_within_node(request: Request, run: PlannedRun) -> int | None:
    """Return the number of replicas on a node to shard over; None unless a node has some but not all."""
    if request.fixed_fields & {"data_parallel_shard_degree", "num_distributed_optimizer_instances"}:
        return None
    degree = gcd(run.num_sharing, request.cluster.gpus_per_node // run.tp)
    return degree if 1 < degree < run.num_sharing else None


def _levels(request: Request, run: PlannedRun) -> dict[str, Any]:
    """Return the sizes with which the ranks that exchange heads are those of a node, if a ring is left."""
    name, per_node = "hierarchical_context_parallel_sizes", request.cluster.gpus_per_node // run.tp
    fitting = [n for n in _divisors(run.cp) if 1 < n < run.cp and n <= per_node]
    return (
        {name: (fitting[-1], run.cp // fitting[-1])} if fitting and name not in request.fixed_fields else {}
    )


def _micro_batches(base: Config, dp: int) -> list[int]:
    samples = base.training.global_batch_size or 1
    sizes = [2**power for power in range(MAX_MICRO_BATCH.bit_length())]
    return [size for size in sizes if samples % (size * dp) == 0] or [1]


def _pipelines(base: Config, pp: int, *, has_messages: bool) -> list[dict[str, Any]]:
    """Return the schedules to try; those that overlap actions only if these can hide messages of experts."""
    if pp == 1:
        return [{"pipeline_schedule": "1f1b"}]
    own = base.model.num_layers // pp
    chunks = [
        count for count in range(2, min(own, MAX_CHUNKS) + 1) if base.model.num_layers % (pp * count) == 0
    ]
    fixed: list[dict[str, Any]] = []
    chosen: list[dict[str, Any]] = []
    for name, schedule in SCHEDULES.items():
        if schedule.num_chunks is None:
            chosen += [
                {"pipeline_schedule": name, "num_virtual_stages_per_pipeline_rank": count} for count in chunks
            ]
        elif (
            schedule.num_chunks <= max(own, 1)
            and not schedule.keeps_all_microbatches  # GPipe takes as long as 1F1B, and more memory
            and (has_messages or not schedule.overlaps)
        ):
            fixed.append({"pipeline_schedule": name})
    return fixed + chosen


def _recomputes(run: PlannedRun) -> list[dict[str, Any]]:
    ways: list[dict[str, Any]] = [{"recompute_granularity": None}, {"recompute_granularity": "full"}]
    if run.provider is not None:  # only a transformer's layers have the modules
        return ways
    sets = [EXPERT_MODULES, EXPERT_MODULES[:1]] if run.config.model.has_experts else [CHEAP_MODULES]
    scores = ("core_attn",) if run.program.keeps_scores else ()
    return ways + [
        {"recompute_granularity": "selective", "recompute_modules": (*modules, *scores)} for modules in sets
    ]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
