"""Ranks that wait for each other in the store: for one at work, and not for nobody."""

import threading
import time

import pytest
import torch.distributed as dist

from megalite.distributed import store_barrier


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_barrier, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(store_barrier, "_SILENCE_SECONDS", 0.3)


def test_nobody_at_work_is_not_waited_for() -> None:
    start = time.monotonic()
    store_barrier.wait_for_all(dist.HashStore(), 2)  # type: ignore[attr-defined]
    assert 0.3 <= time.monotonic() - start < 5


def test_one_at_work_is_waited_for() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    arrived = []

    def work() -> None:
        with store_barrier.at_work(store):
            time.sleep(1.0)
        arrived.append(time.monotonic())
        store_barrier.wait_for_all(store, 2)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        store_barrier.wait_for_all(store, 2)
        assert arrived and time.monotonic() >= arrived.pop()
        thread.join()


def test_no_thread_is_left_and_an_error_passes() -> None:
    with pytest.raises(ValueError, match="of the block"), store_barrier.at_work(dist.HashStore()):  # type: ignore[attr-defined]
        raise ValueError("of the block")
    assert not [thread for thread in threading.enumerate() if thread.name == "at-work"]


def _names(store: dist.Store, world_size: int, seconds: float = 30.0) -> list[str]:
    """What each rank of a start takes as its name; an error's text where it takes none."""
    names = [""] * world_size

    def come(rank: int) -> None:
        try:
            names[rank] = store_barrier.name_of_start(store, rank, world_size, seconds)
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
        store_barrier.name_of_start(store, 2, 3, 0.05)
    with pytest.raises(TimeoutError, match="2 ranks were expected"):
        store_barrier.name_of_start(store, 0, 3, 0.05)
    assert len(set(_names(store, 3))) == 1
