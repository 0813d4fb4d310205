"""The operators that readers observe, and the tensors among arguments and results."""

from __future__ import annotations

import threading
from collections import namedtuple
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from megalite.observe.recorder import Reader, reading, tensors_in


class Names(Reader):
    """Names of the operators that begin and end, of those with a name in `read` if it is not None."""

    def __init__(self, *read: str) -> None:
        self.read = read
        self.asked: list[str] = []
        self.found: list[str] = []

    def reads(self, func: Any) -> bool:
        self.asked.append(name := func.overloadpacket.__name__)
        return not self.read or name in self.read

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.found.append(func.overloadpacket.__name__)

    def after(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        self.found.append(f"{func.overloadpacket.__name__} {list(out.shape)}")


class Doubled(Reader):
    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return 2 * func(*args, **kwargs)


def test_readers_share_one_mode_and_each_sees_what_it_reads() -> None:
    x = torch.ones(2)
    with Names("mul") as outer:
        x * x
        with Names() as inner, reading(Doubled()):
            y = x + x
            x * x
        x * x
        with Names() as last:
            x - x
    assert y.tolist() == [4.0, 4.0]
    assert inner.found == ["add", "add [2]", "mul", "mul [2]"]
    assert outer.found == ["mul", "mul [2]"] * 3
    assert last.found == ["sub", "sub [2]"]
    x + x
    assert len(inner.found) == 4 and len(last.found) == 2


def test_a_reader_is_asked_once_about_an_operator() -> None:
    x = torch.ones(2)
    with Names("mul") as names:
        for _ in range(3):
            x + x
    assert names.asked == ["add"] and names.found == []


def test_an_exception_ends_the_block_and_keeps_the_operator_from_running() -> None:
    class Refusal(Reader):
        def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            raise ValueError("refused")

    x = torch.ones(2)
    with pytest.raises(ValueError, match="refused"), Refusal():
        x.add_(1.0)
    assert x.tolist() == [1.0, 1.0]
    with Names() as names:
        x.add_(1.0)
    assert names.found == ["add_", "add_ [2]"]


def test_backward_is_observed_and_another_thread_is_not() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with Names("mm") as names:
        (x @ x).sum().backward()
        thread = threading.Thread(target=lambda: x @ x)
        thread.start()
        thread.join()
    assert names.found == ["mm", "mm [2, 2]"] * 3


def test_tensors_of_containers_within_containers_are_found_in_order() -> None:
    a, b, c, d = map(torch.tensor, range(4))
    pair = namedtuple("pair", "first second")
    found = tensors_in((a, [b, None, (3, pair("c", c))], {"d": d, "e": "e"}))
    assert [each is other for each, other in zip(found, (a, b, c, d), strict=True)] == [True] * 4


def test_one_tensor_and_none() -> None:
    tensor = torch.zeros(2)
    assert tensors_in(tensor)[0] is tensor
    assert tensors_in(None) == tensors_in({}) == tensors_in("text") == []
