"""Split texts into sentences."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable

from megalite.utils.errors import UserError


def sentence_splitter(language: str, keep_newlines: bool) -> Callable[[str], list[str]]:
    """Return the function that splits a text into its sentences.

    Args:
        language: ISO 639 code, such as "en"; a language without rules uses the rules of its nearest relative.
        keep_newlines: append the newlines and spaces after each sentence to it, except the last; otherwise
            sentences have no surrounding white space.

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
        sentences = [sentence for part in segment(language, text) if (sentence := part.strip())]
        if not keep_newlines:
            return sentences
        starts, end = [], 0
        for sentence in sentences:
            starts.append(text.index(sentence, end))
            end = starts[-1] + len(sentence)
        return [text[start:stop] for start, stop in itertools.pairwise([*starts, end])]

    return split
