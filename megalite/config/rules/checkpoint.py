"""Rules of what a run takes from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.problem import Problem

_NON_PERSISTENT = "non_persistent_save_interval"
_OVERRIDE, _KEEP = "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"


def schedule(config: Config, world_size: int | None) -> Iterator[Problem]:
    """There is one schedule to go on with."""
    if (
        config.checkpoint.override_opt_param_scheduler
        and config.checkpoint.use_checkpoint_opt_param_scheduler
    ):
        yield Problem(
            (_OVERRIDE, _KEEP),
            "--override-opt-param-scheduler takes the given schedule and "
            "--use-checkpoint-opt-param-scheduler the checkpoint's: leave one out",
        )


def model(config: Config, world_size: int | None) -> Iterator[Problem]:
    """There is a checkpoint to take the model from."""
    if config.checkpoint.use_checkpoint_args and config.checkpoint.load is None:
        yield Problem(
            ("use_checkpoint_args", "load"),
            "--use-checkpoint-args takes the model from --load, which is missing: give it, or leave both out",
        )


def finetune(config: Config, world_size: int | None) -> Iterator[Problem]:
    """A run of its own does not write over the one that it starts from."""
    checkpoint = config.checkpoint
    if checkpoint.finetune and checkpoint.loads_own:
        yield Problem(
            ("finetune", "save", "load"),
            f"--finetune starts a run of its own at iteration 0, but --save {checkpoint.save} is --load's: "
            "give another --save",
        )


def no_load_optim(config: Config, world_size: int | None) -> Iterator[Problem]:
    """A run that comes back finds the optimizer's state that it saved."""
    checkpoint = config.checkpoint
    if (
        not checkpoint.load_optim
        and checkpoint.save_optim
        and checkpoint.loads_own
        and not checkpoint.finetune
    ):
        yield Problem(
            ("load_optim", "save", "load"),
            f"--no-load-optim would leave out at each start what the one before saved, as --save "
            f"{checkpoint.save} is --load's: give another --save, or --no-save-optim too",
        )


def non_persistent(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Non-persistent saves have a place, and a run that they are of."""
    checkpoint = config.checkpoint
    if checkpoint.non_persistent_save_interval is None:
        return
    given = f"--non-persistent-save-interval {checkpoint.non_persistent_save_interval}"
    if checkpoint.non_persistent_local_ckpt_dir is None:
        yield Problem(
            (_NON_PERSISTENT, "non_persistent_local_ckpt_dir"),
            f"{given} needs --non-persistent-local-ckpt-dir: a folder on each node's disk or in its memory, "
            "as in /dev/shm/megalite",
        )
    if checkpoint.save is None:
        yield Problem(
            (_NON_PERSISTENT, "save"),
            f"{given} needs --save: the run's lasting checkpoints, which it falls back on",
        )
