#!/usr/bin/env python
"""Compare planned gains of one setting with published ones: pairs of rows of the open half.

PYTHONPATH=. python benchmarks/planner_gains.py

The rows of a pair are equal but for one setting: precision, CUDA graphs, dispatcher, recomputation. If a
release has both, they differ in nothing else. Otherwise they are of consecutive releases, whose programs
differ too. Rows whose recipe has other sizes are left out. A gain is the change of tokens per second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

from benchmarks.planner_published import Comparison, Row, compare, settings_of
from benchmarks.published_rows import OPEN, read_rows

_SAME = (
    *("source", "task", "gpu", "gpus", "model", "variant", "seq", "mbs", "gbs"),
    *("fsdp", "tp", "pp", "cp", "vp", "ep"),
)
_UNSET = {"fsdp": "0", "vp": "1", "ep": "1"}


class Pair(NamedTuple):
    """Two runs that differ in a setting, the earlier release first."""

    setting: str
    first: Comparison
    second: Comparison

    @property
    def releases(self) -> str:
        """Return the release, or both."""
        return " to ".join(dict.fromkeys((self.first.row["release"], self.second.row["release"])))

    @property
    def published(self) -> float:
        """Return the published gain."""
        return self.first.seconds / self.second.seconds - 1

    @property
    def planned(self) -> float:
        """Return the planned gain."""
        assert self.first.plan is not None and self.second.plan is not None
        return self.first.plan.time.seconds / self.second.plan.time.seconds - 1


def settings_that_plans_read(row: Row) -> dict[str, str]:
    """Return a row's settings; a CUDA graph and its scope are one."""
    settings = settings_of(row)
    scope, graph = settings.pop("cuda_graph_scope", ""), settings.pop("cuda_graph", "none")
    if settings.get("recompute") == "selective":  # what it recomputes is another setting
        del settings["recompute"]
    graphs = "" if graph == "none" else scope or graph
    return {**settings, "cuda_graph": graphs, "precision": row["precision"]}


def pairs(comparisons: Sequence[Comparison]) -> Iterator[Pair]:
    """Yield the pairs of planned rows."""
    alike = defaultdict(list)
    for each in sorted(comparisons, key=lambda each: each.row["date"]):
        if each.plan is not None and not each.row["recipe_differs"]:
            alike[tuple(each.row[name] or _UNSET.get(name, "") for name in _SAME)].append(each)
    for rows in alike.values():
        releases = list(dict.fromkeys(each.row["release"] for each in rows))
        for first, second in combinations(rows, 2):
            distance = releases.index(second.row["release"]) - releases.index(first.row["release"])
            before, after = settings_that_plans_read(first.row), settings_that_plans_read(second.row)
            changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
            is_new = changed != ["precision"] or distance == 0
            if len(changed) == 1 and distance <= 1 and is_new:
                name = changed[0]
                text = f"{name} {before.get(name) or 'off'} to {after.get(name, 'off') or 'on'}"
                yield Pair(text, first, second)


def main() -> None:
    """Print a line a pair."""
    found = list(pairs(list(compare(read_rows(OPEN)))))
    print(f"{'published':>9}{'planned':>9}  run, setting")
    for pair in found:
        row = pair.first.row
        name = f"{row['model']} on {row['gpus']} {row['gpu']}, {pair.releases}"
        planned = f"{pair.planned:+9.1%}" if pair.planned else " no model"
        print(f"{pair.published:+9.1%}{planned}  {name}: {pair.setting}")
    modelled = [pair for pair in found if pair.planned]
    errors = [abs(pair.planned - pair.published) for pair in modelled]
    signs = sum(pair.planned * pair.published > 0 for pair in modelled)
    print(f"{len(modelled)} pairs: median difference {median(errors):.1%}, {signs} with the right sign")


if __name__ == "__main__":
    main()
