"""Changes of the layout during a run: those of --layout-at, checked before the run and made in it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch.distributed import ReduceOp

from megalite.checkpoint.relayout import bytes_to_hold
from megalite.config import Config
from megalite.config.option import flag_of
from megalite.distributed.axes import coordinates_text
from megalite.distributed.collectives import all_reduce
from megalite.distributed.topology import Topology
from megalite.model.stage import is_own_model
from megalite.observe.meta_tensors import meta_tensors
from megalite.observe.verify.layouts import Layout
from megalite.plan.rank_plan import MemoryExhausted, RankPlan
from megalite.train.model_chunks import build_chunks
from megalite.train.run_context import RunContext
from megalite.train.setup import announce
from megalite.train.trainer import LayoutChange, Relayout, Trainer
from megalite.utils.errors import ConfigError, UserError, counted
from megalite.utils.hardware.host_memory import free_bytes
from megalite.utils.log import log


def layouts_at(config: Config, world_size: int) -> dict[int, Layout]:
    """Return the layouts of --layout-at, by the iteration after which each begins.

    Raises:
        ConfigError: lists what is wrong with each, in one line.
    """
    layouts: dict[int, Layout] = {}
    problems: list[str] = []
    groups = "data_parallel_shard_degree", "num_distributed_optimizer_instances"
    grouped = [name for name in groups if getattr(config.parallel, name) is not None]
    for entry in config.checkpoint.layout_at or ():
        number, _, name = entry.partition(":")
        iteration = int(number)
        num_iterations = config.num_iterations(1)  # does not depend on dp: the global batch size is set
        if iteration <= max(layouts, default=0):
            problems.append(
                f"--layout-at {entry} is not after {max(layouts)}: write them in increasing order"
            )
        elif iteration >= num_iterations:
            problems.append(
                f"--layout-at {entry}: the run ends after iteration {num_iterations}: pass a smaller one"
            )
        try:
            layouts[iteration] = layout = Layout.parse(name)
            if layout.world_size != world_size:
                raise UserError(_other_world_size(layout, world_size))
            if grouped and layout.shard is None and layout.size("dp") > 1:
                raise UserError(
                    f"{layout} does not keep the groups of {flag_of(grouped[0])}: write shardN after its dp, "
                    "for groups of N replicas"
                )
            layout.apply(config, _global_batch_size(config))
        except ConfigError as error:
            problems += [f"--layout-at {entry}: {problem}" for problem in error.problems]
        except UserError as error:
            problems.append(f"--layout-at {entry}: {error}")
    if problems:
        raise ConfigError(problems)
    return layouts


def _other_world_size(layout: Layout, world_size: int) -> str:
    num_replicas, rest = divmod(world_size, layout.world_size // layout.size("dp"))
    advice = f"sizes whose product is {world_size}"
    if rest == 0:
        advice = str(replace(layout, sizes={**layout.sizes, "dp": num_replicas}))
    return f"{layout} has {counted(layout.world_size, 'rank')}, and the run {world_size}: write {advice}"


def _global_batch_size(config: Config) -> int:
    assert config.training.global_batch_size is not None  # a rule of the config
    return config.training.global_batch_size


def check_own_model(run: RunContext, layouts: Collection[Layout]) -> None:
    """Check that the program's own model can be built in each layout, by its first stage on meta tensors.

    Raises:
        UserError: it cannot; on every rank.
    """
    if not is_own_model(run.providers.model):
        return
    for layout in layouts:
        config = layout.apply(run.config, _global_batch_size(run.config))
        first = Topology.on_paper(config.mesh.sizes_in(layout.world_size), config.mesh.table)
        try:
            with meta_tensors():
                build_chunks(config, first, build_stage=run.providers.model)
        except UserError as error:
            raise UserError(f"--layout-at, layout {layout}: {error}") from None


def relayouts(
    trainer: Trainer, layouts: Mapping[int, Layout], plan: RankPlan, explained: ExitStack
) -> dict[int, Relayout]:
    """Return what changes the run to each of the layouts, and log the host memory that this needs.

    Args:
        plan: plan of the first layout.
        explained: stack in which the run's later errors of memory are explained.
    """
    first, topology = trainer.config, trainer.topology

    entries = {iteration: f"--layout-at {iteration}:{layout}: " for iteration, layout in layouts.items()}
    plans = {
        iteration: replace(plan, config=layout.apply(first, _global_batch_size(first)))
        for iteration, layout in layouts.items()
    }

    def log_memory(after: int) -> None:
        """Log the host memory that the next change needs, if there is one; a collective."""
        if later := [iteration for iteration in layouts if iteration > after]:
            needed = torch.tensor(float(bytes_to_hold(trainer.tensors())), dtype=torch.float64)
            needed = all_reduce(needed, topology.world, ReduceOp.MAX, of="host memory")
            entry, per_rank, free = entries[min(later)], needed.item(), free_bytes()
            log.info("%sthe change needs up to %.3f GB of host memory per rank", entry, per_rank / 1e9)
            if free is not None and plan.num_local * per_rank > free:
                log.warning(
                    "%sonly %.1f GB of host memory are free for the %d ranks of this machine: pass "
                    "--use-distributed-optimizer, whose ranks hold less, or save and start again in it",
                    *(entry, free / 1e9, plan.num_local),
                )

    def change(iteration: int, trainer: Trainer) -> LayoutChange:
        begin, before = time.perf_counter(), topology.sizes
        later = plans[iteration]
        explained.enter_context(naming(entries[iteration]))
        explained.enter_context(later.explains_out_of_memory())
        num_bytes = trainer.change_layout(later.config, later.weight_gathering)
        announce(trainer)
        log_memory(after=iteration)
        seconds = time.perf_counter() - begin
        return LayoutChange(coordinates_text(before), str(layouts[iteration]), seconds, num_bytes)

    for iteration, later in plans.items():
        later.warn_of_memory(entries[iteration])
    passed = max((iteration for iteration in layouts if iteration <= trainer.progress.iteration), default=1)
    log_memory(after=passed - 1)
    return {iteration: partial(change, iteration) for iteration in layouts}


@contextmanager
def naming(entry: str) -> Iterator[None]:
    """Name the change in an error of memory: it says nothing about the first layout, which may be chosen."""
    try:
        yield
    except MemoryExhausted as error:
        named = UserError(f"{entry}{error}")
        named.on_one_rank = True
        raise named from None
