"""The tensors among arguments and results."""

from collections import namedtuple

import torch

from megalite.recording.nested_tensors import tensors_in


def test_tensors_of_containers_within_containers_are_found_in_order() -> None:
    a, b, c, d = map(torch.tensor, range(4))
    pair = namedtuple("pair", "first second")
    found = tensors_in((a, [b, None, (3, pair("c", c))], {"d": d, "e": "e"}))
    assert [each is other for each, other in zip(found, (a, b, c, d), strict=True)] == [True] * 4


def test_one_tensor_and_none() -> None:
    tensor = torch.zeros(2)
    assert tensors_in(tensor)[0] is tensor
    assert tensors_in(None) == tensors_in({}) == tensors_in("text") == []
