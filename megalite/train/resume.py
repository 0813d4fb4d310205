"""Where a run goes on from: the checkpoint that it is told of, or its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from megalite.errors import UserError
from megalite.log import log
from megalite.parallel.collectives import largest_of_all
from megalite.topology import Launch, Topology
from megalite.train.trainer import Trainer


def resume(trainer: Trainer, launch: Launch) -> None:
    """Loads the latest checkpoint of --load, where there is one; a restarted run's own one before that."""
    if _is_restart(launch, trainer.topology) and _resume_own(trainer):
        return
    folder = trainer.config.checkpoint.load
    if not folder:
        _warn_of_other_checkpoints(trainer)
        return
    if trainer.load():
        iteration = trainer.progress.iteration
        if trainer.config.checkpoint.finetune:
            _warn_of_other_checkpoints(trainer)
        else:
            log.info("resumed from %s at iteration %d", folder, iteration)
        if skipped := trainer.progress.num_skipped:
            log.info("so far the updates of %d iterations were skipped", skipped)
        if iteration >= trainer.config.num_iterations(trainer.topology.dp.size):
            flag = "--train-samples" if trainer.config.training.is_counted_in_samples else "--train-iters"
            log.warning("nothing is left to train: raise %s to go on", flag)
    elif not trainer.config.checkpoint.loads_own:  # a first start may find its own folder empty, and no other
        there = "holds no checkpoint of megalite" if Path(folder).exists() else "does not exist"
        raise UserError(f"--load {folder} {there}: give the folder that --save wrote, or leave it out")
    else:
        log.warning("no checkpoint in --load %s yet: training starts from new weights", folder)


def _is_restart(launch: Launch, topology: Topology) -> bool:
    """Whether any rank was restarted: torchrun's agents count each for themselves."""
    return bool(largest_of_all(torch.tensor(launch.restarts, device=topology.device), topology))


def _resume_own(trainer: Trainer) -> bool:
    """Goes on from --save, if this is where a restarted run has to: its command line says how it began."""
    config = trainer.config
    given = config.checkpoint
    if given.save is None or (given.loads_own and given.load_iteration is None and not given.finetune):
        return False
    own = dataclasses.replace(
        given, load=given.save, load_iteration=None, finetune=False, load_optim=given.save_optim
    )
    trainer.config = dataclasses.replace(config, checkpoint=own)
    if not trainer.load():
        trainer.config = config
        return False
    iteration = trainer.progress.iteration
    log.warning("restarted: going on from --save %s at iteration %d", given.save, iteration)
    return True


def _warn_of_other_checkpoints(trainer: Trainer) -> None:
    save = trainer.config.checkpoint.save
    if save and (Path(save) / "latest").exists():
        log.warning(
            "--save %s holds checkpoints, and none of them is loaded: to go on from them give --load %s, and "
            "for another run another folder",
            save,
            save,
        )
