"""The vote over values of ranks."""

from __future__ import annotations

import pytest

from megalite.distributed.topology import Topology
from megalite.train.replicas import Finding, outliers


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1, 1, 2), {2}),
        ((3, 1, 1, 2, 1), {0, 3}),
        ((1, 2), None),
        ((1, 1, 2, 2), None),
        ((1, 2, 3), None),
        ((1, 1), set()),
    ],
)
def test_the_majority_is_right(values: tuple[int, ...], expected: set[int] | None) -> None:
    assert outliers(dict(enumerate(values))) == expected


def test_the_text_names_the_device(one_rank: Topology) -> None:
    text = Finding(("model.a", "model.b"), "differs", (0,), is_voted=True).text(one_rank)
    assert text.startswith("model.a, model.b differs; wrong: rank 0 (host ")
    assert text.endswith("; pp 0 dp 0 tp 0)")
