"""A declared method can be wrapped for one module, and is called like any other."""

import pytest
from torch import nn

from megalite.utils.errors import UserError
from megalite.utils.wrapping import communicating_names, communication_point, wrap, wrap_point, wrapped_names


class Doubling(nn.Module):
    @wrap_point
    def forward(self, x: float) -> float:
        return 2 * self.shift(x)

    @wrap_point
    def shift(self, x: float) -> float:
        return x

    def undeclared(self, x: float) -> float:
        return x


class Overriding(Doubling):
    @communication_point
    def shift(self, x: float) -> float:
        return super().shift(x) + 1


class Undeclaring(Doubling):
    def shift(self, x: float) -> float:
        return x


def add(amount: float):  # type: ignore[no-untyped-def]
    return lambda function: lambda x: function(x) + amount


def test_a_wrapper_changes_one_module_alone() -> None:
    wrapped, plain = Doubling(), Doubling()
    wrap(wrapped, "shift", add(10))
    assert (wrapped(1), plain(1)) == (22, 2)
    assert (wrapped_names(wrapped), wrapped_names(plain)) == ({"shift"}, set())


def test_a_later_wrapper_is_outside_of_the_earlier() -> None:
    module = Doubling()
    wrap(module, "shift", add(10))
    wrap(module, "shift", lambda function: lambda x: 100 * function(x))
    assert module(1) == 2 * 100 * 11


def test_forward_is_wrapped_inside_of_the_hooks() -> None:
    module, outputs = Doubling(), []
    module.register_forward_hook(lambda _, __, output: outputs.append(output))
    wrap(module, "forward", add(5))
    assert module(1) == 7
    assert outputs == [7]


def test_an_override_is_wrapped_once() -> None:
    """It may call the method of its base class, which is a point of its own."""
    module = Overriding()
    wrap(module, "shift", add(10))
    assert module(1) == 2 * (1 + 1 + 10)


def test_methods_that_communicate_are_declared_by_the_class() -> None:
    names = [communicating_names(kind()) for kind in (Doubling, Overriding, Undeclaring)]
    assert names == [set(), {"shift"}, set()]


@pytest.mark.parametrize(("kind", "name"), [(Doubling, "undeclared"), (Undeclaring, "shift")])
def test_only_declared_methods_can_be_wrapped(kind: type[Doubling], name: str) -> None:
    with pytest.raises(UserError, match=rf"{kind.__name__}\.{name} must be wrapped.*@megalite\.wrap_point"):
        wrap(kind(), name, add(1))
