"""Runs whose nodes fail: which save interval is best, how long a run takes, its spare nodes and its price.

A failure stops all ranks. They start again with a spare node, load the last complete checkpoint (with
--peer-copies, the last non-persistent save, of which a copy is left), and repeat the work since then. With
--inprocess-restart, their processes live on, and train with a smaller dp if no spare node is free. All times
are in seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from megalite.plan.estimate import Costs, RunPlan, duration, plain, train_tokens
from megalite.plan.failing_run import (
    FREE_SPARE,
    FailingRun,
    RunTimes,
    SaveIntervals,
    compare_intervals,
    daly_interval,
    enough_spares,
    simulate_runs,
    young_interval,
)
from megalite.utils.errors import UserError, counted

_GB, _HOUR, _DAY = 1e9, 3600.0, 86400.0
NODE_STORAGE_GBPS = 1.0
"""GB/s of storage per node. BLOOM saved 2.3 TB from 48 nodes in 40 s (bigscience-workshop/bigscience,
train/tr11-176B-ml/chronicles.md), and Llama 3 had storage of 2 TB/s for 2,048 nodes (Grattafiori et al. 2024,
section 3.3.1)."""
RESTART_MINUTES = 10.0
"""From a failure to the first load: ranks that hang are noticed after --distributed-timeout-minutes, 10."""
IN_PROCESS_MINUTES = 20 / 60
"""The same with --inprocess-restart. TrainMover, whose standby machines are ready too, took 20 s on 1,024
GPUs (Lao et al., arXiv:2412.12636v3)."""
REPAIR_DAYS = 1.0
"""Days until a failed node is repaired or replaced."""
ASYNC_SHARE = 0.005
"""Share of a save's time for which an async save stops training (benchmarks/RESULTS.md, Checkpoints)."""
ASYNC_GAP = 2.0
"""Shortest interval of async saves, as a multiple of the time to write one: no two saves run at once."""
PEER_GBPS = 0.8
"""GB/s at which a rank writes or verifies its part of a non-persistent save, or sends and receives a copy:
between two processes of one machine (benchmarks/RESULTS.md, Checkpoints)."""
MIN_SHARE = 0.01
"""Smallest share of useful time with which a run is simulated."""
LONG_RUN = 100 * _DAY
"""Length of the simulated run if the run has no length."""
SPREAD = (5, 95)
"""Percentiles of the days and the price."""


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


@dataclass(frozen=True)
class Recovery:
    """Way to go on after a failure.

    Attributes:
        num_copies: value of --peer-copies; 0 if it loads a checkpoint.
        in_process: whether --inprocess-restart is set.
        spares: number of spare nodes; None for enough.
    """

    num_copies: int
    in_process: bool
    spares: int | None


class GoodputPlan:
    """Plan of a run on nodes that fail. Each number is computed when it is first requested.

    Args:
        plan: the plan without failures.
        costs: inputs to the days and the price.
        recovery: how the run goes on after a failure; by default as its flags say.

    Raises:
        UserError: the run would hardly make progress.
    """

    def __init__(
        self, plan: RunPlan, reliability: Reliability, costs: Costs, recovery: Recovery | None = None
    ) -> None:
        self.plan, self.reliability, self.costs = plan, reliability, costs
        cluster, config = plan.run.cluster, plan.run.config
        self.num_nodes, self.node_mtbf = cluster.num_nodes, reliability.node_mtbf
        self.storage_gbps = reliability.storage_gbps or NODE_STORAGE_GBPS * self.num_nodes
        gap = reliability.node_mtbf / self.num_nodes
        repair = reliability.node_repair or REPAIR_DAYS * _DAY
        checkpoint = config.checkpoint
        of_flags = Recovery(checkpoint.peer_copies, checkpoint.inprocess_restart, reliability.spare_nodes)
        self.recovery = recovery or of_flags
        self._is_requested = self.recovery == of_flags
        minutes = IN_PROCESS_MINUTES if self.recovery.in_process else RESTART_MINUTES
        if self.recovery.in_process == of_flags.in_process and reliability.restart_minutes:
            minutes = reliability.restart_minutes
        self.num_copies, spares = self.recovery.num_copies, self.recovery.spares
        if self.num_copies >= self.num_nodes:
            raise UserError(
                f"--peer-copies {self.num_copies} needs {self.num_copies + 1} nodes, and the run has "
                f"{self.num_nodes}: pass fewer copies"
            )
        saved = self.peer_save_seconds if self.num_copies else self.save_seconds
        self.failing = FailingRun(
            failure_gap=gap,
            blocked=self._blocked(saved),
            written=saved if checkpoint.async_save else 0.0,
            restart=60 * minutes + (self.peer_load_seconds if self.num_copies else self.load_seconds),
            repair=repair,
            spares=enough_spares(gap, repair) if spares is None else spares,
            rates=[self.dp_without(number) / plan.run.dp for number in range(self.num_nodes + 1)]
            if self.recovery.in_process
            else (),
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
        if 1 - self.failing.missing[0] < MIN_SHARE:
            raise UserError(f"--node-mtbf {plain(self.node_mtbf / _HOUR)}h: {failures}: pass --spare-nodes")
        if self.failing.useful_share(interval) < MIN_SHARE:
            raise UserError(
                f"the run saves every {duration(interval / _DAY, 2)}, and {failures}: it would hardly make "
                f"progress; pass {self.interval_flag} {self.intervals.best}"
            )

    def dp_without(self, num_missing: int) -> int:
        """Return the replicas that train with fewer nodes: a divisor of the batch; 0 if none can.

        Nodes of several replicas may be missing: the others form whole ones, of the same tp, pp and cp.
        """
        run, left = self.plan.run, self.num_nodes - num_missing
        most = left * run.cluster.gpus_per_node // (run.cluster.world_size // run.dp)
        return self._smaller_dps[bisect_right(self._smaller_dps, most) - 1]

    @cached_property
    def _smaller_dps(self) -> list[int]:
        """Return 0 and the sizes of dp, up to the run's, that divide the batch."""
        run = self.plan.run
        num_microbatches = run.global_batch // run.config.training.micro_batch_size
        return [0, *(dp for dp in range(1, run.dp + 1) if num_microbatches % dp == 0)]

    @cached_property
    def recoveries(self) -> list[GoodputPlan]:
        """Return plans of the run with this recovery and others, from the most goodput to the least."""
        copies, spares = max(1, self.num_copies), self.recovery.spares
        compared = {
            Recovery(0, False, spares),
            Recovery(copies, False, spares),
            Recovery(copies, True, spares),
            Recovery(copies, True, 0),
        }
        others = []
        for recovery in compared - {self.recovery}:
            with suppress(UserError):  # the run would hardly make progress, or has too few nodes
                others.append(GoodputPlan(self.plan, self.reliability, self.costs, recovery))
        return sorted([self, *others], key=lambda each: -each.times.share("work"))

    @cached_property
    def cheapest_spares(self) -> int:
        """Return the number of spare nodes with which the run takes the fewest GPU hours."""

        def cost(spares: int) -> float:
            run = replace(self.failing, spares=spares)
            interval = self.save_interval * self.plan.time.seconds
            times = simulate_runs(run, self.work or LONG_RUN, interval, num_runs=100)
            return float(times.total.mean()) * (self.num_nodes + spares)

        return min(range(enough_spares(self.failing.failure_gap, self.failing.repair) + 1), key=cost)

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
    def _loaded_bytes(self) -> float:
        """Return the bytes that all ranks load: each one the weights and the state that it holds."""
        run = self.plan.run
        copies = run.num_sharing / (run.num_shards if run.zero_stage else 1)  # of each rank's state
        weights = run.element_bytes * (copies if run.zero_stage == 3 else run.num_sharing)
        return self.plan.parameters * (weights + self._optimizer_bytes * copies)

    @property
    def load_seconds(self) -> float:
        """Return the time to load a checkpoint from storage."""
        return self._loaded_bytes / (self.storage_gbps * _GB)

    @property
    def peer_save_seconds(self) -> float:
        """Return the time in which ranks write their parts of a non-persistent save, and exchange copies."""
        cluster = self.plan.run.cluster
        part = self.checkpoint_bytes / cluster.world_size / _GB
        return part / PEER_GBPS + self.num_copies * part / min(PEER_GBPS, cluster.network_gbps)

    @property
    def peer_load_seconds(self) -> float:
        """Return the time in which ranks verify the parts of a non-persistent save, and exchange them."""
        cluster = self.plan.run.cluster
        part, loaded = (
            each / cluster.world_size / _GB for each in (self.checkpoint_bytes, self._loaded_bytes)
        )
        return part / PEER_GBPS + loaded / cluster.network_gbps

    def _blocked(self, written: float) -> float:
        """Return how long a save that is written in this time stops training.

        With an async one, the copy to the host runs while the next gradients are computed. Training waits for
        the rest of it.
        """
        cluster = self.plan.run.cluster
        if not self.plan.run.config.checkpoint.async_save:
            return written
        rate = cluster.gpu.host_link_bandwidth * cluster.gpu.link_share * cluster.world_size
        exposed = max(0.0, self.checkpoint_bytes / rate - self.plan.time.seconds)
        return exposed + ASYNC_SHARE * written

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

    @property
    def interval_flag(self) -> str:
        """Return the flag of the interval of the saves from which a run restarts."""
        return "--non-persistent-save-interval" if self.num_copies else "--save-interval"

    @property
    def _persistent_interval(self) -> float | None:
        """Return the requested interval of persistent saves in iterations."""
        checkpoint = self.plan.run.config.checkpoint
        return self._shortest(checkpoint.save_interval, checkpoint.save_interval_minutes)

    def _shortest(self, iterations: int | None, minutes: float | None) -> float | None:
        """Return the shorter of two intervals in iterations; None without any."""
        requested = [float(iterations)] if iterations else []
        if minutes:
            requested.append(60 * minutes / self.plan.time.seconds)
        return min(requested, default=None)

    @cached_property
    def save_interval(self) -> float:
        """Return the planned interval in iterations: the requested one, or the best."""
        checkpoint = self.plan.run.config.checkpoint
        if not self._is_requested:
            return float(self.intervals.best)
        if self.num_copies:
            interval = self._shortest(
                checkpoint.non_persistent_save_interval, checkpoint.non_persistent_save_interval_minutes
            )
            assert interval is not None
            return interval
        return self._persistent_interval or float(self.intervals.best)

    @cached_property
    def times(self) -> RunTimes:
        """Return the simulated runs."""
        failing = self.failing
        if self.num_copies and self._persistent_interval:  # those saves stop training too, now and then
            share = self.save_interval / self._persistent_interval
            failing = replace(failing, blocked=failing.blocked + share * self._blocked(self.save_seconds))
        return simulate_runs(failing, self.work or LONG_RUN, self.save_interval * self.plan.time.seconds)

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
        if self.num_copies:
            size = (1 + self.num_copies) * self.checkpoint_bytes / self.num_nodes / _GB
            times = f"made in {length(self.peer_save_seconds)}, loaded in {length(self.peer_load_seconds)}"
            yield f"peer copies    {self.num_copies} of each part, {plain(2 * size, 3)} GB a node: {times}"
        if failing.written:
            yield f"{'':15}an async save stops training for {length(blocked)}"
        planned = self.save_interval
        if planned != best:
            yield f"save interval  {plain(planned)} iterations, {length(planned * iteration)}, as requested"
        low, high = self.intervals.near_best
        yield (
            f"{'best interval' if planned != best else 'save interval':15}{self.interval_flag} {best}, "
            f"{length(best * iteration)}; at most 1% slower: {low} to {high}"
        )
        yield (
            f"{'':15}by Young's formula {length(young_interval(gap, blocked))}, by Daly's "
            f"{length(daly_interval(gap, blocked))}"
        )
        names = {"saves": "saves", "lost": "lost work", "restarts": "restarts", "waits": "waits for nodes"}
        parts = ", ".join(f"{name} {self.times.share(kind):.1%}" for kind, name in names.items())
        yield f"goodput        {self.times.share('work'):.1%} of the time: {parts}"
        enough = f", one is free for {FREE_SPARE:.0%} of the failures" if self.recovery.spares is None else ""
        yield f"spare nodes    {failing.spares}{enough}; a repair takes {length(failing.repair)}"
        if self.cheapest_spares != failing.spares:
            yield f"{'':15}--spare-nodes {self.cheapest_spares} needs the fewest GPU hours"
        yield from self._recovery_lines()
        if self.work is None:
            return
        mean, least, most = (length(each) for each in self.spread(1.0))
        count = plain(self.times.failures.mean(), 3)
        yield f"with failures  {mean}, {count} failures; 90% of runs: {least} to {most}"
        if self.price_per_hour is not None:
            mean, least, most = (plain(each * self.price_per_hour) for each in self.spread(_HOUR))
            yield f"total price    {mean} with the spare nodes; 90% of runs: {least} to {most}"

    def _recovery_lines(self) -> Iterator[str]:
        """Yield a table of recoveries, with the flags to pass."""
        yield f"{'recovery':15}goodput  GPU hours"
        own_nodes = self.num_nodes + self.failing.spares
        for each in self.recoveries:
            spares = each.failing.spares
            hours = (self.num_nodes + spares) * each.times.total.mean()
            ways = [f"--peer-copies {each.num_copies}"] if each.num_copies else ["checkpoints"]
            ways += ["--inprocess-restart"] if each.recovery.in_process else []
            with_spares = counted(spares, "spare node")
            if each.recovery.in_process and not spares:
                with_spares = f"no spare node (dp {self.dp_without(1)})"
            share = hours / (own_nodes * self.times.total.mean())
            planned = " (as planned)" if each is self else ""
            row = f"{each.times.share('work'):7.1%}  {share:9.1%}  {' '.join(ways)}"
            yield f"{'':15}{row}, {with_spares}{planned}"

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
            "cheapest_spare_nodes": self.cheapest_spares,
            "recoveries": [
                {
                    "peer_copies": each.num_copies,
                    "in_process": each.recovery.in_process,
                    "spare_nodes": each.failing.spares,
                    "goodput": each.times.share("work"),
                    "best_save_interval": each.intervals.best,
                }
                for each in self.recoveries
            ],
            "node_repair_days": failing.repair / _DAY,
        }
        if self.num_copies:
            found |= {"peer_save_s": self.peer_save_seconds, "peer_load_s": self.peer_load_seconds}
        if self.work is None:
            return found
        names = ("mean", *(f"percentile_{each}" for each in SPREAD))
        found["failures"] = float(self.times.failures.mean())
        found["days"] = dict(zip(names, self.spread(_DAY), strict=True))
        if self.price_per_hour is not None:
            prices = [each * self.price_per_hour for each in self.spread(_HOUR)]
            found["price"] = dict(zip(names, prices, strict=True))
        return found
