"""Comparison of two runs, and what a verification changes of the config."""

from __future__ import annotations

import io
import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.config import Config
from megalite.frontends.command_line import parse
from megalite.utils.errors import UserError
from megalite.verify import compare_runs
from megalite.verify.compare_runs import (
    FP16_LOSS_SCALE,
    TOLERANCES,
    compare,
    verify_layouts,
    with_constant_loss_scale,
)
from megalite.verify.layouts import Layout
from megalite.verify.record_run import RunRecord

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


@pytest.mark.parametrize(
    ("dtype", "given", "expected"),
    [("fp16", None, FP16_LOSS_SCALE), ("fp16", 8.0, 8.0), ("bf16", None, None)],
)
def test_only_a_dynamic_loss_scale_is_replaced(
    dtype: str, given: float | None, expected: float | None
) -> None:
    config = Config()
    config = replace(
        config,
        model=replace(config.model, params_dtype=dtype),
        optimizer=replace(config.optimizer, loss_scale=given),
    )
    assert with_constant_loss_scale(config).optimizer.loss_scale == expected


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [_Terminal, io.StringIO])
def test_a_terminal_shows_which_run_comes_before_the_first_row(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def record(config: Config, *_: Any, **options: Any) -> SimpleNamespace:
        shown.append(sys.stderr.getvalue())  # type: ignore[attr-defined]
        if config.parallel.mesh.smallest_world > 1:
            raise UserError("a model without cuts")
        return SimpleNamespace(routing=None)

    monkeypatch.setattr(compare_runs, "record_run", record)
    monkeypatch.setattr(sys, "stderr", stream())
    config, _ = parse(["--preset", "llama-tiny", "--vocab-size", "256", "--mock-data", "--train-iters", "1"])
    with pytest.raises(UserError, match="without cuts"):
        verify_layouts(config, [Layout.parse("tp2"), Layout.parse("pp2")], 1)
    last = [text.rpartition("\r")[2].removesuffix("\033[K") for text in shown]
    assert last == (
        ["run 1 of 3: one rank", "run 2 of 3: tp2", "run 3 of 3: pp2"] if stream is _Terminal else [""] * 3
    )
    assert sys.stderr.getvalue().endswith("\r\033[K" if stream is _Terminal else "")  # type: ignore[attr-defined]
