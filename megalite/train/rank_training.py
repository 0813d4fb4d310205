"""Train on one rank of a run, from its parsed command line to the end."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch.distributed import ReduceOp, Store

from megalite.checkpoint.lease import hold_folder
from megalite.checkpoint.relayout import bytes_to_hold
from megalite.config import Config, check_config
from megalite.config.config import layout_source
from megalite.config.validate import problems_in_any_layout, unused_options
from megalite.data.samples import Samples
from megalite.data.tokenizers.tokenizer import configured_tokenizer
from megalite.distributed.axes import coordinates_text
from megalite.distributed.collectives import all_reduce
from megalite.distributed.rendezvous import (
    Launch,
    refusal_reported,
    several_by_other_launcher,
)
from megalite.distributed.topology import Topology
from megalite.frontends.command_line import ParsedRun
from megalite.model.stage import StageProvider, is_own_model
from megalite.observe.meta_tensors import meta_tensors
from megalite.observe.verify.layouts import Layout, layouts_named
from megalite.observe.verify.verification import verify_layouts
from megalite.plan.dry_run.dry_run import dry_run
from megalite.plan.rank_plan import LayoutTrial, RankPlan, train_in_chosen_layout
from megalite.train.callbacks import default_callbacks
from megalite.train.loop import Callback, check_callbacks, train
from megalite.train.model_chunks import build_chunks
from megalite.train.own_model import warn_if_unverified
from megalite.train.run_context import (
    DatasetProvider,
    Providers,
    RunContext,
    build_data,
    resolve_run,
    with_vocab_size,
)
from megalite.train.setup import (
    announce,
    bind_to_cores,
    check_checkpoint_folders,
    listen,
    open_writers,
    prepare_process,
    resume,
    settings_of,
)
from megalite.train.stopping import StopConditions, StopSignals, exit_if_switched_off
from megalite.train.telemetry.writers import Writers
from megalite.train.trainer import LayoutChange, Relayout, Trainer
from megalite.utils.errors import ConfigError, UserError, counted, one_line
from megalite.utils.log import configure_logging, log, log_notes


def train_parsed_run(
    parsed: ParsedRun,
    provided: tuple[StageProvider | None, DatasetProvider | None, Samples | None],
    callbacks: Sequence[Callback],
) -> None:
    """Train on one rank, or report the dry run, or verify layouts, as the command line says.

    Raises:
        SystemExit: with the exit status, except after a dry run.
        UserError: the config, the provided parts, a file or the cluster have an error.
    """
    with refusal_reported():
        providers = Providers(*provided)
        check_callbacks(callbacks)
        config = parsed.config
        notices = [*parsed.notices, *_unused(config, config.dry_run.world_size)]
        if config.dry_run.dry_run:
            _refuse_several_ranks("--dry-run", "; pass --world-size and --rank")
            return dry_run(config, notices, providers.model)
        if config.dry_run.verify_layouts is not None:
            _refuse_several_ranks("--verify-layouts")
            configure_logging(rank=0)
            log_notes(notices)
            layouts = layouts_named(config.dry_run.verify_layouts, config)
            is_same = verify_layouts(config, layouts, providers=providers)
            raise SystemExit(0 if is_same else 1)
        launch = Launch.from_environment()
        config = _with_layout_source(parsed, providers, launch)
        if config.parallel.layout == "manual":
            notices = [*parsed.notices, *_unused(config, launch.world_size)]
            if config.parallel.calibration is not None:
                notices.append("--calibration has no effect: the layout is not chosen (--layout auto)")
            prepare_process(config, notices, launch)

    with listen(config, launch) as signals:
        # Exit inside the block, so that later signals do not change the exit status.
        if config.parallel.layout == "manual":
            raise SystemExit(train_rank(config, launch, signals, callbacks, providers))

        def train_in(trial: LayoutTrial) -> int:
            unused = _unused(trial.config, launch.world_size)
            prepare_process(trial.config, [*parsed.notices, *unused], trial.launch)
            for line in trial.lines:
                log.info("%s", line)
            return train_rank(trial.config, trial.launch, signals, callbacks, providers, trial.store)

        configure_logging(launch.rank)
        settings = settings_of(config)
        raise SystemExit(
            train_in_chosen_layout(config, parsed.set_fields, launch, settings, _with_vocabulary, train_in)
        )


def _unused(config: Config, world_size: int | None) -> list[str]:
    return [one_line(notice) for notice in unused_options(config, world_size)]


def _refuse_several_ranks(flag: str, more: str = "") -> None:
    if (world_size := os.environ.get("WORLD_SIZE", "1")) != "1":
        started = f"the launcher has started {world_size} (WORLD_SIZE)"
    elif several := several_by_other_launcher():
        _, started = several
    else:
        return
    raise UserError(f"{flag} is one process, but {started}: start it with python{more}")


def _with_layout_source(parsed: ParsedRun, providers: Providers, launch: Launch) -> Config:
    """Return the config with `layout` resolved, and with its global batch size if the layout is chosen.

    Raises:
        ConfigError: the layout is chosen, and the config has mistakes in any layout.
        UserError: --layout auto is set, but the run cannot be planned.
    """
    config, source = parsed.config, layout_source(parsed.config, parsed.set_fields)
    is_default = config.parallel.layout is None
    if source == "auto" and is_own_model(providers.model):
        if not is_default:
            raise UserError(
                "--layout auto plans only models that flags describe, not a program's own model: pass the "
                "layout"
            )
        source = "manual"
    if source == "auto" and is_default:
        check_config(config, launch.world_size)
        global_batch_size = config.global_batch(launch.world_size)
        config = replace(config, training=replace(config.training, global_batch_size=global_batch_size))
    elif source == "auto" and (problems := problems_in_any_layout(config)):
        raise ConfigError(problems)
    return replace(config, parallel=replace(config.parallel, layout=source))


def _with_vocabulary(config: Config) -> Config:
    if config.data.resolved_tokenizer_type is None:
        return config
    return with_vocab_size(config, configured_tokenizer(config.data, config.model.vocab_size))


def task_evaluation(run: RunContext) -> Callable[[Writers], list[Callback]]:
    """Load the tasks of --eval-tasks; return a function that returns the callback for them, if there are any.

    Raises:
        UserError: lm_eval is not installed, or a task cannot be evaluated. Every rank raises it.
    """
    if run.config.training.eval_tasks is None:
        return lambda writers: []
    with run.topology.agreed():
        if importlib.util.find_spec("lm_eval") is None:
            raise UserError('--eval-tasks needs lm-evaluation-harness: pip install "megalite[eval]"')
    from megalite.generate.task_evaluation import TaskEvaluation, load_tasks

    tasks, tokenizer = load_tasks(run), run.tokenizer
    assert tokenizer is not None
    return lambda writers: [TaskEvaluation(tasks, tokenizer, writers)]


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
            layouts[iteration] = layout = Layout.parse(name)
            if layout.world_size != world_size:
                raise UserError(_other_world_size(layout, world_size))
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

    def log_memory(after: int) -> None:
        """Log the host memory that the next change needs, if there is one; a collective."""
        if later := [iteration for iteration in layouts if iteration > after]:
            needed = torch.tensor(float(bytes_to_hold(trainer.tensors())), dtype=torch.float64)
            needed = all_reduce(needed, topology.world, ReduceOp.MAX, of="host memory")
            log.info(
                "--layout-at: the change after iteration %d needs up to %.3f GB of host memory per rank",
                *(min(later), needed.item() / 1e9),
            )

    def change(iteration: int, trainer: Trainer) -> LayoutChange:
        begin, before = time.perf_counter(), topology.sizes
        layout = layouts[iteration]
        new_plan = replace(plan, config=layout.apply(first, _global_batch_size(first)))
        new_plan.warn_of_memory()
        explained.enter_context(new_plan.explains_out_of_memory())
        num_bytes = trainer.change_layout(new_plan.config, new_plan.weight_gathering)
        announce(trainer)
        log_memory(after=iteration)
        seconds = time.perf_counter() - begin
        return LayoutChange(coordinates_text(before), str(layout), seconds, num_bytes)

    log_memory(after=trainer.progress.iteration - 1)
    return {iteration: partial(change, iteration) for iteration in layouts}


def train_rank(
    config: Config,
    launch: Launch,
    signals: StopSignals,
    callbacks: Sequence[Callback],
    providers: Providers,
    store: Store | None = None,
) -> int:
    """Join the other ranks, train, and return the exit status.

    Args:
        store: the store of this start, if it is open already.
    """
    with refusal_reported() if store is None else nullcontext():
        layouts = layouts_at(config, launch.world_size)
    with Topology.start(config.mesh, launch, must_agree=settings_of(config), store=store) as topology:
        exit_if_switched_off(config.training, topology)
        bind_to_cores(config.parallel, topology.device)
        with hold_folder(config.checkpoint.save, topology) as lease:
            run = resolve_run(config, topology, lease=lease, providers=providers)
            check_checkpoint_folders(run.config.checkpoint, launch, topology)
            check_own_model(run, layouts.values())
            evaluates_tasks = task_evaluation(run)
            plan = RankPlan(run.config, topology, providers.model, max(launch.local_world_size, 1))
            plan.check_host_memory()
            plan.warn_of_memory()
            datasets = build_data(run)
            with (
                open_writers(run) as writers,
                plan.explains_out_of_memory(),
                ExitStack() as explained,
                Trainer(run, datasets, plan.weight_gathering()) as trainer,
            ):
                announce(trainer)
                if is_own_model(providers.model):
                    warn_if_unverified(run)
                states = resume(trainer, launch)
                stop_conditions = StopConditions(config.training, topology, signals, lease)
                return train(
                    trainer,
                    stop_conditions,
                    [*callbacks, *evaluates_tasks(writers), *default_callbacks(writers, run.config)],
                    states,
                    relayouts(trainer, layouts, plan, explained),
                )
