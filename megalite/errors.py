"""What a user can do wrong, told apart from what the program did wrong."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(ValueError):
    """A mistake in the user's input: the program prints it as one line and exits with status 1.

    The message names the fields or files at fault, their values, and what to do.
    Anything else that is raised is a defect of megalite and keeps its traceback.

    Attributes:
        on_one_rank: other ranks may not have met it, so this one must tell it, whichever it is.
    """

    on_one_rank = False


class ConfigError(UserError):
    """All mistakes of one configuration at once, a line each.

    Attributes:
        problems: the mistakes, each a message by itself.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        """Travels from a rank as what it was made of, not as its message."""
        return type(self), (self.problems,)
