"""Split texts into sentences."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable

from megalite.errors import UserError


def sentence_splitter(language: str, keep_newlines: bool) -> Callable[[str], list[str]]:
    """Return the function that splits a text into its sentences.

    Args:
        language: its ISO 639 code, as "en"; one without rules of its own gets those of its nearest relative.
        keep_newlines: end each sentence but the last with the newlines and spaces that follow it; otherwise
            sentences have no white space around them.

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
