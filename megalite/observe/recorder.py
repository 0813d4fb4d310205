"""Let readers observe the operators and modules that run.

Operators go through one dispatch mode a thread, whatever the number of readers:

    class Matmuls(Reader):
        count = 0

        def reads(self, func):
            return func.overloadpacket is torch.ops.aten.mm

        def after(self, func, args, kwargs, out):
            self.count += 1

    with Matmuls() as matmuls:
        model(x)

The recorder asks a reader once per operator whether it reads it, and calls only the methods that its class
defines. An operator that nobody reads costs one look-up. Modules are observed by hooks: see `watch_modules`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from megalite.utils.torch_private import EagerMode
from megalite.utils.wrapping import wrap

R = TypeVar("R", bound="Reader")


class Reader:
    """Base class of what observes the operators of a block, ``with reader:``, or modules, or both."""

    def reads(self, func: Any) -> bool:
        """Return whether this reader observes an operator."""
        return True

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Observe an operator that is about to run. An exception keeps it from running."""

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator in torch's place, and return its result."""
        return func(*args, **kwargs)

    def after(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Observe an operator and its result."""

    def enters(
        self, name: str, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Observe a watched module or wrap point that is about to run; `module` is None for a wrap point."""

    def leaves(self, name: str, module: nn.Module | None, args: tuple[Any, ...], output: Any) -> None:
        """Observe its end. `output` is None if an exception ends it, as at the end of recomputation."""

    def __enter__(self: R) -> R:
        self._block = reading(self)
        self._block.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)


@contextmanager
def reading(*readers: Reader) -> Iterator[None]:
    """Let readers observe the operators of this block, after the readers that already do."""
    with ExitStack() as stack:
        recorder: _Recorder | None = getattr(_thread, "recorder", None)
        if recorder is None:
            recorder = _thread.recorder = stack.enter_context(_Recorder())
            stack.callback(delattr, _thread, "recorder")
        recorder.set_readers((*recorder.readers, *readers))
        try:
            yield
        finally:
            left = list(recorder.readers)
            for reader in readers:
                left.remove(reader)
            recorder.set_readers(tuple(left))


_thread = threading.local()
"""`recorder`: the recorder of this thread's blocks, as a thread has its own stack of dispatch modes."""


class _Handlers(NamedTuple):
    """Functions to call for an operator; `run` is None if torch runs it."""

    before: tuple[Callable[..., None], ...]
    run: Callable[..., Any] | None
    after: tuple[Callable[..., None], ...]


class _Recorder(EagerMode):
    """Dispatch mode that passes each operator to the readers that read it."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: tuple[Reader, ...] = ()
        self._handlers: dict[Any, _Handlers] = {}

    def set_readers(self, readers: tuple[Reader, ...]) -> None:
        self.readers = readers
        self._handlers = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        handlers = self._handlers.get(func)
        if handlers is None:
            handlers = self._handlers[func] = self._handlers_of(func)
        for before in handlers.before:
            before(func, args, kwargs)
        out = func(*args, **kwargs) if handlers.run is None else handlers.run(func, args, kwargs)
        for after in handlers.after:
            after(func, args, kwargs, out)
        return out

    def _handlers_of(self, func: Any) -> _Handlers:
        readers = [each for each in self.readers if each.reads(func)]

        def methods(name: str) -> tuple[Callable[..., Any], ...]:
            return tuple(getattr(each, name) for each in readers if _defines(each, name))

        return _Handlers(methods("before"), next(iter(methods("run")), None), methods("after"))


def _defines(reader: Reader, name: str) -> bool:
    return getattr(type(reader), name) is not getattr(Reader, name)


def watch_modules(reader: Reader, modules: Iterable[tuple[str, nn.Module]]) -> ExitStack:
    """Let a reader observe the forwards of modules, under names.

    Returns:
        A block whose end removes the hooks.
    """
    hooks = ExitStack()
    for name, module in modules:
        if _defines(reader, "enters"):
            hook = module.register_forward_pre_hook(partial(reader.enters, name), with_kwargs=True)
            hooks.callback(hook.remove)
        if _defines(reader, "leaves"):
            hook = module.register_forward_hook(partial(reader.leaves, name), always_call=True)
            hooks.callback(hook.remove)
    return hooks


def watch_point(reader: Reader, name: str, module: nn.Module, method: str) -> None:
    """Let a reader observe a wrap point of a module, inside of what wraps it later."""

    def watched(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        reader.enters(name, None, args, kwargs)
        output = None
        try:
            output = function(*args, **kwargs)
        finally:
            reader.leaves(name, None, args, output)
        return output

    wrap(module, method, lambda function: partial(watched, function))


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of nested lists, tuples and dicts, such as the arguments of an operator.

    `tree_leaves` of torch also knows other containers, and would take a third of the time of a dry run.
    """
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [tensor for each in tree for tensor in tensors_in(each)]
