"""Print the planner's output: a plan or a search, as text or JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megalite.config.model.model_config import CONVENTION
from megalite.plan.estimate import RunPlan, as_object, duration, large, plain, run_costs
from megalite.plan.goodput import GoodputPlan
from megalite.plan.layout_fields import layout_name, legend_lines, routing_line
from megalite.plan.layout_search import (
    NUM_NEAREST,
    SIMILAR,
    SearchResult,
    Watch,
    fastest,
    largest_kind,
    ranked,
    search,
    watch_nothing,
)
from megalite.plan.optimizer_update import (
    NODE_MEMORY_GB,
    largest_offloaded_state,
    offload_seconds,
    updates_under_forward,
)
from megalite.plan.plan_options import Scaling
from megalite.plan.plan_request import Request, has_gemms, read_request, start_command
from megalite.plan.planned_run import PlannedRun, run_problems
from megalite.plan.rank_memory import (
    TIGHT_SHARE,
    RankMemory,
    activation_parts,
    logit_parts,
    node_host_bytes,
)
from megalite.plan.scaling import as_objects, plan_scaling, scaling_svg, scaling_title, table_lines
from megalite.plan.uncertainty import HOST_BOUND, narrowing
from megalite.utils.commands import command_lines
from megalite.utils.errors import ConfigError, UserError, counted
from megalite.utils.files import write_output
from megalite.utils.hardware.gpus import GPUS

_GB = 1e9
_KINDS = {
    "gemms": "GEMMs",
    "attention": "attention",
    "memory_bound": "memory-bound kernels",
    "tp": "tp communication",
    "cp": "cp communication",
    "ep": "ep communication",
    "dp": "dp communication",
    "pp": "pp communication",
    "launch": "kernel launches",
    "offload": "offloading",
}
"""Names of the fields of `WorkSeconds` in the output."""
_COST_COLUMNS = {"days": "days", "MWh": "energy_mwh", "price": "price"}
"""Columns of a search's table if the run has a length, with their keys in `run_costs`."""
_WIDTHS = {"s/iter": 8, "TFLOP/s": 8, "MFU": 6, "GB ": 8, "bubble": 7, "days": 8, "MWh": 8, "price": 11}
"""Column widths of a search's table. The table fits 80 columns, or 100 with costs."""
NO_COMMAND = (
    "this layout cannot be started: --search tries all other layouts on these GPUs, and if none fits, it "
    "names a cluster that is large enough"
)
_THRIFTY = {"micro_batch_size": 1, "recompute_granularity": "full", "pipeline_schedule": "1f1b"}
"""Options that need the least memory on a GPU. They suffice to find out whether any layout fits."""
_MAX_GROWTH = 1024
"""Largest cluster to try if no layout fits, as a multiple of the requested one."""


def answer(arguments: Sequence[str], watch: Watch = watch_nothing) -> Iterable[str]:
    """Return the lines of a plan or of a search.

    Raises:
        UserError: the command line is invalid, or no layout fits the cluster.
    """
    request = read_request(arguments)
    if request.scaling is not None:
        return _scaling(request, request.scaling)
    if request.top is not None:
        return _all(request, request.top, watch)
    plan = requested_plan(request)
    if request.is_json:
        return [json.dumps(_object(request, plan))]
    command = command_lines(start_command(request, plan.run.config)) if plan.fits else [NO_COMMAND]
    return [*plan_lines(request, plan), "", *command]


def requested_plan(request: Request) -> RunPlan:
    """Return the plan of the requested layout.

    Raises:
        ConfigError: training would reject it.
    """
    if problems := run_problems(request.config, request.cluster):
        raise ConfigError(problems)
    return RunPlan(request.planned_run())


def search_fitting(request: Request, watch: Watch = watch_nothing) -> SearchResult:
    """Return the result of a search in which a layout fits.

    Raises:
        UserError: none fits.
    """
    found = search(request, watch=watch)
    if not found.fitting:
        raise UserError(nothing_fits(request, found, watch))
    return found


def _scaling(request: Request, scaling: Scaling) -> Iterable[str]:
    points = list(plan_scaling(request))
    if scaling.svg is not None:
        write_output(scaling.svg, scaling_svg(points, scaling_title(request)), "--svg")
    if request.is_json:
        return [json.dumps({"scaling": as_objects(points), "notices": [*request.assumed, *request.notices]})]
    rates = request.cluster.network_gbps, scaling.ethernet_gbps
    networks = "GB/s per GPU to other nodes: InfiniBand {}, Ethernet {}".format(*map(plain, rates))
    return [*_assumptions(request), *table_lines(points), networks]


def _all(request: Request, top: int, watch: Watch) -> Iterable[str]:
    found = search_fitting(request, watch)
    best = ranked(found.fitting, top, watch)
    if not request.is_json:
        return search_lines(request, best, found)
    return [
        json.dumps(
            {
                "layouts": [_object(request, plan) for plan in best],
                "fitting": len(found.fitting),
                "too_large": found.too_large,
                "refused": found.rejected,
            }
        )
    ]


def _object(request: Request, plan: RunPlan) -> dict[str, Any]:
    goodput = goodput_of(request, plan)
    return {
        **as_object(plan, request.costs),
        **({} if goodput is None else {"goodput": goodput.as_object()}),
        "assumed": list(request.assumed),
        "notices": list(request.notices),
        "command": start_command(request, plan.run.config),
    }


def plan_lines(request: Request, plan: RunPlan) -> Iterator[str]:
    """Yield the plan of one layout, without the command that starts it."""
    run, time = plan.run, plan.time
    yield from _assumptions(request)
    yield (
        f"{large(plan.parameters)} parameters on {counted(run.cluster.world_size, 'GPU')}: "
        f"{_sizes_text(run)}, {counted(run.num_microbatches, 'microbatch', 'es')} of "
        f"{counted(run.config.training.micro_batch_size, 'sample')} per replica"
    )
    if routing := routing_line(run.config):
        yield f"assumed: {routing}"
    yield ""
    yield from _memory_table(plan)
    yield from _offload_lines(plan)
    yield ""
    works = {name: getattr(time.work, kind) for kind, name in _KINDS.items()}
    works["waiting for stages"] = time.waiting
    shares = {name: 100 * seconds / time.seconds for name, seconds in works.items()}
    parts = ", ".join(f"{name} {share:.0f}%" for name, share in shares.items() if share >= 0.5)
    yield f"iteration      {time.seconds:.3f} s, on the busiest rank: {parts}"
    yield f"tokens/s       {plan.tokens_per_second:,.0f}"
    yield f"TFLOP/s        {plain(plan.tflops_per_gpu)} per GPU, MFU {plan.mfu:.1%} ({CONVENTION})"
    yield f"bubble         {time.bubble_fraction:.1%} of the time, for the average rank"
    yield from _interval_lines(plan)
    if time.work.launch > HOST_BOUND * time.seconds:
        yield from textwrap.wrap(f"warning: {_host_bound(plan)}", 80, break_on_hyphens=False)
    yield from _cost_lines(request, plan)
    yield from _goodput_lines(request, plan)


def _sizes_text(run: PlannedRun, joined_by: str = " x ") -> str:
    """Return the sizes of the axes, and of those of experts if they have their own."""
    parallel = run.config.parallel
    text = joined_by.join(f"{name} {size}" for name, size in run.sizes.items())
    return f"{text} (experts: ep {parallel.ep}, etp {parallel.etp})" if parallel.has_expert_axes else text


def _assumptions(request: Request) -> Iterator[str]:
    for text in request.notices:
        yield f"note: {text}"
    for text in request.assumed:
        yield f"assumed: {text}"


def _memory_table(plan: RunPlan) -> Iterator[str]:
    names = RankMemory._fields
    widths = [max(len(name), 6) + 1 for name in (*names, "total")]
    yield "GB/rank" + "".join(
        f"{name:>{width}}" for name, width in zip((*names, "total"), widths, strict=True)
    )
    memories = plan.memories
    largest = max(range(len(memories)), key=lambda rank: memories[rank].total)
    rows = {0: "first", len(memories) - 1: "last"}
    if len(memories) == 1:
        rows = {0: "every"}
    rows.setdefault(largest, f"stage {largest}")
    for rank, name in sorted(rows.items()):
        values = [getattr(memories[rank], each) for each in (*names, "total")]
        yield f"{name:7}" + "".join(
            f"{value / _GB:{width}.2f}" for value, width in zip(values, widths, strict=True)
        )
    parts = activation_parts(plan.run, largest, memories[largest].activations)
    yield from _part_lines("activations", rows[largest], parts)
    for rank, name in sorted(rows.items()):
        if memories[rank].logits:
            yield from _part_lines("logits", name, logit_parts(plan.run))
    available = plan.run.cluster.gpu.memory_bytes
    left = (available - plan.memory_bytes) / _GB
    result = f"fits, {left:.1f} GB are left" if plan.fits else f"does not fit: {-left:.1f} GB too much"
    yield f"of {available / _GB:.1f} GB (10^9 bytes) per GPU: {result}"
    if plan.host_bytes:
        of_node = plan.host_bytes * plan.run.cluster.ranks_per_node
        yield (
            f"host memory    {plan.host_bytes / _GB:.1f} GB of activations per rank, up to "
            f"{of_node / _GB:.1f} GB per node"
        )
    if plan.run.zero_stage == 3 and plan.run.pp > 1:
        kept = "kept for an iteration" if plan.run.gathers_once else "freed after each use"
        choice = plan.run.config.parallel.fsdp_reshard_after_forward
        yield f"gathered weights are {kept} (--fsdp-reshard-after-forward {choice})"
    if (host := node_host_bytes(plan.run)) > NODE_MEMORY_GB * _GB:
        yield (
            f"warning: offloading needs {host / _GB:.0f} GB of host memory per node, and nodes usually have "
            f"{NODE_MEMORY_GB:.0f} GB"
        )
    if plan.is_tight:
        yield f"warning: {_tight(plan)}"


def _part_lines(kind: str, rank: str, parts: Mapping[str, float]) -> list[str]:
    """Return lines with the parts of a kind of memory, the largest first; those below 5 MB are omitted."""
    sizes = sorted(parts.items(), key=lambda item: -item[1])
    texts = [f"{part} {size / _GB:.2f}" for part, size in sizes if size >= 0.005 * _GB]
    line = f"{kind:14} {rank}: {', '.join(texts) or 'under 0.01'}"
    return textwrap.wrap(line, 80, subsequent_indent=" " * 15, break_long_words=False)


def _offload_lines(plan: RunPlan) -> Iterator[str]:
    """Yield where the offloaded optimizer state is, and the traffic and time of its update."""
    run, state = plan.run, largest_offloaded_state(plan.run)
    if state is None:
        return
    of_node = state.host * run.cluster.ranks_per_node
    places = f"{state.host / _GB:.2f} GB of host memory"
    if state.file:
        places += f" and {state.file / _GB:.2f} GB on the disk"
    yield f"offloaded      {places} per rank, {of_node / _GB:.0f} GB of host memory per node"
    seconds = offload_seconds(run, state)
    if state.gradients:
        yield (
            f"each backward  {state.gradients / _GB:.2f} GB of gradients down in {seconds.gradients:.2f} s, "
            "at the same time"
        )
    moved = f"{state.down / _GB:.2f} GB down in {seconds.down:.2f} s, " if state.down else ""
    moved += f"{state.up / _GB:.2f} GB up in {seconds.up:.2f} s, update {seconds.update:.2f} s"
    if state.file:
        moved += f", disk {state.disk / _GB:.2f} GB in {seconds.disk:.2f} s"
    others = "each other and the next forward" if updates_under_forward(run) else "each other"
    yield f"each update    {moved}; they overlap {others}"


def _tight(plan: RunPlan) -> str:
    share = plan.memory_bytes / plan.run.cluster.gpu.memory_bytes
    return (
        f"this layout takes {share:.0%} of a GPU's memory, and plans are typically off by 4 to 8%: it may "
        "run out of memory"
    )


def _host_bound(plan: RunPlan) -> str:
    training, share = plan.run.config.training, plan.time.work.launch / plan.time.seconds
    without = "" if training.fp8_format is None else f", or remove {training.fp8_flag}"
    return (
        f"for {share:.0%} of the time the GPU waits for the host, which launches kernels more slowly than "
        f"they run: pass a --micro-batch-size above {training.micro_batch_size}{without}"
    )


def _interval_lines(plan: RunPlan) -> Iterator[str]:
    """Yield the 80% intervals, the published runs that they come from, and what would narrow them."""
    time, memory = plan.intervals["time"], plan.intervals["memory"]
    seconds = f"{time.low:.3f} to {time.high:.3f} s"
    yield f"80% interval   {seconds}, from {time.settings} published settings: {time.kind}"
    sizes = f"{memory.low / _GB:.1f} to {memory.high / _GB:.1f} GB"
    yield f"{'':15}{sizes}, from {memory.settings}: {memory.kind}"
    measured, share = narrowing(plan.run, plan.time)
    yield f"narrower with  {measured}: {share:.0%} of the time;"
    yield f"{'':15}or iterations in this layout (tools/autotune.py)"


def _cost_lines(request: Request, plan: RunPlan) -> Iterator[str]:
    costs = run_costs(plan, request.costs)
    if not costs:
        return
    yield (
        f"whole run      {large(costs['train_tokens'])} tokens: {duration(costs['days'])}, "
        f"{plain(costs['gpu_hours'])} GPU hours"
    )
    if "energy_mwh" in costs:
        energy = costs["energy_mwh"]
        yield f"energy         {f'{plain(energy)} MWh' if energy >= 1 else f'{plain(1e3 * energy)} kWh'}"
    if "price" in costs:
        price = f"{plain(costs['price'])} in the currency of --price-per-gpu-hour {request.costs.price:g}"
        yield f"price          {price}"


def goodput_of(request: Request, plan: RunPlan) -> GoodputPlan | None:
    """Return the plan on nodes that fail; None without --node-mtbf."""
    return None if request.reliability is None else GoodputPlan(plan, request.reliability, request.costs)


def _goodput_lines(request: Request, plan: RunPlan) -> Iterator[str]:
    goodput = goodput_of(request, plan)
    if goodput is not None:
        yield ""
        yield from goodput.lines()


def search_lines(request: Request, best: Sequence[RunPlan], found: SearchResult) -> Iterator[str]:
    """Yield the table of a search, the numbers of other layouts, and the command of the first layout."""
    yield from _assumptions(request)
    if best[0].run.config.optimizer.offloads_optimizer and not request.config.optimizer.offloads_optimizer:
        yield "note: no layout fits with the optimizer state on the GPU: these keep it in host memory"
    if (
        best[0].run.config.recompute.cpu_offload_activations
        and not request.config.recompute.cpu_offload_activations
    ):
        yield "note: no layout fits with all activations on the GPU: these keep them in host memory"
    if routing := next(filter(None, (routing_line(plan.run.config) for plan in best)), None):
        yield f"assumed: {routing}"
    samples, length = request.config.training.global_batch_size or 0, request.config.model.seq_length
    yield f"iteration: {counted(samples, 'sample')} of {length:,} tokens, {large(samples * length)} in all"
    rows = [_row(request, plan) for plan in best]
    yield "".join(f"{name:>{_WIDTHS[name]}}" for name in rows[0]) + "  layout"
    for plan, row in zip(best, rows, strict=True):
        cells = "".join(f"{cell:>{_WIDTHS[name]}}" for name, cell in row.items())
        yield f"{cells}  {layout_name(plan.run)}"
    yield ""
    yield from textwrap.wrap(_choice(best[0], found), 80, break_long_words=False, break_on_hyphens=False)
    yield "TFLOP/s: per GPU; GB (10^9 bytes): memory of the largest rank"
    costs = run_costs(best[0], request.costs)
    if costs:
        price = request.costs.price
        currency = "" if price is None else f"; price in the currency of --price-per-gpu-hour {price:g}"
        yield f"days and costs: for {large(costs['train_tokens'])} tokens{currency}"
    else:
        yield "bubble: share of the time, for the average rank"
    yield from legend_lines([layout_name(plan.run) for plan in best])
    yield "first row:"
    yield from _interval_lines(best[0])
    yield f"{counted(len(found.fitting), 'layout')} fit{'s' if len(found.fitting) == 1 else ''}"
    available = request.cluster.gpu.memory_bytes / _GB
    if any(plan.is_tight for plan in best):
        yield (
            f"! takes more than {TIGHT_SHARE:.0%} of a GPU's {available:.1f} GB: plans are typically off by "
            "4 to 8%, so it may run out of memory"
        )
    if found.too_large:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in found.too_large.most_common())
        number = sum(found.too_large.values())
        yield f"{number} more do not fit in {available:.1f} GB; largest part of their memory: {kinds}"
    for text, count in found.rejected.most_common():
        yield f"{count} more are rejected, for example: {text}"
    yield from _goodput_lines(request, best[0])
    yield ""
    if best[0].is_tight:
        yield f"warning: {_tight(best[0])}"
    yield from command_lines(start_command(request, best[0].run.config))


def _choice(chosen: RunPlan, found: SearchResult) -> str:
    """Return why the first row is the layout to use, and how much faster the fastest layout is."""
    (best,) = fastest(found.fitting, 1)
    if best is chosen:
        return "first row: the fastest layout, and the one that --layout auto chooses"
    faster = chosen.time.seconds / best.time.seconds - 1
    name = f"{layout_name(best.run)} at {best.time.seconds:.3f} s{'!' if best.is_tight else ''}"
    limit = f"{SIMILAR - 1:.0%} of the fastest{' that is not tight (!)' if best.is_tight else ''}"
    return (
        f"first row: the simplest layout within {limit}, the one that --layout auto chooses; the fastest is "
        f"{name}, {faster:.1%} faster"
    )


def _row(request: Request, plan: RunPlan) -> dict[str, str]:
    """Return the cells of a search's table, by column: with costs, or with the bubble."""
    costs = run_costs(plan, request.costs)
    row = {
        "s/iter": f"{plan.time.seconds:.3f}",
        "TFLOP/s": plain(plan.tflops_per_gpu),
        "MFU": f"{plan.mfu:.1%}",
        "GB ": f"{plan.memory_bytes / _GB:.1f}{'!' if plan.is_tight else ' '}",
    }
    if not costs:
        return row | {"bubble": f"{plan.time.bubble_fraction:.1%}"}
    return row | {name: plain(costs[key]) for name, key in _COST_COLUMNS.items() if key in costs}


def nothing_fits(request: Request, found: SearchResult, watch: Watch = watch_nothing) -> str:
    """Return by how much the smallest layouts are too large, and a cluster that is large enough."""
    cluster, nearest = request.cluster, found.nearest(NUM_NEAREST)
    if not nearest:
        reasons = "; ".join(text for text, _ in found.rejected.most_common(3)) or "no tp x pp divides it"
        return f"--world-size {cluster.world_size}: training rejects every layout: {reasons}"
    plan, *others = nearest
    needed, available = plan.memory_bytes / _GB, cluster.gpu.memory_bytes / _GB
    more = "".join(
        f", {layout_name(each.run)} lacks {each.memory_bytes / _GB - available:.1f} GB" for each in others
    )
    return (
        f"no layout fits {counted(cluster.world_size, 'GPU')} of {available:.1f} GB: the smallest of "
        f"{sum(found.too_large.values())} layouts needs {needed:.1f} GB per GPU, {needed - available:.1f} GB "
        f"too much ({_sizes_text(plan.run, ', ')}; most of it is "
        f"{largest_kind(plan)}{more}); {_remedy(request, plan, watch)}"
    )


def _remedy(request: Request, smallest: RunPlan, watch: Watch) -> str:
    cluster, thrifty = request.cluster, request.with_fixed({**_THRIFTY, "optimizer_cpu_offload": False})
    remedies, growth = list[str](), 2
    while growth <= _MAX_GROWTH and not remedies:
        larger = replace(cluster, world_size=cluster.world_size * growth)
        if search(thrifty, larger, watch).fitting:
            remedies.append(f"--world-size {larger.world_size}")
        growth *= 2
    kinds = [
        name
        for name, gpu in GPUS.items()
        if gpu.memory_bytes >= smallest.memory_bytes and has_gemms(gpu, request.config)
    ]
    if kinds:
        remedies.append(f"--gpu {' or '.join(kinds)}")
    if not remedies:
        return "use a smaller model, shorter samples or more GPUs"
    return f"pass {', or '.join(remedies)}"
