#!/usr/bin/env python
"""Kills a small training again and again, loses a node each time, and restarts in another layout.

    python tests/soak/lost_nodes.py --kills 60 --folder DIR

prints `60 kills, 60 resumed, 0 lost` and exits with 0 if

- each start went on from the newest non-persistent save of which the folders of its nodes have all parts,
- that was the newest one at the kill, lost node or not: its copies were enough, and no checkpoint was read,
- the losses of all iterations are those of a run that nobody disturbed, within 1e-12.

A node is a folder that some ranks see. After a kill, one of them is wiped, or its ranks stay away: it may
come back later with what it had. Others join.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # the fork server's

from tests.soak.folder import is_whole, iterations_of, losses_of  # noqa: E402
from tests.soak.group import Group  # noqa: E402
from tests.soak.kill_loop import RUN, Lost, number_lost  # noqa: E402

INTERVAL = 2
"""Iterations between saves."""
NODES = (0, 1, 2)
LAYOUTS = {
    1: ("",),
    2: ("--tp 2", "--pp 2", "--zero-stage 1"),
    4: ("--tp 2 --zero-stage 1", "--tp 2 --pp 2", "--pp 2 --zero-stage 2", "--zero-stage 3"),
}
"""Layouts by the number of ranks."""


class Soak:
    """One run, killed `num_kills` times."""

    def __init__(self, num_kills: int, seed: int, folder: Path, say: Callable[[str], None]) -> None:
        self.num_kills, self.folder, self.say = num_kills, folder, say
        self.random = random.Random(seed)
        self.nodes: list[int] = [0, 1]
        self.resumed = self.most_repeated = 0

    def run(self) -> None:
        """Run to the end through all the kills.

        Raises:
            Lost: what is promised did not hold.
        """
        expected: int | None = None
        for number in range(self.num_kills + 1):
            group, layout = self._start()
            try:
                if number < self.num_kills:
                    self._let_it_run(group)
                    group.freeze()
                    group.kill(range(group.size))
                elif group.wait() != 0:
                    raise Lost(f"the last start failed: see {group.log}")
            finally:
                group.end()
            self._account(group, expected)
            if number < self.num_kills:
                nodes, reached = len(self.nodes), self._iteration()
                expected = self._lose_a_node()
                self.most_repeated = max(self.most_repeated, reached - expected)
                self.say(
                    f"kill {number + 1}: {nodes} nodes, {layout or 'one rank'}: {reached}, {expected} kept"
                )

    def _start(self) -> tuple[Group, str]:
        most = 4 if len(self.nodes) > 1 else 2
        num_ranks = self.random.choice([size for size in LAYOUTS if len(self.nodes) <= size <= most])
        layout = self.random.choice(LAYOUTS[num_ranks])
        flags = [*flags_of(self.folder, self.num_kills), *layout.split(), "--peer-copies", "1"]
        flags += ["--non-persistent-save-interval", str(INTERVAL)]
        flags += ["--async-save"] if self.random.random() < 0.7 else []
        places = [self._memory(self.nodes[rank * len(self.nodes) // num_ranks]) for rank in range(num_ranks)]
        of_ranks = [["--non-persistent-local-ckpt-dir", str(place)] for place in places]
        return Group.start(num_ranks, flags, self.folder, of_ranks=of_ranks), layout

    def _memory(self, node: int) -> Path:
        return self.folder.parent / f"node{node}"

    def _let_it_run(self, group: Group) -> None:
        """Wait for some iterations, and for a moment in the next one."""
        until, deadline = self._iteration() + self.random.randint(2, 2 * INTERVAL + 1), time.monotonic() + 300
        while self._iteration() < until:
            if group.is_over() or time.monotonic() > deadline:
                raise Lost(f"the ranks ended or hung by themselves: see {group.log}")
            time.sleep(0.001)
        time.sleep(self.random.uniform(0.0, 0.1))

    def _lose_a_node(self) -> int:
        """Choose the nodes of the next start; return the iteration that it must go on from."""
        before = newest_save([self._memory(node) for node in self.nodes])
        lost = self.random.choice(self.nodes) if len(self.nodes) > 1 else None
        following = [node for node in self.nodes if node != lost]
        if lost is not None and self.random.random() < 0.6:
            shutil.rmtree(self._memory(lost))
            following.append(lost)  # replaced by one with an empty memory
        following += [node for node in NODES if node not in self.nodes and self.random.random() < 0.5]
        self.nodes = self.random.sample(following, len(following))
        after = newest_save([self._memory(node) for node in self.nodes])
        if after < before:
            raise Lost(f"the save of iteration {before} is gone with node {lost}; {after} is left")
        return after

    def _account(self, group: Group, expected: int | None) -> None:
        if expected is not None:
            if group.told().resumed_at != expected:
                raise Lost(f"resumed at {group.told().resumed_at} instead of {expected}: see {group.log}")
            self.resumed += 1

    def _iteration(self) -> int:
        return max(iterations_of(self.folder), default=0)


def flags_of(folder: Path, num_kills: int) -> list[str]:
    iterations = ["--train-iters", str((num_kills + 1) * (2 * INTERVAL + 2)), "--params-dtype", "fp64"]
    iterations += ["--lr", "1e-4"]  # a larger one lets the roundings of layouts grow
    metrics = ["--metrics-file", str(folder / "metrics.jsonl")]
    return [*RUN, *iterations, *metrics, "--save", str(folder), "--load", str(folder)]


def newest_save(folders: Sequence[Path]) -> int:
    """Return the iteration of the newest save of which the folders have all parts; 0 without."""
    found: dict[tuple[int, str, int], set[int]] = {}
    for folder in folders:
        for part in folder.glob("*/rank_*/iter_*"):
            if is_whole(part):
                record = json.loads((part / "run.json").read_text())["part"]
                key = int(part.name.removeprefix("iter_")), record["save"], record["num_parts"]
                found.setdefault(key, set()).add(int(part.parent.name.removeprefix("rank_")))
    whole = [key[0] for key, sources in found.items() if sources == set(range(key[2]))]
    return max(whole, default=0)


def differences(disturbed: Path, undisturbed: Path) -> int:
    """Return how many iterations are missing, or had another loss in one of their runs."""
    ours = losses_of(disturbed)
    return sum(
        iteration not in ours or any(abs(each - loss) > 1e-12 * abs(loss) for each in ours[iteration])
        for iteration, (loss,) in losses_of(undisturbed).items()
    )


def soak(num_kills: int, seed: int, folder: Path, say: Callable[[str], None] = print) -> tuple[str, bool]:
    """Return the tally, and whether nothing was lost."""
    began = time.monotonic()
    undisturbed, disturbed = folder / "undisturbed", folder / "disturbed"
    if Group.start(1, flags_of(undisturbed, num_kills), undisturbed).wait() != 0:
        raise SystemExit(f"error: the undisturbed run failed: see {undisturbed}")
    run = Soak(num_kills, seed, disturbed, say)
    num_lost = number_lost(run.run, lambda: differences(disturbed, undisturbed), say)
    say(f"at most {run.most_repeated} iterations repeated; {(time.monotonic() - began) / 60:.1f} minutes")
    tally = f"{num_kills} kills, {run.resumed} resumed, {num_lost} lost"
    return tally, num_lost == 0 and run.resumed == num_kills


def main(soak: Callable[[int, int, Path, Callable[[str], None]], tuple[str, bool]], description: str) -> None:
    """Run a soak with the options of the command line; exit with 0 if nothing was lost."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True, help="new; its runs stay there")
    given = parser.parse_args()
    tally, is_well = soak(given.kills, given.seed, given.folder, lambda text: print(text, flush=True))
    print(tally)
    raise SystemExit(not is_well)


if __name__ == "__main__":
    main(soak, __doc__)
