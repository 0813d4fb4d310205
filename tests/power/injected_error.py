"""An injected error, and the replacements of functions that most errors consist of.

An error replaces functions of megalite in a forked rank, on every rank and in every layout, the reference of
one rank included: a mistake in the code would also be there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.distributed.collectives import Pending
from megalite.distributed.topology import Topology

Change = Callable[[Callable[..., Any], Topology], Callable[..., Any]]
"""Returns what replaces a function, given the function and the rank's topology."""


@dataclass(frozen=True)
class InjectedError:
    """A mistake in a function of megalite.

    Attributes:
        name: says what happens instead of the right thing.
        kind: class of the error.
        layout: a layout in which it changes a run. The verification also runs it in the default layouts.
        owner, attribute: module or class, and the name of the function there.
        change: returns the wrong function.
        model: key of `MODELS`, a model with the code that is wrong.
        unseen: the reason why no layout shows it; empty for an error that must be caught.
        is_of_saves: whether it is in an evaluation, a save or a resume, which a quick verification omits.
    """

    name: str
    kind: str
    layout: str
    owner: Any
    attribute: str
    change: Change
    model: str = "gpt"
    unseen: str = ""
    is_of_saves: bool = False

    @contextmanager
    def injected(self, topology: Topology) -> Iterator[None]:
        """Inject the error into this process during the block."""
        with pytest.MonkeyPatch.context() as patch:
            original = getattr(self.owner, self.attribute)
            patch.setattr(self.owner, self.attribute, self.change(original, topology))
            yield


def before(change: Callable[..., tuple[Any, ...]]) -> Change:
    """Call the function with the arguments that `change` returns."""
    return lambda original, _: lambda *args, **more: original(*change(*args), **more)


def after(change: Callable[..., Any]) -> Change:
    """Return ``change(result, *args)`` instead of the result."""
    return lambda original, _: lambda *args, **more: change(original(*args, **more), *args)


def instead(function: Callable[..., Any]) -> Change:
    """Call another function."""
    return lambda *_: function


def unless(condition: Callable[..., bool], result: Callable[..., Any]) -> Change:
    """Return ``result(*args)`` without a call if the condition holds for the arguments."""

    def change(original: Callable[..., Any], topology: Topology) -> Callable[..., Any]:
        def function(*args: Any, **more: Any) -> Any:
            return result(*args) if condition(*args, **more) else original(*args, **more)

        return function

    return change


def over(axis_of: Callable[[Topology], Any], position: int = 1) -> Change:
    """Call a collective with another axis, if the right one has several ranks."""

    def change(original: Callable[..., Any], topology: Topology) -> Callable[..., Any]:
        def function(*args: Any, **more: Any) -> Any:
            wrong = axis_of(topology) if args[position].size > 1 else args[position]
            return original(*args[:position], wrong, *args[position + 1 :], **more)

        return function

    return change


def complete_over(*names: str) -> Change:
    """Call the gradients of these parameters of a new module complete, though each rank has a part.

    Args:
        names: attributes of the module.
    """

    def forget(_: None, module: Any, *args: Any) -> None:
        for name in names:
            parameter = getattr(module, name)
            parameter.spec = replace(parameter.spec, partial_over=())

    return after(forget)


def not_summed(x: Tensor, *_: Any) -> Pending:
    """Return what an asynchronous all-reduce returns, without a collective."""
    return Pending(x, None)


def mean_first(x: Tensor, axis: Any, *rest: Any) -> tuple[Any, ...]:
    """Divide what is summed over an axis by its size."""
    return (x.div_(axis.size), axis, *rest)


def twice(original: Callable[..., Any], _: Topology) -> Callable[..., Any]:
    """Run an asynchronous all-reduce two times."""

    def function(x: Tensor, axis: Any) -> Any:
        original(x, axis).wait()
        return original(x, axis)

    return function


def rounded(dtype: torch.dtype) -> Callable[..., tuple[Any, ...]]:
    """Return a function that rounds the first tensor among its arguments in place."""

    def function(*args: Any) -> tuple[Any, ...]:
        tensor = next(each for each in args if isinstance(each, Tensor))
        with torch.no_grad():
            tensor.copy_(tensor.to(dtype))
        return args

    return function
