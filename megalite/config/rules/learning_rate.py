"""Rules of the courses of learning rate and weight decay."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.flags import flag_of
from megalite.config.problem import Problem


def bounds(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The learning rate starts and ends below its peak."""
    optimizer = config.optimizer
    for name, value in (("min_lr", optimizer.min_lr), ("lr_warmup_init", optimizer.lr_warmup_init)):
        if value > optimizer.lr:
            yield Problem(
                (name, "lr"),
                f"{flag_of(name)} {value} is above --lr {optimizer.lr}, the peak: change one",
            )


def unit(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The run and its learning rate are counted in one unit, iterations or samples."""
    training, optimizer = config.training, config.optimizer
    length, other = (
        ("train_samples", "iters") if training.is_counted_in_samples else ("train_iters", "samples")
    )
    for kind in ("lr_decay", "lr_warmup", "lr_wsd_decay", "weight_decay_incr"):
        name = f"{kind}_{other}"
        if getattr(optimizer, name) and getattr(training, length) is not None:
            yield Problem(
                (name, length),
                f"{flag_of(name)} {getattr(optimizer, name)} with {flag_of(length)} "
                f"{getattr(training, length)}: a run is counted in iterations or in samples, choose one",
            )


def warmup(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Warm-up is given once, and is over before decay is."""
    optimizer, (decay, decay_name) = config.optimizer, _decay(config)
    name = f"lr_warmup_{_unit(config)}"
    length = getattr(optimizer, name)
    if optimizer.lr_warmup_fraction is not None and length:
        yield Problem(
            ("lr_warmup_fraction", name),
            f"--lr-warmup-fraction {optimizer.lr_warmup_fraction} and {flag_of(name)} {length} "
            "both give the warm-up: leave one out",
        )
    elif decay is not None and length >= decay:
        yield Problem(
            (name, decay_name),
            f"{flag_of(name)} {length} does not end before {flag_of(decay_name)} {decay}: "
            "shorten the warm-up",
        )


def wsd(config: Config, world_size: int | None) -> Iterator[Problem]:
    """WSD knows how long its last part is, and that part fits in the decay."""
    if config.optimizer.lr_decay_style != "WSD":
        return
    decay, decay_name = _decay(config)
    unit, name = _unit(config), f"lr_wsd_decay_{_unit(config)}"
    length = getattr(config.optimizer, name)
    if length is None:
        yield Problem(
            ("lr_decay_style", name),
            f"--lr-decay-style WSD needs {flag_of(name)}: give the {_WORDS[unit]} of its last part",
        )
    elif decay is not None and length > decay:
        yield Problem(
            (name, decay_name),
            f"{flag_of(name)} {length} is more than the {decay} {_WORDS[unit]} of {flag_of(decay_name)}: "
            "shorten it",
        )


def weight_decay(config: Config, world_size: int | None) -> Iterator[Problem]:
    """A weight decay that changes has a start and an end; a constant one has neither."""
    optimizer = config.optimizer
    style, ends = optimizer.weight_decay_incr_style, ("start_weight_decay", "end_weight_decay")
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    for name in ends:
        value = getattr(optimizer, name)
        if style == "constant" and value is not None:
            yield Problem(
                (name, "weight_decay_incr_style"),
                f"{flag_of(name)} {value} with --weight-decay-incr-style constant: give --weight-decay, "
                "or the style linear or cosine",
            )
        elif style != "constant" and value is None:
            yield Problem(
                (name, "weight_decay_incr_style"),
                f"--weight-decay-incr-style {style} needs {flag_of(name)}: give it",
            )
    if start is not None and end is not None and start > end:
        yield Problem(ends, f"--start-weight-decay {start} is above --end-weight-decay {end}: change one")


_WORDS = {"iters": "iterations", "samples": "samples"}


def _unit(config: Config) -> str:
    """How the names of fields end that are in the run's unit."""
    return "samples" if config.training.is_counted_in_samples else "iters"


def _decay(config: Config) -> tuple[int | None, str]:
    """Where the decay ends, and the field that says so."""
    unit = _unit(config)
    decay: int | None = getattr(config.optimizer, f"lr_decay_{unit}")
    if decay is not None:
        return decay, f"lr_decay_{unit}"
    name = f"train_{unit}"
    return getattr(config.training, name), name
