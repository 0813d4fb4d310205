"""A plan, and a search, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from megalite.plan.estimate import Plan, run_costs
from megalite.plan.flops import CONVENTION
from megalite.plan.layout import layout_flags
from megalite.plan.memory import Memory
from megalite.plan.program import OWN
from megalite.plan.request import Request, start_command
from megalite.plan.search import Findings

_GB = 1e9
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
        f"{plan.parameters / 1e9:.3f} billion parameters on {cluster.world_size} GPUs: tp {job.tp} x "
        f"pp {job.pp} x dp {job.dp}, {job.num_microbatches} microbatches of "
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
    yield f"TFLOP/s a GPU  {plan.tflops_per_gpu:.4g}, MFU {plan.mfu:.1%} ({CONVENTION})"
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


def _cost_lines(request: Request, plan: Plan) -> Iterator[str]:
    costs = run_costs(plan, request.costs)
    if not costs:
        return
    yield (
        f"whole run      {costs['train_tokens'] / 1e9:,.3g} billion tokens: {costs['days']:,.2f} days, "
        f"{costs['gpu_hours']:,.0f} GPU hours"
    )
    if "energy_mwh" in costs:
        yield f"energy         {costs['energy_mwh']:,.3g} MWh"
    if "price" in costs:
        yield f"price          {costs['price']:,.0f}"


def search_lines(request: Request, best: Sequence[Plan], found: Findings) -> Iterator[str]:
    """The table of a search, what was left out and why, and the command of the first row."""
    yield from _assumptions(request)
    yield f"{'s/iteration':>12}{'TFLOP/s':>9}{'MFU':>7}{'GB':>7}{'bubble':>8}  layout"
    for plan in best:
        yield (
            f"{plan.time.seconds:12.3f}{plan.tflops_per_gpu:9.1f}{plan.mfu:7.1%}"
            f"{plan.memory_bytes / _GB:7.1f}{plan.time.bubble_fraction:8.1%}  "
            f"--dp {plan.job.dp} {' '.join(layout_flags(plan.job.config))}"
        )
    yield ""
    yield f"{len(found.fitting)} layouts fit"
    if found.too_large:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in found.too_large.most_common())
        available = request.cluster.gpu.memory_bytes / _GB
        yield f"{sum(found.too_large.values())} do not fit in {available:.1f} GB; what takes most: {kinds}"
    for text, count in found.refused.most_common():
        yield f"{count} refused, as: {text}"
    yield ""
    yield start_command(request, best[0].job.config)
