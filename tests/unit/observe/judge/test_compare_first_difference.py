"""The first tensor that differs, for tensors that are cut, permuted, partial, scaled or wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.observe.judge.compare import first_difference
from megalite.observe.judge.rank_record import Observation

SIZES = {"tp": 2, "dp": 4}
FULL = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _observed(
    tensor: Tensor, name: str = "layer", call: int = 0, *, is_gradient: bool = False
) -> Observation:
    return Observation(name, call, is_gradient, tensor, "allreduce of [2]")


HALVES = torch.cat([FULL[..., :2], FULL[..., 4:6]], -1), torch.cat([FULL[..., 2:4], FULL[..., 6:]], -1)


@pytest.mark.parametrize(
    "ranks",
    [
        [FULL[..., :4], FULL[..., 4:]],
        [*HALVES],
        [FULL[[0, 3, 5]], FULL[[2, 1, 4]]],
        [FULL[:, :1], FULL[:, 1:]],
        [FULL - 3.0, torch.full_like(FULL, 3.0)],
    ],
    ids=["features", "halves", "permuted", "samples", "partial sums"],
)
def test_parts_of_a_tensor_agree_with_it(ranks: list[Tensor]) -> None:
    traces = [[_observed(each)] for each in ranks]
    assert first_difference(traces, [_observed(FULL)], SIZES, is_gradient=False) == ""


def test_the_first_wrong_tensor_is_named_with_its_rank_and_factor() -> None:
    other = FULL.flip(0) + 1.0
    reference = [_observed(FULL, "first"), _observed(other, "second"), _observed(FULL, "third")]
    right = [_observed(FULL, "first"), _observed(other, "second"), _observed(FULL + 9.0, "third")]
    wrong = [_observed(FULL, "first"), _observed(2.0 * other, "second"), _observed(FULL, "third")]
    text = first_difference([right, wrong], reference, SIZES, is_gradient=False)
    assert text == (
        "first difference in forward: the output of second is 2 (tp) times the reference's on rank 1, after "
        "allreduce of [2]; the last one that agrees is first"
    )


def test_gradients_may_have_one_common_factor_and_no_other() -> None:
    reference = [_observed(FULL, name, is_gradient=True) for name in ("b", "a")]
    scaled = [_observed(FULL * 4.0, name, is_gradient=True) for name in ("b", "a")]
    assert first_difference([scaled], reference, SIZES, is_gradient=True) == ""
    mixed = [scaled[0], _observed(FULL * 2.0, "a", is_gradient=True)]
    text = first_difference([mixed], reference, SIZES, is_gradient=True)
    assert "gradient of the output of a is 0.5 (1/tp) times the reference's" in text


def test_a_nan_differs() -> None:
    text = first_difference([[_observed(FULL * torch.nan)]], [_observed(FULL)], SIZES, is_gradient=False)
    assert "the output of layer differs on rank 0" in text
