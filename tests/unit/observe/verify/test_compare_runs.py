"""Comparison of two runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.record_run import RunRecord

REFERENCE = RunRecord(
    terms=[{"lm_loss": 3.5, "router_loss": 0.5}, {"lm_loss": 1.75, "router_loss": 0.25}],
    grad_norms=[1.0, 1.0],
    gradients={"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([0.5])},
    weights={"a": torch.tensor([2.0, 0.0]), "b": torch.tensor([0.0])},
)


def test_a_run_is_the_same_as_itself() -> None:
    comparison = compare(REFERENCE, REFERENCE)
    assert (comparison.loss, comparison.grad_norm) == (0.0, 0.0)
    assert comparison.excesses(TOLERANCES["fp64"]) == []


def test_differences_are_relative_to_the_largest_magnitude() -> None:
    terms = [REFERENCE.terms[0], {"lm_loss": 1.925, "router_loss": 0.25}]
    run = replace(REFERENCE, terms=terms, gradients=REFERENCE.gradients | {"a": torch.tensor([1.2, -4.0])})
    comparison = compare(run, REFERENCE)
    assert math.isclose(comparison.loss, 0.1)
    assert comparison.worst(comparison.gradients) == [("a", comparison.gradients["a"])]
    assert math.isclose(comparison.gradients["a"], 0.2 / 4.0, rel_tol=1e-6)
    excesses = comparison.excesses(TOLERANCES["fp32"])
    assert [excess.split(" differs")[0] for excess in excesses] == ["lm_loss of iteration 2", "gradient of a"]


def _with_bias(gradient: float, weight: float) -> RunRecord:
    """Return the reference with another parameter, and its average."""
    weights = {name: torch.tensor([weight]) for name in ("bias", "ema.bias")}
    gradients = REFERENCE.gradients | {"bias": torch.tensor([gradient], dtype=torch.float64)}
    return replace(REFERENCE, gradients=gradients, weights=REFERENCE.weights | weights)


def test_a_gradient_that_is_only_rounding_has_no_digits() -> None:
    """As that of a bias of keys, which changes no softmax. A weight that starts at zero has none either."""
    reference = _with_bias(1e-16, 1e-12)
    assert compare(_with_bias(-1e-16, -1e-12), reference).excesses(TOLERANCES["fp64"]) == []
    (excess,) = compare(_with_bias(1e-9, 1e-12), reference).excesses(TOLERANCES["fp64"])
    assert excess.startswith("gradient of bias differs by")
    for weight in (1e-6, math.nan):
        (excess,) = compare(_with_bias(1e-16, weight), reference).excesses(TOLERANCES["fp64"])
        assert excess.startswith("weight bias differs by")


@pytest.mark.parametrize("gradient", [0.0, 1e-9])
def test_a_weight_with_another_small_gradient_is_compared(gradient: float) -> None:
    run, reference = (_with_bias(gradient, weight) for weight in (-1e-12, 1e-12))
    (excess,) = compare(run, reference).excesses(TOLERANCES["fp64"])
    assert excess.startswith("weight bias differs by")


@pytest.mark.parametrize("name", ["lm_loss", "router_loss"])
def test_a_term_that_differs_is_named(name: str) -> None:
    """Even if another term hides it in the sum."""
    other = "router_loss" if name == "lm_loss" else "lm_loss"
    first, second = REFERENCE.terms
    alone = replace(REFERENCE, terms=[first, {**second, name: second[name] * 1.01}])
    assert compare(alone, REFERENCE).excesses(TOLERANCES["bf16"]) == [
        f"{name} of iteration 2 differs by 1.0e-02, over 2e-03"
    ]
    hidden = replace(REFERENCE, terms=[{name: first[name] + 0.1, other: first[other] - 0.1}, second])
    assert hidden.losses == pytest.approx(REFERENCE.losses)
    excesses = compare(hidden, REFERENCE).excesses(TOLERANCES["bf16"])
    assert {excess.split(" differs")[0] for excess in excesses} == {
        "lm_loss of iteration 1",
        "router_loss of iteration 1",
    }


def test_a_term_that_one_run_lacks_is_named() -> None:
    lacking = replace(REFERENCE, terms=[{"lm_loss": 3.5}, REFERENCE.terms[1]])
    for runs in ((lacking, REFERENCE), (REFERENCE, lacking)):
        assert compare(*runs).excesses(TOLERANCES["bf16"]) == [
            "router_loss of iteration 1 differs by nan, over 2e-03"
        ]


def test_an_iteration_without_terms_in_both_runs_is_the_same() -> None:
    """As one that --iterations-to-skip excludes."""
    excluded = replace(REFERENCE, terms=[{}, REFERENCE.terms[1]], grad_norms=[0.0, 1.0])
    assert compare(excluded, excluded).excesses(TOLERANCES["fp64"]) == []
    assert len(compare(excluded, REFERENCE).excesses(TOLERANCES["fp64"])) == 3


def test_an_evaluation_and_the_use_of_experts_are_compared() -> None:
    full = replace(REFERENCE, evaluation={"lm_loss": 2.0}, expert_use={"tokens of expert 0 of layers.1": 8.0})
    assert compare(full, full).excesses(TOLERANCES["fp64"]) == []
    other = replace(full, evaluation={"lm_loss": 2.2}, expert_use={"tokens of expert 0 of layers.1": 7.0})
    assert compare(other, full).excesses(TOLERANCES["fp64"]) == [
        "lm_loss of the evaluation differs by 1.0e-01, over 1e-11",
        "tokens of expert 0 of layers.1 differs by 1.2e-01, over 1e-09",
    ]
    assert compare(other, full).training_excesses(TOLERANCES["fp64"]) == []
    lacking = replace(full, evaluation={}, expert_use={})
    assert len(compare(lacking, full).excesses(TOLERANCES["fp64"])) == 2


def test_a_resumed_run_is_compared_with_the_same_iterations() -> None:
    resumed = replace(REFERENCE, terms=REFERENCE.terms[1:], grad_norms=[1.0], num_before=1)
    assert compare(resumed, REFERENCE).excesses(TOLERANCES["fp64"]) == []
    other = replace(resumed, terms=[{"lm_loss": 1.8, "router_loss": 0.25}])
    (excess,) = compare(other, REFERENCE).excesses(TOLERANCES["fp64"])
    assert excess.startswith("lm_loss of iteration 2 differs by")


def test_nan_is_never_the_same() -> None:
    for run in (
        replace(REFERENCE, terms=[{**REFERENCE.terms[0], "lm_loss": math.nan}, REFERENCE.terms[1]]),
        replace(REFERENCE, weights=REFERENCE.weights | {"b": torch.tensor([math.nan])}),
    ):
        assert compare(run, REFERENCE).excesses(TOLERANCES["fp64"])
