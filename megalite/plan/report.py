"""A plan, and a search, as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from megalite.plan.estimate import TIGHT_SHARE, Plan, run_costs
from megalite.plan.flops import CONVENTION
from megalite.plan.layout import layout_flags
from megalite.plan.memory import Memory
from megalite.plan.program import OWN
from megalite.plan.request import Request, start_command
from megalite.plan.search import Findings

_GB = 1e9
_COST_COLUMNS = {"days": "days", "GPU hours": "gpu_hours", "MWh": "energy_mwh", "price": "price"}
"""Of a search's table where the length of the run is known, by the names that `run_costs` has for them."""
NO_COMMAND = (
    "this layout cannot be started: --search tries every other one on these GPUs, and where none fits says "
    "what would hold the model"
)


def plan_lines(request: Request, plan: Plan) -> Iterator[str]:
    """One layout, in full."""
    job, time = plan.job, plan.time
    cluster = job.cluster
    yield from _assumptions(request)
    yield (
        f"{_large(plan.parameters)} parameters on {_counted(cluster.world_size, 'GPU')}: tp {job.tp} x "
        f"pp {job.pp} x dp {job.dp}, {_counted(job.num_microbatches, 'microbatch', 'es')} of "
        f"{job.config.training.micro_batch_size}"
    )
    yield ""
    yield from _memory_table(plan)
    yield ""
    share = 100 / time.seconds
    works = {**vars(time.work), "bubble": time.waiting}
    parts = ", ".join(f"{name} {value * share:.0f}%" for name, value in works.items() if value * share >= 0.5)
    yield f"iteration      {time.seconds:.3f} s: {parts}"
    yield f"tokens/s       {plan.tokens_per_second:,.0f}"
    yield f"TFLOP/s a GPU  {_plain(plan.tflops_per_gpu)}, MFU {plan.mfu:.1%} ({CONVENTION})"
    yield f"bubble         {time.bubble_fraction:.1%} of the average rank's time"
    yield from _cost_lines(request, plan)
    yield ""
    yield start_command(request, job.config) if plan.fits else NO_COMMAND


def _assumptions(request: Request) -> Iterator[str]:
    for text in request.notices:
        yield f"note: {text}"
    for text in request.assumed:
        yield f"assumed: {text}"
    if request.program != OWN:
        yield f"note: --program {request.program} is planned; the command below starts this program"
    if request.cp > 1:
        yield f"note: --context-parallel-size {request.cp} is planned, but training here has no such axis"


def _memory_table(plan: Plan) -> Iterator[str]:
    names = [field.name for field in fields(Memory)]
    yield "GB a rank   " + "".join(f"{name:>13}" for name in (*names, "total"))
    memories = plan.memories
    heaviest = max(range(len(memories)), key=lambda rank: memories[rank].total)
    rows = {0: "first stage", len(memories) - 1: "last stage"}
    if len(memories) == 1:
        rows = {0: "every rank"}
    rows.setdefault(heaviest, f"stage {heaviest}")
    for rank, name in sorted(rows.items()):
        values = [getattr(memories[rank], each) for each in (*names, "total")]
        yield f"{name:12}" + "".join(f"{value / _GB:13.2f}" for value in values)
    available = plan.job.cluster.gpu.memory_bytes
    left = (available - plan.memory_bytes) / _GB
    verdict = f"fits, {left:.1f} GB are left" if plan.fits else f"does not fit: {-left:.1f} GB too much"
    yield f"of {available / _GB:.1f} GB a GPU: {verdict}"
    if plan.is_tight:
        yield f"warning: {_tight(plan)}"


def _tight(plan: Plan) -> str:
    share = plan.memory_bytes / plan.job.cluster.gpu.memory_bytes
    return (
        f"this layout takes {share:.0%} of a GPU's memory, and a plan is typically off by 4 to 8%: it may "
        "run out of memory"
    )


def _cost_lines(request: Request, plan: Plan) -> Iterator[str]:
    costs = run_costs(plan, request.costs)
    if not costs:
        return
    yield (
        f"whole run      {_large(costs['train_tokens'])} tokens: {_duration(costs['days'])}, "
        f"{_plain(costs['gpu_hours'])} GPU hours"
    )
    if "energy_mwh" in costs:
        energy = costs["energy_mwh"]
        yield (
            f"energy         {_plain(energy)} MWh"
            if energy >= 1
            else f"energy         {_plain(1e3 * energy)} kWh"
        )
    if "price" in costs:
        price = f"{_plain(costs['price'])} in the currency of --price-per-gpu-hour {request.costs.price:g}"
        yield f"price          {price}"


def _large(number: float) -> str:
    """Return a count in trillions, billions or millions, or in full below a million."""
    for unit, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{_plain(number / unit)} {name}"
    return f"{number:,.0f}"


def _plain(number: float) -> str:
    """Return a number with at least four significant digits and never with an exponent."""
    if number == 0:
        return "0"
    decimals = max(0, 3 - math.floor(math.log10(number)))
    text = f"{number:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def _duration(days: float) -> str:
    """Return a length of time in the largest unit of which there is at least one."""
    for name, unit in (("days", 1.0), ("hours", 24.0), ("minutes", 1440.0)):
        if days * unit >= 1:
            return f"{_plain(days * unit)} {name}"
    return f"{_plain(days * 86400)} seconds"


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def search_lines(request: Request, best: Sequence[Plan], found: Findings) -> Iterator[str]:
    """The table of a search, what was left out and why, and the command of the first row."""
    yield from _assumptions(request)
    costs = [run_costs(plan, request.costs) for plan in best]
    columns = [(name, key) for name, key in _COST_COLUMNS.items() if key in costs[0]]
    yield (
        f"{'s/iteration':>12}{'TFLOP/s':>9}{'MFU':>7}{'GB':>7} {'bubble':>8}"
        f"{''.join(f'{name:>12}' for name, _ in columns)}  layout"
    )
    for plan, cost in zip(best, costs, strict=True):
        yield (
            f"{plan.time.seconds:12.3f}{_plain(plan.tflops_per_gpu):>9}{plan.mfu:7.1%}"
            f"{plan.memory_bytes / _GB:7.1f}{'!' if plan.is_tight else ' '}{plan.time.bubble_fraction:8.1%}"
            f"{''.join(f'{_plain(cost[key]):>12}' for _, key in columns)}"
            f"  --dp {plan.job.dp} {' '.join(layout_flags(plan.job.config))}"
        )
    yield ""
    if columns:
        yield from _search_costs(request, costs[0])
    yield f"{_counted(len(found.fitting), 'layout')} fit{'s' if len(found.fitting) == 1 else ''}"
    available = request.cluster.gpu.memory_bytes / _GB
    if any(plan.is_tight for plan in best):
        yield (
            f"! takes more than {TIGHT_SHARE:.0%} of a GPU's {available:.1f} GB: a plan is typically off by "
            "4 to 8%, so this layout may run out of memory"
        )
    if found.too_large:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in found.too_large.most_common())
        yield f"{sum(found.too_large.values())} do not fit in {available:.1f} GB; what takes most: {kinds}"
    for text, count in found.refused.most_common():
        yield f"{count} refused, as: {text}"
    yield ""
    if best[0].is_tight:
        yield f"warning: {_tight(best[0])}"
    yield start_command(request, best[0].job.config)


def _search_costs(request: Request, costs: Mapping[str, float]) -> Iterator[str]:
    """What the table's columns of costs are of."""
    currency = ""
    if "price" in costs:
        currency = f"; price in the currency of --price-per-gpu-hour {request.costs.price:g}"
    yield f"days and costs are of {_large(costs['train_tokens'])} tokens{currency}"
