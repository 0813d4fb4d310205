"""Find the model that a program of the user's own trains."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import patch

import megalite
from megalite.utils.errors import UserError, first_line

SUFFIX = ".py"


class _PretrainCalled(BaseException):
    """Raised in place of training; not an `Exception`, so that a program does not handle it.

    Attributes:
        model: the program's model provider.
    """

    def __init__(self, model: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model = model


def model_of(path: Path) -> Callable[..., Any]:
    """Run a program up to its call of `megalite.pretrain`, and return the model that it passes.

    Raises:
        UserError: there is no such program, it has an error, or it passes no model.
    """
    flag = f"--program {path}"
    try:
        code = compile(path.read_bytes(), str(path), "exec")
    except OSError as error:
        raise UserError(f"{flag} cannot be read ({error.strerror}): pass your program's file") from None
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{flag} is not a Python program: {first_line(error)}") from None
    try:
        with _as_main(path):
            exec(code, ModuleType("__main__").__dict__ | {"__file__": str(path)})
    except _PretrainCalled as called:
        if called.model is None:
            raise UserError(
                f"{flag} passes no model to megalite.pretrain: remove --program to plan the flags' model"
            ) from None
        return called.model
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
        ]
        raise UserError(
            f"{flag}, line {lines[-1] if lines else 1}, raises {type(error).__name__}: {first_line(error)}"
        ) from None
    raise UserError(f"{flag} does not call megalite.pretrain with a model: pass the program that trains it")


@contextmanager
def _as_main(path: Path) -> Iterator[None]:
    """Run a program in this block with its own arguments and folder; training ends it."""

    def pretrain(model_provider: Callable[..., Any] | None = None, *_: Any, **__: Any) -> NoReturn:
        raise _PretrainCalled(model_provider)

    with (
        patch.object(megalite, "pretrain", pretrain),
        patch.object(sys, "argv", [str(path)]),
        patch.object(sys, "path", [str(path.parent.resolve()), *sys.path]),
    ):
        yield
