"""Who is at fault for a hang, and the words that say it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from megalite.train.health.standing import Standing

MAX_STACKS = 3
"""Stacks in a report: of one rank at each place where some are that did not arrive."""


@dataclass(frozen=True)
class Absence:
    """The ranks that the others wait for.

    Attributes:
        ranks: in order; empty where every rank waits and none is behind.
        why: how that is known.
    """

    ranks: tuple[int, ...]
    why: str


def find_absence(standings: Mapping[int, Standing], silent: Collection[int]) -> Absence:
    """Finds who did not arrive where the others wait.

    Those that do not answer, have left or are at something else than waiting. If all wait, some have started
    fewer collectives on an axis than others of it: they are in another one, or skipped one.

    Args:
        standings: of all ranks that ever told theirs.
        silent: ranks that tell nothing now.
    """
    here = [standing for rank, standing in sorted(standings.items()) if rank not in silent]
    gone = {standing.rank for standing in here if standing.has_left}
    elsewhere = {
        standing.rank
        for standing in here
        if not standing.has_left and (standing.place is None or standing.place.waits_for is None)
    }
    if absent := {*silent, *gone, *elsewhere}:
        return Absence(tuple(sorted(absent)), "the others wait, or cannot go on without them")
    if behind := sorted(_behind(here)):
        return Absence(
            tuple(behind), "every rank waits, but these started fewer collectives than their peers"
        )
    return Absence((), "every rank waits in a collective, and none is behind: suspect the network")


def _behind(standings: Iterable[Standing]) -> set[int]:
    """Ranks with fewer collectives on an axis than one that waits there."""
    counts: dict[tuple[int, ...], dict[int, tuple[int, bool]]] = defaultdict(dict)
    for standing in standings:
        waits_for = standing.place.waits_for if standing.place else None
        for ranks, number in standing.collectives:
            # Behind a GPU the host does not wait where it starts a collective: later, and for any of them.
            counts[ranks][standing.rank] = number, waits_for in ((), ranks)
    behind = set()
    for of_axis in counts.values():
        most = max((number for number, waits in of_axis.values() if waits), default=0)
        behind |= {rank for rank, (number, _) in of_axis.items() if number < most}
    return behind


def report(standings: Mapping[int, Standing], silent: Collection[int], seconds: float, stacks: str) -> str:
    """The whole report, of several lines.

    Args:
        seconds: how long nobody has made progress.
        stacks: where the ranks' stacks are written.
    """
    absence = find_absence(standings, silent)
    lines = [f"error: hang: no rank has made progress for {seconds:.0f} s"]
    who = numbers(absence.ranks) if absence.ranks else "nobody is missing"
    lines.append(f"  did not arrive: {who} ({absence.why})")
    lines += [f"  {line}" for line in _groups(standings, silent, absence.ranks)]
    lines.append(f"  stacks of every rank that answered: {stacks}")
    for rank, stack in _stacks(standings, silent, absence.ranks):
        lines.append(f"  stack of rank {rank}:")
        lines += [f"  {line}" for line in stack.splitlines()]
    return "\n".join(lines) + "\n"


def numbers(ranks: Collection[int]) -> str:
    """Ranks in words: `rank 3`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {words}"


def where(standing: Standing) -> str:
    """Where a rank stands, in words that are the same for all ranks at one place."""
    iteration, place = f"iteration {standing.num_done + 1}", standing.place
    if standing.has_left:
        return f"has left training after iteration {standing.num_done}"
    if place is None:
        return iteration
    action = f", in {place.action}" if place.action else ""
    return f"{iteration}, {place.what} ({place.line}){action}"


def _groups(
    standings: Mapping[int, Standing], silent: Collection[int], absent: Collection[int]
) -> Iterator[str]:
    """A line for each place with the ranks there, those that are missing first."""
    together: dict[tuple[bool, str], list[Standing]] = defaultdict(list)
    for rank in sorted({*standings, *silent}):
        standing = standings.get(rank)
        if standing is None:
            text = "did not answer, and never has"
        elif rank in silent:
            text = f"did not answer; last heard of at {where(standing)}, on {standing.host}"
        else:
            text = where(standing)
        together[rank not in absent, text].append(standing or Standing(rank, "", 0, 0))
    for (_, text), members in sorted(together.items(), key=lambda entry: entry[0][0]):
        idle = max(each.idle for each in members)
        is_here = members[0].rank not in silent and not members[0].has_left
        hosts = sorted({each.host for each in members}) if members[0].rank in absent and is_here else []
        on = f", on {', '.join(hosts[:8])}" if hosts else ""
        seconds = f" for {idle:.0f} s" if is_here else ""
        yield f"{numbers([each.rank for each in members])}: {text}{seconds}{on}"


def _stacks(
    standings: Mapping[int, Standing], silent: Collection[int], absent: Collection[int]
) -> list[tuple[int, str]]:
    """One stack for each place that missing ranks are at, or any one where nobody is missing."""
    found: dict[str, tuple[int, str]] = {}
    for rank in sorted(absent or standings):
        standing = standings.get(rank)
        if rank not in silent and standing is not None and standing.stack:
            found.setdefault(where(standing), (rank, standing.stack))
    return list(found.values())[: MAX_STACKS if absent else 1]
