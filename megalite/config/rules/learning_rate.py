"""Rules of the learning rate's course."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megalite.config.flags import flag_of
from megalite.config.problem import Problem

if TYPE_CHECKING:
    from megalite.config.config import Config


def bounds(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The learning rate starts and ends below its peak."""
    optimizer = config.optimizer
    for name, value in (("min_lr", optimizer.min_lr), ("lr_warmup_init", optimizer.lr_warmup_init)):
        if value > optimizer.lr:
            yield Problem(
                (name, "lr"),
                f"{flag_of(name)} {value} is above --lr {optimizer.lr}, the peak: change one",
            )


def warmup(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Warm-up is given once, and is over before decay is."""
    optimizer = config.optimizer
    if optimizer.lr_warmup_fraction is not None and optimizer.lr_warmup_iters:
        yield Problem(
            ("lr_warmup_fraction", "lr_warmup_iters"),
            f"--lr-warmup-fraction {optimizer.lr_warmup_fraction} and --lr-warmup-iters "
            f"{optimizer.lr_warmup_iters} both give the warm-up: leave one out",
        )
        return
    decay, name = optimizer.lr_decay_iters, "lr_decay_iters"
    if decay is None:
        decay, name = config.training.train_iters, "train_iters"
    if decay is not None and optimizer.lr_warmup_iters >= decay:
        yield Problem(
            ("lr_warmup_iters", "lr_decay_iters", name),
            f"--lr-warmup-iters {optimizer.lr_warmup_iters} does not end before "
            f"{flag_of(name)} {decay}: shorten the warm-up",
        )


def wsd(config: Config, world_size: int | None) -> Iterator[Problem]:
    """WSD knows how long its last part is, and that part fits in the decay."""
    optimizer = config.optimizer
    if optimizer.lr_decay_style != "WSD":
        return
    decay = optimizer.lr_decay_iters or config.training.train_iters
    if optimizer.lr_wsd_decay_iters is None:
        yield Problem(
            ("lr_decay_style", "lr_wsd_decay_iters"),
            "--lr-decay-style WSD needs --lr-wsd-decay-iters: give the iterations of its last part",
        )
    elif decay is not None and optimizer.lr_wsd_decay_iters > decay:
        yield Problem(
            ("lr_wsd_decay_iters", "lr_decay_iters", "train_iters"),
            f"--lr-wsd-decay-iters {optimizer.lr_wsd_decay_iters} is more than the {decay} iterations "
            "of --lr-decay-iters (by default --train-iters): shorten it",
        )
