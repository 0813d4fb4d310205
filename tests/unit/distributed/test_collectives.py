"""Two computations change places where they give turns, and an error of either one is raised."""

from __future__ import annotations

import pytest
import torch

from megalite.distributed.collectives import OverlapSlots

CPU = torch.device("cpu")


def test_they_change_places_in_give_alone() -> None:
    overlap_slots, order = OverlapSlots(CPU), []

    def count(name: str, number: int) -> str:
        for each in range(number):
            order.append(f"{name}{each}")
            overlap_slots.yield_slot()
        return name

    for _ in range(2):
        order.clear()
        assert overlap_slots.run(lambda: count("a", 2), lambda: count("b", 4)) == ["a", "b"]
        assert order == ["a0", "b0", "a1", "b1", "b2", "b3"]  # the longer one goes on alone
        order.clear()
        assert overlap_slots.run(lambda: count("a", 3), lambda: count("b", 1)) == ["a", "b"]
        assert order == ["a0", "b0", "a1", "a2"]


def test_give_does_nothing_alone() -> None:
    OverlapSlots(CPU).yield_slot()


@pytest.mark.parametrize("fails", [0, 1])
def test_an_error_is_raised(fails: int) -> None:
    overlap_slots = OverlapSlots(CPU)

    def run(number: int) -> None:
        overlap_slots.yield_slot()
        if number == fails:
            raise ValueError(f"computation {number}")
        overlap_slots.yield_slot()

    with pytest.raises(ValueError, match=f"computation {fails}"):
        overlap_slots.run(lambda: run(0), lambda: run(1))
