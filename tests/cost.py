"""The processor time that the tests of each folder take, with that of the programs and ranks they start.

`tests/cost.json` has the seconds of a whole run. Such a run fails if a folder has become much dearer beside
the others, which a faster or slower machine does not change.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pytest

LEDGER = Path(__file__).with_name("cost.json")
LIMIT = 1.5
"""A folder may cost this much more than the ledger says, beside the others: a machine's neighbours change."""
SLACK = 10.0
"""Seconds by which short folders may differ."""
SAMPLE, IMPORTS = "sample of slow tests", "imports and collection"


class Cost:
    """Measures the processor time between tests of different folders, in each worker of pytest-xdist.

    Args:
        config: that of pytest.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: dict[str, float] = defaultdict(float)
        self._folder, self._before = IMPORTS, 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        is_sampled = item in self._config.stash.get(SAMPLED, ())
        self._enter(SAMPLE if is_sampled else folder_of(item.nodeid))

    @pytest.hookimpl(tryfirst=True)  # before ranks end that are alive
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._config.pluginmanager.has_plugin("dsession"):  # workers have told what they measured
            self._enter("")
        if hasattr(self._config, "workeroutput"):  # in a worker
            self._config.workeroutput["cost"] = dict(self._seconds)
            return
        if self._config.option.record_cost:
            rounded = {folder: round(self._seconds[folder]) for folder in sorted(self._seconds)}
            for other in (SAMPLE, IMPORTS):
                rounded.pop(other, None)
            LEDGER.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
        if self._is_whole and self._dearer() and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for folder, seconds in getattr(node, "workeroutput", {}).get("cost", {}).items():
            self._seconds[folder] += seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._is_whole:
            return
        terminalreporter.section("processor time in seconds, and that of tests/cost.json")
        recorded = read_ledger()
        for folder, seconds in sorted(self._seconds.items(), key=lambda each: -each[1]):
            terminalreporter.write_line(f"{folder:<32}{seconds:8.0f}{recorded.get(folder, 0.0):8.0f}")
        total, before = sum(self._seconds.values()), sum(recorded.values())
        terminalreporter.write_line(f"{'all':<32}{total:8.0f}{before:8.0f}")
        for line in self._dearer():
            terminalreporter.write_line(f"FAILED {line}", red=True)

    @property
    def _is_whole(self) -> bool:
        """Whether all tests run that run by default."""
        option = self._config.option
        return not (
            option.quick
            or option.keyword
            or option.deselect
            or option.collectonly
            or option.markexpr != "not slow"
            or self._config.args_source is not pytest.Config.ArgsSource.TESTPATHS
        )

    def _dearer(self) -> list[str]:
        return dearer(self._seconds, read_ledger())

    def _enter(self, folder: str) -> None:
        if folder != self._folder:
            now = max(processor_seconds(os.getpid()) for _ in range(2))  # one may miss a process that ends
            self._seconds[self._folder] += max(now - self._before, 0.0)
            self._folder, self._before = folder, now


SAMPLED = pytest.StashKey[set[pytest.Item]]()


def folder_of(test: str) -> str:
    """Return the folder of a test by its name, of two levels below `tests`."""
    return "/".join(test.split("::")[0].split("/")[1:-1][:2]) or "tests"


def read_ledger() -> dict[str, float]:
    """Return the seconds of each folder in a whole run."""
    recorded: dict[str, float] = json.loads(LEDGER.read_text(encoding="utf-8"))
    return recorded


def dearer(seconds: Mapping[str, float], recorded: Mapping[str, float]) -> list[str]:
    """Return a line for each folder that costs more than its line in the ledger allows.

    The unit is that of the ledger, by the folder whose ratio is the median.
    """
    both = [folder for folder in seconds if recorded.get(folder)]
    speed = median([seconds[folder] / recorded[folder] for folder in both]) if both else 1.0
    advice = "make its tests cheaper, or record the cost by `scripts/test.sh --record-cost`"
    return [
        f"tests/{folder} costs {seconds[folder] / speed:.0f} s, by tests/cost.json {allowed:.0f}: {advice}"
        for folder, allowed in recorded.items()
        if seconds.get(folder, 0.0) / speed > LIMIT * allowed + SLACK
    ]


def processor_seconds(pid: int) -> float:
    """Return the time that a process and all that it has started have used; 0 where there is no /proc."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        number = int(path.parent.name)
        children.setdefault(int(fields[1]), []).append(number)
        ticks[number] = sum(map(int, fields[11:15]))  # its own, and of those it has waited for
    total, waiting = 0, [pid] if pid in ticks else []
    while waiting:
        number = waiting.pop()
        total += ticks[number]
        waiting += children.get(number, [])
    return total / os.sysconf("SC_CLK_TCK")
