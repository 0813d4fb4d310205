"""Split texts into sentences."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from megalite.errors import UserError


def sentence_splitter(language: str) -> Callable[[str], list[str]]:
    """Return the function that splits a text into its sentences, without the spaces around them.

    Args:
        language: its ISO 639 code, as "en"; one without rules of its own gets those of its nearest relative.

    Raises:
        UserError: the library is not installed.
    """
    try:
        segment = importlib.import_module("sentencex").segment
    except ImportError:
        raise UserError(
            "--split-sentences needs a package that is not installed: pip install sentencex"
        ) from None

    def split(text: str) -> list[str]:
        return [sentence for part in segment(language, text) if (sentence := part.strip())]

    return split
