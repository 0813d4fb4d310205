"""What tests of every kind share, and the samples of slow tests that a run adds to the others."""

import atexit
import gc
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch is imported: its OpenMP reads them once. Workers and programs that tests start inherit them.
# Threads of torch that wait would use up the cores, which several processes share.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# torch.compile would build and run a program for each kind of vector instructions that the processor names.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# It would start a process to compile in, which imports torch again.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Each program that a test starts would compile all modules again, in seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Data of lm-evaluation-harness' tasks: each worker of pytest has its own folder. It is read at import, too.
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="megalite-tests-")

import hypothesis
import pytest
import torch

from megalite.config import ParallelConfig
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.utils.log import log
from tests.changes import changed_files, names_of
from tests.cost import SAMPLED, Cost
from tests.live_ranks import RANKS

atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)

hypothesis.settings.register_profile(  # a busy machine is no failure
    "megalite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("megalite")

ROOT = Path(__file__).parents[1]
SEED = torch.initial_seed()  # of torch in a new process
SIGNAL_HANDLERS = {
    number: signal.getsignal(number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
}
FOLDERS_OF_RANKS = {"parity", "power", "ranks", "slurm", "soak"}  # their tests run several processes at once


class FirstResult:
    """Prints how long a session of several workers has run, until the first test ends: it takes minutes.

    Args:
        interval: seconds between lines.
    """

    def __init__(self, reporter: Any, interval: float = 15.0) -> None:
        self._reporter, self._interval = reporter, interval
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._is_over.set()

    def pytest_sessionfinish(self) -> None:
        self._is_over.set()

    def _show(self) -> None:
        start = time.monotonic()
        while not self._is_over.wait(self._interval):
            seconds = round(time.monotonic() - start)
            self._reporter.ensure_newline()
            self._reporter.write_line(
                f"{seconds} s: imports, collection or the first tests; none has ended yet"
            )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--layout-sample",
        type=int,
        default=0,
        metavar="N",
        help="also run N of the layout table's slow rows, drawn by --layout-seed",
    )
    parser.addoption(
        "--slow-sample",
        type=int,
        default=0,
        metavar="N",
        help="also run N of the other slow tests, near what changed or drawn by --layout-seed; none of "
        "injected errors",
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help="run only unit tests near what changed, the tests of the architecture, and ten rows of the "
        "layout table, drawn by --layout-seed",
    )
    parser.addoption(
        "--layout-seed",
        help="seed of the samples, also of the injected errors (default: the commit's digest)",
    )
    parser.addoption("--record-cost", action="store_true", help="write tests/cost.json: see tests/cost.py")


def pytest_configure(config: pytest.Config) -> None:
    # It takes 4 ms, and no test needs it: a killed process loses nothing that it has written.
    os.fsync = os.fstat
    sys.dont_write_bytecode = False  # else each worker rewrites all tests' assertions in each run
    if config.option.layout_seed is None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        config.option.layout_seed = commit.stdout.strip()[:12] or "no commit"
    config.pluginmanager.register(Cost(config))


def pytest_sessionstart(session: pytest.Session) -> None:
    plugins = session.config.pluginmanager
    if plugins.has_plugin("dsession"):  # in one process, a test's capture would take the lines
        result = FirstResult(plugins.get_plugin("terminalreporter"))
        plugins.register(result)
        result.start()


def pytest_report_header(config: pytest.Config) -> list[str]:
    option = config.option
    samples = f"--layout-sample {option.layout_sample} --slow-sample {option.slow_sample}"
    return [f"samples: {samples} --layout-seed {option.layout_seed}"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without Python's garbage collector: what it would visit stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m deselects what is marked slow
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Unmark the samples of slow tests: rows of the layout table, and tests of other folders.

    Three quarters of the others are near what changed, as far as there are so many. Else tests are ordered by
    the digest of the seed and their name: another commit runs another sample, and the same seed runs the same
    one again.
    """
    option = config.option
    drawn = sorted(
        items, key=lambda each: hashlib.sha256(f"{option.layout_seed} {each.nodeid}".encode()).digest()
    )
    slow = [each for each in drawn if each.get_closest_marker("slow")]
    rows = [each for each in slow if "tests/parity/" in each.nodeid]
    others = [each for each in slow if not {"parity", "power"}.intersection(each.nodeid.split("/"))]
    sample = config.stash[SAMPLED] = set(rows[: option.layout_sample])
    changed = set[str]()
    if option.quick or option.slow_sample:
        changed = changed.union(*map(names_of, changed_files()))

    def is_near_change(item: pytest.Item) -> bool:
        return bool(changed & names_of(item.path.relative_to(ROOT).as_posix()))

    if option.slow_sample:
        near = [each for each in others if is_near_change(each)][: option.slow_sample * 3 // 4]
        far = [each for each in others if each not in near]
        sample.update(near, far[: option.slow_sample - len(near)])
    for item in slow:
        for node in item.listchain():  # a module can mark its tests, too
            node.own_markers = [mark for mark in node.own_markers if mark.name != "slow"]
        if item not in sample:
            item.add_marker("slow")
    if option.quick:
        fast = [each for each in drawn if not each.get_closest_marker("slow")]
        rows = [each for each in fast if each.path.name == "test_layout_table.py"][:10]
        unit = [each for each in fast if "tests/unit/" in each.nodeid and is_near_change(each)]
        quick = {*rows, *unit, *(each for each in fast if each.path.name == "test_architecture.py")}
        config.hook.pytest_deselected(items=[each for each in items if each not in quick])
        items[:] = [each for each in items if each in quick]


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one worker run the tests of several ranks, and the other workers run the rest.

    Two tests of several ranks at once on two cores take three times as long as one after the other.
    `--dist loadgroup` does the same for marked tests, but has no effect with pytest 9.2: it renames tests.
    """
    from xdist.scheduler import LoadScopeScheduling

    class RanksOnOneWorker(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folders = nodeid.split("/")
            if "fake_cuda" in folders:
                return "fake_cuda"  # its tests share a process
            return "ranks" if FOLDERS_OF_RANKS.intersection(folders) else nodeid

        def _assign_work_unit(self, node: Any) -> None:
            # After each test xdist visits all units that the worker ever got: forget those that have ended.
            units = self.assigned_work[node]
            for scope in [scope for scope, tests in units.items() if all(tests.values())]:
                del units[scope]
            super()._assign_work_unit(node)

    return RanksOnOneWorker(config, log)


@pytest.fixture(scope="module", autouse=True)
def ranks_of_earlier_modules(request: pytest.FixtureRequest) -> None:
    """End the ranks that stay alive when the tests of several ranks are over: they hold much memory."""
    if not FOLDERS_OF_RANKS.intersection(request.path.relative_to(ROOT).parts):
        RANKS.end()


@pytest.fixture(scope="module", autouse=True)
def objects_of_earlier_modules() -> None:
    """Let Python's collector pass over what exists before a module's tests: imports, caches, collected items.

    Each run in this process collects several times. After a thousand tests, these visits take most of its
    time. A run also asks whether any object is frozen, for which Python counts them all.
    """
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: 1


@pytest.fixture(scope="module", autouse=True)
def loggers_of_earlier_modules() -> None:
    """Let torch's loggers propagate: pytest gives each of the others two handlers, three times a test."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch."):
            logger.propagate = True


@pytest.fixture(autouse=True)
def process_as_started() -> Iterator[None]:
    """Undo what a program run in this process, by a test or a wider fixture, made of logger and signals.

    A program that is about to exit ignores signals, and so would the programs that later tests start. A test
    draws the same random tensors, whichever tests its worker ran before.
    """
    _reset_process()
    torch.default_generator.manual_seed(SEED)  # torch.manual_seed also notes the stack for each kind of GPU
    yield
    _reset_process()


def _reset_process() -> None:
    log.handlers.clear()
    if log.level != logging.NOTSET:  # setting it clears what each of a thousand loggers has cached
        log.setLevel(logging.NOTSET)
    log.propagate = True
    for number, handler in SIGNAL_HANDLERS.items():
        signal.signal(number, handler)


@pytest.fixture
def one_rank() -> Iterator[Topology]:
    """A world of this process alone; its process group ends with the test."""
    with Topology.start(
        ParallelConfig(distributed_backend="gloo").mesh, Launch.from_environment()
    ) as topology:
        yield topology
