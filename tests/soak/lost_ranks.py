#!/usr/bin/env python
"""Kills ranks of a small training that goes on without them, and lets others join.

Now and then another one is killed amid the restart, or one joins amid it.

    python tests/soak/lost_ranks.py --kills 60 --folder DIR

prints `60 kills, 60 survived, 0 lost` and exits with 0 if

- the processes that were left went on by themselves each time, from the newest save of which they had all
  parts, or a newer one; when too few were left, a new launch went on from what they had,
- the losses of all iterations are those of a run that nobody disturbed, within 1e-12.

Each process is a node of its own, whose folder is wiped when it is killed. Some are spares at first.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # the fork server's

from tests.soak.folder import iterations_of, newest_whole  # noqa: E402
from tests.soak.group import Group  # noqa: E402
from tests.soak.kill_loop import Lost, number_lost  # noqa: E402
from tests.soak.lost_nodes import INTERVAL, differences, flags_of, main, newest_save  # noqa: E402

LAUNCHES = (
    (5, 2, "--tp 2 --zero-stage 1 --spare-nodes 1"),
    (4, 2, "--pp 2 --zero-stage 2 --async-save"),
    (3, 1, "--zero-stage 3 --spare-nodes 1"),
    (4, 1, "--layout auto --async-save"),
)
"""Numbers of processes, how many of them can train, and flags."""
WENT_ON = re.compile(r"lost after iteration (\d+) .* went on from iteration (\d+)")
SECONDS = re.compile(r"^([\d.]+) s from the alarm", re.MULTILINE)
GREW = re.compile(r"\d+ ranks? instead of \d+ after iteration (\d+): .* went on from iteration (\d+)")
JOINING = "joining the run"
PATIENCE = 120.0
ONE_A_NODE = {"LOCAL_WORLD_SIZE": "1"}


class Soak:
    """One run, of which `num_kills` processes are killed."""

    def __init__(
        self,
        num_kills: int,
        seed: int,
        folder: Path,
        say: Callable[[str], None],
        launches: Sequence[tuple[int, int, str]],
        joins: float,
        length: int,
    ) -> None:
        self.num_kills, self.folder, self.say, self.launches = num_kills, folder, say, launches
        self.random = random.Random(seed)
        self.joins, self.length = joins, length
        self.num_killed = self.num_survived = self.num_joined = self.most_repeated = 0
        self.seconds: list[float] = []

    def run(self) -> None:
        """Run to the end through all the kills.

        Raises:
            Lost: what is promised did not hold.
        """
        number, group = 0, None
        while group is None or self.num_killed < self.num_kills:
            size, least, flags = self.launches[number % len(self.launches)]
            number += 1
            group = self._start(size, flags)
            try:
                self._kill_all_but(least, group, flags)
                if self.num_killed == self.num_kills:
                    group.wait_for_rest()  # the comparison finds an iteration that is missing
            finally:
                group.end(0.0)

    def _start(self, size: int, flags: str) -> Group:
        self.flags = [*flags_of(self.folder, self.length), *flags.split(), "--peer-copies", "1"]
        self.flags += ["--non-persistent-save-interval", str(INTERVAL), "--save-interval", "12"]
        self.flags += ["--inprocess-restart"]
        places = [self._place(number) for number in range(size)]
        return Group.start(size, self.flags, self.folder, ONE_A_NODE, places)

    def _place(self, number: int) -> list[str]:
        return ["--non-persistent-local-ckpt-dir", str(self._memory(number))]

    def _memory(self, number: int) -> Path:
        return self.folder.parent / f"node{number}"

    def _kill_all_but(self, least: int, group: Group, flags: str) -> None:
        self._wait(group, self._iteration() + 2)
        while len(alive := group.alive()) > least and self.num_killed < self.num_kills:
            self._wait(group, self._iteration() + self.random.randint(2, 2 * INTERVAL + 1))
            time.sleep(self.random.uniform(0.0, 0.1))
            said = len(WENT_ON.findall(group.log.read_text()))
            group.freeze()
            reached = self._iteration()
            victims = self._kill_one(group, alive)
            if len(alive) > least and self.num_killed < self.num_kills and self.random.random() < 0.25:
                time.sleep(self.random.uniform(0.0, 2.0))  # while the others restart
                group.freeze()
                said, reached = len(WENT_ON.findall(group.log.read_text())), self._iteration()
                victims += self._kill_one(group, alive)
            kept = max(newest_save([self._memory(each) for each in alive]), newest_whole(self.folder))
            # A spare may be all that was killed: then nothing happens.
            self._wait(group, max(self._iteration(), reached) + 3)
            self.num_survived += len(victims)
            report = WENT_ON.findall(group.log.read_text())[said:]
            resumed = int(report[-1][1]) if report else reached
            if report and resumed < kept:
                raise Lost(f"went on from {resumed} instead of {kept}: see {group.log}")
            self.most_repeated = max(self.most_repeated, reached - resumed)
            if self.random.random() < self.joins:
                self._let_join(group, alive)
            self.seconds += [float(each) for each in SECONDS.findall(group.log.read_text())[said:]]
            self.say(
                f"kill {self.num_killed}: {flags}, {victims} killed, {len(alive)} left: {reached}, {resumed}"
            )

    def _let_join(self, group: Group, alive: list[int]) -> None:
        """Start another process; return once it waits for its place, or has it."""
        said = group.log.read_text().count(JOINING)
        alive.append(group.add([*self.flags, *self._place(group.size), "--join-run"], ONE_A_NODE))
        deadline = time.monotonic() + PATIENCE
        while group.log.read_text().count(JOINING) == said:
            if time.monotonic() > deadline:
                raise Lost(f"a process does not join: see {group.log}")
            time.sleep(0.05)
        time.sleep(self.random.uniform(0.5, 10.0))  # it has its place after 5 s
        self.num_joined += 1

    def _kill_one(self, group: Group, alive: list[int]) -> list[int]:
        victim = self.random.choice(alive)
        alive.remove(victim)
        group.kill([victim])
        shutil.rmtree(self._memory(victim), ignore_errors=True)
        self.num_killed += 1
        return [victim]

    def _wait(self, group: Group, iteration: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while self._iteration() < iteration:
            if not group.alive() or time.monotonic() > deadline:
                raise Lost(f"the processes that were left ended or hang: see {group.log}")
            time.sleep(0.01)

    def _iteration(self) -> int:
        return max(iterations_of(self.folder), default=0)


def soak(
    num_kills: int,
    seed: int,
    folder: Path,
    say: Callable[[str], None] = print,
    launches: Sequence[tuple[int, int, str]] = LAUNCHES,
    joins: float = 0.5,
) -> tuple[str, bool]:
    """Return the tally, and whether nothing was lost.

    Args:
        joins: after which share of the kills a new process joins.
    """
    began = time.monotonic()
    undisturbed, disturbed = folder / "undisturbed", folder / "disturbed"
    length = round((2 + 20 * joins) * num_kills)
    if Group.start(1, flags_of(undisturbed, length), undisturbed).wait() != 0:
        raise SystemExit(f"error: the undisturbed run failed: see {undisturbed}")
    run = Soak(num_kills, seed, disturbed, say, launches, joins, length)
    num_lost = number_lost(run.run, lambda: differences(disturbed, undisturbed), say)
    grown = [grew for log in folder.glob("*.log") for grew in GREW.findall(log.read_text())]
    say(f"{run.num_joined} processes joined, with which training was enlarged {len(grown)} times")
    if any(int(reached) != int(resumed) for reached, resumed in grown):
        say("iterations were repeated when it was enlarged")
        num_lost += 1
    times = sorted(run.seconds)
    say(f"at most {run.most_repeated} iterations repeated; {(time.monotonic() - began) / 60:.1f} minutes")
    if times:
        say(f"{len(times)} restarts: median {times[len(times) // 2]} s, at most {times[-1]} s")
    tally = f"{num_kills} kills, {run.num_survived} survived, {num_lost} lost"
    return tally, num_lost == 0 and run.num_survived == num_kills


if __name__ == "__main__":
    main(soak, __doc__)
