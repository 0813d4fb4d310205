import math
from dataclasses import replace

import torch

from megalite.verify.compare_runs import TOLERANCES, compare
from megalite.verify.record_run import RunRecord

REFERENCE = RunRecord(
    losses=[4.0, 2.0],
    grad_norms=[1.0, 1.0],
    gradients={"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([0.5])},
    weights={"a": torch.tensor([2.0, 0.0]), "b": torch.tensor([0.0])},
)


def test_a_run_is_the_same_as_itself() -> None:
    comparison = compare(REFERENCE, REFERENCE)
    assert (comparison.loss, comparison.grad_norm) == (0.0, 0.0)
    assert comparison.excesses(TOLERANCES["fp64"]) == []


def test_differences_are_relative_to_the_largest_magnitude() -> None:
    run = replace(
        REFERENCE, losses=[4.0, 2.2], gradients=REFERENCE.gradients | {"a": torch.tensor([1.2, -4.0])}
    )
    comparison = compare(run, REFERENCE)
    assert math.isclose(comparison.loss, 0.1)
    assert comparison.worst(comparison.gradients) == [("a", comparison.gradients["a"])]
    assert math.isclose(comparison.gradients["a"], 0.2 / 4.0, rel_tol=1e-6)
    excesses = comparison.excesses(TOLERANCES["fp32"])
    assert [excess.split(" differs")[0] for excess in excesses] == ["loss", "gradient of a"]


def test_nan_is_never_the_same() -> None:
    for run in (
        replace(REFERENCE, losses=[math.nan, 2.0]),
        replace(REFERENCE, weights=REFERENCE.weights | {"b": torch.tensor([math.nan])}),
    ):
        assert compare(run, REFERENCE).excesses(TOLERANCES["fp64"])
