"""Scheduling of a rank's threads."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from megalite.utils.hardware.process_settings import schedule_as_batch


def _policy_after(policy: int) -> int:
    os.sched_setscheduler(0, policy, os.sched_param(0))
    schedule_as_batch()
    return os.sched_getscheduler(0)


@pytest.mark.skipif(sys.platform != "linux", reason="scheduling policies are Linux's")
@pytest.mark.parametrize("name", ["SCHED_BATCH", "SCHED_IDLE"])
def test_only_the_default_policy_is_replaced(name: str) -> None:
    policy = getattr(os, name)
    with ThreadPoolExecutor(1) as own_thread:
        assert own_thread.submit(_policy_after, policy).result() == policy


@pytest.mark.skipif(sys.platform != "linux", reason="scheduling policies are Linux's")
def test_a_system_that_forbids_it_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    schedule_as_batch()
