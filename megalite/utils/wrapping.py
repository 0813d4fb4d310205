"""Declare the methods of a module that recomputation, offloading and compilation may wrap.

    class MLP(nn.Module):
        @wrap_point
        def activate(self, x: Tensor) -> Tensor: ...

    wrap(mlp, "activate", torch.compiler.disable)

Callers call a declared method like any other. `wrap` changes it for one module, and the class stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any, TypeVar

from torch import nn

from megalite.utils.errors import UserError

Method = TypeVar("Method", bound=Callable[..., Any])
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Maps a function to a function with the same arguments and results."""

_PREFIX = "wrapped "


def wrap_point(method: Method) -> Method:
    """Declare a method of an `nn.Module`: `wrap` may wrap it. Decorate a subclass's override as well."""
    key = _key(method)

    @wraps(method)
    def point(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        wrapped = self.__dict__.get(key)
        return method(self, *args, **kwargs) if wrapped is None else wrapped(*args, **kwargs)

    point.communicates = point.is_eager = False  # type: ignore[attr-defined]
    return point  # type: ignore[return-value]


def communication_point(method: Method) -> Method:
    """Declare a wrap point whose forward or backward communicates, or stores weight gradients for later.

    With several tensor-parallel or context-parallel ranks, or stored gradients, compiled layers call it
    between their graphs.
    """
    point = wrap_point(method)
    point.communicates = True  # type: ignore[attr-defined]
    return point


def eager_point(method: Method) -> Method:
    """Declare a communication point with shapes that depend on values.

    Compiled layers always call it between their graphs.
    """
    point = communication_point(method)
    point.is_eager = True  # type: ignore[attr-defined]
    return point


def wrap(module: nn.Module, name: str, wrapper: Wrapper) -> None:
    """Wrap a declared method of one module; a later wrapper is outside of the earlier ones.

    Raises:
        UserError: the module's class does not declare the method.
    """
    point = getattr(type(module), name)
    if not hasattr(point, "communicates"):
        raise UserError(
            f"{type(module).__name__}.{name} must be wrapped for --compile, recomputation or offloading, and "
            "it is not declared: decorate it with @megalite.wrap_point"
        )
    key = _key(point)
    module.__dict__[key] = wrapper(module.__dict__.get(key) or MethodType(point.__wrapped__, module))


def wrapped_names(module: nn.Module) -> set[str]:
    """Return the names of the module's methods that are wrapped."""
    return {key.rpartition(".")[2] for key in vars(module) if key.startswith(_PREFIX)}


def communicating_names(module: nn.Module) -> set[str]:
    """Return the names of the module's methods that its class declares with `communication_point`."""
    return _names_with(module, "communicates")


def eager_names(module: nn.Module) -> set[str]:
    """Return the names of the module's methods that its class declares with `eager_point`."""
    return _names_with(module, "is_eager")


def _names_with(module: nn.Module, property_of_point: str) -> set[str]:
    methods = ((name, getattr(type(module), name, None)) for name in dir(type(module)))
    return {name for name, method in methods if getattr(method, property_of_point, False)}


def _key(method: Any) -> str:
    """Return the name under which a module holds the wrapped method; an override has its own."""
    return f"{_PREFIX}{method.__qualname__}"
