"""AdamW: an update against the formula in fp64, at odd sizes and alignments, and one that is forbidden."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megalite.kernels import adamw, adamw_
from megalite.kernels.library import is_compiled
from tests.unit.kernels.ulps import assert_within

SIZES = (1, 64, 127, 20_004)
LEARNING_RATE, BETAS, EPSILON = 0.01, (0.9, 0.999), 1e-8
NUMBERS = (1, 2, 1000, 10**7)


@dataclass
class States:
    """The tensors of an update; the model's weights are `rounded`, if there are any."""

    main: list[Tensor]
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]
    rounded: list[Tensor]
    gradients: list[Tensor]

    @staticmethod
    def random(dtype: torch.dtype) -> States:
        """Return states of all sizes for weights of `dtype`, the last of them not aligned."""
        generator = torch.Generator().manual_seed(0)
        wide = torch.promote_types(dtype, torch.float32)

        def numbers() -> list[Tensor]:
            sizes = (*SIZES, SIZES[-1] + 1)
            draws = [torch.randn(n, generator=generator, dtype=torch.float64) for n in sizes]
            *aligned, last = [(draw * draw.abs()).to(wide) for draw in draws]
            return [*aligned, last[1:]]

        main = numbers()
        rounded = [] if dtype == wide else [each.to(dtype) for each in main]
        return States(main, numbers(), [each.abs() for each in numbers()], rounded, numbers())

    def tensors(self) -> list[Tensor]:
        return [*self.main, *self.exp_avg, *self.exp_avg_sq, *self.rounded, *self.gradients]

    def copies(self) -> list[Tensor]:
        return [each.clone() for each in self.tensors()]

    def update(
        self, number: int, divisor: float | None, weight_decay: float = 0.3, is_good: bool = True
    ) -> None:
        adamw_(
            self.main,
            self.exp_avg,
            self.exp_avg_sq,
            self.rounded,
            self.gradients,
            number=torch.tensor(float(number)),
            divisor=None if divisor is None else torch.tensor(divisor, dtype=torch.float64),
            is_good=torch.tensor(is_good),
            learning_rate=LEARNING_RATE,
            betas=BETAS,
            weight_decay=weight_decay,
            epsilon=EPSILON,
        )


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("divisor", [None, 3.7])
@pytest.mark.parametrize("number", NUMBERS)
def test_equals_the_formula(
    number: int, divisor: float | None, weight_decay: float, dtype: torch.dtype
) -> None:
    """Algorithm 2 of Loshchilov and Hutter 2019."""
    states = States.random(dtype)
    mains, firsts, seconds, gradients = (
        [each.to(torch.float64, copy=True) for each in tensors]
        for tensors in (states.main, states.exp_avg, states.exp_avg_sq, states.gradients)
    )
    states.update(number, divisor, weight_decay)
    for i, (main, first, second, gradient) in enumerate(zip(mains, firsts, seconds, gradients, strict=True)):
        divided = gradient / (divisor or 1.0)
        parts = BETAS[0] * first, (1 - BETAS[0]) * divided
        assert_within(states.exp_avg[i], sum(parts), sum(part.abs() for part in parts), ulps=4.0)
        squares = BETAS[1] * second + (1 - BETAS[1]) * divided.square()
        assert_within(states.exp_avg_sq[i], squares, squares, ulps=4.0)
        corrections = [-math.expm1(number * math.log(beta)) for beta in BETAS]
        step = LEARNING_RATE / corrections[0] / ((squares / corrections[1]).sqrt() + EPSILON)
        exact = main * (1 - LEARNING_RATE * weight_decay) - step * sum(parts)
        # PyTorch subtracts beta^number from 1 in fp64, and has as many digits less.
        slack = 4.0 / corrections[1] if dtype == torch.float64 else 4.0
        assert_within(states.main[i], exact, main.abs() + slack * step * sum(part.abs() for part in parts))
        if states.rounded:
            assert torch.equal(states.rounded[i], states.main[i].to(dtype))


def test_a_forbidden_update_changes_nothing(dtype: torch.dtype) -> None:
    states = States.random(dtype)
    states.gradients[-1][3] = torch.inf
    before = states.copies()
    states.update(1, divisor=torch.nan, is_good=False)
    assert all(torch.equal(*pair) for pair in zip(states.tensors(), before, strict=True))


@pytest.mark.skipif(not is_compiled("adamw_", "cpu"), reason="PyTorch's kernel divides them in place")
def test_the_compiled_kernel_does_not_write_the_gradients(dtype: torch.dtype) -> None:
    states = States.random(dtype)
    before = [each.clone() for each in states.gradients]
    states.update(1, divisor=2.0)
    assert all(torch.equal(*pair) for pair in zip(states.gradients, before, strict=True))


@pytest.mark.skipif(not is_compiled("adamw_", "cpu"), reason="PyTorch's kernel has checks of its own")
def test_tensors_that_do_not_fit_are_refused() -> None:
    for spoil in (
        lambda states: states.gradients.pop(),
        lambda states: states.exp_avg.reverse(),
        lambda states: states.gradients.__setitem__(0, states.gradients[0].double()),
        lambda states: states.rounded.__setitem__(1, states.rounded[1].repeat_interleave(2)[::2]),
    ):
        states = States.random(torch.bfloat16)
        spoil(states)
        with pytest.raises(RuntimeError, match="adamw_"):
            states.update(1, divisor=None)


def test_opcheck(dtype: torch.dtype) -> None:
    states = States.random(dtype)
    scalars = torch.tensor(1.0), torch.tensor(2.0, dtype=torch.float64), torch.tensor(True)
    lists = states.main, states.exp_avg, states.exp_avg_sq, states.rounded, states.gradients
    op = torch.ops.megalite.adamw_.default
    torch.library.opcheck(op, (*lists, *scalars, LEARNING_RATE, *BETAS, 0.1, EPSILON))


def test_the_reference_reads_no_value_on_the_host(dtype: torch.dtype) -> None:
    """It would wait for the device. Tensors on meta have no values: reading one raises."""
    states = States.random(dtype)
    lists = states.main, states.exp_avg, states.exp_avg_sq, states.rounded, states.gradients
    scalars = torch.tensor(1.0), torch.tensor(2.0, dtype=torch.float64), torch.tensor(True)
    arguments = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (*lists, *scalars))
    adamw.reference(*arguments, LEARNING_RATE, *BETAS, 0.1, EPSILON)
