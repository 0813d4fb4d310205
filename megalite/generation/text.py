"""Tokens to text while they come."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.data.tokenizer import Tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 8
"""Tokens before a new one that are decoded with it: what they decide is spaces and bytes of a character."""


class TextStream:
    """The text of tokens that come one after another, with what came before them as context.

    A character whose bytes are spread over tokens is held back until the last of them is there.

    Args:
        prompt: tokens before the first new one; their text is not given out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._decode = tokenizer.decode
        self._context = list(prompt[-_CONTEXT:])
        self._new: list[int] = []

    def add(self, token: int) -> str:
        """The text that this token completes, which may be none."""
        self._new.append(token)
        text = self._pending()
        if text.endswith(_BROKEN) and len(self._new) < _CONTEXT:
            return ""
        return self._given(text)

    def finish(self) -> str:
        """What was held back: a broken character is U+FFFD."""
        return self._given(self._pending())

    def _pending(self) -> str:
        return self._decode(self._context + self._new)[len(self._decode(self._context)) :]

    def _given(self, text: str) -> str:
        self._context = (self._context + self._new)[-_CONTEXT:]
        self._new = []
        return text


def text_of(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text of new tokens after a prompt."""
    stream = TextStream(tokenizer, prompt)
    return "".join([*map(stream.add, ids), stream.finish()])
