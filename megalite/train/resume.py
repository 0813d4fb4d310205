"""Resume a run from the checkpoint of --load, or from its own after a restart."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from megalite.checkpoint.load import LoadPlan
from megalite.checkpoint.progress import CallbackStates
from megalite.config import CheckpointConfig
from megalite.distributed.collectives import largest_of_all
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.train.trainer import Trainer
from megalite.utils.errors import UserError
from megalite.utils.log import log


def resume(trainer: Trainer, launch: Launch) -> CallbackStates | None:
    """Load the latest checkpoint of --load, if there is one; a restarted run prefers its own.

    Returns:
        The saved states of callbacks; None for a new run.

    Raises:
        UserError: --load holds no checkpoint, and is not the --save folder.
    """
    if _is_restart(launch, trainer.topology) and (own := _resume_own(trainer)) is not None:
        return own.callbacks
    folder = trainer.config.checkpoint.load
    if not folder:
        _warn_of_other_checkpoints(trainer)
        return None
    if (loaded := trainer.load()) is not None:
        iteration = trainer.progress.iteration
        if trainer.config.checkpoint.finetune:
            log.info("loaded only the weights from %s: the run starts at iteration 0", loaded.folder)
            _warn_of_other_checkpoints(trainer)
        else:
            log.info("resumed from %s at iteration %d", folder, iteration)
        if skipped := trainer.progress.num_skipped:
            log.info("so far the updates of %d iterations were skipped", skipped)
        if iteration >= trainer.config.num_iterations(trainer.topology.sample_ranks.size):
            flag = "--train-samples" if trainer.config.training.is_counted_in_samples else "--train-iters"
            log.warning("nothing is left to train: raise %s to continue", flag)
    elif trainer.config.checkpoint.loads_own:  # first start of a run that loads from its own --save folder
        log.info("note: no checkpoint in --load %s yet: training starts from new weights", folder)
    else:
        raise _no_checkpoint(folder)
    return None if loaded is None else loaded.callbacks


def check_load_folder(config: CheckpointConfig, launch: Launch, topology: Topology) -> None:
    """Refuse a --load folder without checkpoints, before datasets and model are built; a collective.

    Raises:
        UserError: the folder has no checkpoint; raised on every rank.
    """
    may_be_empty = config.loads_own or config.non_persistent_local_ckpt_dir is not None or launch.restarts
    with topology.agreed():
        if config.load and not may_be_empty and not any(Path(config.load).glob("iter_*")):
            raise _no_checkpoint(config.load)


def _no_checkpoint(folder: str) -> UserError:
    there = "holds no checkpoint of megalite" if Path(folder).exists() else "does not exist"
    return UserError(f"--load {folder} {there}: pass the folder that --save wrote, or omit it")


def _is_restart(launch: Launch, topology: Topology) -> bool:
    """Return whether any rank was restarted; each torchrun agent only counts its own restarts."""
    return bool(largest_of_all(torch.tensor(launch.restarts, device=topology.device), topology))


def _resume_own(trainer: Trainer) -> LoadPlan | None:
    """Resume a restarted run from --save; its options describe the first start.

    Returns:
        What was loaded; None if there is no checkpoint yet, or the options load the run's own latest one.
    """
    config = trainer.config
    options = config.checkpoint
    loads_own_latest = options.loads_own and options.load_iteration is None and not options.finetune
    if options.save is None or loads_own_latest:
        return None
    own = dataclasses.replace(
        options, load=options.save, load_iteration=None, finetune=False, load_optim=options.save_optim
    )
    trainer.config = dataclasses.replace(config, checkpoint=own)
    if (loaded := trainer.load()) is None:
        trainer.config = config
        return None
    iteration = trainer.progress.iteration
    log.warning("restarted: resuming from --save %s at iteration %d", options.save, iteration)
    return loaded


def _warn_of_other_checkpoints(trainer: Trainer) -> None:
    save = trainer.config.checkpoint.save
    if save and (Path(save) / "latest").exists():
        log.warning(
            "--save %s holds checkpoints, but none of them is loaded: pass --load %s to resume from them, or "
            "another --save folder for a new run",
            save,
            save,
        )
