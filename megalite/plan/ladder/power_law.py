"""Fit the losses of runs by a floor and power laws: L = E + A C^-a, and L = E + A N^-a + B D^-b.

The second form is that of Hoffmann et al. 2022 (arXiv 2203.15556, approach 3). A fit minimizes the squares
of the relative errors of the losses. Its unknowns are logarithms, since E, A and a are positive. Intervals
follow from the covariance of the linearized fit and the quantiles of Student's t distribution, which are
wide if there are few more runs than unknowns.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.utils.errors import UserError

Floats = NDArray[np.float64]

CONFIDENCE = 0.95
MIN_RUNS_OF_TWO_TERMS = 6
"""Runs that L(N, D) needs: one more than its unknowns."""
_FLAT = 1e-6
"""Smallest exponent of a law that counts as different from 0."""
_START_EXPONENTS = (0.05, 0.2, 0.6)
_START_FLOORS = (0.1, 0.5, 0.9)
"""Floors at which fits start, as shares of the lowest loss."""
_SMALLEST_FLOOR = 1e-3
"""Share of the lowest loss below which a fitted floor is 0: then the losses show none."""
_SMALLEST_SINGULAR = 1e-12
"""Smallest singular value of the slopes that counts as different from 0, relative to the largest."""
_MIN_SPREAD = 0.05
"""Smallest spread of log(D / N) over the runs at which the terms of N and D can be distinguished."""


class Estimate(NamedTuple):
    """Number with its interval. The bounds are None if there are as many unknowns as runs."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class PowerLaw:
    """Fitted law: the loss is a floor plus `coefficient * x^-exponent` for each quantity x.

    Attributes:
        unknowns: log of the floor, if there is one; then for each term the log of its value at `centers` and
            the log of its exponent.
        centers: geometric mean of each quantity over the runs.
        covariance_root: a matrix R for which the covariance of the unknowns is R^T R; None without degrees of
            freedom.
        error: standard deviation of the relative errors of the losses.
        freedom: degrees of freedom: runs less unknowns.
    """

    unknowns: Floats
    centers: Floats
    has_floor: bool
    covariance_root: Floats | None
    error: float
    freedom: int

    @property
    def floor(self) -> Estimate:
        """Return E."""
        return self._exponential(0) if self.has_floor else Estimate(0.0, None, None)

    @property
    def exponents(self) -> list[Estimate]:
        """Return the exponent of each term."""
        first = int(self.has_floor)
        return [self._exponential(first + 2 * term + 1) for term in range(len(self.centers))]

    @property
    def coefficients(self) -> list[float]:
        """Return A of each term."""
        first, powers = int(self.has_floor), [each.value for each in self.exponents]
        values = np.exp(self.unknowns[first::2])
        return [
            float(value * center**power)
            for value, center, power in zip(values, self.centers, powers, strict=True)
        ]

    def predict(self, quantities: Sequence[float]) -> Estimate:
        """Return the loss of a run. The interval contains the error of a single run."""
        point = np.array([quantities], dtype=np.float64)
        value = float(_log_losses(self.unknowns, point / self.centers, self.has_floor)[0])
        if self.covariance_root is None:
            return Estimate(float(np.exp(value)), None, None)
        slope = _slopes(self.unknowns, point / self.centers, self.has_floor)[0]
        deviation = np.hypot(np.linalg.norm(self.covariance_root @ slope), self.error)
        spread = float(deviation) * _quantile(self.freedom)
        return Estimate(*map(_bounded_exp, (value, value - spread, value + spread)))

    def _exponential(self, index: int) -> Estimate:
        value = float(self.unknowns[index])
        if self.covariance_root is None:
            return Estimate(float(np.exp(value)), None, None)
        spread = float(np.linalg.norm(self.covariance_root[:, index])) * _quantile(self.freedom)
        return Estimate(*map(_bounded_exp, (value, value - spread, value + spread)))


def fit_power_law(quantities: Sequence[Sequence[float]], losses: Sequence[float]) -> PowerLaw:
    """Fit the law to runs. The law has no floor if the losses show none.

    Args:
        quantities: of each run: its compute, or its parameters and its tokens.

    Raises:
        UserError: scipy is not installed, or the losses do not fall with the first quantity.
    """
    points, logs = np.array(quantities, dtype=np.float64), np.log(np.array(losses, dtype=np.float64))
    if np.polyfit(np.log(points[:, 0]), logs, 1)[0] > -_FLAT:
        raise UserError("the losses do not fall with the size of the runs: there is no law to fit")
    centers = np.exp(np.log(points).mean(axis=0))
    scaled = points / centers
    has_floor = True
    found = _least_squares(scaled, logs, has_floor)
    if len(logs) < len(found.x) or np.exp(found.x[0]) < _SMALLEST_FLOOR * np.exp(logs.min()):
        has_floor = False
        found = _least_squares(scaled, logs, has_floor)
    freedom = len(logs) - len(found.x)
    error = float(np.sqrt(2 * found.cost / freedom)) if freedom > 0 else 0.0
    root = None
    if freedom > 0:
        _, singular, directions = np.linalg.svd(_slopes(found.x, scaled, has_floor), full_matrices=False)
        # What the runs say nothing about has a huge variance, not an infinite one.
        root = error * directions / np.maximum(singular, _SMALLEST_SINGULAR * singular.max())[:, None]
    return PowerLaw(found.x, centers, has_floor, root, error, max(freedom, 0))


def can_separate(parameters: Sequence[float], tokens: Sequence[float]) -> bool:
    """Return whether runs tell the effect of parameters from the effect of tokens."""
    spread = float(np.std(np.log(np.array(tokens) / np.array(parameters))))
    return len(parameters) >= MIN_RUNS_OF_TWO_TERMS and spread > _MIN_SPREAD


def _log_losses(unknowns: Floats, scaled: Floats, has_floor: bool) -> Floats:
    first = int(has_floor)
    terms = unknowns[first::2] - np.exp(unknowns[first + 1 :: 2]) * np.log(scaled)  # [runs, terms]
    if has_floor:
        terms = np.concatenate([np.full((len(scaled), 1), unknowns[0]), terms], axis=1)
    total: Floats = np.logaddexp.reduce(terms, axis=1)
    return total


def _slopes(unknowns: Floats, scaled: Floats, has_floor: bool) -> Floats:
    """Return the derivatives of `_log_losses` by the unknowns, [runs, unknowns]."""
    first = int(has_floor)
    totals = _log_losses(unknowns, scaled, has_floor)[:, None]
    exponents = np.exp(unknowns[first + 1 :: 2])
    shares = np.exp(unknowns[first::2] - exponents * np.log(scaled) - totals)  # of the loss, [runs, terms]
    slopes = np.empty((len(scaled), len(unknowns)))
    if has_floor:
        slopes[:, :1] = np.exp(unknowns[0] - totals)
    slopes[:, first::2] = shares
    slopes[:, first + 1 :: 2] = -shares * exponents * np.log(scaled)
    return slopes


def _least_squares(scaled: Floats, logs: Floats, has_floor: bool) -> Any:
    """Return the best of the fits from several starts."""
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise UserError("the fit needs scipy: pip install scipy") from None
    num_terms, lowest, middle = scaled.shape[1], float(logs.min()), float(logs.mean())
    fits = []
    for share in _START_FLOORS if has_floor else (0.0,):
        floor = [lowest + np.log(share)] if has_floor else []
        above = np.log(np.exp(middle) - share * np.exp(lowest))
        for exponents in itertools.product(_START_EXPONENTS, repeat=num_terms):
            terms = [number for each in exponents for number in (above - np.log(num_terms), np.log(each))]
            fits.append(
                least_squares(
                    lambda unknowns: _log_losses(unknowns, scaled, has_floor) - logs,
                    np.array([*floor, *terms]),
                    jac=lambda unknowns: _slopes(unknowns, scaled, has_floor),
                    method="lm",
                    xtol=1e-12,
                    ftol=1e-12,
                    gtol=1e-12,
                )
            )
    return min(fits, key=lambda fit: float(fit.cost))


def _quantile(freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, freedom))


def _bounded_exp(value: float) -> float:
    """Return exp(value), at most 1e300, so that JSON can hold it."""
    return float(np.exp(min(value, 690.0)))
