"""The operators and modules that readers observe, and the tensors among arguments and results."""

from __future__ import annotations

import threading
from collections import namedtuple
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from megalite.observe.recorder import Reader, reading, tensors_in, watch_modules, watch_point
from megalite.utils.wrapping import wrap_point


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


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor, *, shift: float) -> torch.Tensor:
        return self.shifted(self.linear(x), shift)

    @wrap_point
    def shifted(self, x: torch.Tensor, shift: float) -> torch.Tensor:
        if shift < 0.0:
            raise ValueError("negative")
        return x + shift


class Calls(Reader):
    """Names and shapes of what watched modules and wrap points read and return."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def enters(self, name: str, module: nn.Module | None, args: Any, kwargs: Any) -> None:
        self.found.append(f"{name} <- {list(args[0].shape)} {kwargs or ''}".strip())

    def leaves(self, name: str, module: nn.Module | None, args: Any, output: Any) -> None:
        assert len(args) == (2 if module is None else 1)
        self.found.append(f"{name} -> {None if output is None else list(output.shape)}")


def test_modules_and_wrap_points_are_observed_until_the_block_ends() -> None:
    block, calls, x = _Block(), Calls(), torch.ones(4, 2)
    watch_point(calls, "shifted", block, "shifted")
    with watch_modules(calls, [("block", block), ("linear", block.linear)]):
        block(x, shift=1.0)
        assert calls.found == [
            *("block <- [4, 2] {'shift': 1.0}", "linear <- [4, 2]", "linear -> [4, 3]"),
            *("shifted <- [4, 3]", "shifted -> [4, 3]", "block -> [4, 3]"),
        ]
        calls.found.clear()
        with pytest.raises(ValueError, match="negative"):
            block(x, shift=-1.0)
        assert calls.found[3:] == ["shifted <- [4, 3]", "shifted -> None", "block -> None"]
    calls.found.clear()
    block(x, shift=1.0)
    assert calls.found == ["shifted <- [4, 3]", "shifted -> [4, 3]"]


def test_a_module_has_only_the_hooks_that_its_reader_needs() -> None:
    class Entries(Reader):
        def enters(self, *_: Any) -> None: ...

    module = nn.Linear(2, 2)
    with watch_modules(Entries(), [("module", module)]):
        assert (len(module._forward_pre_hooks), len(module._forward_hooks)) == (1, 0)
    assert not module._forward_pre_hooks


def test_tensors_of_containers_within_containers_are_found_in_order() -> None:
    a, b, c, d = map(torch.tensor, range(4))
    pair = namedtuple("pair", "first second")
    found = tensors_in((a, [b, None, (3, pair("c", c))], {"d": d, "e": "e"}))
    assert [each is other for each, other in zip(found, (a, b, c, d), strict=True)] == [True] * 4


def test_one_tensor_and_none() -> None:
    tensor = torch.zeros(2)
    assert tensors_in(tensor)[0] is tensor
    assert tensors_in(None) == tensors_in({}) == tensors_in("text") == []
