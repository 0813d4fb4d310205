"""Search all layouts of a model on a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heapreplace
from itertools import chain, product
from math import gcd, inf
from typing import Any, NamedTuple

from megalite.config import Config
from megalite.config.config import layers_per_stage
from megalite.config.fields import with_fields
from megalite.config.parallel import CP_COMM_PROPERTIES, CpCommTypes, num_neighbours
from megalite.config.rules import parallel_rules
from megalite.config.validate import RULES
from megalite.pipeline.schedules import SCHEDULES
from megalite.plan.communication import Cluster
from megalite.plan.estimate import RunPlan
from megalite.plan.layout_fields import MIN_SLICE, changed_fields, with_even_stages
from megalite.plan.optimizer_update import NODE_MEMORY_GB
from megalite.plan.plan_request import Request
from megalite.plan.planned_run import PlannedRun, first_problem
from megalite.plan.rank_memory import node_host_bytes
from megalite.utils.errors import Problem, UserError

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
"""Modules that are cheap to recompute."""
EXPERT_MODULES = ("layernorm", "mlp")
"""Modules of a model with experts, whose activations take most of its memory."""
MAX_EXPERT_NODES = 8
"""Most nodes among which a search divides the experts of a layer, unless NVLink connects more."""
MAX_RACK_TP = 8
"""Largest tensor-parallel size that a search tries over the smaller nodes of a rack."""

_SHARDING_RULE = parallel_rules.shard_groups
"""The rule that depends on how ZeRO shards."""
_OTHER_RULES = tuple(rule for rule in RULES if rule is not _SHARDING_RULE)


@dataclass
class SearchResult:
    """Result of a search.

    Attributes:
        fitting: plans that fit in memory.
        rejected: number of layouts that training would reject, by kind of problem, with its first message.
        too_large: number of layouts that do not fit, by the kind of memory that takes most.
        closest: of the plans that do not fit, the one that needs the least memory for each tp and pp.
        lacking_host: plans that would fit if nodes had more host memory.
    """

    fitting: list[RunPlan] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    too_large: Counter[str] = field(default_factory=Counter)
    closest: dict[tuple[int, int], RunPlan] = field(default_factory=dict)
    lacking_host: list[RunPlan] = field(default_factory=list)

    def nearest(self, count: int) -> list[RunPlan]:
        """Return the `count` plans of different tp and pp that need the least memory, smallest first."""
        return sorted(self.closest.values(), key=lambda plan: plan.memory_bytes)[:count]


Watch = Callable[[str], None]
"""A function that shows the progress of a search; it is called with a text after each layout."""


def watch_nothing(text: str) -> None:
    """Show nothing."""


def search(
    request: Request,
    cluster: Cluster | None = None,
    watch: Watch = watch_nothing,
    host_bytes: float | None = None,
) -> SearchResult:
    """Plan every layout; `fitting` is not sorted.

    If no layout fits, offload all activations to the host, then the optimizer state, and then both. Fields
    of the request that are fixed stay as they are.

    Args:
        host_bytes: host memory of a node. By default, that of a usual node, which only limits what this
            function offloads.
    """
    cluster, found = cluster or request.cluster, list[SearchResult]()
    for of_state, of_activations in _offloads(request):
        config = with_fields(request.config, optimizer_cpu_offload=True) if of_state else request.config
        usual = NODE_MEMORY_GB * 1e9 if of_state or of_activations else inf
        limit = usual if host_bytes is None else host_bytes
        found.append(_search(replace(request, config=config), cluster, watch, limit, offloads=of_activations))
        if found[-1].fitting:
            return found[-1]
    found[0].lacking_host = [plan for each in found for plan in each.lacking_host]
    return found[0]


def _offloads(request: Request) -> Iterator[tuple[bool, bool]]:
    """Return, for each attempt, whether to offload the optimizer state, and all activations."""
    fixed, of_state = request.fixed_fields, {"optimizer_cpu_offload", "optimizer_nvme_offload"}
    return product(
        (False,) if request.provider is not None or of_state & fixed else (False, True),
        (False,) if "cpu_offload_activations" in fixed else (False, True),
    )


def _search(
    request: Request, cluster: Cluster, watch: Watch, host_bytes: float, *, offloads: bool
) -> SearchResult:
    """Plan every layout, each with all activations in host memory if `offloads`."""
    found, reasons = SearchResult(), dict[tuple[str, ...], str]()
    plans = (_plans(request, same, offloads) for same in _layouts(request, cluster))
    for number, plan in enumerate(chain.from_iterable(plans), 1):
        watch(f"{number:,} layouts of {cluster.world_size:,} GPUs planned, {len(found.fitting):,} fit")
        if isinstance(plan, Problem):
            found.rejected[reasons.setdefault(plan.fields, plan.text)] += 1
        elif plan.fits:
            fits_host = host_bytes == inf or node_host_bytes(plan.run) <= host_bytes
            (found.fitting if fits_host else found.lacking_host).append(plan)
        else:
            found.too_large[largest_kind(plan)] += 1
            nearest = found.closest.setdefault((plan.run.tp, plan.run.pp), plan)
            if plan.memory_bytes < nearest.memory_bytes:
                found.closest[plan.run.tp, plan.run.pp] = plan
    return found


@dataclass(frozen=True)
class _Sharding:
    """Sharding of ZeRO in layouts with the same sizes of all axes; `run` is one of them."""

    run: PlannedRun

    @cached_property
    def problem(self) -> Problem | None:
        """Return why training would reject it, if it accepts the sizes."""
        return next(_SHARDING_RULE(self.run.config, self.run.cluster.world_size), None)


class _Layouts(NamedTuple):
    """Layouts that differ only in how ZeRO shards. Most of a plan is the same for all of them."""

    config: Config
    shardings: Sequence[_Sharding]


def _plans(request: Request, layouts: _Layouts, offloads: bool) -> Iterator[RunPlan | Problem]:
    """Yield the plan of each layout of a group, or why it cannot run."""
    config, cluster = layouts.config, layouts.shardings[0].run.cluster
    problem = first_problem(config, cluster, _OTHER_RULES)
    if problem is None and offloads:
        config = with_fields(config, cpu_offload_activations=max(layers_per_stage(config)))
    run = request.planned_run(config, cluster)
    for sharding in layouts.shardings:
        try:
            yield problem or sharding.problem or RunPlan(run.with_sharding(sharding.run))
        except UserError as error:  # the program's own model does not support the layout
            yield Problem((str(error),), str(error))


def largest_kind(plan: RunPlan) -> str:
    """Return the kind of memory that takes most on the largest rank."""
    kind, _ = max(plan.largest_memory._asdict().items(), key=lambda each: each[1])
    return kind


def fastest(plans: Sequence[RunPlan], count: int, watch: Watch = watch_nothing) -> list[RunPlan]:
    """Return the `count` fastest plans. Lower bounds limit how many are simulated.

    A bound that takes little time is replaced by a higher one when it is the lowest of all.
    """
    best: list[RunPlan] = []
    bounds = [(plan.least_layer_seconds, False, i) for i, plan in enumerate(plans)]
    heapify(bounds)
    number = 0
    while bounds:
        bound, is_final, i = bounds[0]
        if len(best) == count and bound >= best[-1].time.seconds:
            break
        if not is_final:
            heapreplace(bounds, (plans[i].least_seconds, True, i))
            continue
        heappop(bounds)
        number += 1
        watch(f"{number:,} of at most {len(plans):,} schedules simulated")
        best = sorted([*best, plans[i]], key=lambda each: each.time.seconds)[:count]
    return best


def simplest(plans: list[RunPlan], ratio: float = SIMILAR) -> RunPlan:
    """Return the layout for a run: the one with the fewest options of those that are almost fastest.

    Plans that may run out of memory count only if there is no other.

    Args:
        ratio: maximum time, relative to the fastest plan.
    """
    plans = [plan for plan in plans if not plan.is_tight] or plans
    (best,) = fastest(plans, 1)
    longest = ratio * best.time.seconds
    by_options = sorted(
        (plan for plan in plans if plan.least_layer_seconds <= longest),
        key=lambda plan: (len(changed_fields(plan.run.config)), plan.run.zero_stage, plan.memory_bytes),
    )
    return next(plan for plan in by_options if plan.least_seconds <= longest and plan.time.seconds <= longest)


def ranked(plans: list[RunPlan], count: int, watch: Watch = watch_nothing) -> list[RunPlan]:
    """Return `count` plans: the one that --layout auto chooses, and then the fastest others."""
    best = fastest(plans, count, watch)
    chosen = simplest(plans)
    return [chosen, *(plan for plan in best if plan is not chosen)][:count]


def _layouts(request: Request, cluster: Cluster) -> Iterator[_Layouts]:
    """Yield every layout whose sizes divide the cluster, with all options that have an effect in it."""
    base = request.config
    if base.training.global_batch_size is None:
        raise UserError(
            "--search needs --global-batch-size: layouts are compared by the time of an optimizer step"
        )
    recomputes = [replace(base.recompute, **values) for values in _recomputes(request)]
    for sizes in _axis_sizes(request, cluster):
        run = request.planned_run(with_fields(base, **sizes), cluster)
        trainings = [replace(base.training, **values) for values in _micro_batches(request, run)]
        shardings = list(_shardings(request, run))
        for pipeline in _pipelines(request, run):
            groups = []
            for exchange in _exchanges(request, run):
                config = with_even_stages(with_fields(base, **sizes, **pipeline, **exchange))
                sharded = [with_fields(config, **values) for values in shardings]
                groups.append(
                    _Layouts(config, [_Sharding(request.planned_run(each, cluster)) for each in sharded])
                )
            for recompute, training, group in product(recomputes, trainings, groups):
                config = replace(group.config, recompute=recompute, training=training)
                yield group._replace(config=config)


def _axis_sizes(request: Request, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Yield the sizes of all axes but dp, which has the other ranks."""
    base, num_ranks = request.config, cluster.world_size
    widest = max(MAX_RACK_TP, cluster.gpus_per_node)
    near = [tp for tp in _divisors(cluster.ranks_per_domain) if tp <= widest]
    for tp, cp in product(near, _context_sizes(request)):
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
    model, requested_cp = request.config.model, request.config.parallel.cp
    if "context_parallel_size" in request.fixed_fields or request.provider is not None:
        return [requested_cp]
    most = max(1, model.seq_length // MIN_SLICE)
    return [2**power for power in range(most.bit_length())]


def _expert_sizes(request: Request, cluster: Cluster, num_ranks: int) -> Iterator[dict[str, Any]]:
    """Yield the sizes of the axes of experts to try, for a stage of `num_ranks` ranks.

    These are the default, and whole experts divided among half a node up to `MAX_EXPERT_NODES` or a rack.
    """
    model, axes = request.config.model, {"expert_model_parallel_size", "expert_tensor_parallel_size"}
    if not model.has_experts or request.provider is not None or axes & request.fixed_fields:
        yield {}
        return
    assert model.num_experts is not None
    yield {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}
    ep = max(2, cluster.gpus_per_node // 2)
    most = max(MAX_EXPERT_NODES * cluster.gpus_per_node, cluster.ranks_per_domain)
    while ep <= most:
        if model.num_experts % ep == 0 and num_ranks % ep == 0:
            yield {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1}
        ep *= 2


def _micro_batches(request: Request, run: PlannedRun) -> list[dict[str, Any]]:
    """Return the micro-batch sizes to try; nothing if a flag sets it, here and below.

    With several samples in a microbatch, smaller microbatches need the same memory without cp.
    """
    if request.config.depends_on_micro_batch:
        return [{}]
    samples = request.config.training.global_batch_size or 1
    sizes = [2**power for power in range(MAX_MICRO_BATCH.bit_length())] if run.cp == 1 else [1]
    fitting = [size for size in sizes if samples % (size * run.dp) == 0] or [1]
    return _unless_fixed(request, "micro_batch_size", fitting)


def _shardings(request: Request, run: PlannedRun) -> Iterator[dict[str, Any]]:
    """Yield the ZeRO stages to try, over all replicas and over those of a node if it has some but not all."""
    degree_fields = {"data_parallel_shard_degree", "num_distributed_optimizer_instances"}
    degree = gcd(run.num_sharing, run.cluster.gpus_per_node // run.tp)
    has_degree = 1 < degree < run.num_sharing and not degree_fields & request.fixed_fields
    for values in _unless_fixed(request, "zero_stage", [0] if run.num_sharing == 1 else [0, 1, 2, 3]):
        yield values
        if has_degree and values.get("zero_stage", request.config.parallel.zero_stage) > 0:
            yield {**values, "data_parallel_shard_degree": degree}


def _exchanges(request: Request, run: PlannedRun) -> Iterator[dict[str, Any]]:
    """Yield the values of --sequence-parallel and --cp-comm-type to try."""
    parallel = request.config.parallel
    slices = [True] if run.config.parallel.has_expert_axes else [False, True]
    types: list[CpCommTypes] = [*CP_COMM_PROPERTIES] if run.cp > 1 else [parallel.cp_comm_type]
    for values, cp_values in product(
        _unless_fixed(request, "sequence_parallel", slices if run.tp > 1 else [False]),
        _unless_fixed(request, "cp_comm_type", types),
    ):
        levels = {}
        if replace(run.config.parallel, **cp_values).has_cp_levels:
            levels = _levels(request, run)
        yield {**values, **cp_values, **levels}


def _unless_fixed(request: Request, name: str, values: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the values of a field to try; a field that a flag sets keeps its value."""
    return [{}] if name in request.fixed_fields else [{name: value} for value in values]


def _levels(request: Request, run: PlannedRun) -> dict[str, Any]:
    """Return the sizes with which the ranks that exchange heads are those of a node, if a ring is left."""
    name = "hierarchical_context_parallel_sizes"
    heads = num_neighbours(run.cp, request.cluster.gpus_per_node // run.tp)
    is_free = heads > 1 and name not in request.fixed_fields
    return {name: (heads, run.cp // heads)} if is_free else {}


def _pipelines(request: Request, run: PlannedRun) -> list[dict[str, Any]]:
    """Return the schedules to try; those that overlap actions only if these can hide messages of experts."""
    pp, num_layers = run.pp, request.config.model.num_layers
    if request.fixed_fields & PIPELINE_FIELDS:
        return [{}]
    if pp == 1:
        return [{"pipeline_schedule": "1f1b"}]
    own = num_layers // pp
    chunks = [count for count in range(2, min(own, MAX_CHUNKS) + 1) if num_layers % (pp * count) == 0]
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
            and (run.config.parallel.has_expert_axes or not schedule.overlaps)
        ):
            fixed.append({"pipeline_schedule": name})
    return fixed + chosen


def _recomputes(request: Request) -> list[dict[str, Any]]:
    if request.fixed_fields & {"recompute_granularity", "recompute_modules"}:
        return [{}]
    ways: list[dict[str, Any]] = [{"recompute_granularity": None}, {"recompute_granularity": "full"}]
    if request.provider is not None:  # only a transformer's layers have the modules
        return ways
    sets = [EXPERT_MODULES, EXPERT_MODULES[:1]] if request.config.model.has_experts else [CHEAP_MODULES]
    return ways + [{"recompute_granularity": "selective", "recompute_modules": modules} for modules in sets]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
