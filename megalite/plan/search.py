"""Every layout of a model on a cluster, the fastest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

from megalite.config import Config
from megalite.errors import UserError
from megalite.plan.check import first_problem
from megalite.plan.cluster import Cluster
from megalite.plan.estimate import Plan
from megalite.plan.job import Job
from megalite.plan.layout import with_even_stages, with_layout
from megalite.plan.pipeline import least_seconds
from megalite.plan.request import Request

MAX_MICRO_BATCH = 16
MAX_CHUNKS = 8
PIPELINE_FIELDS = {
    "pipeline_schedule",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_layers",
}
"""Any of which says what the pipeline is."""
CHEAP_MODULES = ("layernorm", "mlp_act")
"""Recomputed modules that cost next to nothing; the attention product too where its scores are kept."""


@dataclass
class Findings:
    """What a search saw.

    Attributes:
        fitting: plans whose memory is enough.
        refused: layouts that training would refuse, by what is wrong with the first of each kind.
        too_large: layouts that do not fit, by the kind that takes most of the memory.
        smallest: of those, the one that needs least.
    """

    fitting: list[Plan] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    too_large: Counter[str] = field(default_factory=Counter)
    smallest: Plan | None = None


def search(request: Request, cluster: Cluster | None = None) -> Findings:
    """Looks at every layout; `fitting` is in no order."""
    cluster, found, reasons = cluster or request.cluster, Findings(), dict[tuple[str, ...], str]()
    for config in _configs(request, cluster):
        problem = first_problem(config, cluster, request.cp)
        if problem is not None:
            found.refused[reasons.setdefault(problem.fields, problem.text)] += 1
            continue
        plan = Plan(request.job(config, cluster))
        if plan.fits:
            found.fitting.append(plan)
            continue
        found.too_large[_largest_kind(plan)] += 1
        if found.smallest is None or plan.memory_bytes < found.smallest.memory_bytes:
            found.smallest = plan
    return found


def _largest_kind(plan: Plan) -> str:
    memory = max(plan.memories, key=lambda each: each.total)
    return max((each.name for each in fields(memory)), key=lambda name: getattr(memory, name))


def fastest(plans: list[Plan], count: int) -> list[Plan]:
    """The first few by time. A bound without the pipeline's bubble tells which ones need be timed at all."""
    best: list[Plan] = []
    for bound, _, plan in sorted((least_seconds(p.job), i, p) for i, p in enumerate(plans)):
        if len(best) == count and bound >= best[-1].time.seconds:
            break
        best = sorted([*best, plan], key=lambda each: each.time.seconds)[:count]
    return best


def _configs(request: Request, cluster: Cluster) -> Iterator[Config]:
    """Sizes that divide the world, and every choice that means something with them."""
    base, ranks = request.config, cluster.world_size // request.cp
    if base.training.global_batch_size is None:
        raise UserError("--search needs --global-batch-size: layouts are compared by the time of one step")
    for tp, pp in product(_divisors(cluster.gpus_per_node), _divisors(ranks)):
        if ranks % (tp * pp) or pp > base.model.num_layers:
            continue
        sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
        if any(
            getattr(base.parallel, name) != value for name, value in sizes.items() if name in request.given
        ):
            continue
        for values in _choices(request, tp, pp, ranks // (tp * pp)):
            yield with_even_stages(with_layout(base, **sizes, **values))


def _choices(request: Request, tp: int, pp: int, dp: int) -> Iterator[dict[str, Any]]:
    """What is left to choose once the sizes are; what was given by flag stays as it was."""
    base, given = request.config, request.given
    ways: dict[str, list[Any]] = {
        "micro_batch_size": _micro_batches(base, dp),
        "zero_stage": [0] if dp == 1 else [0, 1, 2, 3],
        "sequence_parallel": [False, True] if tp > 1 else [False],
    }
    free = {name: values for name, values in ways.items() if name not in given}
    pipelines: list[dict[str, Any]] = [{}]
    if not given & PIPELINE_FIELDS:
        pipelines = _pipelines(base, pp)
    recomputes: list[dict[str, Any]] = [{}]
    if not given & {"recompute_granularity", "recompute_modules"}:
        recomputes = _recomputes(request.job())
    for pipeline, recompute, values in product(pipelines, recomputes, product(*free.values())):
        yield {**pipeline, **recompute, **dict(zip(free, values, strict=True))}


def _micro_batches(base: Config, dp: int) -> list[int]:
    samples = base.training.global_batch_size or 1
    sizes = [2**power for power in range(MAX_MICRO_BATCH.bit_length())]
    return [size for size in sizes if samples % (size * dp) == 0] or [1]


def _pipelines(base: Config, pp: int) -> list[dict[str, Any]]:
    if pp == 1:
        return [{"pipeline_schedule": "1f1b"}]
    own = base.model.num_layers // pp
    chunks = [
        count for count in range(2, min(own, MAX_CHUNKS) + 1) if base.model.num_layers % (pp * count) == 0
    ]
    plain = [{"pipeline_schedule": name} for name in ("1f1b", "zb-h1", *(["zb-v"] if own >= 2 else []))]
    return [
        *plain,
        *(
            {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": count}
            for count in chunks
        ),
    ]


def _recomputes(job: Job) -> list[dict[str, Any]]:
    modules = (*CHEAP_MODULES, "core_attn") if job.program.keeps_scores else CHEAP_MODULES
    return [
        {"recompute_granularity": None},
        {"recompute_granularity": "selective", "recompute_modules": modules},
        {"recompute_granularity": "full"},
    ]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
