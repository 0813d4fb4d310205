"""The timers of all ranks, put together and told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch.distributed as dist

from megalite.topology import Topology

TimesOfRanks = Mapping[str, Mapping[int, float]]
"""Milliseconds by timer and by rank; a rank is left out where it has not used the timer."""


def times_of_all_ranks(own: Mapping[str, float], topology: Topology) -> TimesOfRanks:
    """Puts the ranks' timers together, on every rank; a collective."""
    told: list[Mapping[str, float]] = [{}] * topology.world_size
    dist.all_gather_object(told, dict(own))
    names = dict.fromkeys(name for times in told for name in times)
    return {name: {rank: times[name] for rank, times in enumerate(told) if name in times} for name in names}


def timer_table(times: TimesOfRanks, option: str) -> str:
    """The lines that Megatron-LM prints at --timing-log-option; the slowest rank's number besides."""
    return "\n".join(_TABLES[option](times))


def _all(times: TimesOfRanks) -> Iterator[str]:
    yield "times across ranks (ms):"
    for name, by_rank in times.items():
        yield f"  {name}:"
        for rank, milliseconds in by_rank.items():
            yield f"     rank {rank:2d}: {milliseconds:.2f}"


def _minmax(times: TimesOfRanks) -> Iterator[str]:
    yield "(min, max) time across ranks (ms):"
    for name, by_rank in times.items():
        least, most = min(by_rank.values()), max(by_rank.values())
        yield f"    {name + ' ':.<48}: ({least:.2f}, {most:.2f}){_slowest(by_rank)}"


def _max(times: TimesOfRanks) -> Iterator[str]:
    yield "max time across ranks (ms):"
    for name, by_rank in times.items():
        yield f"    {name + ' ':.<48}: {max(by_rank.values()):.2f}{_slowest(by_rank)}"


def _slowest(by_rank: Mapping[int, float]) -> str:
    """Which rank has the largest time, where there are several."""
    return f" slowest: rank {max(by_rank, key=lambda rank: by_rank[rank])}" if len(by_rank) > 1 else ""


_TABLES: Mapping[str, Callable[[TimesOfRanks], Iterator[str]]] = {
    "max": _max,
    "minmax": _minmax,
    "all": _all,
}
