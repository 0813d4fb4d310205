"""Simulate a run that fails and restarts, for many save intervals or many whole runs.

Failures are a Poisson process over the nodes in use, as in Young (1974) and Daly (2006). They also occur
during saves, loads and restarts. All times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NUM_LIFETIMES = 2**15
"""Simulated times to a failure with which save intervals are compared."""
NUM_INTERVALS = 200
"""Save intervals to compare."""
INTERVAL_RANGE = 20.0
"""The longest interval to compare, and the inverse of the shortest, as multiples of Daly's."""
NEAR_BEST = 1.01
"""An interval is as good as the best one if a run takes at most this many times as long with it."""
NUM_RUNS = 500
"""Simulated runs, from which the spread of the days is taken."""
MAX_FAILURES = 2000
"""Failures to simulate in a run. Of a longer run, a part is simulated."""
SEED = 0
"""Seed of all random numbers."""
FREE_SPARE = 0.99
"""Share of failures for which a spare node is free, with the planned number of spare nodes."""


@dataclass(frozen=True)
class FailingRun:
    """Times of a run that fails, saves and restarts.

    Attributes:
        failure_gap: mean time between failures of any node.
        blocked: time for which a save stops training.
        written: time from then until the checkpoint is complete, while training continues.
        restart: time from a failure until training continues, if a spare node is free.
        repair: time until a failed node is a spare node.
        spares: number of spare nodes.
        rates: rate of training with 0, 1, … nodes fewer, relative to all; empty if the run waits for a spare
            node.
    """

    failure_gap: float
    blocked: float
    written: float
    restart: float
    repair: float
    spares: int
    rates: Sequence[float] = ()

    @cached_property
    def lifetimes(self) -> Floats:
        """Return random times from one failure to the next."""
        # One number in each of many equal parts of the distribution: much less noise than without parts.
        parts = (np.arange(NUM_LIFETIMES) + np.random.default_rng(SEED).random(NUM_LIFETIMES)) / NUM_LIFETIMES
        return -self.failure_gap * np.log1p(-parts)

    @cached_property
    def missing(self) -> tuple[float, float]:
        """Return the share of training that missing nodes cost, and the share of failures without a spare.

        The number of nodes in repair has a Poisson distribution. Both are 0 if the run waits for a node.
        """
        if not self.rates:
            return 0.0, 0.0
        mean, counts = self.repair / self.failure_gap, np.arange(self.spares + len(self.rates))
        log_factorials = np.concatenate([np.zeros(1), np.cumsum(np.log(counts[1:]))])
        in_repair = np.exp(counts * math.log(mean) - mean - log_factorials)
        kept = float(in_repair @ np.array([self.rates[max(0, each - self.spares)] for each in counts]))
        return 1 - kept, 1 - float(in_repair[: self.spares].sum())

    def saved(self, trained: Floats, interval: float) -> Floats:
        """Return the number of complete checkpoints after this time since a restart."""
        return np.maximum(np.floor((trained - self.written) / (interval + self.blocked)), 0.0)

    def useful_share(self, interval: float) -> float:
        """Return the share of the time that goes into saved work, if spare nodes are always free.

        Args:
            interval: time between saves, without the saves.
        """
        trained = np.maximum(self.lifetimes - self.restart, 0.0)
        return float(self.saved(trained, interval).sum() * interval / self.lifetimes.sum())


def young_interval(failure_gap: float, blocked: float) -> float:
    """Return the best time between saves, to first order (Young, CACM 17(9), 1974)."""
    return math.sqrt(2 * blocked * failure_gap)


def daly_interval(failure_gap: float, blocked: float) -> float:
    """Return the best time between saves, to higher order (Daly, FGCS 22, 2006, equation 37)."""
    if blocked >= 2 * failure_gap:
        return failure_gap
    ratio = math.sqrt(blocked / (2 * failure_gap))
    return young_interval(failure_gap, blocked) * (1 + ratio / 3 + ratio**2 / 9) - blocked


@dataclass(frozen=True)
class SaveIntervals:
    """Simulated save intervals, in iterations.

    Attributes:
        intervals: the intervals, ascending.
        shares: the useful share of the time with each.
    """

    intervals: Sequence[int]
    shares: Sequence[float]

    @cached_property
    def best(self) -> int:
        return max(zip(self.shares, self.intervals, strict=True))[1]

    @cached_property
    def near_best(self) -> tuple[int, int]:
        """Return the shortest and the longest interval with which a run takes at most 1% longer."""
        least = max(self.shares) / NEAR_BEST
        near = [each for each, share in zip(self.intervals, self.shares, strict=True) if share >= least]
        return near[0], near[-1]


def compare_intervals(
    run: FailingRun, iteration: float, shortest: int = 1, longest: int | None = None
) -> SaveIntervals:
    """Simulate the same failures with many save intervals.

    Args:
        iteration: time of an iteration.
        shortest: shortest interval to consider, in iterations.
        longest: longest interval to consider, in iterations.
    """
    centre = max(daly_interval(run.failure_gap, run.blocked) / iteration, 1.0)
    low = max(shortest, centre / INTERVAL_RANGE)
    high = max(low, centre * INTERVAL_RANGE)
    if longest is not None:
        low, high = min(low, longest), min(high, longest)
    intervals = sorted({round(each) for each in np.geomspace(low, high, NUM_INTERVALS)})
    return SaveIntervals(intervals, [run.useful_share(each * iteration) for each in intervals])


@dataclass(frozen=True)
class RunTimes:
    """Time that each simulated run spends on each activity.

    Attributes:
        work: training that is kept.
        saves: training stopped for a save that is kept.
        lost: training that a failure undoes.
        restarts: from a failure until training continues, without waits.
        waits: until a spare node is free, or what the missing ranks would have trained until then.
        failures: number of failures.
    """

    work: Floats
    saves: Floats
    lost: Floats
    restarts: Floats
    waits: Floats
    failures: Floats

    @cached_property
    def total(self) -> Floats:
        """Return the length of each run."""
        return self.work + self.saves + self.lost + self.restarts + self.waits

    def share(self, kind: str) -> float:
        """Return the mean share of a kind of time."""
        return float(getattr(self, kind).sum() / self.total.sum())

    def longer(self, factor: float) -> RunTimes:
        """Return the times of runs that are `factor` times as long, whose parts are independent.

        Means grow with the factor, deviations from the mean with its root.
        """
        each = {field.name: getattr(self, field.name) for field in fields(self)}
        means = {name: times.mean() for name, times in each.items()}
        return RunTimes(
            **{name: factor * means[name] + math.sqrt(factor) * (each[name] - means[name]) for name in each}
        )


def simulate_runs(
    run: FailingRun, work: float, interval: float, num_runs: int = NUM_RUNS, seed: int = SEED
) -> RunTimes:
    """Simulate whole runs.

    Args:
        work: time of the run without saves and failures.
        interval: time between saves, without the saves.
    """
    # Missing nodes make training slower, and the clock time between saves longer.
    lost, unreplaced = run.missing
    rate = 1 - lost
    expected = work / rate / run.useful_share(interval / rate) / run.failure_gap
    factor = max(1.0, expected / MAX_FAILURES)
    times = _simulate(run, work / rate / factor, interval / rate, num_runs, np.random.default_rng(seed))
    times = replace(
        times,
        work=rate * times.work,
        waits=times.waits + lost * times.work,
        restarts=times.restarts + unreplaced * run.restart * times.failures,  # when the node is there again
    )
    return times.longer(factor) if factor > 1 else times


def _simulate(
    run: FailingRun, work: float, interval: float, num_runs: int, random: np.random.Generator
) -> RunTimes:
    now, kept, saves, lost, restarts, waits, failures = np.zeros((7, num_runs))
    repaired: list[Floats] = []  # when the node of each failure is repaired
    running, startup = np.ones(num_runs, dtype=bool), 0.0
    while running.any():
        lifetime = random.exponential(run.failure_gap, num_runs)
        left = work - kept
        saves_left = np.ceil(left / interval)
        needed = startup + left + saves_left * run.blocked + run.written
        ends = running & (lifetime >= needed)
        fails = running & ~ends
        trained = np.maximum(lifetime - startup, 0.0)
        saved = np.where(fails, run.saved(trained, interval), 0.0)
        kept += np.where(ends, left, saved * interval)
        saves += np.where(ends, saves_left * run.blocked + run.written, saved * run.blocked)
        lost += np.where(fails, trained - saved * (interval + run.blocked), 0.0)
        restarts += np.where(ends, startup, np.where(fails, np.minimum(lifetime, startup), 0.0))
        failures += fails
        now += np.where(fails, lifetime, 0.0)
        repaired.append(now + run.repair)
        if len(repaired) > run.spares and not run.rates:
            # The first failures use the spare nodes. Each later one uses the node that was repaired first.
            waited = np.where(fails, np.maximum(repaired[-1 - run.spares] - now, 0.0), 0.0)
            waits += waited
            now += waited
        running, startup = fails, run.restart
    return RunTimes(kept, saves, lost, restarts, waits, failures)


def enough_spares(failure_gap: float, repair: float) -> int:
    """Return the number of spare nodes, of which one is free for `FREE_SPARE` of the failures.

    The number of nodes in repair has a Poisson distribution.
    """
    mean = repair / failure_gap
    if mean > 500:  # nearly a normal distribution, of which 99% are below 2.33 standard deviations
        return math.ceil(mean + 2.33 * math.sqrt(mean)) + 1
    term = share = math.exp(-mean)
    count = 0
    while share < FREE_SPARE:
        count += 1
        term *= mean / count
        share += term
    return count + 1
