"""Train on one rank of a run, from its parsed command line to the end."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial

from torch.distributed import Store

from megalite.checkpoint.lease import hold_folder
from megalite.config import Config, check_config
from megalite.config.config import layout_source
from megalite.config.validate import problems_in_any_layout, unused_options
from megalite.data.samples import Samples
from megalite.data.tokenizers.tokenizer import configured_tokenizer
from megalite.distributed.rendezvous import Launch, refusal_reported, several_by_other_launcher
from megalite.distributed.topology import Topology
from megalite.frontends.command_line import ParsedRun
from megalite.model.stage import StageProvider, is_own_model
from megalite.observe.verify.layouts import layouts_named
from megalite.observe.verify.verification import verify_layouts
from megalite.plan.dry_run.dry_run import dry_run
from megalite.plan.rank_plan import LayoutTrial, RankPlan, train_in_chosen_layout
from megalite.train.callbacks import default_callbacks
from megalite.train.inprocess_restart import Start, train_through_losses
from megalite.train.layout_changes import LayoutChanges, check_own_models, layouts_at
from megalite.train.loop import HOOKS, Callback, overrides, train
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
from megalite.train.trainer import Trainer
from megalite.utils.errors import ConfigError, UserError, check_call, kind_of, one_line
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
    if not config.checkpoint.inprocess_restart:
        return _train_launched(parsed, providers, callbacks)
    if launch.world_size == 1 and not config.checkpoint.join_run:
        notices = [*parsed.notices, "--inprocess-restart has no effect: the launcher has started one rank"]
        return _train_launched(parsed._replace(notices=notices), providers, callbacks)
    train = partial(_train_launched, parsed, providers, callbacks)
    train_through_losses(config, launch, settings_of(config), train)


def _train_launched(
    parsed: ParsedRun, providers: Providers, callbacks: Sequence[Callback], start: Start | None = None
) -> None:
    """Train as the rank that the environment names; return if the processes form a new group.

    Args:
        start: this start, if the process may start again.

    Raises:
        SystemExit: with the exit status.
    """
    with refusal_reported():
        launch = Launch.from_environment()
        config = _with_layout_source(parsed, providers, launch)
        if config.parallel.layout == "manual":
            notices = [*parsed.notices, *_unused(config, launch.world_size)]
            if config.parallel.calibration is not None:
                notices.append("--calibration has no effect: the layout is not chosen (--layout auto)")
            prepare_process(config, notices, launch)

    with listen(config, launch) as signals:

        def train_in(trial: LayoutTrial) -> int:
            unused = _unused(trial.config, launch.world_size)
            prepare_process(trial.config, [*parsed.notices, *unused], trial.launch)
            for line in trial.lines:
                log.info("%s", line)
            return train_rank(trial.config, trial.launch, signals, callbacks, providers, trial.store, start)

        if config.parallel.layout == "manual":
            status = train_rank(config, launch, signals, callbacks, providers, start=start)
        else:
            configure_logging(launch.rank)
            settings = settings_of(config)
            status = train_in_chosen_layout(
                config, parsed.set_fields, launch, settings, _with_vocabulary, train_in
            )
        if start is not None and start.left_at is not None:
            return
        # Exit inside the block, so that later signals do not change the exit status.
        raise SystemExit(status)


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Check that each callback is a Callback, and that its hooks accept their arguments.

    Raises:
        UserError: a callback has another type, overrides no hook, or overrides one with other arguments; it
            overrides only one of `state` and `load_state`, or another callback has a state of the same name.
    """
    with_state: set[str] = set()
    if not isinstance(callbacks, Sequence):
        raise UserError(f"callbacks is {kind_of(callbacks)}: pass a list of callbacks")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise UserError(f"callbacks holds {kind_of(callback)}: pass instances of subclasses of Callback")
        name = type(callback).__name__
        own = [hook for hook in HOOKS if overrides(callback, hook)]
        if not own:
            raise UserError(f"{name} overrides no hook of Callback: define one of {', '.join(HOOKS)}")
        for hook in own:
            _, *arguments = inspect.signature(HOOKS[hook]).parameters
            check_call(getattr(callback, hook), f"{name}.{hook}", *arguments)
        if ("state" in own) != ("load_state" in own):
            missing = "load_state" if "state" in own else "state"
            raise UserError(f"{name} does not define {missing}: define state and load_state, or neither")
        if "state" in own and name in with_state:
            raise UserError(
                f"callbacks holds two {name} with a state, which a checkpoint saves by the class's name: "
                "make a subclass for one of them"
            )
        with_state |= {name} if "state" in own else set()


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


def train_rank(
    config: Config,
    launch: Launch,
    signals: StopSignals,
    callbacks: Sequence[Callback],
    providers: Providers,
    store: Store | None = None,
    start: Start | None = None,
) -> int:
    """Join the other ranks, train, and return the exit status.

    Args:
        store: the store of this start, if it is open already.
        start: see `_train_launched`.
    """
    with refusal_reported() if store is None else nullcontext():
        layouts = layouts_at(config, launch.world_size)
    with Topology.start(config.mesh, launch, must_agree=settings_of(config), store=store) as topology:
        exit_if_switched_off(config.training, topology)
        bind_to_cores(config.parallel, topology.device)
        with hold_folder(config.checkpoint.save, topology) as lease:
            run = resolve_run(config, topology, lease=lease, providers=providers)
            check_checkpoint_folders(run.config.checkpoint, launch, topology)
            check_own_models(run, layouts)
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
                del datasets  # the trainer's, until the layout changes
                announce(trainer)
                if is_own_model(providers.model):
                    warn_if_unverified(run)
                states = resume(trainer, launch)
                can_grow = start.can_grow if start is not None else lambda: False
                stop_conditions = StopConditions(
                    config.training, topology, signals, lease, config.checkpoint.layout_file, can_grow
                )
                if start is not None:
                    start.writers = writers
                    callbacks = [*callbacks, start]
                changes = LayoutChanges(trainer, run, layouts, plan, explained)
                return train(
                    trainer,
                    stop_conditions,
                    [*callbacks, *evaluates_tasks(writers), *default_callbacks(writers, run.config)],
                    states,
                    changes.scheduled,
                    changes.requested,
                )
