"""Places of a rank's values in the tensors of one rank, and the order and the report of differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.distributed.axes import Slice
from megalite.observe.operator_log import Collective
from megalite.observe.verify.compare_runs import TOLERANCES
from megalite.observe.verify.first_difference import FirstDifference, first_difference
from megalite.observe.verify.trace_run import Activation, RankTrace, StepTensor
from megalite.tensor_parallel.placement import Box

SIZE, BATCH = 4, 8
"""Positions and samples of the reference, whose microbatches have two samples."""
WHOLE = Slice(0, 1)


def _activation(name: str, value: Tensor, microbatch: int = 0, **more: object) -> Activation:
    return replace(Activation([f"output of {name}"], microbatch, value, 0, f"output of {name}"), **more)  # type: ignore[arg-type]


def _rank(
    activations: Sequence[Activation],
    steps: Sequence[StepTensor] = (),
    tp: int = 1,
    rank: int = 0,
    micro_batch_size: int = 2,
    first_samples: Sequence[int] = (0, 2, 4, 6),
    positions: Slice = WHOLE,
    collectives: Sequence[Collective] = (),
) -> RankTrace:
    return RankTrace(
        rank,
        {"dp": 0, "tp": rank},
        {"dp": 1, "tp": tp},
        [{"dp": 0, "tp": rank}],
        positions,
        ("dp",),
        range(0),
        micro_batch_size,
        0,
        first_samples,
        [],
        list(activations),
        list(steps),
        list(collectives),
    )


FULL = torch.randn(SIZE, BATCH, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _of_samples(
    *names: str, size: int = 2, cut: Callable[[Tensor], Tensor] = lambda x: x, features: tuple[int, ...] = ()
) -> list[Activation]:
    """Return activations with values of all samples, in microbatches of `size`, cut for a rank."""
    return [
        _activation(name, cut(FULL[:, first : first + size]).clone(), first // size, features=features)
        for first in range(0, BATCH, size)
        for name in names
    ]


REFERENCE = _rank(_of_samples("layers.0.norm", "layers.0", "layers.1.norm", "layers.1"))


def _found(*run: RankTrace, reference: RankTrace = REFERENCE) -> FirstDifference | None:
    return first_difference(run, reference, 1, TOLERANCES["fp64"])[0]


def _cut_pairs(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 3))[..., 1:2].flatten(-2)


@pytest.mark.parametrize(
    ("cut", "positions", "features"),
    [
        (lambda x: x, WHOLE, ()),
        (lambda x: x[..., 3:], WHOLE, ()),
        (lambda x: x[2:], Slice(1, 2), ()),
        (lambda x: x.unflatten(-1, (3, 2))[..., 1:].flatten(-2), WHOLE, (3, 2)),
        (lambda x: x.flatten(0, 1), WHOLE, ()),
    ],
    ids=["whole", "features", "positions", "inner features", "tokens"],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_value_is_compared_with_its_place(
    cut: Callable[[Tensor], Tensor], positions: Slice, features: tuple[int, ...], size: int
) -> None:
    whole = (lambda x: x.flatten(0, 1)) if cut(FULL).dim() == 2 else (lambda x: x)
    reference = _rank(_of_samples("layers.0", cut=whole, features=features))
    activations = _of_samples("layers.0", size=size, cut=cut, features=features)
    run = _rank(activations, (), 2, 1, size, range(0, BATCH, size), positions)
    assert first_difference([run], reference, 1, TOLERANCES["fp64"]) == (None, 0)
    activations[-1].value.view(-1)[-1] += 0.5
    found = _found(run, reference=reference)
    assert found is not None
    last = f"samples {BATCH - size}-7" if size > 1 else "sample 7"
    assert found.what == f"output of layers.0 (forward, iteration 1, {last})"
    assert f"rank 1 (tp 1): 1 of {activations[-1].value.numel()} elements differ" in found.details[0]


def test_elements_have_their_place_in_the_full_tensor() -> None:
    run = _rank(_of_samples("layers.0", cut=lambda x: x[2:, :, 3:]), (), 2, 1, positions=Slice(1, 2))
    run.activations[0].value[1, :, 1:] += 0.5
    found = _found(run, reference=_rank(_of_samples("layers.0")))
    assert found is not None
    assert "4 of 12 elements differ, positions 3-3, features 4-5, by up to 5.0e-01" in found.details[0]


def test_a_shape_without_a_place_is_counted() -> None:
    run = _rank(_of_samples("layers.0", cut=lambda x: x[..., :5]), (), 2)
    reference = _rank(_of_samples("layers.0"))
    assert first_difference([run], reference, 1, TOLERANCES["fp64"]) == (None, 1)


def test_positions_of_ranks_that_exchange_heads_are_not_cut_by_tp() -> None:
    """With a2a+p2p, a rank computes attention at the positions of several ranks, here at the last half."""
    run = _rank(_of_samples("layers.0", cut=lambda x: x[2:]), (), 2, 0, positions=Slice(3, 4))
    reference = _rank(_of_samples("layers.0"))
    assert first_difference([run], reference, 1, TOLERANCES["fp64"]) == (None, 1)


def test_few_heads_are_not_cut_by_positions() -> None:
    """By its sizes alone, 1 of 2 heads could be 1 of 2 positions, with padding for 4 ranks."""
    heads = _of_samples("layers.0", cut=lambda x: x.unflatten(-1, (2, 3)))
    last = _of_samples("layers.0", cut=lambda x: x.unflatten(-1, (2, 3))[:1, :, 1:])
    run = _rank(last, (), 2, 1, positions=Slice(0, 4))
    assert first_difference([run], _rank(heads), 1, TOLERANCES["fp64"]) == (None, 0)


@pytest.mark.parametrize(("num_ranks", "count"), [(2, (None, 0)), (4, (None, 1))])
def test_exchanged_heads_are_in_the_order_of_the_ranks(num_ranks: int, count: tuple[None, int]) -> None:
    """Of 2 heads, each of 2 ranks has one; which one each of 4 ranks has, is not known."""
    heads = _of_samples("layers.0", cut=lambda x: x.unflatten(-1, (2, 3)))
    last = _of_samples("layers.0", cut=lambda x: x.unflatten(-1, (2, 3))[:, :, 1:])
    run = _rank(last, positions=Slice(1, num_ranks))
    assert first_difference([run], _rank(heads), 1, TOLERANCES["fp64"]) == count


def test_the_first_of_several_is_named() -> None:
    """Even if it belongs to a later microbatch."""
    run = _rank(_of_samples("layers.0.norm", "layers.0", "layers.1.norm", "layers.1"))
    for entry in run.activations:
        if entry.microbatch == 3 or entry.names[0].startswith("output of layers.1"):
            entry.value += 0.5
    found = _found(run)
    assert found is not None
    assert found.what == "output of layers.0.norm (forward, iteration 1, samples 6-7)"


def test_a_difference_that_a_later_layer_does_not_have_is_none() -> None:
    run = _rank(_of_samples("layers.0.norm", "layers.0", "layers.1.norm", "layers.1"))
    for entry in run.activations[:4]:
        if entry.names[0] == "output of layers.0.norm":
            entry.value += 0.5  # a representation that is the layer's own affair
    assert _found(run) is None
    for entry in run.activations:
        if entry.names[0] in ("output of layers.1.norm", "output of layers.1"):
            entry.value += 0.5
    found = _found(run)
    assert found is not None
    assert found.name == "output of layers.1.norm"


def test_a_layer_that_no_rank_runs_is_named() -> None:
    first, last = (_rank(_of_samples(name)) for name in ("layers.0", "layers.2"))
    found = _found(first, last, reference=_rank(_of_samples("layers.0", "layers.1", "layers.2")))
    assert found is not None
    assert found.what == "output of layers.1 (forward, iteration 1)"
    assert _found(first, last, reference=_rank(_of_samples("layers.0", "layers.2"))) is None


def test_a_recomputed_value_is_compared_with_that_of_forward() -> None:
    names = "layers.0.norm", "layers.0", "layers.1.norm", "layers.1"
    run = replace(_rank(_of_samples(*names)), recomputed=_of_samples(*names))
    assert _found(run) is None
    run.recomputed[2].value += 0.5  # the norm of layer 1, whose input has been saved
    found = _found(run)
    assert found is not None
    assert found.what == "output of layers.1.norm (recomputed for backward, iteration 1, samples 0-1)"
    run.activations[2].value += 0.5  # a representation: the layer's output agrees
    assert _found(run) is None


def test_terms_of_the_loss_side_by_side_do_not_excuse_each_other() -> None:
    reference = _rank(_of_samples("head", "first_term.part", "first_term", "second_term"))
    run = _rank(_of_samples("head", "first_term.part", "first_term", "second_term"))
    for entry in run.activations:
        entry.value += 0.5 if "first_term" in entry.names[0] else 0.0
    found = _found(run, reference=reference)
    assert found is not None
    assert found.name == "output of first_term.part"


def test_parts_of_a_sum_are_a_difference_if_nothing_adds_them_up() -> None:
    names = ("layers.1.part", "layers.1.sum", "layers.1")
    reference = _rank(_of_samples(*names))
    run = [_rank(_of_samples(*names), (), 2, rank) for rank in (0, 1)]
    for trace in run:
        for entry in trace.activations:
            entry.value *= 1.0 if entry.names[0] != "output of layers.1.part" else 0.25 + 0.5 * trace.rank
            entry.value += 0.5 if entry.names[0] == "output of layers.1" else 0.0
    found = _found(*run, reference=reference)
    assert found is not None
    assert found.name == "output of layers.1"  # the parts are added up
    for trace in run:
        for entry in trace.activations:
            entry.value += 0.5 if entry.names[0] == "output of layers.1.sum" else 0.0
    found = _found(*run, reference=reference)
    assert found is not None
    assert found.name == "output of layers.1.part"
    assert found.ranks == [0, 1]


def test_parts_of_a_sum_are_not_excused_by_a_gradient_beside_them() -> None:
    """The blocks of a layer get the same input, and only one of them sums its gradient."""

    def of_layer(parts: float, inputs: float) -> list[Activation]:
        gradients = {"output of block": parts, "output of beside": 1.0, "input of block": inputs}
        return [
            replace(_activation("", torch.ones(SIZE, 2, 6).double()), names=[name], gradient_name=name,
                    gradient=factor * FULL[:, :2], gradient_order=order)
            for order, (name, factor) in enumerate(gradients.items())
        ]  # fmt: skip

    reference = _rank(of_layer(1.0, 1.0), first_samples=[0])
    run = [_rank(of_layer(part, 0.7), (), 2, rank, first_samples=[0]) for rank, part in enumerate((0.3, 0.7))]
    found = _found(*run, reference=reference)
    assert found is not None
    assert found.what.startswith("gradient of the output of block ")
    summed = [
        _rank(of_layer(part, 1.0), (), 2, rank, first_samples=[0]) for rank, part in enumerate((0.3, 0.7))
    ]
    assert _found(*summed, reference=reference) is None


def _step(value: Tensor, phase: str = "gradient", **more: object) -> StepTensor:
    shape = tuple(value.shape)
    step = StepTensor(phase, "up.weight", value, Box((0,) * len(shape), shape), 5, (), 1)
    return step._replace(**more)


WEIGHT = FULL[0, :6].clone()


def test_a_parameter_is_compared_without_padding_and_summed_over_axes() -> None:
    reference = _rank((), [_step(WEIGHT)])
    halves = [
        _rank((), [_step(0.5 * WEIGHT[3:], box=Box((3, 0), (3, 6)), summed_over=("tp",))], 2, rank)
        for rank in (0, 1)
    ]
    halves[0].steps[0].value[2] = math.pi  # padding
    assert _found(*halves, reference=reference) is None
    halves[0].steps[0].value[1] += 0.5
    found = _found(*halves, reference=reference)
    assert found is not None
    assert found.what == "gradient of up.weight, after all sums (iteration 1)"
    assert "6 of 12 elements differ, dim 0 4-4" in found.details[0]


@pytest.mark.parametrize(
    ("factor", "bias", "is_same"),
    [(1e-16, 1e-14, True), (1e-16, 1e-6, False), (0.0, 1e-14, False), (1e-9, 1e-14, False)],
)
@pytest.mark.parametrize("phase", ["weight", "weight before"])
def test_a_weight_whose_gradient_is_only_rounding_is_compared_with_the_largest(
    phase: str, factor: float, bias: float, is_same: bool
) -> None:
    gradients = [_step(WEIGHT), _step(factor * WEIGHT, name="bias"), _step(WEIGHT, phase)]
    steps = [*gradients, _step(bias * WEIGHT, phase, name="bias")]
    run = [*gradients, _step(2.0 * bias * WEIGHT, phase, name="bias")]
    assert (_found(_rank((), run), reference=_rank((), steps)) is None) == is_same


@pytest.mark.parametrize(
    ("phase", "values", "remark"),
    [
        ("gradient", [0.25 * WEIGHT - 1.0, 0.75 * WEIGHT + 1.0], "a sum over tp is missing"),
        ("gradient", [0.5 * WEIGHT, 0.5 * WEIGHT], "times 0.5, as after a mean over tp"),
        ("gradient", [2.0 * WEIGHT, 2.0 * WEIGHT], "times 2, as after two sums over tp"),
        ("gradient", [0.0 * WEIGHT, 0.0 * WEIGHT], "the values are 0"),
        ("gradient", [WEIGHT.float().double()] * 2, "rounded to fp32"),
        ("norm", [torch.tensor(3.0).double(), torch.tensor(3.0).double()], "3 instead of 6"),
        (
            "norm",
            [torch.tensor(36.0 * part, dtype=torch.float64).sqrt() for part in (0.3, 0.7)],
            "the squares of the tp ranks' values add up to the square of the right one: a sum over tp",
        ),
    ],
)
def test_what_the_values_have_in_common_with_the_right_ones(
    phase: str, values: Sequence[Tensor], remark: str
) -> None:
    right = WEIGHT if values[0].dim() else torch.tensor(6.0).double()
    run = [
        _rank((), [_step(each, phase)], 2, rank, collectives=[Collective("all-reduce", "tp", (36,))])
        for rank, each in enumerate(values)
    ]
    found = _found(*run, reference=_rank((), [_step(right, phase)]))
    assert found is not None
    assert remark in str(found)
    assert "also on rank 1" in str(found)
    assert str(found).endswith("last collective before on rank 0: all-reduce over tp of [36]")


def test_a_nan_on_one_side_differs() -> None:
    bad = WEIGHT.clone()
    bad[0, 0] = math.nan
    assert _found(_rank((), [_step(bad)]), reference=_rank((), [_step(WEIGHT)])) is not None
    assert _found(_rank((), [_step(bad)]), reference=_rank((), [_step(bad)])) is None


def test_a_gradient_that_is_zero_but_for_rounding_is_not_compared() -> None:
    steps = [_step(WEIGHT), _step(1e-18 * WEIGHT, name="key.bias")]
    other = [_step(WEIGHT), _step(2e-18 * WEIGHT, name="key.bias")]
    assert _found(_rank((), other), reference=_rank((), steps)) is None
