"""Say in which tensor a layout first differs from one rank: trace both, iteration by iteration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from megalite.config import Config, check_config
from megalite.distributed.local_ranks import RankError
from megalite.train.run_context import Providers
from megalite.utils.errors import UserError
from megalite.verify.first_difference import LIMITS, FirstDifference, first_difference
from megalite.verify.trace_run import RankTrace, trace_run

Trace = Callable[[Config, int, int, int, Providers | None], list[RankTrace]]
"""Traces an iteration of a config on some ranks, like `trace_run`."""


class Location(NamedTuple):
    """Result of a bisection.

    Attributes:
        difference: the first difference; None if there is none, or if it does not come from the layout.
        text: its report, or the reason why there is none.
        is_same: whether all traced iterations agree.
    """

    difference: FirstDifference | None
    text: str
    is_same: bool = False


def locate_difference(
    config: Config,
    reference: Config,
    world_size: int,
    num_iterations: int,
    providers: Providers | None = None,
    trace: Trace = trace_run,
) -> Location:
    """Trace a layout and one rank until they differ, in fp64 if the model can run in it.

    Args:
        config: config of the layout.
        reference: config of the same run on one rank.
        world_size: number of ranks of the layout.
        num_iterations: number of iterations to trace.

    Raises:
        UserError: the configs are not of the same run, or cannot run.
    """
    _check_same_run(config, reference)
    own_dtype = config.model.params_dtype
    note = ""
    if own_dtype != "fp64":
        try:
            wide, alone = _in_fp64(config, world_size), _in_fp64(reference, 1)
            found = _trace_until_different(wide, alone, world_size, num_iterations, providers, trace)
            if not found.is_same:
                return found._replace(text=f"{found.text}\n  this is in fp64")
            note = f"{found.text}; this is in {own_dtype}"
        except (UserError, RankError) as error:
            reason = str(error).strip().splitlines()[-1]
            note = f"this is in {own_dtype}, because the run is not possible in fp64: {reason}"
    found = _trace_until_different(config, reference, world_size, num_iterations, providers, trace)
    return found._replace(text=f"{found.text}\n  {note}") if note else found


def _check_same_run(config: Config, reference: Config) -> None:
    """Check that the two configs differ in their layouts only.

    Raises:
        UserError: they have another model, data, seed or global batch size.
    """
    values = [
        {
            **dataclasses.asdict(each.model),
            **dataclasses.asdict(each.data),
            "seed": each.training.seed,
            "global_batch_size": each.training.global_batch_size,
        }
        for each in (config, reference)
    ]
    different = [
        f"--{name.replace('_', '-')} is {value} and {values[1][name]}"
        for name, value in values[0].items()
        if value != values[1][name]
    ]
    if different:
        raise UserError(
            f"the two layouts cannot be compared: {'; '.join(different)}: pass the same values to both"
        )


def _in_fp64(config: Config, world_size: int) -> Config:
    """Return the config in fp64.

    Raises:
        ConfigError: an option needs another dtype.
    """
    wide = dataclasses.replace(config, model=dataclasses.replace(config.model, params_dtype="fp64"))
    check_config(wide, world_size)
    return wide


def _trace_until_different(
    config: Config,
    reference: Config,
    world_size: int,
    num_iterations: int,
    providers: Providers | None,
    trace: Trace,
) -> Location:
    config, reference = (_without_graphs(each) for each in (config, reference))
    dtype = config.model.params_dtype
    num_unplaced = 0
    for iteration in range(1, num_iterations + 1):
        (alone,) = trace(reference, 1, iteration, 0, providers)
        run = trace(config, world_size, iteration, 0, providers)
        found, num_unplaced = first_difference(run, alone, iteration, LIMITS[dtype])
        if found is None:
            continue
        again = trace(reference, 1, iteration, 1, providers)
        random, _ = first_difference(again, alone, iteration, LIMITS[dtype])
        if random is not None:
            return Location(
                None,
                f"no first difference: two runs of one rank differ in the {random.what}. The model draws "
                "random numbers of its own: use megalite.Dropout",
            )
        return Location(found, str(found))
    more = f"; {num_unplaced} tensors have no place in the model of one rank" if num_unplaced else ""
    return Location(None, f"no difference in {num_iterations} iterations in {dtype}{more}", is_same=True)


def _without_graphs(config: Config) -> Config:
    """Return the config without --compile: a graph does not call the hooks of its modules."""
    return dataclasses.replace(config, training=dataclasses.replace(config.training, compile=False))
