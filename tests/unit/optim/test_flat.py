"""Parameters and gradients live in the flat tensors, and autograd keeps them there."""

from __future__ import annotations

import pytest
import torch

from megalite.optim.flat import FlatGroup

SHAPES = {"first": (2, 3), "second": (5,), "third": (4, 2)}


@pytest.fixture
def named(make_parameter):
    return [(name, make_parameter(*shape)) for name, shape in SHAPES.items()]


def test_the_last_parameter_comes_first(named):
    group = FlatGroup(named)
    assert [(slot.name, slot.start, slot.end) for slot in group.slots] == [
        ("third", 0, 8),
        ("second", 8, 13),
        ("first", 13, 19),
    ]
    assert group.weight.numel() == group.grad.numel() == 19


def test_weights_keep_their_values_and_become_views(named):
    before = {name: parameter.detach().clone() for name, parameter in named}
    group = FlatGroup(named)
    for name, parameter in named:
        assert torch.equal(parameter, before[name])
    with torch.no_grad():
        group.weight.copy_(torch.arange(19.0))
    for slot in group.slots:
        assert torch.equal(slot.parameter.flatten(), torch.arange(float(slot.start), slot.end).double())
        assert torch.equal(group.view(group.weight.detach(), slot), slot.parameter)


def test_autograd_adds_to_the_views_over_several_backwards(named):
    group = FlatGroup(named)
    pointers = [parameter.grad.data_ptr() for _, parameter in named]
    for number in (1.0, 2.0, 4.0):
        sum((number * (parameter**2).sum() for _, parameter in named)).backward()
    assert [parameter.grad.data_ptr() for _, parameter in named] == pointers
    for slot in group.slots:
        torch.testing.assert_close(group.view(group.grad, slot), 14.0 * slot.parameter.detach())
    group.grad.zero_()
    assert all(not parameter.grad.any() for _, parameter in named)


def test_a_parameter_used_twice_gets_both_gradients(named):
    group = FlatGroup(named)
    table = named[0][1]  # [2, 3]
    (table[0].sum() + 2.0 * table.sum()).backward()
    assert group.grad.tolist() == [0.0] * 13 + [3.0] * 3 + [2.0] * 3
