"""Test how many operators a train step launches: each takes microseconds of the host, and of the device."""

from __future__ import annotations

import pytest

from tests.fake_cuda.child import FakeGpu
from tests.fake_cuda.launches import COMMAND, MODELS, count, differences, read


@pytest.mark.parametrize("name", MODELS)
def test_a_step_launches_what_the_table_says(gpu: FakeGpu, name: str) -> None:
    changed = list(differences(read(), {name: count(gpu, name)}))
    assert not changed, "\n".join([f"if this is intended, run {COMMAND}:", *changed])


def test_a_difference_names_operators() -> None:
    before = {"model": {"layer": {"forward": {"mm": 4, "add": 1}}}}
    now = {"model": {"layer": {"forward": {"mm": 4, "copy_": 2}, "backward": {"mm": 1}}}}
    assert list(differences(before, now)) == [
        "model: forward of a layer: 5 -> 6 (add 1 -> 0, copy_ 0 -> 2)",
        "model: backward of a layer: 0 -> 1 (mm 0 -> 1)",
    ]
