"""Fits to losses whose law is known."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from megalite.plan.ladder.fit_report import can_separate, fit_power_law
from megalite.utils.errors import UserError

COMPUTE = np.geomspace(1e12, 1e15, 6)
LOSSES = 1.7 + 800 * COMPUTE**-0.2
PARAMETERS = np.repeat([1e5, 1e6, 1e7], 3)
TOKENS = PARAMETERS * np.tile([5.0, 20.0, 80.0], 3)


def test_a_law_is_recovered() -> None:
    law = fit_power_law(COMPUTE[:, None], LOSSES)
    assert law.floor.value == pytest.approx(1.7) and law.coefficients == pytest.approx([800])
    assert law.exponents[0].value == pytest.approx(0.2)
    assert law.predict([1e18]).value == pytest.approx(1.7 + 800 * 1e18**-0.2)
    assert (law.freedom, law.error) == (3, pytest.approx(0, abs=1e-9))


def test_parameters_and_tokens_are_told_apart() -> None:
    losses = 1.7 + 400 * PARAMETERS**-0.34 + 410 * TOKENS**-0.28
    law = fit_power_law(np.stack([PARAMETERS, TOKENS], 1), losses)
    assert [each.value for each in law.exponents] == pytest.approx([0.34, 0.28], rel=1e-4)
    assert law.coefficients == pytest.approx([400, 410], rel=1e-3)
    assert can_separate(PARAMETERS, TOKENS)
    assert not can_separate(PARAMETERS, 20 * PARAMETERS)
    assert not can_separate(PARAMETERS[:5], TOKENS[:5])


def test_losses_without_a_floor_have_none() -> None:
    law = fit_power_law(COMPUTE[:, None], 20 * COMPUTE**-0.05)
    assert not law.has_floor and law.floor.value == 0
    assert (law.exponents[0].value, law.freedom) == (pytest.approx(0.05), 4)


def test_three_runs_give_a_law_without_an_interval() -> None:
    law = fit_power_law(COMPUTE[:3, None], LOSSES[:3])
    assert law.predict([1e12]).value == pytest.approx(LOSSES[0])
    assert law.covariance_root is None
    assert law.predict([1e18])[1:] == law.exponents[0][1:] == law.floor[1:] == (None, None)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """The interval of a prediction is of one further run, with its noise; about 95% hold it."""
    random, hits, num_trials = np.random.default_rng(1), 0, 40
    truth = 20 * 3e13**-0.05  # amid the runs, where their own noise is the most of the interval
    for _ in range(num_trials):
        noise = np.exp(random.normal(0, 0.01, len(COMPUTE) + 1))
        low, high = fit_power_law(COMPUTE[:, None], 20 * COMPUTE**-0.05 * noise[1:]).predict([3e13])[1:]
        assert low is not None and high is not None
        hits += low <= truth * noise[0] <= high
    assert 0.85 <= hits / num_trials < 1


@pytest.mark.parametrize("losses", [[2.0, 2.1, 2.2, 2.3], [2.0] * 4, [2.0, 2.1, 2.0, 2.1]])
def test_losses_that_do_not_fall_are_refused(losses: list[float]) -> None:
    with pytest.raises(UserError, match=r"^the losses do not fall with the size of the runs"):
        fit_power_law(COMPUTE[:4, None], losses)


def test_an_unknown_that_the_runs_say_nothing_about_has_a_huge_interval() -> None:
    """Losses that hardly fall: any floor fits, with a term that makes up for it."""
    law = fit_power_law(COMPUTE[:5, None], [2.0013, 1.9987, 2.0064, 1.99, 1.9946])
    assert law.has_floor
    for each in (law.floor, *law.exponents):
        assert each.low is not None and each.high is not None
        assert each.low < 1e-3 * each.value and each.high > 1e3 * each.value
    low, high = law.predict([COMPUTE[2]])[1:]
    assert low is not None and high is not None and 1.9 < low < 2.0 < high < 2.1


def test_without_scipy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(UserError, match=r"^the fit needs scipy: pip install scipy$"):
        fit_power_law(COMPUTE[:, None], LOSSES)
