"""Runs whose nodes fail: which save interval is best, how long a run takes, its spare nodes and its price.

A failure ends all ranks. They restart on a spare node, load the last complete checkpoint, and repeat the work
since then. Failures are a Poisson process over the nodes in use, as in Young (1974) and Daly (2006), and also
occur during saves, loads and restarts. All times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.plan.estimate import Costs, RunPlan, duration, plain, train_tokens
from megalite.utils.errors import UserError, counted

Floats = NDArray[np.float64]

_GB, _HOUR, _DAY = 1e9, 3600.0, 86400.0
NODE_STORAGE_GBPS = 1.0
"""GB/s of storage per node. BLOOM saved 2.3 TB from 48 nodes in 40 s (bigscience-workshop/bigscience,
train/tr11-176B-ml/chronicles.md), and Llama 3 had storage of 2 TB/s for 2,048 nodes (Grattafiori et al. 2024,
section 3.3.1)."""
RESTART_MINUTES = 10.0
"""From a failure to the first load: ranks that hang are noticed after --distributed-timeout-minutes, 10."""
REPAIR_DAYS = 1.0
"""Days until a failed node is repaired or replaced."""
ASYNC_SHARE = 0.005
"""Share of a save's time for which an async save stops training (benchmarks/RESULTS.md, Checkpoints)."""
ASYNC_GAP = 2.0
"""Shortest interval of async saves, as a multiple of the time to write one: no two saves run at once."""
MIN_SHARE = 0.01
"""Smallest share of useful time with which a run is simulated."""
LONG_RUN = 100 * _DAY
"""Length of the simulated run if the run has no length."""
SPREAD = (5, 95)
"""Percentiles of the days and the price."""
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
    """

    failure_gap: float
    blocked: float
    written: float
    restart: float
    repair: float
    spares: int

    @cached_property
    def lifetimes(self) -> Floats:
        """Return random times from one failure to the next."""
        # One number in each of many equal parts of the distribution: much less noise than without parts.
        parts = (np.arange(NUM_LIFETIMES) + np.random.default_rng(SEED).random(NUM_LIFETIMES)) / NUM_LIFETIMES
        return -self.failure_gap * np.log1p(-parts)

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
        waits: until a spare node is free.
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
    expected = work / run.useful_share(interval) / run.failure_gap
    factor = max(1.0, expected / MAX_FAILURES)
    times = _simulate(run, work / factor, interval, num_runs, np.random.default_rng(seed))
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
        if len(repaired) > run.spares:
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


@dataclass(frozen=True)
class Reliability:
    """Failures of nodes, and recovery of a run. None is the default.

    Attributes:
        node_mtbf: mean seconds between failures of one node.
        storage_gbps: GB/s at which all ranks together write or read checkpoints.
        restart_minutes: minutes from a failure until the ranks load the checkpoint.
        node_repair: seconds until a failed node can be used again.
        spare_nodes: nodes that wait to replace failed ones.
    """

    node_mtbf: float
    storage_gbps: float | None = None
    restart_minutes: float | None = None
    node_repair: float | None = None
    spare_nodes: int | None = None


class GoodputPlan:
    """Plan of a run on nodes that fail. Each number is computed when it is first requested.

    Args:
        plan: the plan without failures.
        costs: inputs to the days and the price.

    Raises:
        UserError: the run would hardly make progress.
    """

    def __init__(self, plan: RunPlan, reliability: Reliability, costs: Costs) -> None:
        self.plan, self.costs = plan, costs
        cluster, config = plan.run.cluster, plan.run.config
        self.num_nodes, self.node_mtbf = cluster.num_nodes, reliability.node_mtbf
        self.storage_gbps = reliability.storage_gbps or NODE_STORAGE_GBPS * self.num_nodes
        gap = reliability.node_mtbf / self.num_nodes
        repair = reliability.node_repair or REPAIR_DAYS * _DAY
        start = 60 * (reliability.restart_minutes or RESTART_MINUTES)
        spares = reliability.spare_nodes
        self.has_spare_nodes = spares is not None
        is_async = config.checkpoint.async_save
        self.failing = FailingRun(
            failure_gap=gap,
            blocked=self._async_blocked() if is_async else self.save_seconds,
            written=self.save_seconds if is_async else 0.0,
            restart=start + self.load_seconds,
            repair=repair,
            spares=enough_spares(gap, repair) if spares is None else spares,
        )
        self._check()

    def _check(self) -> None:
        """Check that the run makes progress."""
        gap = duration(self.failing.failure_gap / _DAY, 2)
        failures = f"one of {counted(self.num_nodes, 'node')} fails every {gap}"
        if max(self.intervals.shares) < MIN_SHARE:
            raise UserError(
                f"--node-mtbf {plain(self.node_mtbf / _HOUR)}h: {failures}, and a restart takes "
                f"{duration(self.failing.restart / _DAY, 2)}: the run would hardly make progress; pass a "
                "larger --node-mtbf, or a smaller --restart-minutes"
            )
        interval = self.save_interval * self.plan.time.seconds
        if self.failing.useful_share(interval) < MIN_SHARE:
            raise UserError(
                f"the run saves every {duration(interval / _DAY, 2)}, and {failures}: it would hardly make "
                f"progress; pass --save-interval {self.intervals.best}"
            )

    @property
    def _optimizer_bytes(self) -> int:
        """Return the bytes per parameter of the optimizer state and the averages in a checkpoint."""
        run = self.plan.run
        if not run.config.checkpoint.save_optim:
            return run.average_bytes
        return run.optimizer_bytes + (run.config.optimizer.exp_avg_dtype == "fp8")  # a checkpoint has bf16

    @property
    def checkpoint_bytes(self) -> float:
        """Return the bytes of a checkpoint. It holds each element once, whatever the layout."""
        return self.plan.parameters * (self.plan.run.element_bytes + self._optimizer_bytes)

    @property
    def save_seconds(self) -> float:
        """Return the time to write a checkpoint."""
        return self.checkpoint_bytes / (self.storage_gbps * _GB)

    @property
    def load_seconds(self) -> float:
        """Return the time to load a checkpoint: each rank reads the weights and the state that it holds."""
        run = self.plan.run
        copies = run.num_sharing / (run.num_shards if run.zero_stage else 1)  # of each rank's state
        weights = run.element_bytes * (copies if run.zero_stage == 3 else run.num_sharing)
        return self.plan.parameters * (weights + self._optimizer_bytes * copies) / (self.storage_gbps * _GB)

    def _async_blocked(self) -> float:
        """Return how long an async save stops training.

        The copy to the host runs while the next gradients are computed. Training waits for the rest of it.
        """
        cluster = self.plan.run.cluster
        rate = cluster.gpu.host_link_bandwidth * cluster.gpu.link_share * cluster.world_size
        exposed = max(0.0, self.checkpoint_bytes / rate - self.plan.time.seconds)
        return exposed + ASYNC_SHARE * self.save_seconds

    @cached_property
    def work(self) -> float | None:
        """Return the seconds of the whole run without saves and failures; None if it has no length."""
        tokens = train_tokens(self.plan, self.costs)
        return None if tokens is None else tokens / self.plan.tokens_per_second

    @cached_property
    def intervals(self) -> SaveIntervals:
        """Return the compared save intervals: an async save must end before the next one is due."""
        shortest = math.ceil(ASYNC_GAP * self.failing.written / self.plan.time.seconds)
        longest = None if self.work is None else max(1, math.ceil(self.work / self.plan.time.seconds))
        return compare_intervals(self.failing, self.plan.time.seconds, max(1, shortest), longest)

    @cached_property
    def save_interval(self) -> float:
        """Return the planned interval in iterations: the requested one, or the best."""
        checkpoint = self.plan.run.config.checkpoint
        requested = [float(checkpoint.save_interval)] if checkpoint.save_interval else []
        if checkpoint.save_interval_minutes:
            requested.append(60 * checkpoint.save_interval_minutes / self.plan.time.seconds)
        return min(requested, default=float(self.intervals.best))

    @cached_property
    def times(self) -> RunTimes:
        """Return the simulated runs."""
        return simulate_runs(self.failing, self.work or LONG_RUN, self.save_interval * self.plan.time.seconds)

    def spread(self, unit: float) -> tuple[float, float, float]:
        """Return the mean length of the run, and its `SPREAD`, in this unit."""
        low, high = np.percentile(self.times.total, SPREAD)
        return float(self.times.total.mean()) / unit, float(low) / unit, float(high) / unit

    @property
    def price_per_hour(self) -> float | None:
        """Return the price of all nodes per hour, with the spare nodes."""
        if self.costs.price is None:
            return None
        cluster = self.plan.run.cluster
        return self.costs.price * (cluster.world_size + self.failing.spares * cluster.gpus_per_node)

    def lines(self) -> Iterator[str]:
        """Yield the lines of a plan's output."""
        failing, best, iteration = self.failing, self.intervals.best, self.plan.time.seconds
        gap, blocked = failing.failure_gap, failing.blocked

        def length(seconds: float) -> str:
            return duration(seconds / _DAY, 3)

        yield (
            f"failures       one every {length(gap)}: {counted(self.num_nodes, 'node')}, each every "
            f"{length(self.node_mtbf)}"
        )
        size = self.checkpoint_bytes
        text = f"{plain(size / 1e12, 3)} TB" if size >= 1e12 else f"{plain(size / _GB, 3)} GB"
        times = f"saved in {length(self.save_seconds)}, loaded in {length(self.load_seconds)}"
        yield f"checkpoint     {text} at {plain(self.storage_gbps, 3)} GB/s: {times}"
        if failing.written:
            yield f"{'':15}an async save stops training for {length(blocked)}"
        planned = self.save_interval
        if planned != best:
            yield f"save interval  {plain(planned)} iterations, {length(planned * iteration)}, as requested"
        low, high = self.intervals.near_best
        yield (
            f"{'best interval' if planned != best else 'save interval':15}--save-interval {best}, "
            f"{length(best * iteration)}; at most 1% slower: {low} to {high}"
        )
        yield (
            f"{'':15}by Young's formula {length(young_interval(gap, blocked))}, by Daly's "
            f"{length(daly_interval(gap, blocked))}"
        )
        names = {"saves": "saves", "lost": "lost work", "restarts": "restarts", "waits": "waits for nodes"}
        parts = ", ".join(f"{name} {self.times.share(kind):.1%}" for kind, name in names.items())
        yield f"goodput        {self.times.share('work'):.1%} of the time: {parts}"
        enough = "" if self.has_spare_nodes else f", one is free for {FREE_SPARE:.0%} of the failures"
        yield f"spare nodes    {failing.spares}{enough}; a repair takes {length(failing.repair)}"
        if self.work is None:
            return
        mean, least, most = (length(each) for each in self.spread(1.0))
        count = plain(self.times.failures.mean(), 3)
        yield f"with failures  {mean}, {count} failures; 90% of runs: {least} to {most}"
        if self.price_per_hour is not None:
            mean, least, most = (plain(each * self.price_per_hour) for each in self.spread(_HOUR))
            yield f"total price    {mean} with the spare nodes; 90% of runs: {least} to {most}"

    def as_object(self) -> dict[str, Any]:
        """Return the object of --json."""
        failing = self.failing
        kinds = ("work", "saves", "lost", "restarts", "waits")
        found: dict[str, Any] = {
            "goodput": self.times.share("work"),
            "share_by_kind": {kind: self.times.share(kind) for kind in kinds},
            "nodes": self.num_nodes,
            "node_mtbf_days": self.node_mtbf / _DAY,
            "failure_every_hours": failing.failure_gap / _HOUR,
            "checkpoint_gb": self.checkpoint_bytes / _GB,
            "storage_gbps": self.storage_gbps,
            "save_s": self.save_seconds,
            "save_blocks_s": failing.blocked,
            "load_s": self.load_seconds,
            "restart_s": failing.restart,
            "save_interval": self.save_interval,
            "best_save_interval": self.intervals.best,
            "near_best_save_intervals": list(self.intervals.near_best),
            "best_save_interval_s": self.intervals.best * self.plan.time.seconds,
            "young_s": young_interval(failing.failure_gap, failing.blocked),
            "daly_s": daly_interval(failing.failure_gap, failing.blocked),
            "spare_nodes": failing.spares,
            "node_repair_days": failing.repair / _DAY,
        }
        if self.work is None:
            return found
        names = ("mean", *(f"percentile_{each}" for each in SPREAD))
        found["failures"] = float(self.times.failures.mean())
        found["days"] = dict(zip(names, self.spread(_DAY), strict=True))
        if self.price_per_hour is not None:
            prices = [each * self.price_per_hour for each in self.spread(_HOUR)]
            found["price"] = dict(zip(names, prices, strict=True))
        return found
