"""How tests/conftest.py divides tests among pytest's workers, and what it prints before the first result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
from xdist.scheduler import loadscope

RANKS = [f"tests/{folder}/test_a.py::test_{i}" for folder in ("ranks/train", "parity") for i in range(4)]
FAKE_CUDA = [f"tests/fake_cuda/test_b.py::test_{i}" for i in range(3)]
OTHERS = [f"tests/unit/test_c.py::test_{i}" for i in range(60)]


class Worker:
    """Stands for a process that runs what it is given."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.queue: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        self.queue += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_tests_are_divided_and_forgotten(request: pytest.FixtureRequest, monkeypatch) -> None:
    monkeypatch.setattr(loadscope, "parse_tx_spec_config", lambda _: 2 * ["popen"])
    hook = request.config.hook.pytest_xdist_make_scheduler
    scheduler = hook(config=SimpleNamespace(option=SimpleNamespace(loadscopereorder=True)), log=None)
    tests = [*OTHERS[:30], *FAKE_CUDA, *RANKS, *OTHERS[30:]]
    workers = [Worker("gw0"), Worker("gw1")]
    for worker in workers:
        scheduler.add_node(worker)
    for worker in workers:
        scheduler.add_node_collection(worker, tests)
    scheduler.schedule()
    ran: dict[str, list[str]] = {"gw0": [], "gw1": []}
    while queues := [worker for worker in workers if worker.queue]:
        for worker in queues:
            index = worker.queue.pop(0)
            ran[worker.gateway.id].append(tests[index])
            scheduler.mark_test_complete(worker, index)
            assert len(scheduler.assigned_work[worker]) <= 5  # else each test costs more than the one before
    assert sorted(ran["gw0"] + ran["gw1"]) == sorted(tests)
    for group in (RANKS, FAKE_CUDA):
        assert [set(group) <= set(each) for each in ran.values()].count(True) == 1
        assert [set(group).isdisjoint(each) for each in ran.values()].count(True) == 1
    assert all(set(OTHERS).intersection(each) for each in ran.values())


@pytest.mark.parametrize(
    ("when", "passed", "is_last"), [("setup", True, False), ("call", True, True), ("setup", False, True)]
)
def test_a_session_shows_that_it_runs_until_a_test_has_ended(
    request: pytest.FixtureRequest, when: str, passed: bool, is_last: bool
) -> None:
    plugins = request.config.pluginmanager.get_plugins()
    (conftest,) = (each for each in plugins if getattr(each, "FOLDERS_OF_RANKS", None))
    lines: list[str] = []
    reporter = SimpleNamespace(ensure_newline=lambda: None, write_line=lines.append)
    shown = conftest.FirstResult(reporter, interval=0.02)
    shown.start()
    _wait_until(lambda: len(lines) >= 2)
    assert lines[0].startswith("0 s: ")
    shown.pytest_runtest_logreport(SimpleNamespace(when=when, passed=passed))
    if not is_last:
        number = len(lines)
        _wait_until(lambda: len(lines) > number)
        shown.pytest_sessionfinish()
    shown._thread.join(300.0)
    assert not shown._thread.is_alive()


def _wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300.0
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
