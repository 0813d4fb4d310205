"""Ranks that wait for each other in the store: for one at work, and not for nobody."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megalite.distributed import agreement


class FakeTime:
    """A clock that pauses alone move, during which another rank acts.

    Args:
        other: what the other rank does in a pause, by the time.
    """

    def __init__(self, other: Callable[[float], object]) -> None:
        self.now = 0.0
        self._other = other

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._other(self.now)


def test_nobody_at_work_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime(lambda now: None)
    monkeypatch.setattr(agreement, "time", clock)
    agreement.wait_for_all(dist.HashStore(), 2)  # type: ignore[attr-defined]
    silence = agreement._SILENCE_SECONDS
    assert silence < clock.now <= silence + 2 * agreement._MAX_POLL_SECONDS


def test_one_at_work_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    silence = agreement._SILENCE_SECONDS

    def work(now: float) -> None:
        if now < 10 * silence:
            store.add(agreement._BEATS, 1)

    clock = FakeTime(work)
    monkeypatch.setattr(agreement, "time", clock)
    assert not agreement.wait_for_key(store, "arrives never")
    assert 11 * silence <= clock.now <= 11 * silence + 3 * agreement._MAX_POLL_SECONDS


def test_one_at_work_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_BEAT_SECONDS", 0.01)
    store = dist.HashStore()  # type: ignore[attr-defined]
    with agreement.at_work(store):
        while store.add(agreement._BEATS, 0) < 3:  # a thread that never beats hangs the test
            time.sleep(0.01)
    number = store.add(agreement._BEATS, 0)
    time.sleep(0.1)
    assert store.add(agreement._BEATS, 0) == number


def test_all_meet_each_time() -> None:
    """No rank leaves a barrier before the others have come to it."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    arrived = [0, 0]

    def meet(rank: int) -> None:
        for number in range(1, 21):
            arrived[rank] = number
            agreement.wait_for_all(store, 2)
            assert arrived[1 - rank] >= number

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(meet, range(2)))


def test_no_thread_is_left_and_an_error_passes() -> None:
    with pytest.raises(ValueError, match="of the block"), agreement.at_work(dist.HashStore()):  # type: ignore[attr-defined]
        raise ValueError("of the block")
    assert not [thread for thread in threading.enumerate() if thread.name == "at-work"]


def _names(store: dist.Store, world_size: int, seconds: float = 30.0) -> list[str]:
    """What each rank of a start takes as its name; an error's text where it takes none."""
    names = [""] * world_size

    def come(rank: int) -> None:
        try:
            names[rank] = agreement.name_of_start(store, rank, world_size, seconds)
        except TimeoutError as error:
            names[rank] = str(error)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in reversed(range(world_size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return names


def test_a_start_shares_a_name_that_no_earlier_one_had() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    names = [_names(store, size) for size in (4, 4, 3, 1, 4)]
    assert all(len(set(each)) == 1 for each in names)
    assert len({each[0] for each in names}) == 5


def test_a_start_that_came_half_way_leaves_nothing_that_counts() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError, match="rank 0 did not answer"):
        agreement.name_of_start(store, 2, 3, 0.05)
    with pytest.raises(TimeoutError, match="2 ranks were expected"):
        agreement.name_of_start(store, 0, 3, 0.05)
    assert len(set(_names(store, 3))) == 1
