"""From a plan's command line to what it prints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from megalite.errors import ConfigError, UserError
from megalite.plan.check import job_problems
from megalite.plan.estimate import Plan, as_object
from megalite.plan.gpu import GPUS
from megalite.plan.report import plan_lines, search_lines
from megalite.plan.request import Request, read_request, start_command
from megalite.plan.search import Findings, fastest, search

_GB = 1e9
THRIFTY = {"micro_batch_size": 1, "recompute_granularity": "full", "pipeline_schedule": "1f1b"}
"""What takes the least memory, and is all that needs trying to see whether anything fits."""
MAX_GROWTH = 1024
"""Times the cluster that are tried where a model fits in none of its layouts."""


def answer(arguments: Sequence[str]) -> Iterable[str]:
    """Lines of a plan or of a search.

    Raises:
        UserError: mistakes of the command line, or a cluster that is too small for any layout.
    """
    request = read_request(arguments)
    return _one(request) if request.top is None else _all(request, request.top)


def _one(request: Request) -> Iterable[str]:
    if problems := job_problems(request.config, request.cluster, request.cp):
        raise ConfigError(problems)
    plan = Plan(request.job())
    if not request.is_json:
        return plan_lines(request, plan)
    return [json.dumps(_object(request, plan))]


def _object(request: Request, plan: Plan) -> dict[str, Any]:
    return {
        **as_object(plan, request.costs),
        "assumed": list(request.assumed),
        "notices": list(request.notices),
        "command": start_command(request, plan.job.config),
    }


def _all(request: Request, top: int) -> Iterable[str]:
    found = search(request)
    if not found.fitting:
        raise UserError(nothing_fits(request, found))
    best = fastest(found.fitting, top)
    if not request.is_json:
        return search_lines(request, best, found)
    return [
        json.dumps(
            {
                "layouts": [_object(request, plan) for plan in best],
                "fitting": len(found.fitting),
                "too_large": found.too_large,
                "refused": found.refused,
            }
        )
    ]


def nothing_fits(request: Request, found: Findings) -> str:
    """By how much the least demanding layout is too large, and what would hold it."""
    cluster, plan = request.cluster, found.smallest
    if plan is None:
        reasons = "; ".join(text for text, _ in found.refused.most_common(3)) or "no sizes divide the world"
        return f"--world-size {cluster.world_size}: there is no layout that training would take: {reasons}"
    needed, available = plan.memory_bytes / _GB, cluster.gpu.memory_bytes / _GB
    gpus = "1 GPU" if cluster.world_size == 1 else f"{cluster.world_size} GPUs"
    return (
        f"no layout fits {gpus} of {available:.1f} GB: the least that one of "
        f"{sum(found.too_large.values())} needs is {needed:.1f} GB a GPU, {needed - available:.1f} GB too "
        f"much (tp {plan.job.tp}, pp {plan.job.pp}, dp {plan.job.dp}); "
        f"{' or '.join(_remedies(request, plan))}"
    )


def _remedies(request: Request, smallest: Plan) -> list[str]:
    cluster, found = request.cluster, list[str]()
    growth, thrifty = 2, request.fixed(THRIFTY)
    while growth <= MAX_GROWTH and not found:
        larger = replace(cluster, world_size=cluster.world_size * growth)
        if search(thrifty, larger).fitting:
            found.append(f"--world-size {larger.world_size} would hold it")
        growth *= 2
    kinds = [name for name, gpu in GPUS.items() if gpu.memory_bytes >= smallest.memory_bytes]
    if kinds:
        found.append(f"{cluster.world_size} of --gpu {', '.join(kinds)}")
    return found or ["a smaller model, shorter samples or more GPUs are what is left"]
