#!/usr/bin/env python
"""Kills ranks of a small training again and again with SIGKILL, half of the times during a save.

    python tests/soak/kill_loop.py --kills 50

prints `50 kills, 50 resumed, 0 lost` and exits with 0 if

- the run's folder held a complete checkpoint, by its own SHA256SUMS, at every kill since the first save,
- each start went on from the newest one that was whole at the kill,
- the losses of all iterations, and the last checkpoint's tensors, are to the bit those of a run that nobody
  disturbed.

Ranks run the main function of pretrain_gpt.py, each in a process of its own that a fork server starts.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # the fork server's

from tests.soak.folder import iterations_of, losses_of, newest_whole, tensors_of, traces_of_saving  # noqa: E402
from tests.soak.group import Group, Start  # noqa: E402

RUN = (
    *(
        "--preset",
        "gpt-tiny",
        "--mock-data",
        "--vocab-size",
        "64",
        "--seq-length",
        "16",
        "--num-threads",
        "1",
    ),
    *("--global-batch-size", "4", "--eval-iters", "0", "--log-interval", "1", "--lr", "0.01"),
    *("--hidden-dropout", "0.1", "--distributed-timeout-minutes", "2"),
)
ONE_STARTUP = 0.2
"""Share of the kills at random moments that hit while ranks start."""


class Lost(Exception):
    """Something that a kill must not cost."""


@dataclass(frozen=True)
class Plan:
    """What is run, and what is done to it.

    Attributes:
        layout: flags of tp, pp and the like.
        whole_group: share of the kills that hit all ranks at once; the others hit one.
    """

    kills: int
    ranks: int
    save_interval: int
    layout: Sequence[str]
    whole_group: float
    seed: int
    timeout: float

    @property
    def train_iters(self) -> int:
        """Iterations that outlast the kills: each lets about an interval pass, and some miss their save."""
        return (self.kills + 6) * (self.save_interval + 1)

    def flags(self, folder: Path) -> list[str]:
        own = ["--train-iters", str(self.train_iters), "--save-interval", str(self.save_interval)]
        files = [
            "--save",
            str(folder),
            "--load",
            str(folder),
            "--metrics-file",
            str(folder / "metrics.jsonl"),
        ]
        return [*RUN, *own, *self.layout, *files]


class Soak:
    """One run, killed as often as its plan says."""

    def __init__(self, plan: Plan, folder: Path, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.folder = folder
        self.say = say
        self.random = random.Random(plan.seed)
        self.saves_hit = 0
        self.resumed = 0
        self._stale: set[tuple[str, int]] = set()
        self._owed: list[int] = []
        """For each kill that no start has answered for yet: the iteration to go on from."""

    def run(self) -> None:
        """Runs to the end through all the kills.

        Raises:
            Lost: what is promised did not hold.
        """
        for number in range(self.plan.kills):
            during_save = number % 2 == 1 and 2 * self.saves_hit <= number
            self._stale = traces_of_saving(self.folder)
            group = Group.start(self.plan.ranks, self.plan.flags(self.folder), self.folder)
            try:
                hit = self._kill(group, during_save)
            finally:
                group.end()
            self._account(group.told())
            self._owed.append(newest_whole(self.folder))
            self.saves_hit += hit
            self.say(f"kill {number + 1}: {'during a save' if hit else 'elsewhere'}, {self._standing()}")
        status, start = finish(self.plan, self.folder)
        self._account(start)
        if status != 0 or self._owed:
            raise Lost(f"the last start ended with status {status}, {len(self._owed)} kills not answered for")

    def _standing(self) -> str:
        return f"whole up to {newest_whole(self.folder)}, run up to {self._iteration()}"

    def _kill(self, group: Group, during_save: bool) -> bool:
        """Waits for the moment and kills; tells whether a save was going on."""
        if during_save:
            self._wait_for_a_save(group)
        elif self.random.random() < ONE_STARTUP:
            moment = time.monotonic() + self.random.uniform(0.0, 2.0)
            before = self._iteration()
            self._wait(group, lambda: time.monotonic() > moment or self._iteration() > before)
            group.freeze()
        else:
            ahead = self.random.randrange(self.plan.save_interval + 1)
            before = self._iteration()
            self._wait(group, lambda: self._iteration() > before + ahead)
            time.sleep(self.random.uniform(0.0, 0.1))
            group.freeze()
        saving = self._is_saving()
        before = newest_whole(self.folder)
        everybody = self.random.random() < self.plan.whole_group
        victims = range(group.size) if everybody else [self.random.randrange(group.size)]
        group.kill(victims)
        if newest_whole(self.folder) < before:
            raise Lost(f"no checkpoint as new as {before} is whole after the kill")
        return saving

    def _wait_for_a_save(self, group: Group) -> None:
        """Freezes the ranks in the middle of a save; after one that was missed, it waits less."""
        longest = 0.15
        while True:
            self._wait(group, self._is_saving)
            time.sleep(self.random.uniform(0.0, longest))
            group.freeze()
            if self._is_saving():
                return
            longest /= 2
            group.go_on()

    def _iteration(self) -> int:
        return max(iterations_of(self.folder), default=0)

    def _is_saving(self) -> bool:
        return bool(traces_of_saving(self.folder) - self._stale)

    def _wait(self, group: Group, happens: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.plan.timeout
        while not happens():
            if group.is_over() or time.monotonic() > deadline:
                raise Lost(f"the ranks ended or hung by themselves: see {group.log}")
            time.sleep(0.0005)

    def _account(self, start: Start) -> None:
        """Answers for the kills before a start that came far enough to say where it went on."""
        if start.resumed_at is None:
            return
        for expected in self._owed:
            if start.resumed_at < expected:
                raise Lost(f"went on from iteration {start.resumed_at}, and {expected} was whole")
        self.resumed += len(self._owed)
        self._owed.clear()


def finish(plan: Plan, folder: Path) -> tuple[int, Start]:
    """Runs undisturbed to the end; gives the largest status of a rank."""
    group = Group.start(plan.ranks, plan.flags(folder), folder)
    status = group.wait()
    return status, group.told()


def compare(disturbed: Path, undisturbed: Path) -> int:
    """How many iterations miss or have another loss in any of their runs; one more if the end has."""
    ours, theirs = losses_of(disturbed), losses_of(undisturbed)
    lost = sum(set(ours.get(iteration, ())) != set(losses) for iteration, losses in theirs.items())
    return lost + (tensors_of(disturbed) != tensors_of(undisturbed))


def number_lost(run: Callable[[], None], compared: Callable[[], int], say: Callable[[str], None]) -> int:
    """What the comparison after a run counts; 1 if the run ended early."""
    try:
        run()
    except Lost as what:
        say(f"lost: {what}")
        return 1
    return compared()


def soak(plan: Plan, folder: Path, say: Callable[[str], None] = print) -> tuple[str, bool]:
    """The tally, and whether nothing was lost."""
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"error: --folder {folder} is not empty: pass another one")
    undisturbed, disturbed = folder / "undisturbed", folder / "disturbed"
    if finish(plan, undisturbed)[0] != 0:
        raise SystemExit(f"error: the undisturbed run failed: see {undisturbed}")
    run = Soak(plan, disturbed, say)
    lost = number_lost(run.run, lambda: compare(disturbed, undisturbed), say)
    minutes = (time.monotonic() - began) / 60
    say(f"{run.saves_hit} of the kills during a save; {plan.train_iters} iterations; {minutes:.1f} minutes")
    tally = f"{plan.kills} kills, {run.resumed} resumed, {lost} lost"
    return tally, lost == 0 and run.resumed == plan.kills


def _parse(arguments: Sequence[str]) -> tuple[Plan, Path]:
    parser = argparse.ArgumentParser(description="Kills a training again and again.", allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--save-interval", type=int, default=3)
    parser.add_argument("--whole-group", type=float, default=0.3, help="share of kills that hit all ranks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds until a start counts as hung")
    parser.add_argument("--folder", type=Path, required=True, help="empty or new; its runs stay there")
    parser.add_argument("--layout", default="--tp 2 --zero-stage 1", help="further flags, in one word")
    given = parser.parse_args(arguments)
    plan = Plan(
        given.kills,
        given.ranks,
        given.save_interval,
        given.layout.split(),
        given.whole_group,
        given.seed,
        given.timeout,
    )
    return plan, given.folder


if __name__ == "__main__":
    plan, folder = _parse(sys.argv[1:])
    tally, is_well = soak(plan, folder, lambda text: print(text, flush=True))
    print(tally)
    raise SystemExit(not is_well)
