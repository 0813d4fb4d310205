"""Changes of the layout during a run: those of --layout-at, checked before it, and those of --layout-file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

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
from megalite.utils.errors import ConfigError, UserError, counted, one_line
from megalite.utils.files import no_follow
from megalite.utils.hardware.host_memory import free_bytes
from megalite.utils.log import log

_MAX_LAYOUT = 1000
"""Characters of a layout's name."""


def layouts_at(config: Config, world_size: int) -> dict[int, Layout]:
    """Return the layouts of --layout-at, by the iteration after which each begins.

    Raises:
        ConfigError: lists what is wrong with each, in one line.
    """
    layouts: dict[int, Layout] = {}
    problems: list[str] = []
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
            layouts[iteration] = _layout_named(name, config, world_size)
        except ConfigError as error:
            problems += [f"--layout-at {entry}: {problem}" for problem in error.problems]
        except UserError as error:
            problems.append(f"--layout-at {entry}: {error}")
    if problems:
        raise ConfigError(problems)
    return layouts


def _layout_named(name: str, config: Config, world_size: int) -> Layout:
    """Return a layout in which the run of `config` can train.

    Raises:
        UserError: there is no such layout, or the run cannot train in it.
    """
    layout = Layout.parse(name)
    if layout.world_size != world_size:
        raise UserError(_other_world_size(layout, world_size))
    for degree in ("data_parallel_shard_degree", "num_distributed_optimizer_instances"):
        if getattr(config.parallel, degree) is not None and layout.shard is None and layout.size("dp") > 1:
            raise UserError(
                f"{layout} does not keep the groups of {flag_of(degree)}: write shardN after its dp, for "
                "groups of N replicas"
            )
    layout.apply(config, _global_batch_size(config))
    return layout


def _other_world_size(layout: Layout, world_size: int) -> str:
    num_replicas, rest = divmod(world_size, layout.world_size // layout.size("dp"))
    advice = f"sizes whose product is {world_size}"
    if rest == 0:
        advice = str(replace(layout, sizes={**layout.sizes, "dp": num_replicas}))
    return f"{layout} has {counted(layout.world_size, 'rank')}, and the run {world_size}: write {advice}"


def _global_batch_size(config: Config) -> int:
    assert config.training.global_batch_size is not None  # a rule of the config
    return config.training.global_batch_size


def check_own_models(run: RunContext, layouts: Mapping[int, Layout]) -> None:
    """Check that the program's own model can be built in each layout of --layout-at.

    Raises:
        UserError: it cannot; on every rank.
    """
    for iteration, layout in layouts.items():
        try:
            _check_own_model(run, layout)
        except UserError as error:
            raise UserError(f"--layout-at {iteration}:{layout}: {error}") from None


def _check_own_model(run: RunContext, layout: Layout) -> None:
    """Build the first stage of the program's own model, if it has one, on meta tensors."""
    if is_own_model(run.providers.model):
        config = layout.apply(run.config, _global_batch_size(run.config))
        first = Topology.on_paper(config.mesh.sizes_in(layout.world_size), config.mesh.table)
        with meta_tensors():
            build_chunks(config, first, build_stage=run.providers.model)


class LayoutChanges:
    """Changes of the layout of a run: those of --layout-at, and those that --layout-file asks for.

    Args:
        layouts: those of --layout-at, by the iteration after which each begins.
        plan: plan of the first layout.
        explained: stack in which the run's later errors of memory are explained.

    Attributes:
        scheduled: what changes the layout, by the iteration after which it does.
    """

    def __init__(
        self,
        trainer: Trainer,
        run: RunContext,
        layouts: Mapping[int, Layout],
        plan: RankPlan,
        explained: ExitStack,
    ) -> None:
        self._trainer, self._run, self._plan, self._explained = trainer, run, plan, explained
        self._mistake = ""  # the last one of the file: one that cannot be deleted is seen again
        self._entries = {
            iteration: (f"--layout-at {iteration}:{layout}", layout) for iteration, layout in layouts.items()
        }
        for entry, layout in self._entries.values():
            self._planned(layout).warn_of_memory(f"{entry}: ")
        passed = (iteration for iteration in layouts if iteration <= trainer.progress.iteration)
        self._log_memory_of_next(max(passed, default=1) - 1)
        self.scheduled = {
            iteration: partial(self._change, *entry, then=partial(self._log_memory_of_next, iteration))
            for iteration, entry in self._entries.items()
        }

    def requested(self) -> Relayout | None:
        """Return what changes the layout to that in the file of --layout-file, and delete the file.

        Every rank must call it. Return None, and log why, if the run cannot train in this layout.
        """
        path = Path(self._run.config.checkpoint.layout_file or "")
        topology = self._trainer.topology
        text, mistake = topology.world.object_of_first(
            _take(path) if topology.rank == 0 else ("", None), "layout file"
        )
        entry = f"--layout-file {path}, {text}" if text else f"--layout-file {path}"
        try:
            if mistake is not None:
                raise UserError(mistake)
            if not text:  # nothing has been written yet
                return None
            layout = _layout_named(text, self._run.config, topology.world_size)
            _check_own_model(self._run, layout)
            self._planned(layout).warn_of_memory(f"{entry}: ")
            if (mistake := self._log_memory(entry)) is not None:
                raise UserError(mistake)
        except UserError as error:
            if (mistake := f"{entry}: {one_line(str(error))}; the layout stays") != self._mistake:
                log.error("%s", mistake)
            self._mistake = mistake
            return None
        return partial(self._change, entry, layout)

    def _planned(self, layout: Layout) -> RankPlan:
        first = self._run.config
        return replace(self._plan, config=layout.apply(first, _global_batch_size(first)))

    def _change(
        self, entry: str, layout: Layout, trainer: Trainer, then: Callable[[], None] = lambda: None
    ) -> LayoutChange:
        begin, before = time.perf_counter(), trainer.topology.sizes
        later = self._planned(layout)
        self._explained.enter_context(naming(f"{entry}: "))
        self._explained.enter_context(later.explains_out_of_memory())
        num_bytes = trainer.change_layout(later.config, later.weight_gathering)
        announce(trainer)
        then()
        seconds = time.perf_counter() - begin
        return LayoutChange(coordinates_text(before), str(layout), seconds, num_bytes)

    def _log_memory_of_next(self, iteration: int) -> None:
        """Log the host memory that the next change of --layout-at needs, if one follows the iteration."""
        if later := [each for each in self._entries if each > iteration]:
            entry, _ = self._entries[min(later)]
            if (mistake := self._log_memory(entry)) is not None:
                log.warning("%s: %s", entry, mistake)

    def _log_memory(self, entry: str) -> str | None:
        """Log the host memory that a change needs; return a mistake if a machine has less. A collective."""
        topology, num_local, free = self._trainer.topology, self._plan.num_local, free_bytes()
        needed = bytes_to_hold(self._trainer.tensors(), topology)
        lacking = 0 if free is None else num_local * needed - free
        both = torch.tensor([needed, lacking], dtype=torch.float64)
        needed, lacking = all_reduce(both, topology.world, ReduceOp.MAX, of="host memory").tolist()
        log.info("%s: the change needs up to %.3f GB of host memory per rank", entry, needed / 1e9)
        mistake = f"{lacking / 1e9:.1f} GB of it are not free: save, and start again in this layout"
        return mistake if lacking > 0 else None


def _take(path: Path) -> tuple[str, str | None]:
    """Return the text of a file, which is deleted unless it is empty, and why that is impossible if it is."""
    try:
        with open(path, encoding="utf-8", opener=no_follow) as file:
            text = file.read(_MAX_LAYOUT).strip()
        if text:
            path.unlink()
    except FileNotFoundError:  # it has been read since ranks last looked for it
        return "", None
    except (OSError, UnicodeError) as error:
        return "", f"it cannot be read and deleted ({getattr(error, 'strerror', None) or error})"
    return text, None


@contextmanager
def naming(entry: str) -> Iterator[None]:
    """Name the change in an error of memory: it says nothing about the first layout, which may be chosen."""
    try:
        yield
    except MemoryExhausted as error:
        named = UserError(f"{entry}{error}")
        named.on_one_rank = True
        raise named from None
