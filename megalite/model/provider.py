"""Check that a program's own model provider can be called."""

from __future__ import annotations

from megalite.errors import UserError, check_call, kind_of
from megalite.model.stage import Stage, StageProvider


def name_of(provider: StageProvider) -> str:
    """Return the name of a class or function, for messages."""
    return getattr(provider, "__qualname__", None) or type(provider).__name__


def is_own(provider: StageProvider | None) -> bool:
    """Return whether a model is the program's own; None means the model of the config."""
    return provider is not None and not str(getattr(provider, "__module__", "")).startswith("megalite.")


def check_model_provider(provider: StageProvider) -> None:
    """Check that a model provider can be called like `StageProvider`.

    Raises:
        UserError: it cannot.
    """
    name = name_of(provider)
    if not callable(provider) or (isinstance(provider, type) and not issubclass(provider, Stage)):
        raise UserError(
            f"the model provider is {kind_of(provider)}: pass a subclass of GPT or SequentialStage, or a "
            "function with the same arguments"
        )
    if missing := sorted(getattr(provider, "__abstractmethods__", ())):
        raise UserError(f"{name} lacks {', '.join(missing)}: define each in the class")
    check_call(provider, name, "config", "context", "layers", keywords=("is_first", "is_last"))
